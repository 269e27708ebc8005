"""The registry: what runs where, with a reason for what does not; imports on machines that lack things."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from matrix import IMPLEMENTATIONS

from titan_megamoe import ConfigError, MegaMoEConfig, UnsupportedError, mega_moe
from titan_megamoe import backends as registry
from titan_megamoe.group import PerGroup
from titan_megamoe.testing.problems import Problem, leaves

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def gpu_of(monkeypatch):
    """`gpu_of((9, 0))`: a machine whose GPUs have that compute capability, as far as anyone asks."""

    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
        monkeypatch.setattr(registry, "_resolved", PerGroup(dict))

    return pretend


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_fused_on_another_architecture_says_what_was_found_and_needed(gpu_of, capability) -> None:
    gpu_of(capability)
    with pytest.raises(UnsupportedError) as caught:
        registry.resolve_backend(CUDA, None, MegaMoEConfig(backend="fused"))
    found = ".".join(map(str, capability))
    assert f"this one has {found}" in str(caught.value) and "compute capability 9.0" in str(caught.value)


def test_an_old_gpu_is_refused_by_all_to_all(gpu_of) -> None:
    gpu_of((7, 5))
    with pytest.raises(UnsupportedError, match="needs compute capability 8.0 or newer, this GPU has 7.5"):
        registry.resolve_backend(CUDA, None, MegaMoEConfig(backend="all_to_all"))


@pytest.mark.parametrize(
    ("capability", "expected"), [((9, 0), "fused"), ((8, 0), "all_to_all"), ((12, 0), "all_to_all")]
)
def test_auto_takes_the_best_and_says_why_once(gpu_of, caplog, capability, expected) -> None:
    gpu_of(capability)
    with caplog.at_level(logging.INFO, "titan_megamoe"):
        for _ in range(3):
            assert registry.resolve_backend(CUDA, None, MegaMoEConfig()) == expected
    assert len(caplog.records) == 1
    assert f"auto takes '{expected}'" in caplog.text
    assert ("needs a Hopper GPU" in caplog.text) == (expected != "fused")


def test_auto_on_the_cpu_names_what_it_passed_over(monkeypatch, caplog) -> None:
    monkeypatch.setattr(registry, "_resolved", PerGroup(dict))
    with caplog.at_level(logging.INFO, "titan_megamoe"):
        assert registry.resolve_backend(CPU, None, MegaMoEConfig()) == "all_to_all"
    assert "fused: it needs a Hopper GPU" in caplog.text


def test_auto_in_fp8_takes_the_emulation_not_bf16(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_resolved", PerGroup(dict))
    assert registry.resolve_backend(CPU, None, MegaMoEConfig(precision="fp8")) == "reference"


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize("backend", ["auto", "fused", "all_to_all", "reference", "deepep"])
def test_mxfp8_is_refused_everywhere_with_a_reason(gpu_of, backend, capability) -> None:
    gpu_of(capability)
    with pytest.raises(UnsupportedError, match="mxfp8"):
        registry.resolve_backend(CUDA, None, MegaMoEConfig(backend=backend, precision="mxfp8"))


@pytest.mark.parametrize("backend", ["fused", "all_to_all", "deepep"])
def test_an_explicit_backend_never_falls_back(backend) -> None:
    *arguments, _ = leaves(Problem(tokens=(8,), hidden=64, intermediate=64), 0, CPU)
    config = MegaMoEConfig(backend=backend, precision="fp8")
    with pytest.raises(UnsupportedError, match=f"backend '{backend}' cannot run here"):
        mega_moe(*arguments, config=config)


def test_every_backend_has_a_reason_or_runs() -> None:
    table = registry.backend_table(CPU, None, MegaMoEConfig())
    assert set(table) == {"fused", "all_to_all", "deepep", "reference"}
    assert table["all_to_all"] is None and table["reference"] is None
    assert table["fused"] and table["deepep"]
    tested = {p.values[0].backend for p in IMPLEMENTATIONS}
    assert tested == set(table) - {"deepep"}, "deepep keeps TorchTitan's deviations and has tests of its own"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "nvshmem"}, "backend is 'nvshmem'; it must be one of auto, reference"),
        ({"precision": "fp16"}, "precision is 'fp16'; it must be one of bf16"),
        ({"max_routed_rows": -1}, "max_routed_rows is -1; it must be a whole number"),
        ({"timeout_s": 0}, "timeout_s is 0; it must be > 0"),
        ({"wgrad_precision": "fp8"}, "need precision 'fp8' or 'fp8_bwd'"),
    ],
)
def test_a_bad_option_is_named_when_the_config_is_made(options, message) -> None:
    with pytest.raises(ConfigError) as caught:
        MegaMoEConfig(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "wgrad"),
    [
        ({}, "bf16"),
        ({"precision": "fp8"}, "fp8"),
        ({"precision": "fp8_bwd"}, "bf16"),
        ({"precision": "fp8", "wgrad_precision": "bf16"}, "bf16"),
        ({"precision": "fp8_bwd", "wgrad_precision": "fp8"}, "fp8"),
    ],
)
def test_weight_gradients_are_not_in_the_precision_asked_for(options, wgrad) -> None:
    config = MegaMoEConfig(**options)
    assert config.wgrad_precision == wgrad
    assert MegaMoEConfig.from_text(config.text).wgrad_precision == wgrad


def test_a_config_survives_its_trip_through_the_custom_op() -> None:
    config = MegaMoEConfig(backend="reference", precision="fp8", wgrad_precision="fp8", timeout_s=7.5)
    assert MegaMoEConfig.from_text(config.text) == config


_BLOCKED_IMPORT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(f"blocked {{name}}")
sys.meta_path.insert(0, Block())
import torch
from titan_megamoe import MegaMoEConfig, mega_moe
x = torch.randn(4, 64).bfloat16()
w = torch.randn(2, 64, 64).bfloat16()
ids = torch.zeros(4, 1, dtype=torch.int64)
y = mega_moe(x, ids, torch.ones(4, 1), w, w, w, config=MegaMoEConfig(backend="all_to_all"))
assert y.shape == x.shape
from titan_megamoe.backends import backend_table
print(backend_table(torch.device("cpu"), None, MegaMoEConfig()))
"""


@pytest.mark.parametrize("blocked", [{"triton"}, {"torchtitan", "torchao", "deep_gemm", "deep_ep"}])
def test_import_and_the_op_work_without_optional_packages(blocked) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _BLOCKED_IMPORT.format(blocked=blocked)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "'all_to_all': None" in run.stdout


def test_the_workspace_has_a_public_size() -> None:
    import titan_megamoe

    one = titan_megamoe.workspace_bytes(world=2, max_tokens_per_rank=16384, top_k=8, hidden=2048)
    tokens = 16384 * 2048 * 2
    assert 2 * tokens <= one <= 3 * tokens, "x and the partial sums of one peer, and little more"
