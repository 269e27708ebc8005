"""Run as one plain process: what the adapter for TorchTitan 0.3 makes of configurations; nothing is trained.

    python v03_configs.py <suite> <result.json>

A process of its own, because the CPU shim changes torch for the whole process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titan_megamoe.torchtitan.v03 import cpu_shim

if __name__ == "__main__":
    cpu_shim.apply()

import torch.distributed as dist

WORLD = 4
OVERRIDES = "titan_megamoe.torchtitan.v03.overrides"
ROOT = Path(__file__).parents[2]

REFUSED: dict[str, tuple[str, ...]] = {
    "tensor parallel": ("--parallelism.tensor_parallel_degree=2",),
    "expert tensor parallel": ("--parallelism.expert_tensor_parallel_degree=2",),
    "pipeline parallel": ("--parallelism.pipeline_parallel_degree=2",),
    "grouped quantization": ("--model.converters=mega_moe,quantize.grouped_mm.float8",),
    "indivisible experts": ("--model.flavor=six_experts", "--parallelism.expert_parallel_degree=4"),
    "ep beyond the shards": (
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.expert_parallel_degree=4",
    ),
    "type checking": ("--debug.spmd_typechecking",),
    "unknown backend": ("--mega_moe.backend=magic",),
    "unknown precision": ("--mega_moe.precision=fp3",),
    "unknown option": ("--mega_moe.sms=8",),
    "negative bound": ("--mega_moe.max_routed_rows=-5",),
    "torchtitan's deepep switch": ("--parallelism.expert_parallel_comm_backend=deepep",),
    "torchtitan 0.2's deepep": ("--mega_moe.backend=deepep",),
    "mxfp8": ("--mega_moe.precision=mxfp8", "--mega_moe.backend=reference"),
    "balancing without coefficient": ("--model.flavor=no_coefficient", "--mega_moe.load_balancing"),
    "direct experts": ("--mega_moe.direct_experts",),
    "another MoE model": ("--model.name=deepseek_v3",),
    "unknown flavour": ("--model.flavor=31B",),
    "unknown converter": ("--model.converters=mega_moe,quantize.linear.mx",),
    "own module": ("--job.custom_config_module=mine",),
    "checkpointing by layer": ("--activation_checkpoint.selective_ac_option=2",),
    "checkpointing mode": ("--activation_checkpoint.mode=some",),
    "validation batch": ("--validation.enable", "--validation.seq_len=128"),
    "0.2 only": ("--optimizer.early_step_in_backward",),
    "misspelt": ("--training.step=3",),
    "misspelt section": ("--train.steps=3",),
    "wrong type": ("--training.steps=three",),
    "wrong choice": ("--training.mixed_precision_param=float8",),
    "no option": ("steps=3",),
}
"""Jobs that are refused, each with EP=1 where nothing else is said."""

OVERRIDE_REFUSED: dict[str, dict[str, Any]] = {
    "override: unknown option": {"options": {"sms": 8}},
    "override: load balancing": {"options": {"load_balancing": True}},
    "override: direct experts": {"options": {"direct_experts": True}},
    "override: unknown precision": {"options": {"precision": "fp3"}},
    "override: fused without a GPU": {"options": {"backend": "fused"}},
    "override: quantized experts": {"quantized": True},
    "override: deepep dispatcher": {"moe_comm_backend": "deepep", "expert_parallel_degree": 2},
    "override: tensor parallel": {"tensor_parallel_degree": 2},
    "override: pipeline parallel": {"pipeline_parallel_degree": 2, "expert_parallel_degree": 2},
    "override: indivisible experts": {"flavor": "six_experts", "expert_parallel_degree": 4},
}


def job(*options: str, text: str = "") -> Any:
    """A job file's configuration, of one sparse flavour where the text says nothing else."""
    from titan_megamoe.torchtitan.v03.job_file import read_job

    default = (
        '[model]\nname = "qwen3"\nflavor = "debugmodel_moe"\nconverters = ["mega_moe"]\n'
        "[training]\nlocal_batch_size = 2\nseq_len = 64\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text or default)
        file.flush()
        return read_job(file.name, list(options))


def add_odd_flavors() -> None:
    from torchtitan.models import qwen3

    from titan_megamoe.torchtitan.v03 import flavors

    def without_coefficient(**options: Any) -> Any:
        config = flavors._small(512, 512, 64, 2, 4, 2, 16, 96, 8, 2, **options)
        for layer in config.layers:
            layer.moe.load_balance_coeff = None
        return config

    qwen3.qwen3_configs["six_experts"] = partial(flavors._small, 512, 512, 64, 2, 4, 2, 16, 96, 6, 2)
    qwen3.qwen3_configs["no_coefficient"] = without_coefficient


def said(function: Any, *arguments: Any, **options: Any) -> str:
    from titan_megamoe.errors import MegaMoEError

    try:
        function(*arguments, **options)
    except MegaMoEError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def refusals() -> dict[str, Any]:
    """The message of every refusal. For job files there is no process group: nothing was exchanged."""
    from titan_megamoe.torchtitan.v03 import checks

    os.environ["WORLD_SIZE"] = str(WORLD)
    add_odd_flavors()
    out = {name: said(job, *options) for name, options in REFUSED.items()}
    checks.device_type = "cuda"  # the one refusal that a CPU does not need
    out["CUDA graphs"] = said(job, "--training.no_disable_cuda_graphs")
    checks.device_type = "cpu"
    assert not dist.is_initialized()
    dist.init_process_group("fake", rank=0, world_size=WORLD)
    out |= {name: said(overridden, **options) for name, options in OVERRIDE_REFUSED.items()}
    return out


def overridden(
    options: dict[str, Any] | None = None,
    moe_comm_backend: str = "standard",
    quantized: bool = False,
    flavor: str = "debugmodel_moe",
    **degrees: int,
) -> Any:
    """A job of TorchTitan's own registry with our override, built on the meta device and parallelised."""
    from torchtitan.components.quantization import Float8GroupedExpertsConverter, float8
    from torchtitan.config.override import apply_overrides
    from torchtitan.distributed import ParallelDims
    from torchtitan.models import qwen3
    from torchtitan.models.qwen3 import config_registry

    float8.has_cuda_capability = lambda *_: True  # a GPU is not needed to swap configurations
    converters = [Float8GroupedExpertsConverter.Config(model_compile_enabled=False)] if quantized else []
    config = config_registry.qwen3_moe_debug()
    config.model_spec = qwen3.model_registry(flavor, moe_comm_backend=moe_comm_backend, converters=converters)
    config.training.seq_len, config.training.disable_cuda_graphs = 64, True
    config.parallelism.spmd_backend = "partial_dtensor"
    for name, degree in degrees.items():
        setattr(config.parallelism, name, degree)
    config.override.imports = [(f"{OVERRIDES}.mega_moe", options or {})]
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    dims = ParallelDims.from_config(config.parallelism, WORLD)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.parallelize(dims)
    return model


def options() -> dict[str, Any]:
    """How options reach the op: from the override's JSON, the job file and the command line."""
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import apply_overrides

    from titan_megamoe.torchtitan.v03.converter import settle_job
    from titan_megamoe.torchtitan.v03.experts import MegaMoERoutedExperts

    def op_configs(config: Any) -> list[dict[str, Any]]:
        found = [c for _, c, _, _ in config.model_spec.model.traverse(MegaMoERoutedExperts.Config)]
        return [dataclasses.asdict(c.mega_moe) for c in found]

    out: dict[str, Any] = {}
    imports = (
        f"{OVERRIDES}.mega_moe"
        + '={"precision":"fp8","backend":"reference","max_routed_rows":77,"comm_sms":8}'
    )
    config = ConfigManager().parse_args(
        ["--module=qwen3", "--config=qwen3_moe_debug", "--training.disable_cuda_graphs"]
        + ["--override.imports", imports, f"{OVERRIDES}.selective_ac"]
    )
    apply_overrides(config.override, config)
    out["override"] = op_configs(config)
    out["override ac"] = type(config.activation_checkpoint).__qualname__
    for name, given in (
        ("default", ()),
        ("context parallel", ("--parallelism.context_parallel_degree=2",)),
        ("given", ("--mega_moe.max_tokens_per_rank=99", "--mega_moe.comm-sms", "16")),
    ):
        config = job(*given)
        settle_job(config)
        out[name] = op_configs(config)[0]
        out[f"{name} ac"] = type(config.activation_checkpoint).__qualname__
    dense = job("--model.flavor=debugmodel")
    out["dense"] = [op_configs(dense), type(dense.model_spec.model).__qualname__]
    for name, given in (("unset", ()), ("on", ("true",)), ("off", ("false",))):
        config = job(*(f"--mega_moe.load_balancing={value}" for value in given))
        out[f"balancing {name}"] = config.model_spec.post_optimizer_build_fn is not None
    stock = job("--model.converters=", "--parallelism.expert_parallel_comm_backend=deepep")
    block = stock.model_spec.model.layers[0].moe.routed_experts
    out["torchtitan's deepep"] = type(block.token_dispatcher).__qualname__
    out["mapped"] = _mapped()
    return out


def _mapped() -> dict[str, Any]:
    """Every kind of option that 0.3 has under another name, or that the command line writes differently."""
    config = job(
        "--job.dump_folder=/x/y",
        "--job.print-config",
        "--training.dataset=c4",
        "--training.dataloader.num_workers=2",
        "--optimizer.name=Adam",
        "--optimizer.beta2=0.99",
        "--optimizer.implementation=foreach",
        "--lr_scheduler.decay_ratio=0.5",
        "--profiling.enable_profiling",
        "--checkpoint.no_last_save_model_only",
        "--checkpoint.exclude_from_loading=optimizer,dataloader",
        "--compile.components=model",
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
        "--activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns=[]",
        "--validation.enable",
        "--validation.local_batch_size=2",
        "--validation.seq_len=64",
        "--validation.steps=3",
        "--validation.dataset_path=/z",
        "--metrics.save_tb_folder=7",
    )
    optimizer, validator = config.optimizer, config.validator
    group = optimizer.param_groups[0]
    return {
        "dump_folder": config.dump_folder,
        "print_config": config.debug.print_config,
        "dataset": config.dataloader.dataset,
        "num_workers": config.dataloader.num_workers,
        "optimizer": [group.optimizer_name, group.optimizer_kwargs["betas"][1], optimizer.implementation],
        "decay_ratio": config.lr_scheduler.decay_ratio,
        "profiling": config.profiler.enable_profiling,
        "last_save_model_only": config.checkpoint.last_save_model_only,
        "exclude_from_loading": config.checkpoint.exclude_from_loading,
        "components": config.compile.components,
        "recompute": config.activation_checkpoint.force_recompute_mm_shapes_by_fqns,
        "validation": [validator.enable, validator.steps, validator.dataloader.dataset_path],
        "tb_folder": config.metrics.save_tb_folder,
    }


def jobs() -> dict[str, Any]:
    """Every job file that we ship, as it is and with a backend that this machine has."""
    from torchtitan.components.quantization import float8
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import RoutedExperts

    from titan_megamoe.torchtitan.v03.job_file import read_job

    float8.has_cuda_capability = lambda *_: True
    os.environ["WORLD_SIZE"] = "8"
    out: dict[str, Any] = {}
    for path in job_files():
        refused = said(read_job, path, [])
        config = read_job(path, ["--mega_moe.backend=reference"])
        model = config.model_spec.model
        experts = [c for _, c, _, _ in model.traverse(RoutedExperts.Config)]
        linear = [type(c).__qualname__ for _, c, _, _ in model.traverse(Linear.Config)]
        checkpointing = config.activation_checkpoint
        out[str(path.relative_to(ROOT))] = {
            "refused": refused,
            "layers": len(model.layers),
            "dim": model.dim,
            "experts": sorted({type(c).__qualname__ for c in experts}),
            "inner": sorted({type(c.inner_experts).__qualname__ for c in experts}),
            "linear": sum(name.startswith("Float8Linear") for name in linear),
            "ac": type(checkpointing).__qualname__ if checkpointing else "none",
            "lr": config.optimizer.param_groups[0].optimizer_kwargs["lr"],
            "training": [config.training.local_batch_size, config.training.seq_len, config.training.steps],
            "ep": config.parallelism.expert_parallel_degree,
            "seed": config.debug.seed,
            "compile": config.compile.enable,
        }
    return out


def job_files() -> list[Path]:
    tables = {ROOT / "train_configs/differences.toml"}
    found = {*ROOT.glob("train_configs/**/*.toml"), *ROOT.glob("titan_megamoe/**/*.toml")}
    return sorted(found - tables)


SUITES = {f.__name__: f for f in (refusals, options, jobs)}

if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(SUITES[sys.argv[1]]()))
