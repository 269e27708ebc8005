"""The model converter `mega_moe`: check the job, then swap every MoE block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe import MoE
from torchtitan.models.qwen3.infra import parallelize as qwen3_parallelize
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from ..backends import resolve_backend
from ..errors import ConfigError, UnsupportedError
from .checks import has_own_load_balancing, moe_args_of, refuse_unsupported
from .core import blocks_line, dense_line, ops_to_save
from .load_balancing import update_expert_bias
from .moe import MegaMoE

CONVERTER_NAME = "mega_moe"


class MegaMoEConverter:
    """TorchTitan's ModelConverter protocol.

    Construction reads the job's configuration and refuses what we cannot do; `convert` swaps the
    blocks of the model that is still on the meta device; `post_optimizer_hook` balances the load
    when asked to.

    Raises:
        ConfigError, UnsupportedError: one sentence on what was found, what is needed and the fix.
    """

    def __init__(self, job_config: Any, parallel_dims: ParallelDims) -> None:
        section = getattr(job_config, "mega_moe", None)
        if section is None:
            raise ConfigError(
                "the converter mega_moe needs the section [mega_moe]: set custom_config_module = "
                '"titan_megamoe.torchtitan" in [job], or see with_mega_moe there if you have a '
                "module of your own."
            )
        self.parallel_dims = parallel_dims
        self.load_balancing = section.load_balancing
        self.direct_experts = section.direct_experts
        self.config = section.to_op_config(_tokens_per_rank(job_config, parallel_dims))
        self.flavor = f"{job_config.model.name} {job_config.model.flavor}"

        spec = get_train_spec(job_config.model.name)
        moe_args = moe_args_of(spec.model_args[job_config.model.flavor])
        self.is_moe = moe_args is not None
        if moe_args is None:
            return
        refuse_unsupported(job_config, parallel_dims, spec, moe_args)
        self.count_in_recompute = has_own_load_balancing(spec)
        self.ep_mesh = parallel_dims.get_mesh("ep") if parallel_dims.ep_enabled else None
        group = None if self.ep_mesh is None else self.ep_mesh.get_group()
        self.backend = resolve_backend(torch.device(device_type), group, self.config)

    def convert(self, model: nn.Module) -> None:
        """Swap every MoE block of `model` in place. Dense models are left as they are."""
        if not self.is_moe:
            logger.info(dense_line(self.flavor))
            return
        blocks = [(name, m) for name, m in model.named_modules() if isinstance(m, MoE)]
        for name, block in blocks:
            if type(block) is not MoE:
                raise UnsupportedError(
                    f"{name} is a {type(block).__name__}, but the converter mega_moe replaces "
                    "TorchTitan's own MoE only: take the converter or code that put it there out."
                )
            parent, _, attribute = name.rpartition(".")
            replacement = MegaMoE(
                block,
                self.config,
                self.ep_mesh,
                count_in_recompute=self.count_in_recompute,
                direct_experts=self.direct_experts,
            )
            setattr(model.get_submodule(parent), attribute, replacement)
        self._save_in_selective_checkpointing()
        more = ", expert bias updated every step" if self.load_balancing else ""
        more += ", experts taken as FSDP holds them" if self.direct_experts else ""
        ep = self.parallel_dims.ep
        logger.info(blocks_line(len(blocks), self.flavor, self.backend, self.config, ep, more))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """After each optimizer step: the load-balancing update, where it is on."""
        if not (self.is_moe and self.load_balancing):
            return
        parts = [model] if isinstance(model, nn.Module) else model
        blocks = [m for part in parts for m in part.modules() if isinstance(m, MegaMoE)]
        update_expert_bias(blocks, self.parallel_dims)

    def _save_in_selective_checkpointing(self) -> None:
        """Let per-op activation checkpointing keep the op's outputs, not communicate again."""
        save_list = qwen3_parallelize._op_sac_save_list
        save_list.update(ops_to_save())
        if self.backend == "deepep":
            import torchtitan.distributed.deepep  # noqa: F401, defines torch.ops.deepep

            save_list.add(torch.ops.deepep.dispatch.default)
            save_list.add(torch.ops.deepep.combine.default)


def _tokens_per_rank(job_config: Any, dims: ParallelDims) -> int:
    """Tokens T that this job gives a rank's MoE block, the larger of training and validation."""
    tokens = job_config.training.local_batch_size * job_config.training.seq_len
    if job_config.validation.enable:
        validation = job_config.validation
        tokens = max(tokens, validation.local_batch_size * validation.seq_len)
    return tokens // dims.cp
