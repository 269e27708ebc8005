"""The reduced Qwen3-MoE flavours of :mod:`titan_megamoe.torchtitan.flavors`, for TorchTitan 0.3.

The same names and widths; initialised as 0.3 initialises a model of that depth.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torchtitan.models import qwen3
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.qwen3.model import Qwen3Model

from ..core import LAYERS, QUICKSTART_VOCABULARY, reduced_flavor


def add_to_qwen3() -> None:
    """Add our flavours to TorchTitan's `qwen3_configs`. Idempotent; never replaces one that is there."""
    for flavor in ("30B-A3B", "235B-A22B"):
        for layers in LAYERS:
            made = partial(_reduced, qwen3.qwen3_configs[flavor], layers)
            qwen3.qwen3_configs.setdefault(reduced_flavor(flavor, layers), made)
    small = partial(_small, QUICKSTART_VOCABULARY, 4096)
    qwen3.qwen3_configs.setdefault("quickstart", partial(small, 128, 3, 4, 2, 32, 128, 8, 2))
    qwen3.qwen3_configs.setdefault("quickstart_gpu", partial(small, 1024, 8, 16, 4, 64, 512, 32, 4))


def _reduced(full: Any, layers: int, **options: Any) -> Qwen3Model.Config:
    config = full(**options)
    config.layers = config.layers[:layers]
    for layer in config.layers:
        layer.attention.wo.param_init = qwen3._residual_output_init(layers)
        layer.moe.routed_experts.inner_experts.param_init = qwen3._moe_experts_init(layers)
    return config


def _small(
    vocabulary: int,
    max_seq_len: int,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    experts: int,
    top_k: int,
    attn_backend: str,
    moe_comm_backend: str = "standard",
) -> Qwen3Model.Config:
    return Qwen3Model.Config(
        vocab_size=vocabulary,
        dim=dim,
        norm=qwen3._qwen3_norm(dim),
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=dim, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=qwen3._LINEAR_INIT),
        layers=qwen3._build_qwen3_moe_layers(
            n_layers=layers,
            dim=dim,
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=head_dim,
            moe_hidden_dim=intermediate,
            num_experts=experts,
            top_k=top_k,
            attn_backend=attn_backend,
            moe_comm_backend=moe_comm_backend,
            rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=max_seq_len, theta=1000000.0),
        ),
    )
