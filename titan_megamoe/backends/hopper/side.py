"""A second stream for memory-bound kernels that run beside a GEMM, and the order in which the two start.

A persistent GEMM block leaves registers of its SM free; blocks of a small kernel fit there and use
memory bandwidth that the GEMM does not. For that the GEMM must be resident first: `beside` lets the
side kernel start a few microseconds after its inputs are ready. The order affects time only, never
results.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import triton

from .symmetric import globaltimer
from .triton_launch import launch_triton

HEAD_START_NS = 6_000


@triton.jit
def _pause_kernel(ns):
    """One block that waits `ns` nanoseconds."""
    begin = globaltimer()
    now = begin
    while now - begin < ns:
        now = globaltimer()


@functools.lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def beside(
    ready: torch.cuda.Event, device: torch.device, head_start_ns: int = HEAD_START_NS
) -> Iterator[torch.cuda.Event]:
    """Launch on the side stream, after `ready` and a head start for what the caller has launched.

    Yields an event that is recorded when the block ends: wait for it before using the results. Everything
    used inside must have been allocated before `ready` was recorded, and stay referenced until that wait:
    the allocator hands out memory in the order of the caller's stream only.
    """
    side = _side_stream(device)
    done = torch.cuda.Event()
    with torch.cuda.stream(side):
        side.wait_event(ready)
        if head_start_ns:
            launch_triton(_pause_kernel, (1,), head_start_ns, num_warps=1)
        yield done
        done.record(side)


def give_way(device: torch.device) -> None:
    """The current stream waits until what the side stream was just given has started."""
    with torch.cuda.device(device):
        launch_triton(_pause_kernel, (1,), HEAD_START_NS, num_warps=1)


def join(device: torch.device) -> None:
    """Order the current stream after all that the side stream was given."""
    torch.cuda.current_stream(device).wait_stream(_side_stream(device))


def now() -> torch.cuda.Event:
    """An event recorded on the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event
