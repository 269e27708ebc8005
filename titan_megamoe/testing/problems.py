"""Small random MoE problems, the same on every rank and in the parent, and one rank's run of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import MegaMoEConfig
from ..op import mega_moe
from . import ranks
from .oracle import OracleResult

GRADIENT_NAMES = ("dx", "dweights", "dw1", "dw3", "dw2")


@dataclass(frozen=True)
class Problem:
    """All ranks' arguments come from `seed`; the tensors are made by `tensors`.

    tokens: T of each rank; its length is W. routing: how ids are drawn, see `_ids`. counts, for routing
    "counts": how many slots each of the E experts gets, ΣT·K in all.
    """

    tokens: tuple[int, ...] = (64, 64)
    experts: int = 8
    top_k: int = 2
    hidden: int = 256
    intermediate: int = 384
    routing: str = "uniform"
    counts: tuple[int, ...] = ()
    seed: int = 0
    weights_fp32: bool = False  # expert weights in fp32 instead of bf16
    requires_grad: tuple[bool, ...] = field(default=(True,) * 5)  # x, topk_weights, w1, w3, w2

    @property
    def world(self) -> int:
        return len(self.tokens)


@dataclass
class Tensors:
    """Tokens of all ranks concatenated; weights of all experts. Leaves without gradients."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor
    dy: Tensor


def tensors(problem: Problem) -> Tensors:
    """The global problem on the CPU. Experts differ from each other; nothing is zero by design."""
    generator = torch.Generator().manual_seed(problem.seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    total, p = sum(problem.tokens), problem
    weight_dtype = torch.float32 if p.weights_fp32 else torch.bfloat16
    return Tensors(
        x=normal(total, p.hidden).bfloat16(),
        ids=_ids(problem, generator),
        weights=torch.rand(total, p.top_k, generator=generator) + 0.1,
        w1=normal(p.experts, p.intermediate, p.hidden, scale=p.hidden**-0.5).to(weight_dtype),
        w3=normal(p.experts, p.intermediate, p.hidden, scale=p.hidden**-0.5).to(weight_dtype),
        w2=normal(p.experts, p.hidden, p.intermediate, scale=p.intermediate**-0.5).to(weight_dtype),
        dy=normal(total, p.hidden).bfloat16(),
    )


def _ids(problem: Problem, generator: torch.Generator) -> Tensor:
    total, k, experts = sum(problem.tokens), problem.top_k, problem.experts
    match problem.routing:
        case "uniform":  # K different experts a token
            return torch.rand(total, experts, generator=generator).argsort(1)[:, :k].contiguous()
        case "dropped":  # a third of the slots is -1
            ids = torch.randint(0, experts, (total, k), generator=generator)
            return ids.masked_fill(torch.rand(total, k, generator=generator) < 0.33, -1)
        case "duplicates":  # the same expert in every slot of a token
            return torch.randint(0, experts, (total, 1), generator=generator).repeat(1, k)
        case "rank0":  # only experts of rank 0
            return torch.randint(0, experts // problem.world, (total, k), generator=generator)
        case "first":
            return torch.zeros(total, k, dtype=torch.int64)
        case "last":
            return torch.full((total, k), experts - 1, dtype=torch.int64)
        case "hot":  # one expert has half of all slots
            ids = torch.randint(0, experts, (total, k), generator=generator)
            return ids.masked_fill(torch.rand(total, k, generator=generator) < 0.5, experts // 2)
        case "zipf":
            p = 1.0 / torch.arange(1, experts + 1).float()
            return torch.multinomial(p.expand(total, experts), k, generator=generator)
        case "counts":
            flat = torch.repeat_interleave(torch.arange(experts), torch.tensor(problem.counts))
            return flat[torch.randperm(total * k, generator=generator)].view(total, k)
    raise ValueError(f"unknown routing {problem.routing!r}")


def device_of(rank: int) -> torch.device:
    """The device of this worker, which is rank `rank` of its pool."""
    return ranks.worker_device


def ep_group(world: int) -> dist.ProcessGroup | None:
    """The group of all ranks; None for one rank."""
    return dist.group.WORLD if world > 1 else None


def leaves(problem: Problem, rank: int, device: torch.device) -> list[Tensor]:
    """This rank's x, ids, topk_weights, w1, w3, w2, dy; the first, third… require gradients as asked."""
    full = tensors(problem)
    first = sum(problem.tokens[:rank])
    mine = slice(first, first + problem.tokens[rank])
    local = problem.experts // problem.world
    own = slice(rank * local, (rank + 1) * local)
    made = [full.x[mine], full.ids[mine], full.weights[mine], full.w1[own], full.w3[own], full.w2[own]]
    made = [t.clone().to(device) for t in made]
    for at, needed in zip((0, 2, 3, 4, 5), problem.requires_grad, strict=True):
        made[at].requires_grad_(needed)
    return [*made, full.dy[mine].to(device)]


def run_rank(rank: int, problem: Problem, config: MegaMoEConfig) -> dict[str, Tensor | None]:
    """Forward and backward of one rank through `mega_moe`; y and the gradients on the CPU."""
    *arguments, dy = leaves(problem, rank, device_of(rank))
    y = mega_moe(*arguments, group=ep_group(problem.world), config=config)
    if y.requires_grad:
        y.backward(dy)
    grads = [arguments[at].grad for at in (0, 2, 3, 4, 5)]
    named = {"y": y.detach(), **dict(zip(GRADIENT_NAMES, grads, strict=True))}
    return {name: None if t is None else t.cpu() for name, t in named.items()}


def assemble(results: list[dict[str, Tensor | None]]) -> OracleResult:
    """One result of all ranks: tokens and experts concatenated in rank order."""
    joined: dict[str, Any] = {}
    for name in results[0]:
        parts = [r[name] for r in results]
        missing = [p is None for p in parts]
        assert all(missing) or not any(missing), f"{name} is missing on some ranks only"
        joined[name] = None if missing[0] else torch.cat([p for p in parts if p is not None])
    return OracleResult(**joined)
