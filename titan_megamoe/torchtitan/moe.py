"""The module that takes the place of TorchTitan's MoE block.

    x ─ router (stock) ─ Routing ─ experts.routed_forward ─ mega_moe ─ y (+ shared experts)

How it fits TorchTitan 0.2's seams, all of them its own or FSDP2's public ones:

* The block is a `MoE` that owns the stock block's parameters, buffers and children under their
  stock names: state-dict keys and their order are stock's, and `apply_compile` compiles the same
  children.
* The experts stay at `moe.experts`, where `parallelize_qwen3` shards them (Shard(0) on `ep`) and
  wraps them in FSDP. TorchTitan's all-to-all is a pair of hooks on `experts.__call__`; ours is a
  method of another name, so they never fire, and that method is registered with FSDP, so it still
  unshards the weights and reduces the gradients; with `direct_experts` it is not (see direct.py).
* FSDP casts what passes through a forward, down into tuples, dicts and dataclasses. Scores must
  stay in fp32, so the routing travels in a plain class, which FSDP does not open.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torchtitan.models.moe import MoE
from torchtitan.models.moe.moe import GroupedExperts

from ..config import MegaMoEConfig
from ..generation import renew_on_load
from .core import forward_experts
from .direct import take_from_fsdp, whole

_ROUTED_FORWARD = "routed_forward"


class Routing:
    """Where a rank's T tokens go. No tuple and no dataclass: see the module's docstring.

    Attributes:
        topk_ids: (T, K) int64, global expert ids.
        topk_weights: (T, K) fp32, differentiable.
    """

    __slots__ = ("topk_ids", "topk_weights")

    def __init__(self, topk_ids: Tensor, topk_weights: Tensor) -> None:
        self.topk_ids = topk_ids
        self.topk_weights = topk_weights


class RoutedExperts(GroupedExperts):
    """TorchTitan's experts, with one more way in: all tokens of the rank and their routing.

    Args:
        stock, config, ep_mesh: as in :class:`MegaMoE`.
        direct: run without FSDP's hooks, on the fp32 parameters.
    """

    def __init__(
        self, stock: GroupedExperts, config: MegaMoEConfig, ep_mesh: DeviceMesh | None, direct: bool
    ) -> None:
        nn.Module.__init__(self)
        _adopt(self, stock)
        self.num_experts = stock.num_experts
        self.use_grouped_mm = stock.use_grouped_mm
        self.config = config
        self.ep_mesh = ep_mesh
        self.direct = direct
        renew_on_load(self)

    def routed_forward(self, x_TH: Tensor, routing: Routing) -> Tensor:
        """y (T, H) in x's dtype. Weights: sharded on `ep`, undivided on every other mesh.

        Raises what `mega_moe` raises.
        """
        w1, w3, w2 = self.w1, self.w3, self.w2
        if self.direct:
            w1, w3, w2 = whole(w1), whole(w3), whole(w2)
        ids_TK, weights_TK = routing.topk_ids, routing.topk_weights
        return forward_experts(x_TH, ids_TK, weights_TK, w1, w3, w2, self.ep_mesh, self.config)

    def join_fsdp(self) -> None:
        """Let FSDP run its hooks around `routed_forward`; a no-op without FSDP. Idempotent.

        With `direct`: see that it need not. Raises ConfigError where it must.
        """
        if self.direct:
            take_from_fsdp(self, self.ep_mesh)
        elif isinstance(self, FSDPModule) and _ROUTED_FORWARD not in self.__dict__:
            register_fsdp_forward_method(self, _ROUTED_FORWARD)


class MegaMoE(MoE):
    """TorchTitan's MoE block with `mega_moe` between router and output.

    Args:
        stock: the block to replace; its parameters, buffers and children are shared, not copied.
        config: how the op runs.
        ep_mesh: the one-dimensional mesh of the expert-parallel group; None without EP.
        count_in_recompute: let `tokens_per_expert` advance again when activation checkpointing runs
            the block a second time. False counts every token once; True is what TorchTitan's own
            balancing hook expects, since it halves the counts of checkpointed blocks.
        direct_experts: take the expert weights as FSDP holds them, see direct.py.
    """

    def __init__(
        self,
        stock: MoE,
        config: MegaMoEConfig,
        ep_mesh: DeviceMesh | None,
        *,
        count_in_recompute: bool = False,
        direct_experts: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        _adopt(self, stock)
        self.experts = RoutedExperts(stock.experts, config, ep_mesh, direct_experts)
        if stock.shared_experts is None:
            self.shared_experts = None
        if stock.expert_bias is None:
            self.expert_bias = None
        self.score_before_experts = stock.score_before_experts
        self.load_balance_coeff = stock.load_balance_coeff
        self.count_in_recompute = count_in_recompute

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, H) to y of the same shape and dtype; T = batch · seq."""
        x_TH = x.view(-1, x.shape[-1])
        topk_weights_TK, topk_ids_TK, counts_E = self.router(x_TH, self.expert_bias)
        if torch.is_grad_enabled() and (self.count_in_recompute or not _in_backward()):
            with torch.no_grad():
                self.tokens_per_expert.add_(counts_E)
        y_TH = self.experts.routed_forward(x_TH, Routing(topk_ids_TK, topk_weights_TK))
        if self.shared_experts is not None:
            y_TH = self.shared_experts(x_TH) + y_TH
        return y_TH.view(x.shape)

    def init_weights(self, init_std: float, buffer_device: torch.device) -> None:
        """TorchTitan's initialisation, which it runs once FSDP is in place: so join it here."""
        super().init_weights(init_std, buffer_device)
        self.experts.join_fsdp()


def _adopt(new: nn.Module, stock: nn.Module) -> None:
    """Share `stock`'s own parameters, buffers and children: same names, same order."""
    for name, parameter in stock.named_parameters(recurse=False):
        new.register_parameter(name, parameter)
    for name, buffer in stock.named_buffers(recurse=False):
        persistent = name not in stock._non_persistent_buffers_set
        new.register_buffer(name, buffer, persistent=persistent)
    for name, child in stock.named_children():
        new.add_module(name, child)
    new.train(stock.training)


def _in_backward() -> bool:
    """Whether autograd is running a backward here: a forward seen then is a recomputation."""
    return torch._C._current_graph_task_id() != -1
