"""Symmetric memory of the fused backend: one workspace per (expert-parallel group, geometry).

All layers share it; it is allocated at the first call, printed, and freed when the group goes. A rank's part:

    mail      (W, 16) int32            announcements of calls, row r written by rank r
    flags     (W, chunks) int32        partial sums of a chunk of tokens complete, row r written by rank r
    ids       (T_max, K) int32         published routing
    weights   (T_max, K) fp32
    dweight   (T_max, K) fp32          gradients of top-k weights, written by the experts' ranks
    x         (T_max, H) bf16          published tokens, or their gradients in a backward
    partial   (W - 1, T_max, H) bf16   partial sums, one slab per peer, rank + 1 first (modulo W)
    and where a call's precision is not bf16:
    rows8     (T_max, H) e4m3          published tokens, or their gradients, quantized
    scales    (T_max, ⌈H/128⌉) fp32    their reciprocal scales
    second    (T_max, H) bf16          published tokens in a backward, where x has their gradients

Peers reach a part of rank r at this rank's address plus delta[r] bytes. With W = 1 nothing is shared,
and x and partial do not exist. NVLink multicast is not used.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import CallHeader, Phase, agree
from .backends.hopper.layout import COMBINE_TOKENS, MAIL_WORDS, PROGRESS_AT, RAISED_AT, STATE_WORDS
from .backends.hopper.peer_copies import copies_delta
from .backends.hopper.status import WORDS, error_from
from .config import MegaMoEConfig
from .errors import BoundError, ConfigError, UnsupportedError
from .group import PerGroup, group_rank, group_size

logger = logging.getLogger("titan_megamoe")

MIN_TOKENS = 512
"""Least T_max that is chosen where the user gives none."""
_ALIGN = 256  # bytes


@dataclass(frozen=True)
class Geometry:
    """What a workspace's size depends on; the same on every rank of the group."""

    world: int
    max_tokens: int  # T_max
    top_k: int  # K
    hidden: int  # H
    fp8: bool = False  # some call's precision is not bf16

    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every part, in the order of memory."""
        shared = int(self.world > 1)
        chunks = max(-(-self.max_tokens // COMBINE_TOKENS), 1)
        slots = (self.max_tokens, self.top_k)
        tokens = self.max_tokens * shared
        quantized: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "rows8": ((tokens, self.hidden), torch.float8_e4m3fn),
            "scales": ((tokens, -(-self.hidden // 128)), torch.float32),
            "second": ((tokens, self.hidden), torch.bfloat16),
        }
        return {
            "mail": ((self.world, MAIL_WORDS), torch.int32),
            "flags": ((self.world, chunks), torch.int32),
            "ids": (slots, torch.int32),
            "weights": (slots, torch.float32),
            "dweight": (slots, torch.float32),
            "x": ((tokens, self.hidden), torch.bfloat16),
            "partial": ((self.world - 1, self.max_tokens, self.hidden), torch.bfloat16),
        } | (quantized if self.fp8 else {})

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's part."""
        return sum(_part_bytes(*part) for part in self.parts().values())


