"""What the adapter for 0.3 refuses: options, the experts' configuration, and the whole job.

Every rank reads the same configuration, so every rank refuses alike, before a model is built.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from ...backends import unavailable_reason
from ...config import MegaMoEConfig
from ...errors import ConfigError, UnsupportedError
from ..config import MegaMoE as Section
from ..core import Degrees, refuse_parallelism

OPTIONS = tuple(
    f.name for f in dataclasses.fields(Section) if f.name not in ("load_balancing", "direct_experts")
)
"""What the override and the converter take: the options of [mega_moe], less what 0.3 does by itself or not
at all."""


def op_config(options: dict[str, Any], max_tokens_per_rank: int = 0) -> MegaMoEConfig:
    """The op's configuration from an override's or a converter's options.

    Args:
        options: some of :data:`OPTIONS`.
        max_tokens_per_rank: taken where the options set none; 0 leaves it to the backend.

    Raises:
        ConfigError: an unknown option or value.
        UnsupportedError: a backend that no job on this machine can have, or what 0.3 does not do.
    """
    options = without_direct_experts(options)
    if "load_balancing" in options:
        raise ConfigError(
            "mega_moe has the option load_balancing, but TorchTitan 0.3 updates the expert bias itself, by "
            "load_balance_coeff in MoE.Config: take the option out and set the coefficient."
        )
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ConfigError(
            f"mega_moe has the unknown option {unknown[0]!r}; it must be one of {', '.join(OPTIONS)}."
        )
    config = Section(**options).to_op_config(max_tokens_per_rank)
    # TorchTitan 0.3 rounds before it sums, and all_to_all is there to print TorchTitan's own numbers.
    config = dataclasses.replace(config, all_to_all_sum="bf16")
    if config.backend == "deepep":
        raise UnsupportedError(
            'mega_moe has backend = "deepep", which is TorchTitan 0.2\'s DeepEP, but 0.3 has its own: take '
            'mega_moe out and set expert_parallel_comm_backend = "deepep" in [parallelism] of a job file, or '
            "moe_comm_backend of model_registry."
        )
    if config.backend != "auto":
        reason = unavailable_reason(config.backend, torch.device(device_type), None, config)
        if reason is not None:
            raise UnsupportedError(f"backend {config.backend!r} cannot run here: {reason}")
    return config


def without_direct_experts(options: dict[str, Any]) -> dict[str, Any]:
    """`options` less direct_experts. Raises UnsupportedError where that is on."""
    if options.get("direct_experts"):
        raise UnsupportedError(
            "mega_moe has direct_experts on, but in TorchTitan 0.3 FSDP shards the experts together with the "
            "rest of their block: take the option out."
        )
    return {name: value for name, value in options.items() if name != "direct_experts"}


def refuse_experts(fqn: str, config: RoutedExperts.Config) -> None:
    """Raise UnsupportedError where a block is not TorchTitan's own bf16 one, such as a quantized one."""
    if type(config.inner_experts) is not GroupedExperts.Config:
        raise UnsupportedError(
            f"{fqn} has experts of {type(config.inner_experts).__qualname__}, but mega_moe replaces "
            "TorchTitan's own GroupedExperts only: take out the converter or override that put them there, "
            "and choose the precision in mega_moe."
        )
    if type(config.token_dispatcher) not in (AllToAllTokenDispatcher.Config, LocalTokenDispatcher.Config):
        raise UnsupportedError(
            f"{fqn} sends its tokens by {type(config.token_dispatcher).__qualname__}, but mega_moe brings "
            'its own communication: leave moe_comm_backend at "standard".'
        )


def refuse_job(config: Trainer.Config) -> None:
    """Raise on the first thing in this job that the adapter cannot do.

    Raises:
        UnsupportedError: a valid TorchTitan job that needs something we do not have.
        ConfigError: the job contradicts itself.
    """
    blocks = [moe for _, moe, _, _ in _model(config).traverse(MoE.Config)]
    if not blocks:
        return
    refuse_parallelism(degrees_of(config.parallelism), blocks[0].num_experts)
    if config.debug.spmd_typechecking:
        raise UnsupportedError(
            "[debug] spmd_typechecking is on, but mega_moe is one op in which SPMD types cannot be followed: "
            "turn it off."
        )
    if device_type == "cuda" and not config.training.disable_cuda_graphs:
        raise UnsupportedError(
            "[training] disable_cuda_graphs is off, but training steps with mega_moe in CUDA graphs are not "
            "tested, and its unfused backends wait for the host: turn it on (--training.disable_cuda_graphs)."
        )


def degrees_of(parallelism: Any) -> Degrees:
    """The degrees of a `ParallelismConfig`; data_parallel_shard_degree -1 is resolved by WORLD_SIZE."""
    p = parallelism
    shards = p.data_parallel_shard_degree
    others = p.data_parallel_replicate_degree * p.context_parallel_degree
    others *= p.tensor_parallel_degree * p.pipeline_parallel_degree
    if shards < 0:
        shards = max(1, int(os.environ.get("WORLD_SIZE", "1")) // others)
    return Degrees(
        shards,
        p.context_parallel_degree,
        p.tensor_parallel_degree,
        p.pipeline_parallel_degree,
        p.expert_parallel_degree,
    )


def tokens_per_rank(config: Trainer.Config) -> int:
    """Tokens T that this job gives a rank's MoE block; validation has training's batch in 0.3."""
    training = config.training
    return training.local_batch_size * training.seq_len // config.parallelism.context_parallel_degree


def _model(config: Trainer.Config) -> Any:
    assert config.model_spec is not None
    return config.model_spec.model
