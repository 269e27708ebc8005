"""What a TorchTitan job file says about one training step: model, tokens, parallelism, implementation.

Read from the TOML alone, without TorchTitan, so that a laptop can predict a cluster's step and a result
record says what was run. TorchTitan's own defaults stand where the file says nothing; a test compares both.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import default_wgrad_precision
from ..errors import ConfigError
from .shapes import SHAPES, LayerShape


@dataclass(frozen=True)
class ModelShape:
    """A Qwen3-MoE transformer. `layer` is its MoE block; hidden H is the width of everything else."""

    name: str
    layer: LayerShape
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def attention_parameters(self) -> int:
        """Weights of a layer's four attention linears."""
        return self.layer.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def router_parameters(self) -> int:
        return self.layer.hidden * self.layer.experts

    @property
    def expert_parameters(self) -> int:
        """Weights of all experts of a layer."""
        return 3 * self.layer.experts * self.layer.hidden * self.layer.intermediate

    @property
    def embedding_parameters(self) -> int:
        """Weights of the token embedding; the output linear has as many."""
        return self.vocabulary * self.layer.hidden

    @property
    def parameters(self) -> int:
        """All weights but the norms'."""
        block = self.attention_parameters + self.router_parameters + self.expert_parameters
        return self.layers * block + 2 * self.embedding_parameters


_MODELS = {
    "30B-A3B": ModelShape("qwen3-30b-a3b", SHAPES["qwen3-30b-a3b"], 48, 32, 4, 128, 151936),
    "235B-A22B": ModelShape("qwen3-235b-a22b", SHAPES["qwen3-235b-a22b"], 94, 64, 4, 128, 151936),
    "debugmodel_moe": ModelShape(
        "debugmodel_moe", LayerShape("debugmodel_moe", 256, 768, 64, 8), 8, 16, 8, 128, 2048
    ),
    "quickstart": ModelShape("quickstart", LayerShape("quickstart", 128, 128, 8, 2), 3, 4, 2, 32, 2048),
    "quickstart_gpu": ModelShape(
        "quickstart_gpu", LayerShape("quickstart_gpu", 1024, 512, 32, 4), 8, 16, 4, 64, 2048
    ),
}

FULL_MODELS = {_MODELS[flavor].name: _MODELS[flavor] for flavor in ("30B-A3B", "235B-A22B")}


@dataclass(frozen=True)
class JobFacts:
    """One job. Degrees as TorchTitan names them; dp_shard is -1 where the job takes all GPUs there are.

    tokens: of one rank in one step. impl, precision, num_sms, reserved_sms: as in a result record;
    impl "auto" stands for backend auto, which is known only where it runs. ac: full, selective or none.
    """

    model: ModelShape
    layers: int
    seq_len: int
    batch: int
    global_batch: int
    dp_replicate: int
    dp_shard: int
    cp: int
    ep: int
    ac: str
    compile: bool
    impl: str
    precision: str
    num_sms: int
    reserved_sms: int
    wgrad_precision: str = "bf16"
    direct_experts: bool = False

    @property
    def gpus(self) -> int:
        """GPUs that the degrees multiply to; 0 where the job takes what is there."""
        return 0 if self.dp_shard < 0 else self.dp_replicate * self.dp_shard * self.cp

    def shard_degree(self, gpus: int) -> int:
        """data_parallel_shard_degree on that many GPUs."""
        return self.dp_shard if self.dp_shard > 0 else gpus // (self.dp_replicate * self.cp)

    def tokens(self, gpus: int) -> int:
        """Tokens of one rank in one optimizer step, accumulated micro-batches included."""
        if self.global_batch <= 0:
            return self.batch * self.seq_len // self.cp
        return self.global_batch * self.seq_len // gpus


def read_job(path: str | Path, overrides: Sequence[str] = ()) -> JobFacts:
    """The facts of a job file with TorchTitan's command-line options `--section.key=value` over it.

    Raises:
        ConfigError: not a job of a known Qwen3 flavour.
        FileNotFoundError: no such file.
    """
    table = tomllib.loads(Path(path).read_text())
    for option in overrides:
        _apply(table, option)
    model, training = table.get("model", {}), table.get("training", {})
    parallelism, section = table.get("parallelism", {}), table.get("mega_moe", {})
    shape, layers = _flavor(str(model.get("flavor", "debugmodel")), path)
    impl, precision = _implementation(list(model.get("converters", [])), section)
    wgrad = section.get("wgrad_precision", "auto") if impl != "torchtitan" else "auto"
    return JobFacts(
        model=shape,
        layers=layers,
        seq_len=training.get("seq_len", 2048),
        batch=training.get("local_batch_size", 8),
        global_batch=training.get("global_batch_size", -1),
        dp_replicate=parallelism.get("data_parallel_replicate_degree", 1),
        dp_shard=parallelism.get("data_parallel_shard_degree", -1),
        cp=parallelism.get("context_parallel_degree", 1),
        ep=parallelism.get("expert_parallel_degree", 1),
        ac=table.get("activation_checkpoint", {}).get("mode", "selective"),
        compile=table.get("compile", {}).get("enable", False),
        impl=impl,
        precision=precision,
        num_sms=section.get("comm_sms", 0) if impl not in ("torchtitan", "mega_moe") else 0,
        reserved_sms=section.get("reserved_sms", 0) if impl != "torchtitan" else 0,
        wgrad_precision=default_wgrad_precision(precision) if wgrad == "auto" else wgrad,
        direct_experts=impl != "torchtitan" and section.get("direct_experts", False),
    )


def _flavor(flavor: str, path: str | Path) -> tuple[ModelShape, int]:
    match = re.fullmatch(r"(.+)-(\d+)layers", flavor)
    base, layers = (match[1], int(match[2])) if match else (flavor, 0)
    if base not in _MODELS:
        raise ConfigError(
            f"{path}: flavour {flavor!r} is unknown here; known are {', '.join(_MODELS)} and their "
            "-<n>layers twins."
        )
    return _MODELS[base], layers or _MODELS[base].layers


def _implementation(converters: list[str], section: dict[str, Any]) -> tuple[str, str]:
    if "mega_moe" in converters:
        backend = section.get("backend", "auto")
        return "mega_moe" if backend == "fused" else backend, section.get("precision", "bf16")
    float8 = any(c.startswith("quantize.grouped_mm.float8") for c in converters)
    return "torchtitan", "float8_rowwise" if float8 else "bf16"


def _apply(table: dict[str, Any], option: str) -> None:
    """Set `--a.b.key=value`, `--a.b.flag` or `--a.b.no-flag` in the parsed TOML."""
    match = re.fullmatch(r"--([\w.]+)\.(no-)?([\w]+)(?:=(.*))?", option, re.DOTALL)
    if match is None:
        raise ConfigError(f"{option!r} is not a TorchTitan option of the form --section.key=value.")
    for part in match[1].split("."):
        table = table.setdefault(part, {})
    table[match[3]] = match[2] is None if match[4] is None else _value(match[3], match[4])


def _value(key: str, text: str) -> Any:
    if key in ("converters", "filter_fqns", "fqns"):
        return [part for part in text.split(",") if part]
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)
