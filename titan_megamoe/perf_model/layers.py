"""The time of one MoE layer: from a layer record, carried over to another T or EP degree, or to fp8."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..bench.records import wgrad_precision
from ..bench.shapes import SHAPES, LayerShape
from ..errors import ConfigError
from .estimate import ZERO, Estimate, excess
from .rates import Cluster

IMBALANCE = 0.05
"""Half-range for ranks that get more rows than others in real training; the records' routing is balanced."""

_BY_ROW = ("torchtitan", "all_to_all", "reference")


@dataclass(frozen=True)
class LayerTime:
    """forward and backward of one layer and call; `router` whether they include it; `how` in words."""

    forward: Estimate
    backward: Estimate
    router: bool
    how: str


def remote_rows(impl: str, shape: LayerShape, ep: int) -> float:
    """Rows that a token sends to other ranks, on average over uniform routing.

    All-to-all sends one for each remote expert; DeepEP and the fused kernels one for each remote rank.
    """
    if ep == 1:
        return 0.0
    if impl in _BY_ROW:
        return shape.top_k * (ep - 1) / ep
    missed = math.comb(shape.experts - shape.experts // ep, shape.top_k) / math.comb(
        shape.experts, shape.top_k
    )
    return (ep - 1) * (1 - missed)


def wire(impl: str, shape: LayerShape, tokens: int, ep: int, cluster: Cluster) -> Estimate:
    """One exchange: dispatch, or combine; bf16 rows."""
    rows = tokens * remote_rows(impl, shape, ep)
    return cluster.rate("nvlink").time(rows * shape.hidden * 2)


def exposed(impl: str, shape: LayerShape, tokens: int, ep: int, phase: str, cluster: Cluster) -> Estimate:
    """What of a phase's two exchanges nothing hides. phase: forward or backward, alike in this.

    Unfused: both. Fused: the dispatch of the forward is under GEMM1 and the combine of the backward is beside
    dW13, which is as many operations; the other exchange of each phase is open.
    """
    once = wire(impl, shape, tokens, ep, cluster)
    if impl != "mega_moe":
        return once * 2
    flops = 4 * tokens * shape.top_k * shape.hidden * shape.intermediate
    return once + excess(once, cluster.rate("grouped_gemm").time(flops))


class Layers:
    """Layer times from result records. `published`: take published records instead of measured ones."""

    def __init__(self, records: Iterable[Mapping[str, Any]], published: bool = False) -> None:
        source = "published" if published else "measured"
        self.records = [r for r in records if r["kind"] == "layer" and r["source"] == source]
        self.published = published

    def time(
        self, model: str, shape: LayerShape, impl: str, precision: str, tokens: int, ep: int, compiled: bool,
        num_sms: int, cluster: Cluster, wgrad: str = "bf16",
    ) -> LayerTime:  # fmt: skip
        """One layer of `tokens` T a rank at that EP degree.

        Raises ConfigError where there is no record to start from; the message has the command that makes one.
        """
        found = self._pair(model, impl, precision, tokens, ep, compiled, num_sms, wgrad)
        if found is not None:
            return self._carried(found, shape, impl, tokens, ep, cluster)
        if impl == "all_to_all":  # the same exchange and the same GEMMs as TorchTitan's
            return self.time(model, shape, "torchtitan", precision, tokens, ep, compiled, num_sms, cluster)
        if impl == "mega_moe" and precision in ("fp8", "fp8_bwd"):
            base = self.time(model, shape, impl, "bf16", tokens, ep, compiled, num_sms, cluster)
            return _in_fp8(base, shape, precision, tokens, cluster)
        raise ConfigError(
            f"no layer time of {impl} in {precision} for {model}: measure it with `python -m "
            f"titan_megamoe.bench layer --model {model} --impls {impl} --out FILE` and give the file."
        )

    def router(self, model: str, shape: LayerShape) -> tuple[Estimate, Estimate]:
        """Forward and backward of the router for 16384 tokens: TorchTitan's layer with it less that without.

        The two were measured in different launches, so each may be half off. For a model that has not both,
        the other model's, by the width H.
        """
        for name in (model, *(n for n in SHAPES if n != model)):
            both = []
            for phase in ("forward", "backward"):
                ms: dict[bool, float] = {}
                for r in self.records:
                    is_it = (r["model"], r["impl"], r["precision"], r["phase"], r["tokens"]) == (
                        name, "torchtitan", "bf16", phase, 16384
                    )  # fmt: skip
                    if is_it and r["ep"] == 2:
                        ms[r["router"]] = min(ms.get(r["router"], r["ms_median"]), r["ms_median"])
                if len(ms) == 2:
                    both.append(Estimate(max(ms[True] - ms[False], 0.0) / 1e3, {}, frozenset(["measured"])))
            if len(both) == 2:
                wider = shape.hidden / SHAPES[name].hidden
                return both[0].doubted("router", 0.5) * wider, both[1].doubted("router", 0.5) * wider
        return ZERO, ZERO

    def _pair(
        self,
        model: str,
        impl: str,
        precision: str,
        tokens: int,
        ep: int,
        compiled: bool,
        num_sms: int,
        wgrad: str,
    ) -> Sequence[Mapping[str, Any]] | None:
        """Forward and backward records that fit best, both of one run."""
        runs: dict[Any, dict[str, Mapping[str, Any]]] = {}
        for r in self.records:
            fits = r["model"] == model and r["impl"] == impl and r["precision"] == precision
            if fits and r["routing"] in ("uniform", "unknown"):
                setting = (r.get("run"), r["tokens"], r["ep"], r["compile"], r["num_sms"], r["router"],
                           wgrad_precision(r))  # fmt: skip
                runs.setdefault(setting, {})[r["phase"]] = r
        pairs = [(v["forward"], v["backward"]) for v in runs.values() if {"forward", "backward"} <= set(v)]
        if not pairs:
            return None

        def misfit(pair: tuple[Mapping[str, Any], ...]) -> tuple[float, ...]:
            r = pair[0]
            return (
                abs(math.log2(r["ep"] / ep)), abs(math.log2(r["tokens"] / tokens)), r["router"],
                wgrad_precision(r) != wgrad,
                bool(num_sms) and r["num_sms"] != num_sms, r["compile"] != compiled,
                sum(p["ms_median"] for p in pair),
            )  # fmt: skip

        return min(pairs, key=misfit)

    def _carried(
        self, pair: Sequence[Mapping[str, Any]], shape: LayerShape, impl: str, tokens: int, ep: int,
        cluster: Cluster,
    ) -> LayerTime:  # fmt: skip
        made = []
        for r in pair:
            ms, low = r["ms_median"], r.get("ms_min", r["ms_median"] * 0.97)
            basis = "published" if self.published else "measured"
            time = Estimate(ms / 1e3, {f"layer {impl}": (ms - low) / 1e3}, frozenset([basis]))
            if r["ep"] != ep:
                time = time + _moved(impl, shape, r["tokens"], r["ep"], ep, r["phase"], cluster)
            if r["tokens"] != tokens:
                time = (time * (tokens / r["tokens"])).doubted("layer time over T", 0.05)
            made.append(time.doubted("routing imbalance", IMBALANCE))
        first = pair[0]
        how = f"{'published' if self.published else 'measured'} at EP={first['ep']}, T={first['tokens']}"
        if first["ep"] != ep:
            how += f", carried to EP={ep} by its exposed bytes"
        if first["tokens"] != tokens:
            how += f", scaled to T={tokens}"
        return LayerTime(made[0], made[1], first["router"], how)


