"""The converter for TorchTitan 0.3: `model_registry("30B-A3B", converters=[MegaMoEConverter.Config(…)])`.

It swaps the configuration of every MoE block's routed experts. The model's own configuration becomes one
that, when TorchTitan shows it the job, checks the job, takes the bound on tokens from it and lets selective
activation checkpointing keep the op's outputs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.protocols.model import BaseModel, ModelConfigConverter
from torchtitan.tools.logging import logger

from ..core import blocks_line, dense_line
from .activation_checkpoint import MegaMoESelectiveAC
from .checks import op_config, refuse_experts, refuse_job, tokens_per_rank
from .experts import MegaMoERoutedExperts


class MegaMoEConverter(ModelConfigConverter):
    """Qwen3's MoE blocks, or those of any model with TorchTitan's own `RoutedExperts`, on `mega_moe`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """The options of [mega_moe]; see titan_megamoe/torchtitan/config.py."""

        backend: str = "auto"
        precision: str = "bf16"
        wgrad_precision: str = "auto"
        max_tokens_per_rank: int = 0
        max_routed_rows: int = 0
        comm_sms: int = 0
        reserved_sms: int = 0
        timeout_s: float = 300.0
        debug: bool = False

    def __init__(self, config: Config) -> None:
        self.options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}

    def convert(self, model_config: BaseModel.Config) -> BaseModel.Config:
        """`model_config` with every block swapped. Dense models are left as they are.

        Raises:
            ConfigError, UnsupportedError: one sentence on what was found, what is needed and the fix.
        """
        found = list(model_config.traverse(RoutedExperts.Config))
        if not found:
            logger.info(dense_line(_name(model_config)))
            return model_config
        config = op_config(self.options)
        for fqn, experts, parent, attribute in found:
            refuse_experts(fqn, experts)
            setattr(parent, attribute, derive(experts, MegaMoERoutedExperts.Config, mega_moe=config))
        return derive(model_config, _shown_the_job(type(model_config)))


def settle_job(config: Any) -> None:
    """What a job with converted experts needs: checks, the bound on tokens, selective checkpointing.

    Raises:
        ConfigError, UnsupportedError: one sentence on what was found, what is needed and the fix.
    """
    refuse_job(config)
    tokens = tokens_per_rank(config)
    for _, experts, _, _ in config.model_spec.model.traverse(MegaMoERoutedExperts.Config):
        bound = experts.mega_moe.max_tokens_per_rank or tokens
        experts.mega_moe = dataclasses.replace(experts.mega_moe, max_tokens_per_rank=bound)
    if type(config.activation_checkpoint) is SelectiveAC.Config:
        config.activation_checkpoint = derive(config.activation_checkpoint, MegaMoESelectiveAC.Config)


def _shown_the_job(config_class: type[BaseModel.Config]) -> type[BaseModel.Config]:
    """`config_class`, which TorchTitan shows the job before it builds the model."""

    def update_from_config(self: Any, *, config: Any, **kwargs: Any) -> None:
        settle_job(config)
        config_class.update_from_config(self, config=config, **kwargs)
        _say(self, config)

    # Slots of a subclass would only repeat the parent's; a model's configuration is found by isinstance.
    return type(
        config_class.__name__,
        (config_class,),
        {"update_from_config": update_from_config, "__slots__": (), "__module__": __name__},
    )


def _say(model: Any, job: Any) -> None:
    experts = [config for _, config, _, _ in model.traverse(MegaMoERoutedExperts.Config)]
    config = experts[0].mega_moe
    name = f"{job.model_spec.name} {job.model_spec.flavor}"
    logger.info(
        blocks_line(len(experts), name, config.backend, config, job.parallelism.expert_parallel_degree)
    )


def _name(model_config: BaseModel.Config) -> str:
    return type(model_config).__qualname__.removesuffix(".Config")