def _part_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for n in shape:
        size *= n
    return -(-size // _ALIGN) * _ALIGN


def workspace_bytes(
    *, world: int, max_tokens_per_rank: int, top_k: int, hidden: int, precision: str = "bf16"
) -> int:
    """Bytes of symmetric memory per rank that all fused layers of this geometry share.

    Args:
        world: ranks of the expert-parallel group.
        max_tokens_per_rank: T_max, tokens of a rank and call at most.
        top_k: K, experts of a token.
        hidden: H.
        precision: one of `config.PRECISIONS`; all but bf16 need room for e4m3 rows and a second bf16 part.

    Raises:
        ConfigError: no such precision.
    """
    MegaMoEConfig(precision=precision)  # says what is wrong with it
    return Geometry(world, max_tokens_per_rank, top_k, hidden, precision != "bf16").num_bytes


class Workspace:
    """One rank's part, its views, and what ties it to the peers' parts.

    Attributes:
        geometry: the sizes.
        mail, flags, ids, weights, dweight, x, partial, rows8, scales, second: views, see the module's head.
        delta: (W,) int64, bytes from this rank's part to each rank's.
        peers_rows8, peers_scales, peers_second: the peers' parts, rank + 1 first (modulo W).
        copies_delta: (W,) int64, bytes from the first row of this rank's copies of them (peer_copies.py) to
            those of each rank.
        state: (STATE_WORDS,) int32 device words; progress: those of the communication blocks.
        report: (WORDS,) int32 in pinned host memory, where kernels report a fault.
    """

    mail: Tensor
    flags: Tensor
    ids: Tensor
    weights: Tensor
    dweight: Tensor
    x: Tensor
    partial: Tensor
    rows8: Tensor
    scales: Tensor
    second: Tensor
    peers_rows8: tuple[Tensor, ...]
    peers_scales: tuple[Tensor, ...]
    peers_second: tuple[Tensor, ...]

    def __init__(self, group: dist.ProcessGroup | None, geometry: Geometry, device: torch.device) -> None:
        self.geometry = geometry
        self.rank = group_rank(group)
        size = geometry.num_bytes
        if geometry.world == 1:
            self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
            ranks, deltas = [self.memory], [0]
        else:
            self.memory, ranks, deltas = _symmetric(group, size, device)
        for name, view in _views(self.memory, geometry).items():
            setattr(self, name, view)
        self.delta = torch.tensor(deltas, dtype=torch.int64, device=device)
        self.peers_rows8 = self.peers_scales = self.peers_second = ()
        if geometry.fp8:
            peers = [ranks[(self.rank + i) % geometry.world] for i in range(1, geometry.world)]
            views = [_views(memory, geometry) for memory in peers]
            self.peers_rows8 = tuple(view["rows8"] for view in views)
            self.peers_scales = tuple(view["scales"] for view in views)
            self.peers_second = tuple(view["second"] for view in views)
        peer_bytes = 2 * geometry.max_tokens * geometry.hidden
        self.copies_delta = torch.tensor(
            copies_delta(geometry.world, self.rank, peer_bytes), dtype=torch.int64, device=device
        )
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        self.progress = self.state[PROGRESS_AT:]
        self._close: Callable[[], None] | None = None
        self.report = torch.zeros(WORDS, dtype=torch.int32, pin_memory=True)
        self._reported = ctypes.c_int32.from_address(self.report.data_ptr())  # its first word
        # Zeroed memory must be in place on every rank before a peer announces its first call.
        torch.cuda.synchronize(device)
        if geometry.world > 1:
            agree(group, _header(geometry), device)
        logger.info(
            "mega_moe: workspace of %.1f MiB per rank for %d tokens × H %d, top-%d, %d ranks",
            size / 2**20, geometry.max_tokens, geometry.hidden, geometry.top_k, geometry.world,
        )  # fmt: skip

    def enter(self) -> None:
        """Order the current stream after the device's last call, of whatever group, if it ran on another one,
        and close this group's last call if it was suspended and never resumed.

        Calls share a side stream and wait for peers, so a device runs them in the order in which its host
        makes them, and hosts that share several groups must make them in the same order.
        """
        if not torch.cuda.is_current_stream_capturing():  # a graph's replays are ordered by who replays them
            device = self.memory.device
            stream = torch.cuda.current_stream(device)
            last = _last_calls.get(device)
            if last is not None and last[0] != stream:
                stream.wait_event(last[1])
        close, self._close = self._close, None
        if close is not None:
            close()

    def suspend(self, close: Callable[[], None]) -> None:
        """Leave a call in its middle; `close` ends it on the current stream unless `resume` comes next."""
        self.leave()
        self._close = close

    def resume(self, close: Callable[[], None]) -> None:
        """Go on with the call that was suspended with `close`. Raises ConfigError after any other call."""
        if self._close is not close:
            raise ConfigError(
                "a suspended mega_moe call was resumed after another call on its group; finish it first."
            )
        self._close = None
        self.enter()

    def leave(self) -> None:
        """Mark the end of a call on the current stream."""
        if torch.cuda.is_current_stream_capturing():
            return
        device = self.memory.device
        stream = torch.cuda.current_stream(device)
        _, event = _last_calls.get(device) or (stream, torch.cuda.Event())
        event.record(stream)
        _last_calls[device] = stream, event

    def raise_reported(self, timeout_s: float, max_routed_rows: int) -> None:
        """Raise the fault that an earlier call reported, once. Reads pinned memory, no synchronisation.

        The device is told, after all calls made so far, so that the next one may meet the peers again. What
        is captured does not run now: during a capture the fault is raised but stays for the next call.
        """
        if not self._reported.value:
            return
        words = self.report.clone()
        if not torch.cuda.is_current_stream_capturing():
            self.report.zero_()
            self.enter()
            self.state[RAISED_AT].fill_(1)
            self.leave()
        raise error_from(words, self.rank, timeout_s, max_routed_rows)

    def refuse(self) -> None:
        """Tell the peers that this rank refuses the call they are about to make, or are in.

        As a call would, after the last one, which it closes if that was suspended: peers close theirs too.
        """
        from .backends.hopper.symmetric import refuse_call

        self.enter()
        refuse_call(self.mail, self.delta, self.state, world=self.geometry.world, rank=self.rank)
        self.leave()


def _views(memory: Tensor, geometry: Geometry) -> dict[str, Tensor]:
    """The parts of one rank's `memory`."""
    views, start = {}, 0
    for name, (shape, dtype) in geometry.parts().items():
        length = _part_bytes(shape, dtype)
        view = memory[start : start + length].view(dtype)
        wanted = 1
        for n in shape:
            wanted *= n
        # A part of size 0 still needs an address for the kernels' arguments.
        views[name] = view[:wanted].view(shape) if wanted else memory.view(dtype)[:8]
        start += length
    return views


def _symmetric(
    group: dist.ProcessGroup | None, size: int, device: torch.device
) -> tuple[Tensor, list[Tensor], list[int]]:
    """This rank's part, (size,) bytes; every rank's as this one reaches it, valid as long as the first; and
    the bytes from this rank's to each.
    """
    import torch.distributed._symmetric_memory as symmetric

    assert group is not None
    rank = group.rank()
    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, group.group_name)
    pointers = [int(p) for p in handle.buffer_ptrs]
    missing = [r for r, p in enumerate(pointers) if not p]
    if missing:
        raise UnsupportedError(
            f"rank {rank} has no NVLink path to rank(s) {missing} of the expert-parallel group; backend "
            f"'fused' needs all its ranks in one NVLink domain. Use backend 'all_to_all' or 'deepep'."
        )
    memory.zero_()
    ranks = [handle.get_buffer(r, (size,), torch.uint8) for r in range(len(pointers))]
    deltas = [p - pointers[rank] for p in pointers]
    if any(d % 16 for d in deltas):
        raise UnsupportedError(f"symmetric buffers are not 16-byte aligned to each other: {deltas}.")
    return memory, ranks, deltas


