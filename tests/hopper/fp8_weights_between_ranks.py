"""Weight gradients of the fp8 backend between ranks; run as a script with TRITON_INTERPRET=1 on a CPU.

The ranks share one memory and run one after the other, as in fp8_one_rank.py; what a peer would have
published by then is there before. Sums are not exchanged. Compared with the oracle of the recipe, in the
order in which each rank has its rows.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from fp8_one_rank import ALL, LIMIT, inputs, without_a_gpu

from titan_megamoe.backends.base import MoECall, Needs
from titan_megamoe.backends.hopper import fp8_backend
from titan_megamoe.backends.hopper.fp8_quantize import quantize_rows
from titan_megamoe.backends.hopper.peer_copies import copies_delta
from titan_megamoe.config import MegaMoEConfig
from titan_megamoe.precision import get_recipe
from titan_megamoe.routing import PlanShape, RoutingPlan, plan_reference
from titan_megamoe.testing.fp8_chain import relative
from titan_megamoe.testing.oracle import moe_oracle
from titan_megamoe.workspace import Geometry, _views

TOKENS, T_MAX, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = (21, 0, 13), 24, 2, 2, 144, 208


def workspaces(world):
    """Of every rank; what is never written holds NaN."""
    geometry = Geometry(world, T_MAX, TOP_K, HIDDEN, fp8=True)
    memory = torch.full((world, geometry.num_bytes), 255, dtype=torch.uint8)
    views = [_views(part, geometry) for part in memory]
    for rank in range(world):
        words = torch.zeros(64, dtype=torch.int32)
        yield SimpleNamespace(
            geometry=geometry, state=words, report=words, leave=lambda: None, suspend=lambda _: None,
            memory=memory,
            delta=torch.tensor([(r - rank) * geometry.num_bytes for r in range(world)]),
            **{
                f"peers_{part}": tuple(views[(rank + i) % world][part] for i in range(1, world))
                for part in ("rows8", "scales", "second")
            },
            copies_delta=torch.tensor(copies_delta(world, rank, 2 * T_MAX * HIDDEN)),
            **views[rank],
        )  # fmt: skip


def check(world, wgrad, needs=ALL):
    experts = world * EXPERTS
    tokens = TOKENS[:world]
    _, _, _, *weights, _ = inputs(1, TOP_K, experts, HIDDEN, INTERMEDIATE)
    given = []
    for rank, workspace in enumerate(ranks := list(workspaces(world))):
        x, ids, factors, *_, dy = inputs(tokens[rank] + 1, TOP_K, experts, HIDDEN, INTERMEDIATE)
        given.append([t[: tokens[rank]] for t in (x, ids, factors, dy)])
        x, _, _, dy = given[rank]
        workspace.x[: len(dy)], workspace.second[: len(x)] = dy, x
    config = MegaMoEConfig(backend="fused", precision="fp8", wgrad_precision=wgrad)
    for rank, workspace in enumerate(ranks):
        shape = PlanShape(world, rank, TOP_K, EXPERTS, T_MAX, sum(tokens) * TOP_K)
        order = [(rank + i) % world for i in range(world)]
        own = slice(rank * EXPERTS, (rank + 1) * EXPERTS)
        x, ids, factors, dy = given[rank]
        call = MoECall(x, ids, factors, *(w[own].contiguous() for w in weights), None, config, needs)

        def plan(plans, *_, shape=shape):
            made = plan_reference([i for _, i, _, _ in given], [f for _, _, f, _ in given], shape)
            plans[0].flat.copy_(made.flat)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fp8_backend, "_prepare", lambda _, w=workspace, s=shape: (w, s))
            patch.setattr(fp8_backend, "build_plans", plan)
            backend = fp8_backend.Fp8FusedBackend()
            patch.setattr(backend, "first_half", "expanded")
            patch.setattr(backend, "combine_in", "triton")
            share(ranks, given, 0)
            saved = backend.begin(call).saved
            if world <= fp8_backend.MAX_GATHER_RANKS and wgrad == "bf16":
                patch.setattr(backend, "first_half", "copied")
                flat, gate_up, _ = backend.begin(call).saved
                live = RoutingPlan.over(flat, shape).row_slot >= 0
                assert torch.equal(flat, saved[0]) and torch.equal(gate_up[:, live], saved[1][:, live])
            share(ranks, given, 3)
            grads = backend.backward(call, saved, dy)
        x, ids, factors, dy = (torch.cat([given[r][i] for r in order]) for i in range(4))
        oracle = moe_oracle(x, ids, factors, *weights, dy, recipe=get_recipe("fp8", wgrad))
        errors = {
            name: relative(getattr(grads, name), getattr(oracle, name.replace("w", "dw"))[own])
            for name in ("w1", "w3", "w2")
            if getattr(needs, name)
        }
        print(world, rank, wgrad, errors, file=sys.stderr)
        assert errors and all(e <= LIMIT for e in errors.values()), errors


def share(ranks, given, which):
    """x, or dy, of every rank as e4m3."""
    for workspace, tensors in zip(ranks, given, strict=True):
        quantize_rows(tensors[which], data=workspace.rows8, scale=workspace.scales)


def main():
    with without_a_gpu() as patch:
        patch.setattr(fp8_backend, "combine", lambda *a, **k: None)
        for wgrad in ("bf16", "fp8"):
            check(2, wgrad)
            check(3, wgrad)
            check(3, wgrad, Needs(False, False, True, False, False))
    print("ok")


if __name__ == "__main__":
    main()
