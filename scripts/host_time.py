"""How long a fused call keeps the host busy: forward up to GEMM1 (`begin`), the rest (`finish`), backward.

    python scripts/host_time.py                         # no GPU: driver and torch.cuda are stand-ins
    torchrun --nproc-per-node 2 scripts/host_time.py    # 2 GPUs, EP=2, shapes of Qwen3-30B-A3B

Prints, for each precision, the median of the microseconds from entering a phase to its return, with the
device idle at the start; without a GPU the lowest tenth of the thread's own processor time, because what else
the machine does is not the question. `--profile` adds cProfile's table of one phase.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from titan_megamoe import MegaMoEConfig, mega_moe
from titan_megamoe.backends import get_backend
from titan_megamoe.backends.base import MoECall, Needs, StagedBackend

SMALL = dict(tokens=256, hidden=512, intermediate=256, experts=16, top_k=8)
"""Sizes without a GPU; the host's work does not depend on them."""
QWEN3_30B = dict(tokens=16384, hidden=2048, intermediate=768, experts=128, top_k=8)
clock = time.perf_counter
PHASES = ("begin", "finish", "backward")


typical: Callable[[list[float]], float] = statistics.median


def lowest_tenth(values: list[float]) -> float:
    return sorted(values)[len(values) // 10]


class _Patch:
    """As much of pytest's monkeypatch as testing.no_gpu needs."""

    def setattr(self, target, name, value, raising=True) -> None:
        mock.patch.object(target, name, value, create=not raising).start()


def make_call(sizes: dict[str, int], group, device: torch.device, precision: str) -> MoECall:
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    tokens, hidden, intermediate = sizes["tokens"], sizes["hidden"], sizes["intermediate"]
    experts = sizes["experts"]
    local = experts // group.size()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    scores = torch.rand(tokens, experts, generator=generator, device=device)
    weights, ids = scores.topk(sizes["top_k"])
    return MoECall(
        x=normal(tokens, hidden), topk_ids=ids, topk_weights=weights,
        w1=normal(local, intermediate, hidden), w3=normal(local, intermediate, hidden),
        w2=normal(local, hidden, intermediate), group=group,
        config=MegaMoEConfig(backend="fused", precision=precision), needs=Needs(True, True, True, True, True),
    )  # fmt: skip


def backend_times(call: MoECall, steps: int, synchronize: Callable[[], None]) -> dict[str, float]:
    """Microseconds of each phase of the backend alone."""
    backend = get_backend("fused")
    assert isinstance(backend, StagedBackend)
    dy = torch.randn_like(call.x)
    taken: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(steps):
        synchronize()
        start = clock()
        begun = backend.begin(call)
        middle = clock()
        begun.finish()
        end = clock()
        synchronize()
        before = clock()
        backend.backward(call, begun.saved, dy)
        after = clock()
        for phase, seconds in zip(PHASES, (middle - start, end - middle, after - before), strict=True):
            taken[phase].append(seconds * 1e6)
    return {phase: typical(times) for phase, times in taken.items()}


def op_times(call: MoECall, steps: int, synchronize: Callable[[], None]) -> dict[str, float]:
    """Microseconds of `mega_moe` under autograd, and of the backward that it starts."""
    inputs = [t.detach().requires_grad_() for t in (call.x, call.topk_weights, call.w1, call.w3, call.w2)]
    x, weights, w1, w3, w2 = inputs
    dy = torch.randn_like(call.x)
    forward, backward = [], []
    for _ in range(steps):
        synchronize()
        start = clock()
        y = mega_moe(x, call.topk_ids, weights, w1, w3, w2, group=call.group, config=call.config)
        forward.append((clock() - start) * 1e6)
        synchronize()
        start = clock()
        torch.autograd.grad(y, inputs, dy)
        backward.append((clock() - start) * 1e6)
    return {"op forward": typical(forward), "op backward": typical(backward)}


def profile(call: MoECall, phase: str, steps: int, synchronize: Callable[[], None], rows: int) -> str:
    """cProfile's table of `steps` runs of one phase, by own time."""
    backend = get_backend("fused")
    assert isinstance(backend, StagedBackend)
    profiler, dy = cProfile.Profile(), torch.randn_like(call.x)
    watched = profiler.runcall
    for _ in range(steps):
        synchronize()
        begun = watched(backend.begin, call) if phase == "begin" else backend.begin(call)
        watched(begun.finish) if phase == "finish" else begun.finish()
        if phase == "backward":
            watched(backend.backward, call, begun.saved, dy)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(rows)
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", choices=PHASES)
    parser.add_argument("--rows", type=int, default=45, help="lines of the profile")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        group, sizes, synchronize = dist.group.WORLD, QWEN3_30B, torch.cuda.synchronize
        where = torch.cuda.get_device_name(device)
    else:
        from titan_megamoe.testing.no_gpu import pretend, two_ranks

        global clock, typical
        clock, typical = time.thread_time, lowest_tenth
        pretend(_Patch())
        device, group, sizes, where = torch.device("cpu"), two_ranks(), SMALL, "no GPU: stand-in driver"

        def synchronize() -> None: ...

    if dist.get_rank() == 0:
        print(f"host time, microseconds; {where}")
    for precision in arguments.precisions:
        call = make_call(sizes, group, device, precision)
        backend_times(call, 5, synchronize)
        times = backend_times(call, arguments.steps, synchronize)
        op_times(call, 5, synchronize)
        times |= op_times(call, arguments.steps, synchronize)
        table = profile(call, arguments.profile, 20, synchronize, arguments.rows) if arguments.profile else ""
        if dist.get_rank() == 0:
            print(f"{precision:8}", "  ".join(f"{phase} {value:.0f}" for phase, value in times.items()))
            print(table, end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
