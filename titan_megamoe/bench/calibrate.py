"""Measure what the performance model takes from elsewhere otherwise: all of a step but the MoE layer."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import records
from .jobfile import FULL_MODELS, ModelShape
from .timing import measure

Phase = Callable[[int], object]


@dataclass(frozen=True)
class Item:
    """Phases that are timed apart, each with its name, its work and the unit of work over time.

    unit: "TFLOP/s", "TB/s read+write" or "GB/s each way" for work in FLOP or bytes; "ms" for the time itself.
    """

    names: tuple[str, ...]
    impl: str
    precision: str
    phases: tuple[Phase, ...]
    work: tuple[float, ...]
    unit: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=FULL_MODELS, action="append", help="default: both")
    parser.add_argument("--tokens", type=int, default=16384, help="one sequence of so many tokens")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--commit", default="", help="what to record instead of what git says")
    parser.add_argument("--out", default="", help="record file, for example docs/benchmarks/calibration.json")


def run(args: argparse.Namespace) -> int:
    """Run on every rank of an initialised process group; rank 0 prints and writes. Exit status."""
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    console = Console(quiet=dist.get_rank() != 0)
    environment = records.environment(args.commit)
    made: list[dict[str, Any]] = []

    def time(phases: Sequence[Phase]) -> list[list[float]]:
        return measure(phases, iterations=args.iterations, warmup=3, group=group)

    device = torch.device("cuda", torch.cuda.current_device())
    for name in args.model or list(FULL_MODELS):
        for item in items(FULL_MODELS[name], args.tokens, device, group):
            made += [r | environment for r in to_records(item, time(item.phases), name, args.tokens)]
            torch.cuda.empty_cache()
    table = Table(title="calibration")
    for column in ("model", "what", "by", "value"):
        table.add_column(column)
    for r in made:
        table.add_row(r["model"], r["name"], r["impl"], f"{r['value']:.4g} {r['unit']}")
    console.print(table)
    if args.out and dist.get_rank() == 0:
        records.write(args.out, made)
        console.print(f"records: {args.out}")
    return 0


def to_records(
    item: Item, milliseconds: Sequence[Sequence[float]], model: str, tokens: int
) -> list[dict[str, Any]]:
    """One calibration record for each name; phases beyond the last name are added to the last."""
    medians = [statistics.median(values) for values in milliseconds]
    last = len(item.names) - 1
    times = [*medians[:last], sum(medians[last:])]
    scale = {"T": 1e9, "G": 1e6, "m": 1.0}[item.unit[0]]
    return [
        {
            "kind": "calibration",
            "source": "measured",
            "model": model,
            "impl": item.impl,
            "precision": item.precision,
            "name": name,
            "value": round(ms if item.unit == "ms" else work / ms / scale, 5),
            "unit": item.unit,
            "tokens": tokens,
            "n": len(milliseconds[0]),
        }
        for name, work, ms in zip(item.names, item.work, times, strict=True)
    ]


def items(
    shape: ModelShape, tokens: int, device: torch.device, group: dist.ProcessGroup | None
) -> Iterator[Item]:
    """What to time for a model, one after another, so that only one item's tensors live at a time."""
    yield _attention(shape, tokens, device)
    yield _linears(shape, tokens, device)
    yield _loss(shape, tokens, device)
    yield _router(shape, tokens, device)
    yield _optimizer(min(2**28, shape.expert_parameters), device)
    yield _copy(min(2**30, 2 * shape.expert_parameters), device)
    if group is not None:
        yield from _collectives(shape.expert_parameters // group.size(), device, group)


def _random(*size: int, device: torch.device, grad: bool = False) -> Tensor:
    made = torch.randn(*size, device=device, dtype=torch.float32).bfloat16()
    return made.requires_grad_(grad)


def _attention(shape: ModelShape, tokens: int, device: torch.device) -> Item:
    """Causal SDPA with grouped queries, as TorchTitan's Qwen3 calls it."""
    q = _random(1, shape.heads, tokens, shape.head_dim, device=device, grad=True)
    k, v = (_random(1, shape.kv_heads, tokens, shape.head_dim, device=device, grad=True) for _ in range(2))
    dy = _random(1, shape.heads, tokens, shape.head_dim, device=device)
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    out: dict[str, Tensor] = {}

    def forward(_: int) -> None:
        with sdpa_kernel(backends, set_priority=True):
            out["y"] = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def backward(_: int) -> None:
        torch.autograd.grad(out.pop("y"), (q, k, v), dy)

    flops = 2.0 * tokens * tokens * shape.heads * shape.head_dim
    return Item(
        ("attention_forward", "attention_backward"), "SDPA", "bf16", (forward, backward),
        (flops, 2.5 * flops), "TFLOP/s",
    )  # fmt: skip


def _linears(shape: ModelShape, tokens: int, device: torch.device) -> Item:
    """Query, key, value, output and vocabulary linears: forward and both gradients, one rate."""
    hidden, q, kv = shape.layer.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (shape.vocabulary, hidden)]
    weights = [_random(*size, device=device) for size in sizes]
    inputs = {n: _random(tokens, n, device=device) for n in {n for _, n in sizes}}
    grads = {n: _random(tokens, n, device=device) for n in {n for n, _ in sizes}}

    def phase(i: int) -> None:
        for w in weights:
            x, dy = inputs[w.shape[1]], grads[w.shape[0]]
            x @ w.t()
            dy @ w
            dy.t() @ x

    flops = 6.0 * tokens * sum(a * b for a, b in sizes)
    return Item(("dense_gemm",), "matmul", "bf16", (phase,), (flops,), "TFLOP/s")


