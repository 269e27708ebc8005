"""Where a training step's time goes, from the profiler's trace of one rank: kernels, and gaps between them.

    python scripts/step_gaps.py rank0_trace.json[.gz] [--gap-us 30] [--kernels 40]

A trace comes from TorchTitan's own profiler: any job with --profiling.enable_profiling and
--profiling.profile_freq=14 leaves one in its dump folder (`scripts/measure.sh profile` does it for the fp8
step). Prints the span from the first kernel's start to the last one's end, the time in which any kernel or
copy ran, the gaps longer than --gap-us by what ended before and began after them, what the host did at each
end of the longest, the kernels by their total time, and those that took another time while one of NCCL's ran:
a collective that waits for its peer holds SMs, of which a persistent kernel has too few then.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


class Work(NamedTuple):
    """A kernel or copy; microseconds."""

    start: float
    end: float
    name: str


class Gap(NamedTuple):
    """Nothing ran on the GPU; microseconds."""

    start: float
    end: float
    before: str
    after: str

    @property
    def length(self) -> float:
        return self.end - self.start


def load(path: Path) -> dict[str, Any]:
    """A Chrome trace, packed or not."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        return json.load(file)


def read(trace: dict[str, Any]) -> tuple[list[Work], list[Work]]:
    """What ran on the GPU, by start, and what the host did (operators and CUDA calls)."""
    gpu, host = [], []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        work = Work(event["ts"], event["ts"] + event["dur"], event["name"])
        if event.get("cat") in ON_GPU:
            gpu.append(work)
        elif event.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation"):
            host.append(work)
    return sorted(gpu), sorted(host)


def gaps(gpu: Sequence[Work], shortest_us: float) -> tuple[float, list[Gap]]:
    """The time in which something ran, and the gaps, longest first."""
    busy, found, last = 0.0, [], gpu[0]
    end = last.start
    for work in gpu:
        if work.start - end > shortest_us:
            found.append(Gap(end, work.start, last.name, work.name))
        busy += max(0.0, work.end - max(work.start, end))
        if work.end > end:
            end, last = work.end, work
    return busy, sorted(found, key=lambda gap: -gap.length)


def beside_collectives(
    gpu: Sequence[Work], least_us: float = 20
) -> dict[str, tuple[list[float], list[float]]]:
    """Of kernels: their times with at least so much of a collective beside them, and without any."""
    collectives = [work for work in gpu if "nccl" in work.name]
    found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for work in gpu:
        if "nccl" in work.name or work.name.startswith("Mem"):
            continue
        beside = sum(max(0.0, min(work.end, c.end) - max(work.start, c.start)) for c in collectives)
        if not 0 < beside < least_us:
            found[work.name][beside == 0].append(work.end - work.start)
    return found


def short(name: str) -> str:
    """A kernel's name without types and arguments."""
    name = re.sub(r"^void ", "", name)
    return re.sub(r"[<(].*", "", name)[-44:]


def during(host: Sequence[Work], at: float) -> str:
    """The innermost thing that the host was in at that time."""
    inside = [work for work in host if work.start <= at < work.end]
    return short(min(inside, key=lambda work: work.end - work.start).name) if inside else "(nothing traced)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gap-us", type=float, default=30.0)
    parser.add_argument("--kernels", type=int, default=40)
    options = parser.parse_args()
    gpu, host = read(load(options.trace))
    if not gpu:
        raise SystemExit(f"{options.trace}: no kernel in it")
    busy, found = gaps(gpu, options.gap_us)
    span = max(work.end for work in gpu) - gpu[0].start
    lost = sum(gap.length for gap in found)
    print(
        f"span {span / 1e3:.1f} ms, busy {busy / 1e3:.1f}, {len(found)} gaps of more than "
        f"{options.gap_us:g} µs: {lost / 1e3:.1f}, shorter ones {(span - busy - lost) / 1e3:.1f}"
    )
    pairs: dict[tuple[str, str], list[Gap]] = defaultdict(list)
    for gap in found:
        pairs[short(gap.before), short(gap.after)].append(gap)
    print("\ngaps by their ends:   ms, how many, after, before")
    for (before, after), some in sorted(pairs.items(), key=lambda item: -sum(g.length for g in item[1]))[:20]:
        print(f"{sum(g.length for g in some) / 1e3:8.2f} {len(some):4}  {before:<44} {after}")
    print("\nlongest gaps:   at ms, ms, the host when it begins, when it ends")
    for gap in found[:20]:
        at = (gap.start - gpu[0].start) / 1e3
        print(f"{at:8.1f} {gap.length / 1e3:6.2f}  {during(host, gap.start):<44} {during(host, gap.end)}")
    totals: dict[str, list[float]] = defaultdict(list)
    for work in gpu:
        totals[work.name].append(work.end - work.start)
    print("\nkernels:   ms, how many")
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))[: options.kernels]:
        print(f"{sum(times) / 1e3:9.3f} {len(times):5}  {name[:110]}")
    print("\nbeside a collective, and without:   ms in the mean, how many, ms in the mean, how many")
    for name, (beside, alone) in sorted(beside_collectives(gpu).items()):
        if len(beside) > 1 and len(alone) > 1 and sum(beside) > 300:
            means = (f"{sum(times) / len(times) / 1e3:8.3f} {len(times):4}" for times in (beside, alone))
            print("  ".join(means), f" {name[:100]}")


if __name__ == "__main__":
    main()