def _moved(
    impl: str, shape: LayerShape, tokens: int, ep: int, to: int, phase: str, cluster: Cluster
) -> Estimate:
    """What a phase gains in exposed communication from one EP degree to another."""
    there = exposed(impl, shape, tokens, ep, phase, cluster)
    here = exposed(impl, shape, tokens, to, phase, cluster)
    return (here - there).doubted("exposed communication", 0.5)


def carry(
    layer: LayerTime, impl: str, shape: LayerShape, tokens: int, ep: int, to: int, cluster: Cluster
) -> LayerTime:
    """The layer at another EP degree."""
    if ep == to:
        return layer
    forward = layer.forward + _moved(impl, shape, tokens, ep, to, "forward", cluster)
    backward = layer.backward + _moved(impl, shape, tokens, ep, to, "backward", cluster)
    return LayerTime(
        forward, backward, layer.router, layer.how + f"; carried to EP={to} by its exposed bytes"
    )


def _in_fp8(base: LayerTime, shape: LayerShape, precision: str, tokens: int, cluster: Cluster) -> LayerTime:
    """bf16's time with the GEMMs of activations and of their gradients at fp8's measured rate.

    Weight gradients stay bf16, and so does what crosses NVLink. Quantizing reads bf16 and writes fp8.
    """
    rows = tokens * shape.top_k
    flops = rows * shape.gemm_flops_per_row
    saved = cluster.rate("grouped_gemm").time(flops) - cluster.rate("fp8_gemm").time(flops)
    into = cluster.rate("hbm").time(3.0 * rows * (shape.hidden + shape.intermediate))
    out_of = cluster.rate("hbm").time(3.0 * rows * (shape.hidden + 2 * shape.intermediate))
    doubt = ("fp8 layers not measured at this width", 0.5)
    forward = base.forward - (saved - into).doubted(*doubt) if precision == "fp8" else base.forward
    backward = base.backward - (saved - out_of).doubted(*doubt)
    return LayerTime(
        forward, backward, base.router, f"bf16 {base.how}; its GEMMs at fp8's measured rate, modelled"
    )


def infer_from_step(rest: Estimate, step_s: float, layers: int, passes: float) -> LayerTime:
    """A layer's time as what a measured step leaves after all other parts.

    passes: forwards a layer runs. Forward and backward are told apart 1 to 1.3, which does not matter for the
    sum as long as `passes` is the same.
    """
    each = Estimate(step_s, {}, frozenset(["measured"])) - rest
    each = each * (1 / layers)
    forward = each * (1 / (passes + 1.3))
    return LayerTime(forward, forward * 1.3, True, "inferred: a measured step less all other parts")


NO_LAYER = LayerTime(ZERO, ZERO, True, "none")
