"""The module that takes the place of TorchTitan 0.3's `RoutedExperts`.

    MoE (stock): router (stock) ─ x, scores, ids, counts ─ RoutedExperts: mega_moe ─ y (+ shared experts)

How it fits TorchTitan 0.3's seams, all of them its own:

* It is a `RoutedExperts` with a `Config` of its own, so an override or a converter puts it into the model's
  configuration; the stock `MoE` around it, the counts and the balancing of experts stay as they are.
* `inner_experts` is built, initialised, sharded (Shard(0) on `ep`) and checkpointed as stock's: only its
  forward is never called. FSDP unshards the weights with the transformer block.
* `token_dispatcher` is built too, and told the expert-parallel mesh: the op takes the mesh from there.
* `forward` keeps stock's argument names, by which `sharding_config` says what each of them is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.tools.utils import device_type

from ...backends import resolve_backend
from ...config import MegaMoEConfig
from ...generation import renew_on_load
from ..core import Degrees, forward_experts, refuse_parallelism


class MegaMoERoutedExperts(RoutedExperts):
    """TorchTitan's routed experts, computed by `mega_moe`."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        mega_moe: MegaMoEConfig = field(default_factory=MegaMoEConfig)
        """How the op runs."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.op_config = config.mega_moe
        renew_on_load(self)

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """y (B, L, D) in x's dtype; T = B · L, H = D. The counts are not needed.

        Raises what `mega_moe` raises.
        """
        experts = self.inner_experts
        y_TH = forward_experts(
            x_BLD.reshape(-1, x_BLD.shape[-1]),
            topk_expert_ids_BLK.reshape(-1, topk_expert_ids_BLK.shape[-1]),
            topk_scores_BLK.reshape(-1, topk_scores_BLK.shape[-1]).float(),
            experts.w1_EFD,
            experts.w3_EFD,
            experts.w2_EDF,
            getattr(self.token_dispatcher, "ep_mesh", None),
            self.op_config,
        )
        return y_TH.view(x_BLD.shape)

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Shard and learn the meshes as stock does.

        Raises:
            ConfigError, UnsupportedError: a parallelism or a backend that cannot run here.
        """
        dims = parallel_dims
        refuse_parallelism(
            Degrees(dims.dp_shard, dims.cp, dims.tp, dims.pp, dims.ep), self.inner_experts.num_experts
        )
        super().parallelize(parallel_dims)
        ep_mesh = dims.get_optional_mesh("ep")
        group = None if ep_mesh is None else ep_mesh.get_group()
        resolve_backend(torch.device(device_type), group, self.op_config)
