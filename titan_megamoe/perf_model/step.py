"""One training step, part by part.

T tokens of a rank in a call, H hidden, V vocabulary, L layers, P parameters of an FSDP unit, s ranks it is
sharded over. A forward runs `passes` times: once, and again for what activation checkpointing recomputes.

    attention        4·T·seq/2·heads·head_dim FLOP a forward (causal half), 2.5 times that a backward
    linears          2·T·weights FLOP a forward, 4 a backward
    pointwise        norms, rotary embedding, residuals: their bytes over HBM; compiled, so each tensor once
    router           measured: TorchTitan's layer with it less the layer without it
    MoE              one layer's measured time, see :mod:`.layers`
    output, loss     the output linear as above; the loss reads logits twice, then reads and writes them
    FSDP             all-gather of bf16 weights twice, reduce-scatter of fp32 gradients (HSDP: all-reduce too)
                     once a step, under a neighbouring layer's compute, which it slows; the ends exposed
    optimizer        AdamW reads 16 and writes 12 bytes a local weight; clipping reads 8 and writes 4
    host             the step's own synchronisation (loss and norm are printed)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..bench.jobfile import JobFacts
from ..errors import ConfigError
from .estimate import ZERO, Estimate, Rate, excess, longer
from .layers import NO_LAYER, Layers, LayerTime, carry, infer_from_step
from .rates import Cluster, h200

PASSES = {"none": 1.0, "selective": 1.5, "full": 2.0}
"""Forwards of a layer; TorchTitan's selective default recomputes every second one."""

EAGER_TRAFFIC = 4.0
"""Times that pointwise work touches memory when it is not compiled: rotary embedding and norms in fp32."""

SM_SHARE = (0.12, 0.12)
"""SMs that NCCL takes from compute while it runs: 16 of 132 channels, ± all of it."""

COPY_SHARE = (0.5, 0.5)
"""Part of FSDP's copies (casts, copies in and out) that compute waits for: from none to all of it."""

HOST = Rate("host", 1.0, 1.0, "assumed", "one synchronisation a step, 3 ms ± 3")
HOST_S = 0.003


@dataclass(frozen=True)
class Part:
    """What takes time in a step: `time` in seconds, and how it was found, in words."""

    name: str
    time: Estimate
    note: str


@dataclass(frozen=True)
class Prediction:
    """parts sum up to the step. layer: one MoE layer's times. cluster: every rate that was used."""

    facts: JobFacts
    gpus: int
    parts: tuple[Part, ...]
    layer: LayerTime
    cluster: Cluster

    @property
    def step(self) -> Estimate:
        return sum((part.time for part in self.parts), ZERO)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.facts.tokens(self.gpus) / self.step.seconds


def predict(
    facts: JobFacts,
    records: Iterable[Mapping[str, Any]],
    gpus: int = 0,
    node: int = 8,
    nvlink_gb_s: float = 0.0,
    network_gb_s: float = 0.0,
    published_layers: bool = False,
) -> Prediction:
    """The step of a job on `gpus` GPUs (0: as many as it is written for) in nodes of `node`.

    records: result records of every kind, from docs/benchmarks. Raises ConfigError for a job that the model
    does not cover or has no layer time for.
    """
    records = list(records)
    gpus = gpus or facts.gpus
    _refuse(facts, gpus, node)
    cluster = h200(records, facts.model.name, facts.seq_len, node, nvlink_gb_s, network_gb_s)
    layers = Layers(records, published_layers)
    if facts.impl == "torchtitan" and facts.precision == "float8_rowwise" and not published_layers:
        layer = _inferred(facts, records, cluster)
    else:
        layer = _layer(facts, layers, cluster)
    router = layers.router(facts.model.name, facts.model.layer)
    if "router_forward" in cluster.times:
        router = cluster.times["router_forward"], cluster.times["router_backward"]
    return Prediction(facts, gpus, _parts(facts, gpus, cluster, layer, router), layer, cluster)