def _loss(shape: ModelShape, tokens: int, device: torch.device) -> Item:
    """TorchTitan's cross entropy of bf16 logits, compiled, forward and backward."""
    logits = _random(tokens, shape.vocabulary, device=device, grad=True)
    labels = torch.randint(0, shape.vocabulary, (tokens,), device=device)

    def entropy(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    compiled = torch.compile(entropy) if device.type == "cuda" else entropy

    def phase(_: int) -> None:
        torch.autograd.grad(compiled(logits, labels), (logits,))

    return Item(("loss",), "torch.compile", "bf16", (phase,), (0.0,), "ms")


def _router(shape: ModelShape, tokens: int, device: torch.device) -> Item:
    """TorchTitan's router: gate, scores, top-k and counts."""
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.moe.moe import MoE

    layer = shape.layer
    moe_args = MoEArgs(
        num_experts=layer.experts, num_shared_experts=0, top_k=layer.top_k, score_func="softmax",
        route_norm=True, score_before_experts=False,
    )  # fmt: skip
    with torch.device("meta"):
        router = MoE(moe_args, layer.hidden, layer.intermediate).router
    router = router.to_empty(device=device).to(torch.bfloat16)
    torch.nn.init.normal_(router.gate.weight, std=0.02)
    x = _random(tokens, layer.hidden, device=device, grad=True)
    bias = torch.zeros(layer.experts, device=device)
    out: dict[str, Tensor] = {}

    def forward(_: int) -> None:
        out["scores"] = router(x, bias)[0]

    def backward(_: int) -> None:
        scores = out.pop("scores")
        torch.autograd.grad(scores, (x, router.gate.weight), torch.ones_like(scores))

    return Item(
        ("router_forward", "router_backward"), "torchtitan", "bf16", (forward, backward), (0.0, 0.0), "ms"
    )


def _optimizer(parameters: int, device: torch.device) -> Item:
    """Fused AdamW in fp32, as bytes: reads weight, gradient and two moments, writes three of them."""
    weight = torch.nn.Parameter(torch.zeros(parameters, device=device))
    weight.grad = torch.randn(parameters, device=device)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return Item(
        ("optimizer",), "AdamW fused", "fp32", (lambda _: optimizer.step(),), (28.0 * parameters,),
        "TB/s read+write",
    )  # fmt: skip


def _copy(size: int, device: torch.device) -> Item:
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    phase = (lambda _: target.copy_(source),)
    return Item(("device_copy",), "copy", "none", phase, (2.0 * size,), "TB/s read+write")


def _collectives(parameters: int, device: torch.device, group: dist.ProcessGroup) -> Iterator[Item]:
    """All-gather of bf16 and reduce-scatter of fp32: what a rank takes in, over time."""
    size = group.size()
    shard = torch.empty(parameters // size, dtype=torch.bfloat16, device=device)
    whole = torch.empty(shard.numel() * size, dtype=torch.bfloat16, device=device)
    taken_in = 2.0 * shard.numel() * (size - 1)
    gather = (lambda _: dist.all_gather_into_tensor(whole, shard, group=group),)
    yield Item(("nccl_all_gather",), "NCCL", "bf16", gather, (taken_in,), "GB/s each way")
    shard, whole = shard.float(), whole.float()
    scatter = (lambda _: dist.reduce_scatter_tensor(shard, whole, group=group),)
    yield Item(("nccl_reduce_scatter",), "NCCL", "fp32", scatter, (2 * taken_in,), "GB/s each way")
