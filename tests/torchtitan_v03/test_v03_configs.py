"""Which jobs the adapter for TorchTitan 0.3 takes, which it refuses and what it says; nothing is trained."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from v03_configs import OVERRIDE_REFUSED, REFUSED, ROOT, job_files

Suite = Callable[[int, str], dict[str, Any]]

FOUND_AND_FIX = {
    "tensor parallel": ("tensor_parallel_degree is 2", "set it to 1"),
    "expert tensor parallel": ("expert_tensor_parallel_degree is 2", "take it out"),
    "pipeline parallel": ("pipeline_parallel_degree is 2", "set it to 1"),
    "grouped quantization": ("quantize.grouped_mm.float8", "take"),
    "indivisible experts": ("expert_parallel_degree is 4", "divisor of 6"),
    "ep beyond the shards": ("expert_parallel_degree is 4", "= 2"),
    "type checking": ("spmd_typechecking", "turn it off"),
    "CUDA graphs": ("disable_cuda_graphs is off", "turn it on"),
    "unknown backend": ("'magic'", "must be one of"),
    "unknown precision": ("'fp3'", "must be one of"),
    "unknown option": ("[mega_moe] sms is 8", "correct it"),
    "negative bound": ("-5", "≥ 0"),
    "torchtitan's deepep switch": ("expert_parallel_comm_backend is 'deepep'", 'set it to "standard"'),
    "torchtitan 0.2's deepep": ('backend = "deepep"', 'expert_parallel_comm_backend = "deepep"'),
    "mxfp8": ("mxfp8", "bf16"),
    "balancing without coefficient": ("load_balance_coeff", "turn load_balancing off"),
    "direct experts": ("direct_experts on", "take the option out"),
    "another MoE model": ("'deepseek_v3'", "'qwen3'"),
    "unknown flavour": ("'31B'", "30B-A3B-8layers"),
    "unknown converter": ("'quantize.linear.mx'", "must be one of"),
    "own module": ("'mine'", "take it out"),
    "checkpointing by layer": ("selective_ac_option is 2", '"op"'),
    "checkpointing mode": ("'some'", "must be one of"),
    "validation batch": ("[validation]", "make them equal"),
    "0.2 only": ("early_step_in_backward is True", "take it out"),
    "misspelt": ("[training] step is 3", "correct it"),
    "misspelt section": ("[train] steps is 3", "correct it"),
    "wrong type": ("'three'", "of type int"),
    "wrong choice": ("'float8'", "bfloat16, float32"),
    "no option": ("'steps=3'", "--section.option=value"),
    "override: unknown option": ("'sms'", "must be one of backend"),
    "override: load balancing": ("load_balancing", "take the option out"),
    "override: direct experts": ("direct_experts on", "take the option out"),
    "override: unknown precision": ("'fp3'", "must be one of"),
    "override: fused without a GPU": ("'fused' cannot run here", "Hopper"),
    "override: quantized experts": ("Float8GroupedExperts", "take out"),
    "override: deepep dispatcher": ("DeepEPTokenDispatcher", '"standard"'),
    "override: tensor parallel": ("tensor_parallel_degree is 2", "set it to 1"),
    "override: pipeline parallel": ("pipeline_parallel_degree is 2", "set it to 1"),
    "override: indivisible experts": ("expert_parallel_degree is 4", "divisor of 6"),
}


@pytest.mark.parametrize("job", [*REFUSED, "CUDA graphs", *OVERRIDE_REFUSED])
def test_unsupported_job_starts_anyway(suite: Suite, job: str) -> None:
    said = suite(0, "refusals")[job]
    assert said.startswith(("ConfigError: ", "UnsupportedError: "))
    for words in FOUND_AND_FIX[job]:
        assert words in said
    assert "\n" not in said


def test_option_of_the_override_does_not_reach_the_op(suite: Suite) -> None:
    for config in suite(0, "options")["override"]:
        found = [config[key] for key in ("precision", "backend", "max_routed_rows", "comm_sms")]
        assert found == ["fp8", "reference", 77, 8]


@pytest.mark.parametrize(
    ("job", "tokens", "sms"), [("default", 128, 0), ("context parallel", 64, 0), ("given", 99, 16)]
)
def test_bound_on_tokens_misses_a_rank_s_batch(suite: Suite, job: str, tokens: int, sms: int) -> None:
    config = suite(0, "options")[job]
    assert (config["max_tokens_per_rank"], config["comm_sms"]) == (tokens, sms)


@pytest.mark.parametrize("way", ["override", "default"])
def test_selective_checkpointing_does_not_know_the_op(suite: Suite, way: str) -> None:
    assert suite(0, "options")[f"{way} ac"] == "MegaMoESelectiveAC.Config"


def test_dense_model_is_changed(suite: Suite) -> None:
    assert suite(0, "options")["dense"] == [[], "Qwen3Model.Config"]


@pytest.mark.parametrize(("setting", "balanced"), [("unset", True), ("on", True), ("off", False)])
def test_load_balancing_is_ignored(suite: Suite, setting: str, balanced: bool) -> None:
    assert suite(0, "options")[f"balancing {setting}"] is balanced


def test_torchtitans_own_deepep_cannot_be_had(suite: Suite) -> None:
    assert suite(0, "options")["torchtitan's deepep"] == "DeepEPTokenDispatcher.Config"


def test_a_renamed_option_is_lost(suite: Suite) -> None:
    assert suite(0, "options")["mapped"] == {
        "dump_folder": "/x/y",
        "print_config": True,
        "dataset": "c4",
        "num_workers": 2,
        "optimizer": ["Adam", 0.99, "foreach"],
        "decay_ratio": 0.5,
        "profiling": True,
        "last_save_model_only": False,
        "exclude_from_loading": ["optimizer", "dataloader"],
        "components": ["model"],
        "recompute": [],
        "validation": [True, 3, "/z"],
        "tb_folder": "7",
    }


@pytest.mark.parametrize("path", job_files(), ids=lambda path: "/".join(path.parts[-3:]))
def test_shipped_job_file_means_something_else(suite: Suite, path: Path) -> None:
    out = suite(0, "jobs")[str(path.relative_to(ROOT))]
    file = tomllib.loads(path.read_text())
    training, converters = file["training"], file["model"].get("converters", [])
    mega_moe = file.get("mega_moe", {}) if "mega_moe" in converters else {}
    assert out["training"] == [training[key] for key in ("local_batch_size", "seq_len", "steps")]
    assert out["lr"] == file["optimizer"]["lr"]
    assert out["ep"] == file["parallelism"]["expert_parallel_degree"]
    assert out["compile"] is file.get("compile", {}).get("enable", False)
    assert out["ac"] == {"full": "FullAC.Config", "none": "none"}[file["activation_checkpoint"]["mode"]]
    experts = "MegaMoERoutedExperts.Config" if "mega_moe" in converters else "RoutedExperts.Config"
    assert out["experts"] == [experts]
    flavor = file["model"]["flavor"]
    if flavor.endswith("layers"):
        assert out["layers"] == int(flavor.removesuffix("layers").rpartition("-")[2])
    # Attention's two linear layers of each block; never the router or the last layer.
    float8 = "quantize.linear.float8" in converters
    assert out["linear"] == (2 * out["layers"] if float8 else 0)
    backend = mega_moe.get("backend", "auto")
    assert (out["refused"] == "not refused") == (backend in ("auto", "all_to_all", "reference"))
