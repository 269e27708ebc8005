"""Run as one plain process: what the converter makes of configurations, on the meta device.

    python titan_configs.py <suite> <result.json>

A process of its own, because the CPU shim changes torch for the whole process.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from titan_megamoe.torchtitan import cpu_shim

if __name__ == "__main__":
    cpu_shim.apply()

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

EPS = (1, 2, 4)
WORLD = 4

REFUSED: dict[str, tuple[str, ...]] = {
    "tensor parallel": ("--parallelism.tensor_parallel_degree=2",),
    "expert tensor parallel": ("--parallelism.expert_tensor_parallel_degree=2",),
    "pipeline parallel": ("--parallelism.pipeline_parallel_degree=2",),
    "grouped quantization": ("--model.converters=mega_moe,quantize.grouped_mm.float8",),
    "indivisible experts": (
        "--model.flavor=six_experts",
        "--parallelism.expert_parallel_degree=4",
    ),
    "ep beyond the shards": (
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=2",
        "--parallelism.expert_parallel_degree=4",
    ),
    "unknown backend": ("--mega_moe.backend=magic",),
    "unknown precision": ("--mega_moe.precision=fp3",),
    "negative bound": ("--mega_moe.max_routed_rows=-5",),
    "torchtitan's deepep switch": ("--parallelism.expert_parallel_comm_backend=deepep",),
    "score before experts": ("--model.flavor=score_first",),
    "another MoE model": ("--model.name=deepseek_v3", "--model.flavor=debugmodel"),
    "balancing without coefficient": ("--model.flavor=no_coefficient", "--mega_moe.load_balancing"),
    "direct experts without EP": ("--mega_moe.direct_experts",),
    "direct experts on shards": (
        "--mega_moe.direct_experts",
        "--parallelism.expert_parallel_degree=2",
    ),
    "direct experts in replicas": (
        "--mega_moe.direct_experts",
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=2",
        "--parallelism.expert_parallel_degree=2",
    ),
    "direct experts too few": (
        "--mega_moe.direct_experts",
        "--model.flavor=six_experts",
        "--parallelism.expert_parallel_degree=2",
    ),
    "direct experts of deepep": (
        "--mega_moe.direct_experts",
        "--mega_moe.backend=deepep",
        "--parallelism.expert_parallel_degree=4",
    ),
    "direct experts offloaded": (
        "--mega_moe.direct_experts",
        "--parallelism.expert_parallel_degree=4",
        "--training.enable_cpu_offload",
    ),
    "direct experts with replica groups": (
        "--mega_moe.direct_experts",
        "--parallelism.expert_parallel_degree=4",
        "--fault_tolerance.enable",
    ),
    "deepep without CUDA": ("--mega_moe.backend=deepep",),
    "mxfp8": ("--mega_moe.precision=mxfp8",),
}
"""Jobs that are refused, each with EP=1 where nothing else is said."""


def parse(*arguments: str) -> Any:
    from torchtitan.config import ConfigManager

    base = [
        "--job.custom_config_module=titan_megamoe.torchtitan",
        "--model.name=qwen3",
        "--model.flavor=debugmodel_moe",
        "--model.converters=mega_moe",
        "--training.local_batch_size=2",
        "--training.seq_len=64",
        "--activation_checkpoint.mode=none",
    ]
    return ConfigManager().parse_args([*base, *arguments])


def dims_of(config: Any, world: int = WORLD) -> Any:
    from torchtitan.distributed import ParallelDims

    p = config.parallelism
    return ParallelDims(
        dp_shard=p.data_parallel_shard_degree,
        dp_replicate=p.data_parallel_replicate_degree,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        pp=p.pipeline_parallel_degree,
        ep=p.expert_parallel_degree,
        etp=p.expert_tensor_parallel_degree,
        world_size=world,
    )


def add_odd_flavors() -> None:
    from torchtitan.models.qwen3 import qwen3_args

    base = qwen3_args["debugmodel_moe"]
    for name, change in (
        ("six_experts", {"num_experts": 6, "top_k": 2}),
        ("score_first", {"score_before_experts": True}),
        ("no_coefficient", {"load_balance_coeff": None}),
    ):
        moe_args = dataclasses.replace(base.moe_args, **change)
        qwen3_args[name] = dataclasses.replace(base, moe_args=moe_args)


def refusals() -> dict[str, Any]:
    """The message of every refusal. There is no process group: nothing can have been exchanged."""
    from titan_megamoe.errors import MegaMoEError

    out = {}
    parse()  # registers converter and flavours
    add_odd_flavors()
    from titan_megamoe.torchtitan.converter import MegaMoEConverter

    assert not dist.is_initialized()
    for name, arguments in REFUSED.items():
        config = parse(*arguments)
        try:
            MegaMoEConverter(config, dims_of(config))
        except MegaMoEError as error:
            out[name] = f"{type(error).__name__}: {error}"
        else:
            out[name] = "not refused"
    return out


def configs() -> dict[str, Any]:
    """Every Qwen3 flavour x EP x converter on and off: built, converted and parallelised on meta."""
    from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3, qwen3_args
    from torchtitan.protocols.model_converter import build_model_converters

    dist.init_process_group("fake", rank=0, world_size=WORLD)
    logged = _Lines()
    logging.getLogger().addHandler(logged)
    logging.getLogger().setLevel(logging.INFO)
    out: dict[str, Any] = {}
    flavors = list(qwen3_args)
    for flavor in flavors:
        # Two layers stand for all of a flavour's equal ones.
        qwen3_args[flavor] = dataclasses.replace(qwen3_args[flavor], n_layers=2)
        for ep in EPS:
            for converter in (True, False):
                logged.lines.clear()
                config = parse(f"--model.flavor={flavor}", f"--parallelism.expert_parallel_degree={ep}")
                config.model.converters = ["mega_moe"] if converter else []
                dims = dims_of(config)
                dims.build_mesh()
                args = qwen3_args[flavor]
                args.update_from_config(config)
                with torch.device("meta"):
                    model: nn.Module = Qwen3Model(args)
                build_model_converters(config, dims).convert(model)
                model = parallelize_qwen3(model, dims, config)
                out[f"{flavor} EP={ep} {'on' if converter else 'off'}"] = {
                    "moe": args.moe_enabled,
                    "blocks": sorted(
                        {type(m).__name__ for m in model.modules() if "MoE" in type(m).__name__}
                    ),
                    "layout": _layout(model),
                    "direct": _taken_from_fsdp(model, dims) if converter and args.moe_enabled else "",
                    "said": [
                        line for line in logged.lines if "mega_moe" in line and "auto takes" not in line
                    ],
                }
    return out


def _taken_from_fsdp(model: nn.Module, dims: Any) -> str:
    """What direct_experts says to experts that FSDP shards, or, with EP over all ranks, whose gradients it
    divides."""
    from titan_megamoe.errors import ConfigError
    from titan_megamoe.torchtitan.direct import take_from_fsdp

    experts = next(m for name, m in model.named_modules() if name.endswith("moe.experts"))
    if dims.ep == WORLD:
        experts.set_gradient_divide_factor(float(WORLD))
    try:
        take_from_fsdp(experts, dims.get_optional_mesh("ep"))
    except ConfigError as error:
        return str(error)
    return "not refused"


def jobs() -> dict[str, Any]:
    """Every job file that we ship: parsed, built on meta with two of its layers, converted, parallelised.

    `refused` is what the converter says to the file as it is, on this machine without a GPU; what it refuses
    here is then built with backend reference, whose converter, blocks and sharding are the same.
    """
    from torchtitan.components.quantization import float8
    from torchtitan.config import ConfigManager
    from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3, qwen3_args
    from torchtitan.protocols.model_converter import build_model_converters

    from titan_megamoe.errors import UnsupportedError

    float8.has_cuda_capability = lambda *_: True  # torchao swaps modules, which needs no GPU
    out: dict[str, Any] = {}
    for path in job_files():
        config = ConfigManager().parse_args([f"--job.config_file={path}"])
        config.compile.enable = False  # the model stays on meta
        p = config.parallelism
        world = 2 if p.data_parallel_shard_degree == -1 else 1
        world *= abs(p.data_parallel_shard_degree) * p.data_parallel_replicate_degree
        dist.init_process_group("fake", rank=0, world_size=world)
        dims = dims_of(config, world)
        dims.build_mesh()
        layers = qwen3_args[config.model.flavor].n_layers
        args = dataclasses.replace(qwen3_args[config.model.flavor], n_layers=2)
        args.update_from_config(config)
        refused = ""
        try:
            converters = build_model_converters(config, dims)
        except UnsupportedError as error:
            refused = str(error)
            config.mega_moe.backend = "reference"
            converters = build_model_converters(config, dims)
        with torch.device("meta"):
            model: nn.Module = Qwen3Model(args)
        converters.convert(model)
        parallelize_qwen3(model, dims, config)
        modules = [type(m).__name__ for m in model.modules()]
        out[str(path.relative_to(Path(__file__).parents[2]))] = {
            "blocks": [name for name in modules if name.endswith("MoE")],
            "float8": sum("Float8" in name for name in modules),
            "layers": layers,
            "width": [args.dim, args.moe_inter_dim],
            "gpus": world,
            "ep": dims.ep,
            "facts": _facts(config, dataclasses.replace(args, n_layers=layers)),
            "refused": refused,
        }
        dist.destroy_process_group()
    return out


def _facts(config: Any, args: Any) -> dict[str, Any]:
    """What bench.jobfile reads without TorchTitan, as TorchTitan reads it."""
    p, t = config.parallelism, config.training
    return {
        "width": [args.dim, args.moe_inter_dim, args.moe_args.num_experts, args.moe_args.top_k],
        "heads": [args.n_heads, args.n_kv_heads, args.head_dim],
        "vocabulary": args.vocab_size,
        "layers": args.n_layers,
        "seq_len": t.seq_len,
        "batch": [t.local_batch_size, t.global_batch_size],
        "degrees": [
            p.data_parallel_replicate_degree,
            p.data_parallel_shard_degree,
            p.context_parallel_degree,
        ],
        "ac": config.activation_checkpoint.mode,
        "converters": config.model.converters,
    }


def job_files() -> list[Path]:
    root = Path(__file__).parents[2]
    tables = {root / "train_configs/differences.toml"}
    found = {*root.glob("train_configs/**/*.toml"), *root.glob("titan_megamoe/**/*.toml")}
    return sorted(found - tables)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _layout(model: nn.Module) -> list[list[str]]:
    rows = []
    for key, value in model.state_dict().items():
        placed = isinstance(value, DTensor)
        where = [str(value.placements), str(value.device_mesh.mesh_dim_names)] if placed else []
        rows.append([key, str(tuple(value.shape)), *where])
    return rows


def sections() -> dict[str, Any]:
    """How [mega_moe] reaches the op, and how another custom_config_module composes with ours."""
    from torchtitan.config import ConfigManager

    from titan_megamoe.torchtitan import JobConfig, register, with_mega_moe
    from titan_megamoe.torchtitan.converter import MegaMoEConverter

    register()
    register()  # the second time changes nothing
    validated = ("--validation.enable", "--validation.local_batch_size=3", "--validation.seq_len=256")
    out: dict[str, Any] = {}
    for name, arguments in (
        ("default", ()),
        ("context parallel", ("--parallelism.context_parallel_degree=2",)),
        ("validation", validated),
        ("given", ("--mega_moe.max_tokens_per_rank=77", "--mega_moe.comm_sms=8")),
    ):
        config = parse(*arguments, "--mega_moe.backend=reference")
        out[name] = dataclasses.asdict(MegaMoEConverter(config, dims_of(config)).config)

    # Not written as classes: TorchTitan reads field types at run time, here they would be strings.
    mine = dataclasses.make_dataclass("Mine", [("answer", int, 42)])
    field = ("mine", mine, dataclasses.field(default_factory=mine))
    inherited = dataclasses.make_dataclass("Inherited", [field], bases=(JobConfig,))
    other = dataclasses.make_dataclass("Other", [field])

    for name, own in (("inherited", inherited), ("wrapped", with_mega_moe(other))):
        module = type(sys)(f"job_module_{name}")
        module.JobConfig = own
        sys.modules[module.__name__] = module
        config = ConfigManager().parse_args(
            [
                f"--job.custom_config_module={module.__name__}",
                "--mega_moe.backend=reference",
                "--mine.answer=7",
            ]
        )
        out[name] = [config.mega_moe.backend, config.mine.answer]
    for name, wrong in (("no dataclass", int), ("twice", inherited)):
        try:
            with_mega_moe(wrong)
        except TypeError as error:
            out[name] = str(error)
    return out


if __name__ == "__main__":
    suite = {"refusals": refusals, "configs": configs, "sections": sections, "jobs": jobs}[sys.argv[1]]
    Path(sys.argv[2]).write_text(json.dumps(suite()))
