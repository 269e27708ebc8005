"""What the converter refuses, from the job's configuration alone.

Every rank reads the same configuration, so every rank refuses alike, before anything is built.
"""

from __future__ import annotations

from typing import Any

from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.protocols.train_spec import TrainSpec

from ..errors import ConfigError, UnsupportedError
from .core import Degrees, refuse_parallelism


def moe_args_of(model_args: Any) -> MoEArgs | None:
    """The MoE part of a TorchTitan model's arguments; None for a dense model."""
    if not getattr(model_args, "moe_enabled", True):
        return None
    return getattr(model_args, "moe_args", None)


def has_own_load_balancing(spec: TrainSpec) -> bool:
    """Whether the train spec's optimizers already update `expert_bias`."""
    return spec.build_optimizers_fn is build_optimizers_with_moe_load_balancing


def refuse_unsupported(job_config: Any, dims: ParallelDims, spec: TrainSpec, moe_args: MoEArgs) -> None:
    """Raise on the first thing in this job that the converter cannot do.

    Raises:
        UnsupportedError: a valid TorchTitan job that needs something we do not have.
        ConfigError: the job contradicts itself.
    """
    _refuse_model(job_config, spec, moe_args)
    degrees = Degrees(dims.dp_shard, dims.cp, dims.tp, dims.pp, dims.ep, dims.etp)
    refuse_parallelism(degrees, moe_args.num_experts)
    _refuse_other_switches(job_config)
    _refuse_load_balancing(job_config, spec, moe_args)
    _refuse_direct_experts(job_config, degrees, dims.dp_replicate, moe_args.num_experts)


def _refuse_model(job_config: Any, spec: TrainSpec, moe_args: MoEArgs) -> None:
    name = job_config.model.name
    if not issubclass(spec.model_cls, Qwen3Model):
        raise UnsupportedError(
            f"the converter mega_moe knows Qwen3's MoE blocks, but [model] name is {name!r}: use a "
            "qwen3 flavour, or take mega_moe out of [model] converters."
        )
    if moe_args.score_before_experts:
        raise UnsupportedError(
            f"flavour {job_config.model.flavor!r} has score_before_experts = True, but mega_moe "
            "weights the experts' outputs: set score_before_experts = False in its MoEArgs, or "
            "take mega_moe out of [model] converters."
        )


def _refuse_other_switches(job_config: Any) -> None:
    comm_backend = job_config.parallelism.expert_parallel_comm_backend
    if comm_backend == "deepep":
        raise ConfigError(
            '[parallelism] expert_parallel_comm_backend is "deepep", which TorchTitan ignores for '
            'Qwen3: take it out and set backend = "deepep" in [mega_moe].'
        )
    for converter in job_config.model.converters:
        if converter.startswith("quantize.grouped_mm"):
            raise ConfigError(
                f"[model] converters has both mega_moe and {converter!r}, which want the same "
                f"expert weights: take {converter!r} out and choose the precision in [mega_moe]."
            )


def _refuse_load_balancing(job_config: Any, spec: TrainSpec, moe_args: MoEArgs) -> None:
    if not job_config.mega_moe.load_balancing:
        return
    if moe_args.load_balance_coeff is None:
        raise ConfigError(
            f"[mega_moe] load_balancing is on, but flavour {job_config.model.flavor!r} has no "
            "load_balance_coeff: set it in its MoEArgs (TorchTitan's default is 1e-3), or turn "
            "load_balancing off."
        )
    if has_own_load_balancing(spec):
        raise ConfigError(
            f"[mega_moe] load_balancing is on, but the train spec {job_config.model.name!r} "
            "already updates expert_bias in its optimizers: turn load_balancing off, or the bias "
            "would move twice."
        )


def _refuse_direct_experts(job_config: Any, degrees: Degrees, dp_replicate: int, num_experts: int) -> None:
    """Experts can be taken from FSDP as they are where no other rank has a part or a copy of them."""
    if not job_config.mega_moe.direct_experts:
        return
    on = "[mega_moe] direct_experts is on, but"
    deepep = job_config.mega_moe.backend == "deepep"
    for wanted, option, what in (
        (deepep, '[mega_moe] backend = "deepep"', "keeps a bf16 copy of what it is given for the backward"),
        (job_config.training.enable_cpu_offload, "[training] enable_cpu_offload", "keeps experts on the CPU"),
        (job_config.fault_tolerance.enable, "[fault_tolerance] enable", "averages gradients by FSDP's hooks"),
    ):
        if wanted:
            raise ConfigError(f"{on} {option} {what}: turn one of the two off.")
    shards = degrees.dp_shard * degrees.cp
    ranks = dp_replicate * shards
    if dp_replicate == 1 and degrees.ep == shards > 1:
        return
    found = f"[parallelism] expert_parallel_degree is {degrees.ep} on {ranks} data-parallel ranks"
    fix = f"set expert_parallel_degree to {ranks}"
    if dp_replicate > 1:
        found += f" and data_parallel_replicate_degree is {dp_replicate}"
        fix += " and data_parallel_replicate_degree to 1"
    possible = ranks > 1 and num_experts % ranks == 0
    raise ConfigError(
        f"{on} {found}, and it needs all of two or more in one expert-parallel group, so that FSDP has "
        "nothing to gather or to sum for the experts: turn direct_experts off"
        f"{', or ' + fix if possible else ''}."
    )