def _refuse(facts: JobFacts, gpus: int, node: int) -> None:
    if gpus < 1:
        raise ConfigError("the job takes the GPUs that are there: say how many with --gpus.")
    if facts.cp > 1:
        raise ConfigError(
            f"context_parallel_degree is {facts.cp}: the model covers data and expert parallelism."
        )
    if facts.gpus not in (0, gpus):
        raise ConfigError(f"the job's degrees multiply to {facts.gpus} GPUs, not {gpus}: change one of them.")
    if facts.ep > node:
        raise ConfigError(f"expert_parallel_degree {facts.ep} leaves a node of {node} GPUs: not modelled.")
    if facts.shard_degree(gpus) % facts.ep:
        raise ConfigError(f"expert_parallel_degree {facts.ep} does not divide the shards.")


def _layer(facts: JobFacts, layers: Layers, cluster: Cluster) -> LayerTime:
    tokens = facts.batch * facts.seq_len
    impl = "mega_moe" if facts.impl == "auto" else facts.impl
    return layers.time(
        facts.model.name, facts.model.layer, impl, facts.precision, tokens, facts.ep, facts.compile,
        facts.num_sms, cluster, facts.wgrad_precision,
    )  # fmt: skip


def _inferred(facts: JobFacts, records: list[Mapping[str, Any]], cluster: Cluster) -> LayerTime:
    """The layer time of an implementation that has only step records, from the step of its own shape."""
    r = inferred_from(facts, records)
    if r is None:
        raise ConfigError(
            f"neither a layer nor a step record of {facts.impl} in {facts.precision} for {facts.model.name}: "
            "`python -m titan_megamoe.bench compare` makes one."
        )
    there = replace(
        facts, layers=r["layers"], seq_len=r["seq_len"], batch=r["tokens"] // r["seq_len"],
        global_batch=-1, dp_replicate=r.get("dp_replicate", 1), dp_shard=-1, ep=r["ep"], ac=r["ac"],
    )  # fmt: skip
    rest = sum((p.time for p in _parts(there, r["gpus"], cluster, NO_LAYER, (ZERO, ZERO))), ZERO)
    layer = infer_from_step(rest, r["step_s_mean"], r["layers"], PASSES[r["ac"]])
    return carry(layer, facts.impl, facts.model.layer, r["tokens"], r["ep"], facts.ep, cluster)


