"""The cache of quantized weights: when it must make them again, and when it must not."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from titan_megamoe.backends.hopper.fp8_quantize import QuantizedWeight
from titan_megamoe.backends.hopper.fp8_weights import WeightCache
from titan_megamoe.generation import new_weight_generation, renew_on_load
from titan_megamoe.testing.fp8_chain import reference_weights
from titan_megamoe.torchtitan.direct import take_from_fsdp, whole


def make(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 32, 48), (2, 32, 48), (2, 48, 32))
    return [torch.nn.Parameter(torch.randn(s, generator=generator).bfloat16()) for s in shapes]


class Counting:
    runs = 0

    def __call__(self, weights) -> QuantizedWeight:
        self.runs += 1
        return reference_weights([w.detach() for w in weights])


@pytest.fixture
def cache() -> WeightCache:
    return WeightCache(1 << 30, Counting())


def right(cache, w1, w3, w2) -> bool:
    w13, w2_quantized = cache.get(w1, w3, w2)
    wanted = reference_weights([w1.detach(), w3.detach()]), reference_weights([w2.detach()])
    return all(
        torch.equal(ours.float(), theirs.float())
        for pair in zip((w13, w2_quantized), wanted, strict=True)
        for ours, theirs in zip(*pair, strict=True)
    )


def test_weights_are_quantized_again_within_a_step(cache):
    weights = make()
    assert right(cache, *weights) and right(cache, *weights)
    assert right(cache, *(w.view_as(w) for w in weights))  # as DTensor.to_local gives them
    assert cache.quantize.runs == 2


def test_step_leaves_stale_weights(cache):
    weights = make()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    assert right(cache, *weights)
    for w in weights:
        w.grad = torch.ones_like(w)
    optimizer.step()
    assert right(cache, *weights)
    assert cache.quantize.runs == 4


def test_write_in_place_leaves_stale_weights(cache):
    weights = make()
    assert right(cache, *weights)
    size = cache.num_bytes
    for _ in range(3):
        with torch.no_grad():
            weights[1].mul_(2)
        assert right(cache, *weights)
    assert cache.num_bytes == size, "what was made of the old values stays"


def gather(storage: torch.Tensor, values: torch.Tensor) -> None:
    """As FSDP fills a layer's storage: no version advances."""
    storage.untyped_storage().resize_(values.numel() * 2)
    with torch.autograd._unsafe_preserve_version_counter(storage):
        storage.copy_(values)


def test_gathered_weights_of_a_new_step_are_stale(cache):
    weights = [w.detach().clone() for w in make()]
    assert right(cache, *weights)
    for w, new in zip(weights, make(1), strict=True):
        w.untyped_storage().resize_(0)
        gather(w, new.detach())
    new_weight_generation()
    assert right(cache, *weights)


def test_recompute_after_resharding_quantizes_again(cache):
    weights = [w.detach().clone() for w in make()]
    assert right(cache, *weights)
    for w, same in zip(weights, make(), strict=True):
        w.untyped_storage().resize_(0)
        gather(w, same.detach())
    assert right(cache, *weights)
    assert cache.quantize.runs == 2


def test_other_layer_at_a_freed_address_gets_the_old_weights(cache):
    """Whatever address or object a dead layer's successor gets."""
    for seed in range(20):
        weights = make(seed)
        assert right(cache, *weights)
        del weights
        gc.collect()
    assert cache.quantize.runs == 40


def test_dead_layers_keep_their_memory(cache):
    first = make()
    assert right(cache, *first)
    one = cache.num_bytes
    del first
    gc.collect()
    assert right(cache, *make(1))
    assert cache.num_bytes == one


def test_cache_outgrows_its_bound():
    cache = WeightCache(1, Counting())
    layers = [make(seed) for seed in range(3)]
    sizes = []
    for layer in layers:
        assert right(cache, *layer)
        sizes.append(cache.num_bytes)
    assert len(set(sizes)) == 1 and cache.quantize.runs == 6
    assert right(cache, *layers[-1]) and cache.quantize.runs == 6
    assert right(cache, *layers[0]) and cache.quantize.runs == 8


