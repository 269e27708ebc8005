"""Reduced Qwen3-MoE flavours, added to TorchTitan's registry of flavours.

Each keeps the width of a published model, so that one MoE layer costs what it costs there, or is
small enough for a laptop:

* ``quickstart`` (3 layers, 8 experts, top-2) and ``quickstart_gpu`` (8 layers, 32 experts, top-4);
* ``30B-A3B-<n>layers`` and ``235B-A22B-<n>layers`` for n in :data:`.core.LAYERS`.
"""

from __future__ import annotations

import dataclasses

from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args

from .core import LAYERS, QUICKSTART_VOCABULARY, reduced_flavor


def add_to_qwen3() -> None:
    """Add our flavours to TorchTitan's `qwen3_args`. Idempotent; never replaces one that is
    there.
    """
    for flavor in ("30B-A3B", "235B-A22B"):
        full = qwen3_args[flavor]
        for layers in LAYERS:
            args = dataclasses.replace(full, n_layers=layers, moe_args=dataclasses.replace(full.moe_args))
            qwen3_args.setdefault(reduced_flavor(flavor, layers), args)
    qwen3_args.setdefault("quickstart", _small(128, 3, 4, 2, 32, 128, experts=8, top_k=2))
    qwen3_args.setdefault("quickstart_gpu", _small(1024, 8, 16, 4, 64, 512, experts=32, top_k=4))


def _small(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    *,
    experts: int,
    top_k: int,
) -> Qwen3ModelArgs:
    return Qwen3ModelArgs(
        vocab_size=QUICKSTART_VOCABULARY,
        max_seq_len=4096,
        head_dim=head_dim,
        dim=dim,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        qk_norm=True,
        hidden_dim=4 * dim,
        rope_theta=1000000,
        moe_enabled=True,
        moe_inter_dim=intermediate,
        moe_args=MoEArgs(
            num_experts=experts,
            num_shared_experts=0,
            top_k=top_k,
            score_func="softmax",
            route_norm=True,
            route_scale=1.0,
            score_before_experts=False,
        ),
    )
