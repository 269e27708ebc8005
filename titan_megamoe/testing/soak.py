"""Many steps of ragged, badly routed problems with ranks out of step: one worker's part of a soak.

A worker keeps its layers between calls of `part`, so that the caller sees progress and a hang ends a part.
Everything random is a function of (seed, step, rank): any rank can make any rank's inputs for the oracle.
"""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..config import MegaMoEConfig
from ..op import mega_moe
from ..precision.recipes import get_recipe
from .oracle import RESULT_NAMES, moe_oracle, stock_bf16
from .problems import device_of, ep_group

ROUTINGS = ("uniform", "zipf", "hot", "dropped", "first rank", "last rank")
LAYERS = 3  # they share one workspace
RECOMPUTED = 3  # of so many steps the last runs its forward again in its backward, on all ranks
SUMS = ("ours to exact", "stock to exact", "emulation to exact", "ours to emulation", "exact", "emulation")
"""Squared norms that errors are made of: of differences, or of a result itself."""


@dataclass(frozen=True)
class Soak:
    """What is run. tokens: largest T of a rank. delay_ms: longest sleep of a rank before a call."""

    ranks: int
    precision: str = "bf16"
    backend: str = "fused"
    tokens: int = 512
    hidden: int = 512
    intermediate: int = 768
    experts: int = 16
    top_k: int = 4
    seed: int = 0
    delay_ms: float = 0.5
    timeout_s: float = 60.0
    max_routed_rows: int = 0  # 0: enough for all slots of all ranks on one

    @property
    def config(self) -> MegaMoEConfig:
        return MegaMoEConfig(
            backend=self.backend,
            precision=self.precision,
            max_tokens_per_rank=self.tokens,
            max_routed_rows=self.max_routed_rows or self.ranks * self.tokens * self.top_k,
            timeout_s=self.timeout_s,
        )


