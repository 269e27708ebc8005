"""Which jobs the converter takes, which it refuses and what it says; nothing is trained."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from titan_configs import EPS, REFUSED, job_files
from titan_harness import REPOSITORY, Runs

from titan_megamoe import ConfigError
from titan_megamoe.bench.jobfile import read_job
from titan_megamoe.torchtitan import jobs

FOUND_AND_FIX = {
    "tensor parallel": ("tensor_parallel_degree is 2", "set it to 1"),
    "expert tensor parallel": ("expert_tensor_parallel_degree is 2", "set it to 1"),
    "pipeline parallel": ("pipeline_parallel_degree is 2", "set it to 1"),
    "grouped quantization": ("quantize.grouped_mm.float8", "take"),
    "indivisible experts": ("expert_parallel_degree is 4", "divisor of 6"),
    "ep beyond the shards": ("expert_parallel_degree is 4", "= 2"),
    "unknown backend": ("'magic'", "must be one of"),
    "unknown precision": ("'fp3'", "must be one of"),
    "negative bound": ("-5", "≥ 0"),
    "torchtitan's deepep switch": ("expert_parallel_comm_backend", 'backend = "deepep"'),
    "score before experts": ("score_before_experts = True", "score_before_experts = False"),
    "another MoE model": ("'deepseek_v3'", "qwen3"),
    "balancing without coefficient": ("load_balance_coeff", "turn load_balancing off"),
    "direct experts without EP": ("expert_parallel_degree is 1 on 4", "set expert_parallel_degree to 4"),
    "direct experts on shards": ("expert_parallel_degree is 2 on 4", "set expert_parallel_degree to 4"),
    "direct experts in replicas": ("replicate_degree is 2", "to 4 and data_parallel_replicate_degree to 1"),
    "direct experts too few": ("expert_parallel_degree is 2 on 4", "turn direct_experts off."),
    "direct experts of deepep": ('backend = "deepep"', "turn one of the two off"),
    "direct experts offloaded": ("enable_cpu_offload", "turn one of the two off"),
    "direct experts with replica groups": ("[fault_tolerance] enable", "turn one of the two off"),
    "deepep without CUDA": ("CUDA", "all_to_all"),
    "mxfp8": ("mxfp8", "bf16"),
}
DENSE = ("debugmodel", "0.6B", "1.7B", "4B", "8B", "14B", "32B")
SPARSE = ("debugmodel_moe", "30B-A3B", "235B-A22B")


@pytest.mark.parametrize("job", REFUSED)
def test_unsupported_job_starts_anyway(runs: Runs, job: str) -> None:
    said = runs.alone("refusals")[job]
    assert said.startswith(("ConfigError: ", "UnsupportedError: "))
    for words in FOUND_AND_FIX[job]:
        assert words in said
    assert "\n" not in said


def test_every_flavour_is_tried(runs: Runs) -> None:
    assert len(runs.alone("configs")) == len(DENSE + SPARSE) * len(EPS) * 2


@pytest.mark.parametrize("ep", EPS)
@pytest.mark.parametrize("flavor", SPARSE)
def test_converter_is_silently_ignored_or_changes_the_layout(runs: Runs, flavor: str, ep: int) -> None:
    out = runs.alone("configs")
    on, off = out[f"{flavor} EP={ep} on"], out[f"{flavor} EP={ep} off"]
    assert (on["blocks"], off["blocks"]) == (["MegaMoE"], ["MoE"])
    assert on["layout"] == off["layout"]
    assert len(on["said"]) == 1
    assert f"2 MoE blocks of qwen3 {flavor} run on backend" in on["said"][0]
    assert f"EP={ep}," in on["said"][0]


@pytest.mark.parametrize(
    ("ep", "words"),
    [
        (1, "not an FSDP module"),
        (2, "sharded over 4 ranks, and the expert-parallel group has 2"),
        (4, "by 4.0"),
    ],
)
def test_experts_are_taken_from_fsdp_that_shards_or_divides(runs: Runs, ep: int, words: str) -> None:
    said = runs.alone("configs")[f"debugmodel_moe EP={ep} on"]["direct"]
    assert words in said and "direct_experts off" in said


@pytest.mark.parametrize("ep", EPS)
@pytest.mark.parametrize("flavor", DENSE)
def test_dense_model_is_changed(runs: Runs, flavor: str, ep: int) -> None:
    out = runs.alone("configs")
    on, off = out[f"{flavor} EP={ep} on"], out[f"{flavor} EP={ep} off"]
    assert on["layout"] == off["layout"]
    assert on["blocks"] == []
    assert on["said"] == [f"mega_moe: qwen3 {flavor} is dense, so the converter leaves it as it is"]


@pytest.mark.parametrize(
    ("job", "tokens"), [("default", 2 * 64), ("context parallel", 64), ("validation", 3 * 256), ("given", 77)]
)
def test_bound_on_tokens_misses_a_rank_s_batch(runs: Runs, job: str, tokens: int) -> None:
    assert runs.alone("sections")[job]["max_tokens_per_rank"] == tokens


def test_option_does_not_reach_the_op(runs: Runs) -> None:
    out = runs.alone("sections")
    assert (out["given"]["comm_sms"], out["default"]["comm_sms"]) == (8, 0)
    assert out["default"]["backend"] == "reference"


@pytest.mark.parametrize("way", ["inherited", "wrapped"])
def test_another_custom_config_module_cannot_compose(runs: Runs, way: str) -> None:
    assert runs.alone("sections")[way] == ["reference", 7]


def test_wrong_job_config_is_wrapped(runs: Runs) -> None:
    out = runs.alone("sections")
    assert "not a dataclass" in out["no dataclass"]
    assert "already has a section mega_moe" in out["twice"]


@pytest.mark.parametrize("path", job_files(), ids=lambda path: "/".join(path.parts[-3:]))
def test_shipped_job_file_does_not_start(runs: Runs, path: Path) -> None:
    out = runs.alone("jobs")[str(path.relative_to(REPOSITORY))]
    stock = path.stem.startswith("torchtitan") or path.parent.name == "train_configs"
    assert out["blocks"] == ["MoE" if stock else "MegaMoE"] * 2
    assert (out["float8"] > 0) == (path.stem == "torchtitan_float8")
    if path.stem in _REFUSED_WITHOUT_A_GPU:
        assert _REFUSED_WITHOUT_A_GPU[path.stem] in out["refused"]
    else:
        assert out["refused"] == ""


_REFUSED_WITHOUT_A_GPU = {
    "deepep": "DeepEP runs on CUDA devices",
    "mega_moe_bf16": "it needs a Hopper GPU",
    "mega_moe_fp8": "it needs a Hopper GPU",
    "mega_moe_fp8_bwd": "it needs a Hopper GPU",
}


@pytest.mark.parametrize("job", jobs.jobs(), ids=lambda job: str(job.path))
def test_a_twin_has_another_width_or_leaves_the_node(runs: Runs, job: jobs.Job) -> None:
    out = runs.alone("jobs")
    twin, base = out[f"train_configs/{job.path}"], out[f"train_configs/{job.model}.toml"]
    assert twin["width"] == base["width"]
    assert (twin["gpus"], twin["layers"] == base["layers"]) == (job.gpus, job.gpus > 8)
    assert twin["ep"] == min(job.gpus, 8)


@pytest.mark.parametrize("path", job_files(), ids=lambda path: "/".join(path.parts[-3:]))
def test_job_is_read_otherwise_than_by_torchtitan(runs: Runs, path: Path) -> None:
    wanted = runs.alone("jobs")[str(path.relative_to(REPOSITORY))]["facts"]
    facts, shape = read_job(path), read_job(path).model
    layer = shape.layer
    assert [layer.hidden, layer.intermediate, layer.experts, layer.top_k] == wanted["width"]
    assert [shape.heads, shape.kv_heads, shape.head_dim] == wanted["heads"]
    assert shape.vocabulary == wanted["vocabulary"]
    assert (facts.layers, facts.seq_len, facts.ac) == (wanted["layers"], wanted["seq_len"], wanted["ac"])
    assert [facts.batch, facts.global_batch] == wanted["batch"]
    assert [facts.dp_replicate, facts.dp_shard, facts.cp] == wanted["degrees"]
    assert (facts.impl == "torchtitan") == ("mega_moe" not in wanted["converters"])


def test_job_files_are_not_what_their_table_says(tmp_path: Path) -> None:
    assert jobs.write(check=True) == [], "run python -m titan_megamoe.torchtitan.jobs"
    shutil.copytree(jobs.TRAIN_CONFIGS, tmp_path / "copy")
    changed = tmp_path / "copy/qwen3_30b_a3b/2gpu/deepep.toml"
    changed.write_text(changed.read_text().replace("16384", "8192"))
    extra = changed.with_name("left_over.toml")
    extra.write_text("")
    assert jobs.write(tmp_path / "copy", check=True) == [changed, extra]
    assert jobs.main(["--check", "--folder", str(tmp_path / "copy")]) == 1
    jobs.write(tmp_path / "copy")
    assert jobs.write(tmp_path / "copy", check=True) == []


def test_a_change_is_lost_on_a_value_of_several_lines(tmp_path: Path) -> None:
    job = jobs.Job("m", "s", "i", 1, "words", {("model", "converters"): (["mega_moe"], "i")})
    with pytest.raises((ConfigError, tomllib.TOMLDecodeError)):
        jobs.text_of(job, '[model]\nconverters = [\n "x",\n]\n')


def _python(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_importing_the_integration_imports_torchtitan() -> None:
    code = """
import sys
import titan_megamoe.torchtitan, titan_megamoe.torchtitan.launch
assert not any(name.split('.')[0] == 'torchtitan' for name in sys.modules)
"""
    finished = _python(code)
    assert finished.returncode == 0, finished.stderr


def test_missing_torchtitan_is_a_puzzle() -> None:
    finished = _python(
        """
import sys
sys.modules['torchtitan'] = None
from titan_megamoe.torchtitan import JobConfig
"""
    )
    assert finished.returncode == 1
    last = finished.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: titan_megamoe.torchtitan needs TorchTitan")
    assert "pip install" in last


def test_shim_comes_too_late_in_silence() -> None:
    finished = _python(
        """
import torchtitan.tools.utils
from titan_megamoe.torchtitan import cpu_shim
cpu_shim.apply()
"""
    )
    assert finished.returncode == 1
    assert "before the CPU shim was applied" in finished.stderr


def test_shim_acts_beside_a_gpu() -> None:
    finished = _python(
        """
import torch
torch.cuda.is_available = lambda: True
from titan_megamoe.torchtitan import cpu_shim
cpu_shim.apply()
"""
    )
    assert finished.returncode == 1
    assert "a CUDA device is visible" in finished.stderr
