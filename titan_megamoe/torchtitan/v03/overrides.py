"""Overrides for TorchTitan 0.3, to be named in `--override.imports`.

    torchrun … -m torchtitan.train --module qwen3 --config qwen3_30b_a3b --training.disable_cuda_graphs \\
        --override.imports 'titan_megamoe.torchtitan.v03.overrides.mega_moe={"precision":"bf16"}' \\
                           titan_megamoe.torchtitan.v03.overrides.selective_ac

An override sees one part of the model's configuration, never the job: so it takes the bound on tokens from
its options only (0: the fused backend sizes itself at the first call), and a parallelism that mega_moe does
not have is refused when the model is parallelised, still before anything is allocated.
"""

from __future__ import annotations

from typing import Any

from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.moe import RoutedExperts

from .activation_checkpoint import MegaMoESelectiveAC
from .checks import op_config, refuse_experts
from .experts import MegaMoERoutedExperts


@override(
    target=RoutedExperts.Config,
    exact=True,
    description="Dispatch, experts and combine in one op with overlapped communication.",
)
def mega_moe(config: RoutedExperts.Config, **options: Any) -> MegaMoERoutedExperts.Config:
    """Options: those of [mega_moe], :data:`titan_megamoe.torchtitan.v03.checks.OPTIONS`.

    Raises:
        ConfigError, UnsupportedError: one sentence on what was found, what is needed and the fix.
    """
    refuse_experts("a MoE block", config)
    return derive(config, MegaMoERoutedExperts.Config, mega_moe=op_config(options))


@override(
    target=SelectiveAC.Config,
    exact=True,
    description="Selective activation checkpointing keeps mega_moe's outputs.",
)
def selective_ac(config: SelectiveAC.Config) -> MegaMoESelectiveAC.Config:
    """Only for jobs with selective activation checkpointing; without it the op runs again there."""
    return derive(config, MegaMoESelectiveAC.Config)
