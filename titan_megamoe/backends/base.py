"""The protocol every backend follows.

Two kinds: an :class:`ExplicitBackend` brings its own forward and backward and runs inside the custom op
(`titan_megamoe::forward`, `titan_megamoe::backward`); a :class:`CompositeBackend` is a chain of
differentiable operations and runs as they are. Users never see the difference.

Shape letters, here and everywhere: T tokens of this rank, K top-k, E experts, e = E/W local experts,
R routed rows computed on this rank, H hidden, I intermediate, W ranks of the expert-parallel group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import MegaMoEConfig
from ..group import group_rank, group_size


class Needs(NamedTuple):
    """Which gradients are asked for. All False: inference, nothing is saved."""

    x: bool = False
    topk_weights: bool = False
    w1: bool = False
    w3: bool = False
    w2: bool = False

    @property
    def bits(self) -> int:
        return sum(1 << i for i, needed in enumerate(self) if needed)

    @staticmethod
    def from_bits(bits: int) -> Needs:
        return Needs(*(bool(bits >> i & 1) for i in range(5)))


class Gradients(NamedTuple):
    """Gradients in their parameter's dtype; None where not asked for."""

    x: Tensor | None  # (T, H) bf16
    topk_weights: Tensor | None  # (T, K) fp32
    w1: Tensor | None  # (e, I, H)
    w3: Tensor | None  # (e, I, H)
    w2: Tensor | None  # (e, H, I)


@dataclass(frozen=True)
class MoECall:
    """One rank's arguments of one call: validated, on one device, contiguous."""

    x: Tensor  # (T, H) bf16
    topk_ids: Tensor  # (T, K) int32 or int64, in [0, E) or -1 for a dropped slot
    topk_weights: Tensor  # (T, K) fp32
    w1: Tensor  # (e, I, H) bf16 or fp32
    w3: Tensor  # (e, I, H)
    w2: Tensor  # (e, H, I)
    group: dist.ProcessGroup | None  # None: this rank holds all experts
    config: MegaMoEConfig
    needs: Needs

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def hidden(self) -> int:
        return self.x.shape[1]

    @property
    def top_k(self) -> int:
        return self.topk_ids.shape[1]

    @property
    def intermediate(self) -> int:
        return self.w1.shape[1]

    @property
    def num_local_experts(self) -> int:
        return self.w1.shape[0]

    @property
    def world(self) -> int:
        return group_size(self.group)

    @property
    def rank(self) -> int:
        return group_rank(self.group)

    @property
    def num_experts(self) -> int:
        return self.num_local_experts * self.world

    @property
    def first_expert(self) -> int:
        """Global id of this rank's first local expert."""
        return self.rank * self.num_local_experts


class Backend(ABC):
    """What every backend has. `name` is the value of `MegaMoEConfig.backend`."""

    name: str

    @abstractmethod
    def unavailable(
        self, device: torch.device, group: dist.ProcessGroup | None, config: MegaMoEConfig
    ) -> str | None:
        """Why this backend cannot run such a call here; None when it can. No side effects, cheap."""

    def refuse(
        self, group: dist.ProcessGroup | None, device: torch.device, reason: str, timeout_s: float
    ) -> None:
        """Tell the peers of `group`, in place of a call, that this rank refuses it: they raise too.

        May raise what the peers raise. The default tells nobody.
        """
        return None


class ExplicitBackend(Backend):
    """Own forward and backward; runs inside the custom op."""

    @abstractmethod
    def forward(self, call: MoECall) -> tuple[Tensor, list[Tensor]]:
        """y (T, H) bf16 and what the backward needs beside the arguments.

        `saved` must be fresh tensors: never an argument, never a view of a shared workspace. It is empty
        when nothing in `call.needs` is set.
        """

    @abstractmethod
    def backward(self, call: MoECall, saved: list[Tensor], dy: Tensor) -> Gradients:
        """Gradients for exactly `call.needs`, from dy (T, H) bf16, contiguous."""

    @abstractmethod
    def fake_saved(self, call: MoECall) -> list[Tensor]:
        """Tensors shaped like `saved`, for tracing: only shapes, dtypes and devices count."""


class Begun(NamedTuple):
    """A forward whose first stage has run: what its backward needs, and the second stage, which gives y."""

    saved: list[Tensor]
    finish: Callable[[], Tensor]


class StagedBackend(ExplicitBackend):
    """A forward in two stages. A recomputation under activation checkpointing needs only the first: it makes
    all that the backward reads, so the second, with y, is left out.
    """

    @abstractmethod
    def begin(self, call: MoECall) -> Begun:
        """The first stage. `finish` may be called once, before any other call on this group, or never, then
        on no rank.
        """

    def forward(self, call: MoECall) -> tuple[Tensor, list[Tensor]]:
        saved, finish = self.begin(call)
        return finish(), saved


class CompositeBackend(Backend):
    """A chain of differentiable operations; autograd gives the backward."""

    @abstractmethod
    def apply(self, call: MoECall) -> Tensor:
        """y (T, H) bf16, differentiable."""