# ---- under FSDP2 ---------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """Takes its weights from the cache as a fused layer does, and says where they are not right."""

    def __init__(self, cache: WeightCache, seed: int, wrong: list[str]) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (torch.nn.Parameter(w.detach().float()) for w in make(seed))
        self.cache, self.wrong = cache, wrong
        renew_on_load(self)

    def forward(self, x: torch.Tensor, when: str) -> torch.Tensor:
        weights = [whole(w) for w in (self.w1, self.w3, self.w2)]
        if not right(self.cache, *weights):
            self.wrong.append(when)
        return x * sum(w.float().mean() for w in weights)


def _sharded_steps(rank: int, shards: int, direct: bool) -> dict[str, object]:
    """`direct`: the layers' forwards run without FSDP's hooks, on the optimizer's own parameters."""
    mesh = dist.init_device_mesh("cpu", (2 // shards, shards), mesh_dim_names=("ep", "shard"))["shard"]
    cache, wrong = WeightCache(1 << 30, Counting()), []
    model = torch.nn.ModuleList(Layer(cache, seed, wrong) for seed in range(2))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        layer.set_gradient_divide_factor(1.0)  # gloo cannot average
        layer.set_force_sum_reduction_for_comms(True)
        if direct:
            take_from_fsdp(layer, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    other = [w.detach() for seed in (5, 6) for w in make(seed)]
    runs = []

    def step(when: str) -> None:
        """Forward, and a recomputation of each layer in the backward."""
        before = cache.quantize.runs
        y = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
        for layer in model:
            y = checkpoint(layer.forward if direct else layer, y, when, use_reentrant=False)
        y.sum().backward()
        runs.append(cache.quantize.runs - before)

    step("first")
    step("same weights")
    optimizer.step()
    step("after a step")
    model.load_state_dict(
        {
            k: distribute_tensor(w.float(), mesh, [Shard(0)])
            for k, w in zip(model.state_dict(), other, strict=True)
        }
    )
    step("after loading")
    with torch.no_grad():
        for w in model.parameters():
            w.mul_(2)
    new_weight_generation()
    step("after a change of the shards")
    return {"wrong": wrong, "runs": runs}


@pytest.mark.parametrize(("shards", "direct"), [(1, False), (2, False), (1, True)])
def test_resharding_costs_a_quantization_or_hides_new_weights(rank_pool, shards, direct):
    """Two quantizations a layer and step, of w13 and w2, shared by forward and recomputation."""
    for found in rank_pool(2).run(_sharded_steps, shards, direct):
        assert found == {"wrong": [], "runs": [4, 0, 4, 4, 4]}


def test_fp8_is_refused_without_a_reason(monkeypatch):
    from titan_megamoe import MegaMoEConfig, backends
    from titan_megamoe.backends.hopper import fp8_backend

    cpu = torch.device("cpu")
    for precision in ("fp8", "fp8_bwd"):
        config = MegaMoEConfig(backend="fused", precision=precision)
        registered = backends.unavailable_reason("fused", cpu, None, config)
        assert registered and "Hopper" in registered
    backend = fp8_backend.Fp8FusedBackend()
    fp8 = MegaMoEConfig(precision="fp8")
    assert "Hopper" in (backend.unavailable(cpu, None, fp8) or "")
    assert "mxfp8" in (backend.unavailable(cpu, None, MegaMoEConfig(precision="mxfp8")) or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((8, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        reason = backend.unavailable(torch.device("cuda"), None, fp8) or ""
        assert "9.0" in reason and f"{capability[0]}.0" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(fp8_backend, "why_no_kernels", lambda: "no compiler")
    assert backend.unavailable(torch.device("cuda"), None, fp8) == "no compiler"