def inferred_from(facts: JobFacts, records: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The step record from which a layer time is inferred that was not measured: of those on the most GPUs
    the newest of a file, the last of the files."""
    wanted = ("step", "measured", facts.model.name, facts.impl, facts.precision, facts.compile)
    keys = ("kind", "source", "model", "impl", "precision", "compile")
    found = [r for r in reversed(records) if tuple(r.get(key) for key in keys) == wanted]
    return max(found, key=lambda r: r["gpus"], default=None)


def _parts(
    facts: JobFacts, gpus: int, cluster: Cluster, layer: LayerTime, routers: tuple[Estimate, Estimate]
) -> tuple[Part, ...]:
    model, passes = facts.model, PASSES[facts.ac]
    tokens = facts.tokens(gpus)
    calls = tokens / (facts.batch * facts.seq_len)
    hidden, count = model.layer.hidden, facts.layers
    gemm, hbm = cluster.rate("dense_gemm"), cluster.rate("hbm")

    def arithmetic(rate: Rate, flops: float) -> Estimate:
        """Over a rate that was measured in short bursts."""
        slower, doubt = cluster.clocks
        return (rate.time(flops) * (1 + slower)).doubted("clocks under load", doubt / (1 + slower))

    scores = 2.0 * tokens * facts.seq_len * model.heads * model.head_dim
    attention_f = arithmetic(cluster.rate("attention_forward"), scores)
    attention_b = arithmetic(cluster.rate("attention_backward"), 2.5 * scores)
    linear = arithmetic(gemm, 2.0 * tokens * model.attention_parameters)
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    traffic = 2.0 * tokens * (9 * hidden + 4 * q + 4 * kv) * (1 if facts.compile else EAGER_TRAFFIC)
    pointwise = hbm.time(traffic).doubted("pointwise traffic", 0.5)
    # `routers` are of 16384 tokens.
    router = [each * (0.0 if layer.router else tokens / 16384) for each in routers]
    moe_f, moe_b = layer.forward * calls, layer.backward * calls
    forward = attention_f + linear + pointwise + router[0] + moe_f
    backward = forward * (passes - 1) + attention_b + linear * 2 + pointwise * 2 + router[1] + moe_b

    output = arithmetic(gemm, 6.0 * tokens * model.embedding_parameters)
    logits = 2.0 * tokens * model.vocabulary
    loss = hbm.time(logits * (4 if facts.compile else 20)).doubted("loss traffic", 0.5)
    if facts.compile and "loss" in cluster.times:
        loss = cluster.times["loss"] * (tokens / 16384)
    embedding = hbm.time(4.0 * model.embedding_parameters + 8.0 * tokens * hidden).doubted(
        "loss traffic", 0.5
    )

    beside, open_ = _sharding(facts, gpus, cluster, forward, backward)
    local = _local_parameters(facts, gpus)
    return (
        Part("attention", (attention_f * passes + attention_b) * count, "SDPA"),
        Part("attention linears", linear * ((passes + 2) * count), "q, k, v, o"),
        Part("pointwise", pointwise * ((passes + 2) * count), "norms, rotary, residuals"),
        Part(
            "router", (router[0] * passes + router[1]) * count, "in the layer's time" if layer.router else ""
        ),
        Part("MoE", (moe_f * passes + moe_b) * count, layer.how),
        Part("output linear and embedding", output + embedding, f"{model.vocabulary} tokens"),
        Part("loss", loss, "compiled" if facts.compile else "eager"),
        Part("FSDP beside compute", beside, "copies, and SMs that NCCL holds"),
        Part("FSDP exposed", open_, "first gather, last reduction, what is longer than a layer"),
        Part(
            "optimizer and clipping",
            cluster.rate("optimizer").time(40.0 * local).doubted("optimizer traffic", 0.15),
            "AdamW, fused",
        ),
        Part("host", HOST.time(HOST_S), "one synchronisation"),
    )


def _local_parameters(facts: JobFacts, gpus: int) -> float:
    model, shards = facts.model, facts.shard_degree(gpus)
    dense = facts.layers * (model.attention_parameters + model.router_parameters)
    return (dense + 2 * model.embedding_parameters + facts.layers * model.expert_parameters) / shards


def _sharding(
    facts: JobFacts, gpus: int, cluster: Cluster, forward: Estimate, backward: Estimate
) -> tuple[Estimate, Estimate]:
    """(slows the compute it runs beside, exposed) of FSDP or HSDP; casts of fp32 weights on one GPU."""
    model, count, shards = facts.model, facts.layers, facts.shard_degree(gpus)
    block = model.attention_parameters + model.router_parameters
    if gpus == 1:
        # No FSDP: autocast and the experts cast fp32 weights in forward, recompute and backward.
        cast = (PASSES[facts.ac] + 1) * (count * block + 2 * model.embedding_parameters)
        cast += _expert_casts(facts) * count * model.expert_parameters
        return cluster.rate("hbm").time(6.0 * cast).doubted("FSDP copies", 0.5), ZERO

    def unit(parameters: float, ranks: int, stride: int) -> tuple[_Exchange, _Exchange]:
        return _unit(parameters, ranks, stride, facts.dp_replicate, shards, cluster)

    block_gather, block_reduce = unit(block, shards, 1)
    # Experts: one rank of each EP group holds parameters/EP; they are sharded over the ranks at its place.
    experts = 0.0 if facts.direct_experts else model.expert_parameters / facts.ep
    expert_gather, expert_reduce = unit(experts, shards // facts.ep, facts.ep)
    table_gather, table_reduce = unit(model.embedding_parameters, shards, 1)
    gather = block_gather.both(expert_gather)
    reduce = block_reduce.both(expert_reduce)

    first = table_gather.time + gather.time
    last = reduce.time + table_reduce.time
    longer_than_a_layer = excess(gather.time, forward) + excess(gather.time + reduce.time, backward)
    exposed = first + last + longer_than_a_layer * (count - 1)
    hidden = (gather.twice().both(reduce)).slows() * max(count - 1, 0)
    if facts.direct_experts and (passes := _expert_casts(facts)):
        local = count * model.expert_parameters / facts.ep
        hidden = hidden + cluster.rate("hbm").time(6.0 * local * passes).doubted("casts of weights", 0.5)
    return hidden + table_gather.twice().both(table_reduce).slows(), exposed


def _expert_casts(facts: JobFacts) -> float:
    """Passes in which fp32 experts are rounded to bf16. fp8 ones are quantized from fp32, once a step, which
    counts as little here as a quantization from bf16."""
    forwards = PASSES[facts.ac]
    if facts.impl == "torchtitan":
        return forwards + 1
    return {"fp8": 0.0, "fp8_bwd": forwards}.get(facts.precision, forwards + 1)


@dataclass(frozen=True)
class _Exchange:
    """wire: seconds on links. copies: seconds of HBM traffic around it."""

    wire: Estimate
    copies: Estimate

    @property
    def time(self) -> Estimate:
        return self.wire + self.copies

    def both(self, other: _Exchange) -> _Exchange:
        return _Exchange(self.wire + other.wire, self.copies + other.copies)

    def twice(self) -> _Exchange:
        return _Exchange(self.wire * 2, self.copies * 2)

    def slows(self) -> Estimate:
        """What it takes from compute beside it."""
        share, doubt = SM_SHARE
        part, how_much = COPY_SHARE
        return (self.wire * share).doubted("SMs for NCCL", doubt / share) + (self.copies * part).doubted(
            "FSDP copies", how_much / part
        )


def _unit(
    parameters: float, shards: int, stride: int, replicas: int, replica_stride: int, cluster: Cluster
) -> tuple[_Exchange, _Exchange]:
    """All-gather (bf16) and reduction (fp32) of one FSDP unit whose ranks are `stride` apart.

    Bytes of HBM a parameter: gather: the shard is read as fp32 and written as bf16, the whole is written by
    NCCL, read and written by the copy out. Reduction: the gradient is read as bf16 and written as fp32,
    read and written by NCCL. HSDP then adds up the fp32 shards of the replicas.
    """
    hbm = cluster.rate("hbm")
    shard = parameters / shards
    gathered = _group_time(2.0 * parameters, shards, stride, cluster)
    reduced = _group_time(4.0 * parameters, shards, stride, cluster)
    reduced = reduced + _group_time(8.0 * shard, replicas, replica_stride, cluster)
    gather = _Exchange(gathered, hbm.time(6.0 * shard + 6.0 * parameters))
    return gather, _Exchange(reduced, hbm.time(14.0 * parameters))


def _group_time(size: float, ranks: int, stride: int, cluster: Cluster) -> Estimate:
    """Gather or scatter of `size` bytes in all among ranks `stride` apart: each gets all but its own part.

    A node takes in what other nodes hold through the adapters of its members, and passes it on over NVLink;
    the two run at once. Groups at other places of the nodes have adapters of their own.
    """
    if ranks == 1:
        return ZERO
    members = max(1, min(ranks, cluster.node // stride))  # of one node
    nodes = -(-ranks // members)
    inside = cluster.rate("nvlink").time(size * (ranks - 1) / ranks) if members > 1 else ZERO
    across = cluster.rate("network").time(size * (nodes - 1) / nodes / members)
    return longer(inside, across)
