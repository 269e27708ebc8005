"""What the adapters for the TorchTitan lines share: the call of the op, refusals, words.

Nothing of TorchTitan is imported here: an adapter finds its line's MoE blocks, options and meshes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..config import MegaMoEConfig
from ..errors import ConfigError, UnsupportedError
from ..op import mega_moe

LAYERS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Depths of the reduced flavours."""

QUICKSTART_VOCABULARY = 2048
"""Tokens of the byte-level tokenizer that the quickstart trains."""


def reduced_flavor(flavor: str, layers: int) -> str:
    """The name of `flavor` with that many layers."""
    return f"{flavor}-{layers}layers"


def forward_experts(
    x_TH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    ep_mesh: DeviceMesh | None,
    config: MegaMoEConfig,
) -> Tensor:
    """y (T, H) in x's dtype. Weights: DTensors sharded on `ep` and unsharded on every other mesh, or this
    rank's experts as plain tensors. `ep_mesh` is None where this rank holds all experts.

    Raises what `mega_moe` raises.
    """
    y_TH = mega_moe(
        x_TH,
        topk_ids_TK,
        topk_weights_TK,
        _local(w1),
        _local(w3),
        _local(w2),
        group=None if ep_mesh is None else ep_mesh.get_group(),
        config=config,
    )
    return y_TH.to(x_TH.dtype)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


@dataclass(frozen=True)
class Degrees:
    """Ranks of each parallelism; dp_shard is resolved, never -1; etp is 1 where it does not exist."""

    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    etp: int = 1


def refuse_parallelism(degrees: Degrees, num_experts: int) -> None:
    """Raise on the first degree that the converter cannot run with; options are TorchTitan's names.

    Raises:
        UnsupportedError: a parallelism that we do not have.
        ConfigError: the expert-parallel degree fits neither experts nor ranks.
    """
    for degree, name, option in (
        (degrees.tp, "tensor parallelism", "tensor_parallel_degree"),
        (degrees.etp, "expert tensor parallelism", "expert_tensor_parallel_degree"),
        (degrees.pp, "pipeline parallelism", "pipeline_parallel_degree"),
    ):
        if degree > 1:
            raise UnsupportedError(
                f"[parallelism] {option} is {degree}, but the converter mega_moe does not support "
                f"{name}: set it to 1 and use expert_parallel_degree and data parallelism instead."
            )
    if num_experts % degrees.ep:
        raise ConfigError(
            f"[parallelism] expert_parallel_degree is {degrees.ep}, which does not divide the model's "
            f"{num_experts} experts: every rank needs the same number; choose a divisor of {num_experts}."
        )
    shards = degrees.dp_shard * degrees.cp
    if shards % degrees.ep:
        raise ConfigError(
            f"[parallelism] expert_parallel_degree is {degrees.ep}, which does not divide "
            f"data_parallel_shard_degree * context_parallel_degree = {shards}, from which "
            "TorchTitan takes the expert-parallel ranks: choose a divisor."
        )


def dense_line(model: str) -> str:
    """The log line for a model without MoE blocks."""
    return f"mega_moe: {model} is dense, so the converter leaves it as it is"


def blocks_line(blocks: int, model: str, backend: str, config: MegaMoEConfig, ep: int, more: str = "") -> str:
    """The log line that says what runs: `backend` is what `config.backend` was resolved to, if it was yet."""
    asked = "as asked" if config.backend == backend else "chosen by auto"
    chosen = "chosen at the first call" if backend == "auto" else asked
    bound = (
        f"up to {config.max_tokens_per_rank} tokens a rank" if config.max_tokens_per_rank else "any tokens"
    )
    return (
        f"mega_moe: {blocks} MoE blocks of {model} run on backend {backend!r} ({chosen}) in "
        f"{config.precision}, EP={ep}, {bound}{more}"
    )


def ops_to_save() -> set[torch._ops.OpOverload]:
    """Ops whose outputs selective activation checkpointing keeps, so that nothing communicates again."""
    return {torch.ops.titan_megamoe.forward.default}
