"""The cache of quantized weights: when it must make them again, and when it must not."""

from __future__ import annotations

import gc

import pytest
import torch

pytest.importorskip("triton")

from titan_megamoe.backends.hopper.fp8_quantize import QuantizedWeight
from titan_megamoe.backends.hopper.fp8_weights import WeightCache, new_weight_generation
from titan_megamoe.testing.fp8_chain import reference_weights


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
    with torch.no_grad():
        weights[1].mul_(2)
    assert right(cache, *weights)


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
    for config, reason in (
        (MegaMoEConfig(precision="mxfp8"), "mxfp8"),
        (MegaMoEConfig(precision="fp8", wgrad_precision="fp8"), "wgrad_precision='bf16'"),
    ):
        assert reason in (backend.unavailable(cpu, None, config) or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((8, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        reason = backend.unavailable(torch.device("cuda"), None, fp8) or ""
        assert "9.0" in reason and f"{capability[0]}.0" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(fp8_backend, "why_no_kernels", lambda: "no compiler")
    assert backend.unavailable(torch.device("cuda"), None, fp8) == "no compiler"
