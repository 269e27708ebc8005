"""Timing on a GPU with events, the same on every rank."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

_HEAD_START = 2_000_000  # GPU cycles, about 1 ms: the host queues work meanwhile


def measure(
    phases: Sequence[Callable[[int], object]],
    *,
    iterations: int,
    warmup: int,
    group: dist.ProcessGroup | None,
) -> list[list[float]]:
    """Milliseconds of each phase in each iteration, the slowest rank's.

    `phases[p](i)` queues phase p of iteration i. Before an iteration the ranks are lined up on the device and
    the host gets a head start, so that launch time counts only where the host has to wait for the device.
    """
    lead = torch.zeros(1, device="cuda")
    marks = [
        [torch.cuda.Event(enable_timing=True) for _ in range(len(phases) + 1)] for _ in range(iterations)
    ]
    for i in range(-warmup, iterations):
        torch.cuda._sleep(_HEAD_START)
        if group is not None:
            dist.all_reduce(lead, group=group)
        if i >= 0:
            marks[i][0].record()
        for p, phase in enumerate(phases):
            phase(i % max(iterations, 1))
            if i >= 0:
                marks[i][p + 1].record()
    torch.cuda.synchronize()
    times = torch.tensor(
        [[m[p].elapsed_time(m[p + 1]) for m in marks] for p in range(len(phases))], device="cuda"
    )
    if group is not None:
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return times.tolist()


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
