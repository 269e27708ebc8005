"""What the ranks of a group tell each other before an unfused call: one small all-gather.

Every rank sends a header (phase, running number, shapes, which gradients, whether it refuses the call) and
its token counts per expert. A rank that is one call ahead or behind, passes other shapes, holds an expert id
out of range, or refuses its arguments is then an error on every rank, raised before any token moves; the
next call starts clean. The fused backend carries the same facts with its flags instead.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from .backends.base import MoECall
from .errors import AgreementError, BoundError, ConfigError, UnsupportedError
from .group import PerGroup, group_rank, group_size

MAX_EXPERTS = 2048
"""Largest E of the unfused backends: the exchange has one fixed size, whatever a rank believes E to be."""

_REASON_WORDS = 64  # int32 words that carry the reason of a refusal, as UTF-8
_FIELDS = 12
_INVALID_AT = 11  # index of the one field that is written on the device


class Phase(IntEnum):
    INFERENCE = 1
    FORWARD = 2
    BACKWARD = 3


@dataclass(frozen=True)
class CallHeader:
    """What must be equal on all ranks, and what each rank tells of itself."""

    phase: Phase
    top_k: int = 0
    hidden: int = 0
    intermediate: int = 0
    num_local_experts: int = 0
    needs_bits: int = 0
    config_hash: int = 0
    num_tokens: int = 0  # may differ between ranks
    max_tokens: int = 0  # bound on num_tokens; 0: none
    refusal: str = ""  # why this rank refuses its call; "": it does not


@dataclass(frozen=True)
class Agreement:
    """What all ranks said.

    num_tokens: T of every rank. counts: (W, E) int64 on the CPU, tokens of each rank for each expert (empty
    if none were sent).
    """

    num_tokens: list[int]
    counts: Tensor


_call_numbers: PerGroup[int] = PerGroup(int)


def agree(
    group: dist.ProcessGroup | None,
    header: CallHeader,
    device: torch.device,
    topk_ids: Tensor | None = None,
    timeout_s: float = 300.0,
) -> Agreement:
    """Exchange headers (and the counts of `topk_ids`) over `group`; raise on every rank if anything is off.

    Synchronises the host with `device` once. Raises AgreementError, BoundError or ConfigError.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "this call reads token counts on the host, so it cannot be captured in a CUDA graph; use backend "
            "'fused', or run it outside the capture."
        )
    world, rank = group_size(group), group_rank(group)
    number = _next_call_number(group)
    num_experts = header.num_local_experts * world
    message = _encode(header, number, topk_ids, num_experts, device)
    gathered = _all_gather(message, group, header, number, timeout_s)
    rows = gathered[:, : _FIELDS + _REASON_WORDS].tolist()
    _check(rows, rank)
    counts = gathered[:, _FIELDS + _REASON_WORDS :][:, :num_experts].to(torch.int64)
    return Agreement(num_tokens=[row[8] for row in rows], counts=counts)


def call_header(call: MoECall, phase: Phase) -> CallHeader:
    """The header of a valid call."""
    return CallHeader(
        phase=phase,
        top_k=call.top_k,
        hidden=call.hidden,
        intermediate=call.intermediate,
        num_local_experts=call.num_local_experts,
        needs_bits=call.needs.bits,
        config_hash=zlib.crc32(call.config.text.encode()) & 0x7FFFFFFF,
        num_tokens=call.num_tokens,
        max_tokens=call.config.max_tokens_per_rank,
    )


def announce_refusal(
    group: dist.ProcessGroup | None, device: torch.device, reason: str, timeout_s: float
) -> None:
    """Tell the peers, in place of a forward, that this rank refuses its call: all ranks raise."""
    agree(group, CallHeader(phase=Phase.FORWARD, refusal=reason), device, timeout_s=timeout_s)


def _next_call_number(group: dist.ProcessGroup | None) -> int:
    number = _call_numbers.get(group) + 1
    _call_numbers.set(group, number)
    return number


