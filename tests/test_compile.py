"""torch.compile around the op: no graph break, one recompile for a second T, gradients as in eager."""

from __future__ import annotations

import functools

import pytest
import torch
from matrix import BF16
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_megamoe import MegaMoEConfig, mega_moe
from titan_megamoe.testing.problems import Problem, device_of, ep_group, leaves

CONFIG = MegaMoEConfig(backend="all_to_all")


@pytest.mark.parametrize("backend", ["all_to_all", "reference"])
def test_opcheck(backend) -> None:
    *arguments, _ = leaves(Problem(tokens=(24,), hidden=64, intermediate=64), 0, torch.device("cpu"))
    text = MegaMoEConfig(backend=backend).text
    torch.library.opcheck(torch.ops.titan_megamoe.forward.default, (*arguments, "", text, 31))
    frozen = [a.detach() for a in arguments]
    torch.library.opcheck(torch.ops.titan_megamoe.forward.default, (*frozen, "", text, 0))


def _block(config: MegaMoEConfig, group, x, ids, weights, w1, w3, w2):
    return x + mega_moe(x * 2, ids, weights, w1, w3, w2, group=group, config=config)


def _save_the_op(_ctx, op, *_args, **_kwargs) -> CheckpointPolicy:
    ours = op is torch.ops.titan_megamoe.forward.default
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


def _with_ac(mode: str, block):
    if mode == "none":
        return block
    extra = {}
    if mode == "selective":
        extra["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _save_the_op)
    return lambda *args: checkpoint(block, *args, use_reentrant=False, **extra)


def _compiled_equals_eager(rank: int, world: int, config: MegaMoEConfig, ac: str) -> list[str]:
    # The group's workspace, if there is one, does not exist yet at the first compiled call.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    block = functools.partial(_block, config, ep_group(world))
    compiled = torch.compile(_with_ac(ac, block), fullgraph=True)
    wrong = []
    for tokens in ((24,) * world, (40,) * world, (56,) * world):
        made = []
        for function in (compiled, block):
            problem = Problem(tokens=tokens, hidden=64, intermediate=64, seed=1)
            *arguments, dy = leaves(problem, rank, device_of(rank))
            y = function(*arguments)
            y.backward(dy)
            made.append([y.detach(), *(arguments[i].grad for i in (0, 2, 3, 4, 5))])
        wrong += [
            f"T={tokens}: {i}" for i, pair in enumerate(zip(*made, strict=True)) if not torch.equal(*pair)
        ]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if graphs > 2:
        wrong.append(f"{graphs} graphs for three T; one static and one dynamic are enough")
    if torch._dynamo.utils.counters["graph_break"]:
        wrong.append(f"graph breaks: {dict(torch._dynamo.utils.counters['graph_break'])}")
    return wrong


@pytest.mark.parametrize("ac", ["none", "selective", "full"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("config", "device"), BF16)
def test_compiled_gradients_match_eager_under_activation_checkpointing(
    rank_pool, config, device, world, ac
) -> None:
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    unfused_on_cpu = (config.backend, device, ac) == ("all_to_all", "cpu", "selective")
    if unfused_on_cpu and torch.__version__.startswith("2.11."):
        pytest.skip(
            "torch 2.11's inductor asserts on a comparison of dynamic sizes among this graph's outputs"
        )
    results = rank_pool(world, device).run(_compiled_equals_eager, world, config, ac, timeout_s=240)
    assert results == [[]] * world


def _unused_output(x, ids, weights, w1, w3, w2):
    mega_moe(x, ids, weights, w1, w3, w2, config=CONFIG)
    return x * 2


def test_a_compiler_never_drops_a_call_that_peers_wait_for(monkeypatch) -> None:
    from titan_megamoe.backends import get_backend

    calls = []
    backend = get_backend("all_to_all")
    real = backend.forward
    monkeypatch.setattr(backend, "forward", lambda call: calls.append(1) or real(call))
    *arguments, _ = leaves(Problem(tokens=(24,), hidden=64, intermediate=64), 0, torch.device("cpu"))
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(_unused_output, fullgraph=True)(*arguments)
    assert calls == [1]
