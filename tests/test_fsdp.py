"""FSDP2 around the op: sharded experts, idle experts, fp32 accumulation of micro-batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_staged import Staged
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from titan_megamoe import MegaMoEConfig, mega_moe, op
from titan_megamoe.testing.oracle import relative_l2
from titan_megamoe.testing.problems import Problem, Tensors, leaves, tensors

MP = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BACKENDS = ["reference", "all_to_all"]


class Routing:
    """ids and weights in a plain class: FSDP's input cast leaves it alone."""

    def __init__(self, ids: Tensor, weights: Tensor) -> None:
        self.ids, self.weights = ids, weights


class Experts(nn.Module):
    """fp32 master weights of some experts, computed through the op."""

    def __init__(self, t: Tensors, config: MegaMoEConfig, group=None, own: slice = slice(None)) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (nn.Parameter(w[own].float()) for w in (t.w1, t.w3, t.w2))
        self.config, self.group = config, group

    def routed(self, x: Tensor, routing: Routing) -> Tensor:
        return mega_moe(x, routing.ids, routing.weights, self.w1, self.w3, self.w2, group=self.group,
                        config=self.config)  # fmt: skip


def _shard(experts: Experts, mesh) -> Experts:
    fully_shard(experts, mesh=mesh, mp_policy=MP)
    register_fsdp_forward_method(experts, "routed")
    # gloo has no reduce-scatter with averaging; sums are what a trainer with its own loss scaling wants.
    experts.set_gradient_divide_factor(1.0)
    experts.set_force_sum_reduction_for_comms(True)
    return experts


def _full_grads(experts: Experts) -> dict[str, Tensor]:
    return {n: p.grad.full_tensor() for n, p in experts.named_parameters() if p.grad is not None}


# ---- 6 experts on 4 shards, and HSDP 2×2 (case 24) --------------------------------------------------


def _uneven_shards(rank: int, backend: str, hsdp: bool) -> dict[str, float]:
    problem = Problem(tokens=(96,), experts=6, hidden=64, intermediate=96)
    t = tensors(problem)
    config = MegaMoEConfig(backend=backend)
    dims = ((2, 2), ("replicate", "shard")) if hsdp else ((4,), ("shard",))
    mesh = dist.init_device_mesh("cpu", dims[0], mesh_dim_names=dims[1])
    experts = _shard(Experts(t, config), mesh)
    mine = slice(rank * 24, (rank + 1) * 24)
    experts.routed(t.x[mine], Routing(t.ids[mine], t.weights[mine])).backward(t.dy[mine])
    single = Experts(t, config)
    single.routed(t.x, Routing(t.ids, t.weights)).backward(t.dy)
    whole = {n: p.grad for n, p in single.named_parameters()}
    return {n: relative_l2(g, whole[n]) for n, g in _full_grads(experts).items()}


@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp4", "hsdp2x2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_six_experts_on_four_shards(rank_pool, backend, hsdp) -> None:
    for errors in rank_pool(4).run(_uneven_shards, backend, hsdp):
        assert set(errors) == {"w1", "w3", "w2"}
        assert max(errors.values()) < 5e-3, errors  # bf16 gradients of four shards, added in fp32


# ---- idle ranks and experts through an optimizer step (case 1) -----------------------------------------


def _idle_step(rank: int, backend: str, tokens: tuple[int, int], routing: str) -> dict[str, float]:
    problem = Problem(tokens=tokens, hidden=64, intermediate=96, routing=routing)
    t = tensors(problem)
    group = dist.new_group([0, 1])
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "shard"))["shard"]
    own = slice(rank * 4, rank * 4 + 4)
    experts = _shard(Experts(t, MegaMoEConfig(backend=backend), group, own), mesh)
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1, weight_decay=0.0)
    before = {n: p.full_tensor().clone() for n, p in experts.named_parameters()}
    x, ids, weights, *_, dy = leaves(problem, rank, torch.device("cpu"))
    y = experts.routed(x, Routing(ids, weights))
    assert y.shape == x.shape
    y.backward(dy)
    assert x.grad is not None and x.grad.shape == x.shape
    optimizer.step()
    moved = {}
    for name, parameter in experts.named_parameters():
        for e in range(4):
            delta = parameter.full_tensor()[e] - before[name][e]
            moved[f"{name}[{own.start + e}]"] = delta.abs().max().item()
    return moved