def _encode(
    header: CallHeader, number: int, topk_ids: Tensor | None, num_experts: int, device: torch.device
) -> Tensor:
    fields = [
        int(header.phase),
        number & 0x7FFFFFFF,
        header.top_k,
        header.hidden,
        header.intermediate,
        header.num_local_experts,
        header.needs_bits,
        header.config_hash,
        header.num_tokens,
        header.max_tokens,
        int(bool(header.refusal)),
        0,
    ]
    words = _FIELDS + _REASON_WORDS
    host = torch.zeros(words, dtype=torch.int32)
    host[:_FIELDS] = torch.tensor(fields, dtype=torch.int32)
    if header.refusal:
        reason = header.refusal.encode()[: _REASON_WORDS * 4].ljust(_REASON_WORDS * 4, b"\0")
        host[_FIELDS:] = torch.frombuffer(bytearray(reason), dtype=torch.int32)
    message = torch.zeros(words + MAX_EXPERTS + 1, dtype=torch.int32, device=device)
    message[:words] = host.to(device, non_blocking=True)
    if topk_ids is not None and not header.refusal:
        ids = topk_ids.reshape(-1)
        dropped = ids == -1
        valid = (ids >= 0) & (ids < num_experts)
        # Slot num_experts of the histogram collects what is dropped or invalid.
        slots = ids.where(valid, num_experts)
        ones = torch.ones((), dtype=torch.int32, device=device).expand(slots.numel())
        message[words : words + num_experts + 1].index_add_(0, slots, ones)
        lost = message[words + num_experts]
        message[_INVALID_AT] = lost - dropped.sum(dtype=torch.int32)
    return message


def _all_gather(
    message: Tensor,
    group: dist.ProcessGroup | None,
    header: CallHeader,
    number: int,
    timeout_s: float,
) -> Tensor:
    if group is None:
        return message.cpu().unsqueeze(0)
    if message.is_cuda and dist.get_backend(group) == "gloo":
        message = message.cpu()
    gathered = message.new_empty(group.size() * message.numel())
    try:
        work = dist.all_gather_into_tensor(gathered, message, group=group, async_op=True)
        if message.is_cuda:
            work.wait()  # orders the stream; NCCL's own watchdog bounds the wait
        else:
            work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise AgreementError(
            f"rank {group.rank()} of the expert-parallel group waited {timeout_s:g} s in call {number} "
            f"({header.phase.name.lower()}) and not every rank came. Every rank must make the same calls in "
            f"the same order; a rank that skipped one, failed or is slower than timeout_s is the usual "
            f"cause ({error})."
        ) from error
    return gathered.view(group.size(), -1).cpu()


_SAME = (
    (0, "phase"),
    (1, "call number"),
    (2, "top-k K"),
    (3, "hidden size H"),
    (4, "intermediate size I"),
    (5, "number of local experts"),
    (6, "set of requested gradients"),
    (7, "MegaMoEConfig"),
)


def _check(rows: list[list[int]], rank: int) -> None:
    for peer, row in enumerate(rows):
        if row[10]:
            raise AgreementError(
                f"rank {peer} of the expert-parallel group refused this call: {_reason(row)} "
                f"(seen on rank {rank}; no token was sent, the next call starts clean)"
            )
    for at, what in _SAME:
        values = [row[at] for row in rows]
        if len(set(values)) > 1:
            shown = values if at else [_phase_name(v) for v in values]
            said = ", ".join(f"rank {r}: {v}" for r, v in enumerate(shown))
            raise AgreementError(
                f"the ranks of the expert-parallel group are in calls that do not belong together: the "
                f"{what} differs ({said}). Every rank must make the same mega_moe calls, forward and "
                f"backward, in the same order, with the same model and config; look for a rank that "
                f"skips or adds a call. No token was sent, gradients are unchanged."
            )
    for peer, row in enumerate(rows):
        if row[_INVALID_AT]:
            experts = row[5] * len(rows)
            raise ConfigError(
                f"rank {peer} passed {row[_INVALID_AT]} expert ids outside [-1, {experts}); ids must be in "
                f"[0, {experts}), or -1 for a dropped slot. No token was sent."
            )
        if row[9] and row[8] > row[9]:
            raise BoundError(
                f"rank {peer} has {row[8]} tokens but max_tokens_per_rank is {row[9]}; raise the bound "
                f"(0 = none) or pass fewer tokens. No token was sent."
            )


def _phase_name(value: int) -> str:
    return Phase(value).name.lower() if value in set(Phase) else f"unknown ({value})"


def _reason(row: list[int]) -> str:
    words = torch.tensor(row[_FIELDS : _FIELDS + _REASON_WORDS], dtype=torch.int32)
    return bytes(words.view(torch.uint8).tolist()).rstrip(b"\0").decode(errors="replace")