@dataclass
class Part:
    """What one rank saw in some steps.

    finite: whether every value was. sums: (6, 6) of the part's last step, results × SUMS, over all ranks.
    bytes: memory allocated after the part. routings: how often each was drawn. empty: steps with T = 0 here.
    """

    steps: int
    finite: bool
    sums: list[list[float]]
    bytes: int
    empty: int
    routings: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Inputs:
    """One rank's tokens of a step: x (T, H), ids (T, K), weights (T, K), dy (T, H)."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    dy: Tensor


def routing_of(soak: Soak, step: int) -> str:
    return random.Random(f"routing {soak.seed} {step}").choice(ROUTINGS)


def tokens_of(soak: Soak, step: int, rank: int) -> int:
    """T: every tenth is 0, every tenth the bound, and every 50th step has no token anywhere."""
    if step % 50 == 25:
        return 0
    drawn = random.Random(f"tokens {soak.seed} {step} {rank}")
    share = drawn.random()
    return 0 if share < 0.1 else soak.tokens if share > 0.9 else drawn.randint(1, soak.tokens)


def inputs_of(soak: Soak, step: int, rank: int, device: torch.device, tokens: int | None = None) -> Inputs:
    count = tokens_of(soak, step, rank) if tokens is None else tokens
    generator = torch.Generator(device)
    generator.manual_seed(random.Random(f"inputs {soak.seed} {step} {rank}").getrandbits(62))
    ids = draw_ids(soak, routing_of(soak, step), count, generator)
    x, dy = (torch.randn(count, soak.hidden, generator=generator, device=device).bfloat16() for _ in range(2))
    weights = torch.rand(count, soak.top_k, generator=generator, device=device) + 0.1
    return Inputs(x, ids, weights, dy)


def draw_ids(soak: Soak, routing: str, tokens: int, generator: torch.Generator) -> Tensor:
    """(T, K) int64 on the generator's device; see ROUTINGS."""
    device, shape = generator.device, (tokens, soak.top_k)
    local = soak.experts // soak.ranks

    def any_of(first: int, count: int) -> Tensor:
        return torch.randint(first, first + count, shape, generator=generator, device=device)

    def chance(p: float) -> Tensor:
        return torch.rand(shape, generator=generator, device=device) < p

    match routing:
        case "uniform" | "zipf":  # K different experts a token: the first K of exponential clocks
            rates = torch.ones(soak.experts, device=device)
            if routing == "zipf":
                rates /= torch.arange(1, soak.experts + 1, device=device)
            clocks = torch.empty(tokens, soak.experts, device=device).exponential_(generator=generator)
            return (clocks / rates).argsort(1)[:, : soak.top_k].contiguous()
        case "hot":  # one expert has half of all slots
            return any_of(0, soak.experts).masked_fill(chance(0.5), soak.experts // 2)
        case "dropped":
            return any_of(0, soak.experts).masked_fill(chance(0.33), -1)
        case "first rank":
            return any_of(0, local)
        case "last rank":
            return any_of(soak.experts - local, local)
    raise ValueError(f"unknown routing {routing!r}")


class _Layer:
    """w1, w3 (E, I, H) and w2 (E, H, I) of all experts for the oracle, and this rank's as leaves."""

    def __init__(self, soak: Soak, number: int, rank: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(1000 * soak.seed + number)
        h, i, e = soak.hidden, soak.intermediate, soak.experts

        def normal(*shape: int, fan_in: int) -> Tensor:
            made = torch.randn(*shape, generator=generator, device=device)
            return (made * fan_in**-0.5).bfloat16()

        self.all = [normal(e, i, h, fan_in=h), normal(e, i, h, fan_in=h), normal(e, h, i, fan_in=i)]
        local = e // soak.ranks
        self.mine = slice(rank * local, (rank + 1) * local)
        self.leaves = [w[self.mine].clone().requires_grad_() for w in self.all]

    def update(self) -> None:
        """Change w2 in place, as an optimizer does: what was kept of the old one must not be used."""
        self.all[2].neg_()
        with torch.no_grad():
            self.leaves[2].neg_()


@functools.cache
def _layers(soak: Soak, rank: int) -> list[_Layer]:
    return [_Layer(soak, n, rank, device_of(rank)) for n in range(LAYERS)]


def part(rank: int, soak: Soak, first: int, steps: int) -> Part:
    """Steps first, first + 1, …; the last one is compared with the oracle."""
    device, layers = device_of(rank), _layers(soak, rank)
    finite = torch.ones((), dtype=torch.bool, device=device)
    routings: Counter[str] = Counter()
    empty = 0
    for step in range(first, first + steps):
        layer = layers[step % LAYERS]
        if step % 7 == 0:
            layer.update()
        inputs = inputs_of(soak, step, rank, device)
        delays = random.Random(f"delays {soak.seed} {step} {rank}")
        results = _step(soak, layer, inputs, delays, step)
        for result in results:
            finite &= torch.isfinite(result).all()
        routings[routing_of(soak, step)] += 1
        empty += not inputs.x.shape[0]
    everyone = [inputs_of(soak, step, r, device) for r in range(soak.ranks)]
    sums = _errors(soak, layer, everyone, results, rank)
    del inputs, everyone, results
    seen = bool(finite)
    used = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return Part(steps, seen, sums, used, empty, routings)


def repeat(rank: int, soak: Soak, times: int) -> list[str]:
    """One problem again and again with other delays: the results with other bits, by name and number."""
    device, layer = device_of(rank), _layers(soak, rank)[0]
    tokens = soak.tokens // (1 + rank % 3)
    inputs = inputs_of(soak, 0, rank, device, tokens)
    first: list[Tensor] = []
    wrong = []
    for number in range(times):
        delays = random.Random(f"repeat {soak.seed} {number} {rank}")
        results = _step(soak, layer, inputs, delays, number)
        first = first or results
        for name, a, b in zip(RESULT_NAMES, results, first, strict=True):
            if not torch.equal(a, b):
                wrong.append(f"{name} of repeat {number}")
    return wrong


def _step(soak: Soak, layer: _Layer, inputs: Inputs, delays: random.Random, number: int) -> list[Tensor]:
    """y, dx, dweights, dw1, dw3, dw2 of one forward and backward, each after a random wait of this rank."""
    x, weights = (t.detach().requires_grad_() for t in (inputs.x, inputs.weights))
    w1, w3, w2 = layer.leaves

    def forward(x: Tensor, weights: Tensor) -> Tensor:
        _wait(soak, delays, x.device)
        return mega_moe(x, inputs.ids, weights, w1, w3, w2, group=ep_group(soak.ranks), config=soak.config)

    if number % RECOMPUTED == RECOMPUTED - 1:
        y = checkpoint(forward, x, weights, use_reentrant=False, preserve_rng_state=False)
    else:
        y = forward(x, weights)
    _wait(soak, delays, x.device)
    grads = torch.autograd.grad(y, (x, weights, w1, w3, w2), inputs.dy)
    return [y.detach(), *grads]


def _wait(soak: Soak, delays: random.Random, device: torch.device) -> None:
    """Half of the time nothing, else a sleep of the device, and sometimes of the host."""
    share = delays.random()
    ms = delays.random() * soak.delay_ms
    if share < 0.5 and device.type == "cuda":
        torch.cuda._sleep(int(ms * 1.5e6))  # cycles, some 1.5 to 2 GHz
    elif share > 0.9:
        time.sleep(ms / 1e3)


def _errors(
    soak: Soak, layer: _Layer, everyone: list[Inputs], results: list[Tensor], rank: int
) -> list[list[float]]:
    """(6 results × SUMS) over all ranks: this rank adds what it holds, its tokens and its experts.

    fp8 weight gradients quantize blocks of 128 rows, which fused orders from its own rank on (routing.py) and
    the other backends from rank 0: so does the emulation.
    """
    first = rank if soak.backend == "fused" else 0
    order = [(first + i) % soak.ranks for i in range(soak.ranks)]
    x, ids, weights, dy = (
        torch.cat([getattr(everyone[r], name) for r in order]) for name in ("x", "ids", "weights", "dy")
    )
    w1, w3, w2 = layer.all
    exact = moe_oracle(x, ids, weights, w1, w3, w2, dy)
    stock = stock_bf16(x, ids, weights, w1, w3, w2, dy)
    emulation = exact
    if soak.precision != "bf16":
        emulation = moe_oracle(
            x, ids, weights, w1, w3, w2, dy, get_recipe(soak.precision, soak.config.wgrad_precision)
        )
    before = sum(everyone[r].x.shape[0] for r in order[: order.index(rank)])
    tokens = slice(before, before + everyone[rank].x.shape[0])
    rows = []
    for name, ours in zip(RESULT_NAMES, results, strict=True):
        mine = layer.mine if name.startswith("dw") and name != "dweights" else tokens
        e, s, m = (getattr(of, name)[mine].double() for of in (exact, stock, emulation))
        o = ours.double()
        if o.shape != e.shape:
            raise AssertionError(f"{name} has shape {tuple(o.shape)}, not {tuple(e.shape)}")
        parts = (o - e, s - e, m - e, o - m, e, m)
        rows.append(torch.stack([p.square().sum() for p in parts]))
    total = torch.stack(rows)
    if soak.ranks > 1:
        total = total.cpu() if dist.get_backend() == "gloo" else total
        dist.all_reduce(total)
    return total.tolist()