@pytest.mark.parametrize(
    ("tokens", "routing"),
    [((64, 64), "rank0"), ((64, 0), "uniform"), ((64, 0), "rank0"), ((0, 0), "uniform")],
    ids=["all to rank 0", "rank 1 empty", "both", "nothing anywhere"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_idle_experts_step_with_a_zero_gradient_and_no_hang(rank_pool, backend, tokens, routing) -> None:
    used = set(tensors(Problem(tokens=tokens, routing=routing)).ids.flatten().tolist())
    for moved in rank_pool(2).run(_idle_step, backend, tokens, routing):
        for name, delta in moved.items():
            expert = int(name.split("[")[1][:-1])
            assert (delta > 0) == (expert in used), f"{name} moved by {delta}, used: {expert in used}"


# ---- a recomputation that ends inside the experts' forward -----------------------------------------------


class Block(nn.Module):
    """A residual block that ends with the experts, recomputed in its backward if `recompute`."""

    def __init__(self, experts: Experts, recompute: bool) -> None:
        super().__init__()
        self.norm, self.experts, self.recompute = nn.RMSNorm(64), experts, recompute

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        if self.recompute:
            return checkpoint(self.block, x, routing, use_reentrant=False)
        return self.block(x, routing)

    def block(self, x: Tensor, routing: Routing) -> Tensor:
        return x + self.experts.routed(self.norm(x), routing)


def _gradients_of_blocks(rank: int, mesh, recompute: bool) -> list[Tensor]:
    """What two steps leave on two blocks, each sharded as TorchTitan does it: experts, then the block."""
    config = MegaMoEConfig(backend="reference")
    made = [tensors(Problem(tokens=(64, 64), hidden=64, intermediate=96, seed=n)) for n in range(2)]
    blocks = nn.ModuleList(Block(_shard(Experts(t, config), mesh), recompute) for t in made)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=MP)
        block.set_gradient_divide_factor(1.0)
        block.set_force_sum_reduction_for_comms(True)
    mine = slice(rank * 64, (rank + 1) * 64)
    for _ in range(2):
        y = made[0].x[mine]
        for t, block in zip(made, blocks, strict=True):
            y = block(y, Routing(t.ids[mine], t.weights[mine]))
        y.backward(made[0].dy[mine])
    return [p.grad.full_tensor() for p in blocks.parameters() if p.grad is not None]


def _recomputed_blocks(rank: int) -> list[tuple[bool, int, int]]:
    """For each way to recompute: whether nothing changed, and how often each stage ran."""
    mesh = dist.init_device_mesh("cpu", (2,))
    real, found = op.get_backend, []
    want = _gradients_of_blocks(rank, mesh, False)
    for early_stop in (True, False):
        staged = Staged()
        op.get_backend = lambda _, staged=staged: staged
        try:
            with set_checkpoint_early_stop(early_stop):
                grads = _gradients_of_blocks(rank, mesh, True)
        finally:
            op.get_backend = real
        same = all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))
        found.append((same, staged.begun, staged.finished))
    return found


def test_fsdp_loses_its_place_where_a_recomputation_ends_early(rank_pool) -> None:
    for found in rank_pool(2).run(_recomputed_blocks):
        assert found == [(True, 8, 4), (True, 8, 8)]


# ---- gradient accumulation (case 8) ------------------------------------------------------------------


def _accumulate(rank: int, backend: str, micro_batches: int) -> dict[str, Tensor]:
    problem = Problem(tokens=(2048, 2048), hidden=64, intermediate=96)
    t = tensors(problem)
    t.ids[t.ids == 7] = 6
    t.ids[5, 0] = 7  # expert 7 is used once, in one micro-batch of rank 0
    mesh = dist.init_device_mesh("cpu", (2,))
    experts = _shard(Experts(t, MegaMoEConfig(backend=backend)), mesh)
    size = 2048 // micro_batches
    for start in range(rank * 2048, (rank + 1) * 2048, size):
        part = slice(start, start + size)
        experts.routed(t.x[part], Routing(t.ids[part], t.weights[part])).backward(t.dy[part])
    return {n: g.cpu() for n, g in _full_grads(experts).items()}


def _accumulation_oracle() -> dict[str, Tensor]:
    from titan_megamoe.testing.oracle import moe_oracle

    t = tensors(Problem(tokens=(2048, 2048), hidden=64, intermediate=96))
    t.ids[t.ids == 7] = 6
    t.ids[5, 0] = 7
    exact = moe_oracle(t.x, t.ids, t.weights, t.w1, t.w3, t.w2, t.dy)
    return {"w1": exact.dw1, "w3": exact.dw3, "w2": exact.dw2}


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_micro_batches_are_as_exact_as_one_large_batch(rank_pool, backend) -> None:
    exact = _accumulation_oracle()
    one = rank_pool(2).run(_accumulate, backend, 1)[0]
    many = rank_pool(2).run(_accumulate, backend, 64)[0]
    for name, expected in exact.items():
        limit = 2 * relative_l2(one[name], expected)
        assert relative_l2(many[name], expected) <= limit, name
        single = relative_l2(many[name][7], expected[7])
        assert single < 1e-2, f"the one contribution to {name}[7] was lost or blurred: {single}"