def _header(geometry: Geometry) -> CallHeader:
    return CallHeader(
        phase=Phase.FORWARD,
        top_k=geometry.top_k,
        hidden=geometry.hidden,
        num_tokens=geometry.max_tokens,
    )


_last_calls: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
"""By device: the stream of the last call that was not captured, and an event at its end."""


class _Kept:
    """A group's workspaces by (device index, max_tokens, top_k, hidden, fp8), and the one used last."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[int | None, int, int, int, bool], Workspace] = {}
        self.last: Workspace | None = None


_kept: PerGroup[_Kept] = PerGroup(_Kept)


def get_workspace(
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    num_tokens: int,
    max_tokens: int,
    top_k: int,
    hidden: int,
    fp8: bool = False,
) -> Workspace:
    """The workspace for such calls; the first call of a geometry creates it, a collective over the group.

    `max_tokens` 0: the largest `num_tokens` of any rank at the first call, rounded up to a power of two,
    at least MIN_TOKENS. Raises BoundError when this rank's `num_tokens` does not fit.
    """
    kept = _kept.get(group)
    key = (device.index, max_tokens, top_k, hidden, fp8)
    workspace = kept.by_key.get(key)
    if workspace is None:
        workspace = _create(group, device, num_tokens, max_tokens, top_k, hidden, fp8)
        kept.by_key[key] = workspace
    kept.last = workspace
    bound = workspace.geometry.max_tokens
    if num_tokens > bound:
        workspace.refuse()
        raise BoundError(
            f"rank {workspace.rank} has {num_tokens} tokens but max_tokens_per_rank is {bound}"
            f"{'' if max_tokens else ' (from the largest T of the first call)'}; set "
            f"MegaMoEConfig.max_tokens_per_rank to the largest T of any rank and call."
        )
    return workspace


def _create(
    group: dist.ProcessGroup | None,
    device: torch.device,
    num_tokens: int,
    max_tokens: int,
    top_k: int,
    hidden: int,
    fp8: bool,
) -> Workspace:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "the fused backend's workspace cannot be created while a CUDA graph is captured; make one "
            "call (a warm-up) before the capture."
        )
    # Also where the bound is given: here a rank that refuses its first call tells the others.
    header = CallHeader(phase=Phase.FORWARD, top_k=top_k, hidden=hidden, num_tokens=num_tokens)
    largest = max(agree(group, header, device).num_tokens)
    bound = max_tokens or max(MIN_TOKENS, 1 << (largest - 1).bit_length())
    geometry = Geometry(group_size(group), bound, top_k, hidden, fp8)
    with torch.inference_mode(False):  # later calls outside that mode write to it too
        return Workspace(group, geometry, device)


def existing_workspace(group: dist.ProcessGroup | None) -> Workspace | None:
    """The workspace that the group used last, if any."""
    kept = _kept.peek(group)
    return None if kept is None else kept.last


def release_workspaces(group: dist.ProcessGroup | None) -> None:
    """Free the group's workspaces now; without this they go when the group is collected."""
    _kept.drop(group)
