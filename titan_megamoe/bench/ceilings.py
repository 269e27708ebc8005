"""What the machine can do, measured in the same run: grouped GEMM rates and the link between two GPUs.

The ideal time of a phase is the larger of its GEMMs at the best grouped-GEMM rate and its bytes over the
link at the best rate; a perfect overlap would reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .shapes import LayerShape
from .timing import measure, median

_ITERATIONS = 15


@dataclass(frozen=True)
class Ceilings:
    """gemm_ms: best time of each grouped GEMM of a layer in bf16, by name; gemm_by: who reached it.

    fp8_ms: the same in blockwise fp8, for the GEMMs whose operands are fp8; empty where nobody measured it.
    link_gb_s: bytes per second and direction of a copy from a peer's memory, both ways at once; 0 for one
    GPU.
    """

    gemm_ms: dict[str, float]
    gemm_by: dict[str, str]
    link_gb_s: float
    fp8_ms: dict[str, float] = field(default_factory=dict)

    def gemm_sum(self, phase: str, precision: str = "bf16") -> float | None:
        """ms of a phase's GEMMs alone; None where those of the precision were not measured."""
        names = ("gemm1", "gemm2") if phase == "forward" else ("dgrad2", "dgrad1", "wgrad2", "wgrad1")
        times = self.gemm_ms
        if precision == "fp8" or (precision == "fp8_bwd" and phase == "backward"):
            if not self.fp8_ms:
                return None
            times = self.gemm_ms | self.fp8_ms
        return sum(times[n] for n in names)

    def ideal_ms(self, phase: str, wire_bytes: float, precision: str = "bf16") -> float | None:
        """ms below which a phase cannot go: its GEMMs, or its bytes in one direction over the link."""
        gemms = self.gemm_sum(phase, precision)
        wire = wire_bytes / (self.link_gb_s * 1e6) if self.link_gb_s else 0.0
        return None if gemms is None else max(gemms, wire)


def measure_ceilings(
    shape: LayerShape, tokens: int, ep: int, group: dist.ProcessGroup | None, fp8: bool = False
) -> Ceilings:
    """Time every grouped GEMM of a layer for balanced random counts, with each library that is here."""
    device = torch.device("cuda", torch.cuda.current_device())
    experts = shape.experts // ep
    generator = torch.Generator(device).manual_seed(5)
    rows = tokens * shape.top_k
    picks = torch.randint(0, experts, (rows,), generator=generator, device=device)
    # torch._grouped_mm needs groups of multiples of 8 rows.
    counts = (torch.bincount(picks, minlength=experts) + 4) // 8 * 8
    offs = counts.cumsum(0).to(torch.int32)
    total = int(offs[-1])

    def rand(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.float32).bfloat16()

    h, i = shape.hidden, shape.intermediate
    x, act = rand(total, h), rand(total, 2 * i)
    w_up, w_down = rand(experts, 2 * i, h), rand(experts, h, i)
    half = act[:, :i].contiguous()
    torch_gemms: dict[str, Callable[[int], object]] = {
        "gemm1": lambda _: torch._grouped_mm(x, w_up.transpose(1, 2), offs=offs),
        "gemm2": lambda _: torch._grouped_mm(half, w_down.transpose(1, 2), offs=offs),
        "dgrad2": lambda _: torch._grouped_mm(x, w_down, offs=offs),
        "dgrad1": lambda _: torch._grouped_mm(act, w_up, offs=offs),
        "wgrad2": lambda _: torch._grouped_mm(x.t(), half, offs=offs),
        "wgrad1": lambda _: torch._grouped_mm(act.t(), x, offs=offs),
    }
    best: dict[str, float] = {}
    by: dict[str, str] = {}
    contenders = [("torch._grouped_mm", torch_gemms)]
    deep = _deep_gemm(counts, x, half, w_up, w_down)
    if deep:
        contenders.append(("deep_gemm", deep))
    for library, gemms in contenders:
        for name, run in gemms.items():
            times = measure([run], iterations=_ITERATIONS, warmup=3, group=None)
            ms = median(times[0])
            if name not in best or ms < best[name]:
                best[name], by[name] = ms, library
    link = _link_gb_s(group) if group is not None else 0.0
    return Ceilings(best, by, link, _fp8_ms(shape, total, experts, device) if fp8 else {})


def _deep_gemm(
    counts: Tensor, x: Tensor, half: Tensor, w_up: Tensor, w_down: Tensor
) -> dict[str, Callable[[int], object]]:
    """deep_gemm's bf16 forward grouped GEMMs, on the same number of rows; empty where it is not installed.

    It needs every group to start at a multiple of 128 rows, so it gets equal groups: a lower bound.
    """
    try:
        import deep_gemm
    except ImportError:
        return {}
    experts = counts.numel()
    per_expert = max(128, int(counts.sum()) // experts // 128 * 128)
    rows = per_expert * experts
    if rows > x.shape[0]:
        return {}
    layout = torch.arange(experts, device=x.device, dtype=torch.int32).repeat_interleave(per_expert)
    out_up, out_down = x.new_empty(rows, w_up.shape[1]), x.new_empty(rows, w_down.shape[1])
    grouped = deep_gemm.m_grouped_bf16_gemm_nt_contiguous
    return {
        "gemm1": lambda _: grouped(x[:rows], w_up, out_up, layout),
        "gemm2": lambda _: grouped(half[:rows], w_down, out_down, layout),
    }


def _fp8_ms(shape: LayerShape, rows: int, experts: int, device: torch.device) -> dict[str, float]:
    """ms of the four GEMMs of fp8 operands by deep_gemm, on equal groups of whole 128 rows; {} without it."""
    try:
        import deep_gemm
    except ImportError:
        return {}
    per_expert = max(128, rows // experts // 128 * 128)
    rows = per_expert * experts
    layout = torch.arange(experts, device=device, dtype=torch.int32).repeat_interleave(per_expert)
    h, i = shape.hidden, shape.intermediate

    def fp8(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(torch.float8_e4m3fn)

    made = {}
    for name, k, n in (("gemm1", h, 2 * i), ("gemm2", i, h), ("dgrad2", h, i), ("dgrad1", 2 * i, h)):
        x = fp8(rows, k), torch.rand(-(-k // 128), rows, device=device).t()
        w = fp8(experts, n, k), torch.rand(experts, -(-n // 128), -(-k // 128), device=device)
        out = torch.empty(rows, n, dtype=torch.bfloat16, device=device)

        def run(_: int, x: object = x, w: object = w, out: Tensor = out) -> None:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(x, w, out, layout)

        made[name] = median(measure([run], iterations=_ITERATIONS, warmup=3, group=None)[0])
    return made


def _link_gb_s(group: dist.ProcessGroup) -> float:
    """GB/s in each direction, all ranks reading their right neighbour's memory at once."""
    import torch.distributed._symmetric_memory as symm_mem

    size = 256 * 1024 * 1024
    mine = symm_mem.empty((size,), dtype=torch.uint8, device=torch.device("cuda"))
    handle = symm_mem.rendezvous(mine, group.group_name)
    peer = handle.get_buffer((handle.rank + 1) % handle.world_size, (size,), torch.uint8)
    into = torch.empty(size, dtype=torch.uint8, device="cuda")
    times = measure([lambda _: into.copy_(peer)], iterations=_ITERATIONS, warmup=3, group=group)
    return size / median(times[0]) / 1e6
