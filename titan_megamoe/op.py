"""`mega_moe`: the public op, and the two custom ops behind it.

    mega_moe ── check arguments ── choose backend ─┬─ CompositeBackend.apply        (autograd's own backward)
                                                  ├─ titan_megamoe::forward  ── ExplicitBackend.forward
                                                  │  titan_megamoe::backward ── ExplicitBackend.backward
                                                  └─ run_staged (staged.py)  ── StagedBackend, in eager mode

No numerics live here: this file gives the backends their seat under autograd, activation checkpointing,
torch.compile and FSDP2. Both custom ops are registered as having side effects, because peers wait for them:
no compiler drops a call. (Effect tokens, which would also pin the order of calls that do not depend on each
other, make torch 2.13 refuse to recompute the op under activation checkpointing. Every rank compiles the same
graph, and the call header turns a different order on some rank into an error.)
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.node import has_side_effect
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .backends import get_backend, resolve_backend
from .backends.base import Backend, CompositeBackend, ExplicitBackend, MoECall, Needs, StagedBackend
from .config import MegaMoEConfig
from .errors import ConfigError, MegaMoEError
from .group import group_from_name, group_name, group_size
from .staged import no_autocast, run_staged
from .validate import check_arguments, check_ids

DEFAULT_CONFIG = MegaMoEConfig()


def mega_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    config: MegaMoEConfig = DEFAULT_CONFIG,
) -> Tensor:
    """y[t] = Σ_k topk_weights[t, k] · E_id(x[t]) with E_e(x) = W2_e (silu(W1_e x) ⊙ (W3_e x)).

    A collective over `group`: every rank makes the same calls in the same order. Differentiable in x,
    topk_weights, w1, w3 and w2, each only where it requires a gradient.

    Args:
        x: (T, H) bf16 tokens of this rank; fp32 is cast to bf16 once. T may differ per rank and may be 0.
        topk_ids: (T, K) int32 or int64, expert in [0, E), or -1 for a dropped slot: it adds 0 and its weight
            gets a gradient of exactly 0. The same expert twice in a row counts twice.
        topk_weights: (T, K) fp32.
        w1, w3: (E/W, I, H) gate and up projections of this rank's experts, bf16 or fp32.
        w2: (E/W, H, I) down projection, the same dtype.
        group: the expert-parallel group of W ranks; rank r holds experts [r·E/W, (r+1)·E/W). None: all
            experts are here.
        config: backend, precision and bounds; the same on every rank.

    Returns:
        y (T, H) bf16.

    Raises:
        ConfigError: an argument has a wrong shape, dtype or device, H or I is no multiple of 8 (backend
            `fused` in bf16) or 16 (fp8), or (unfused backends, or `config.debug`) an id is out of range.
        UnsupportedError: the requested backend or precision cannot run here.
        AgreementError, BoundError: the ranks' calls do not fit together, or a bound was passed.
    """
    if not isinstance(x, Tensor):
        raise ConfigError(f"x is a {type(x).__name__}; mega_moe needs a torch.Tensor.")
    world = group_size(group)
    name = group_name(group)
    if torch.compiler.is_compiling():
        backend, composite = None, _is_composite(x.device.type, name, config.text)
    else:
        backend = get_backend(resolve_backend(x.device, group, config))
        composite = isinstance(backend, CompositeBackend)
    try:
        check_arguments(x, topk_ids, topk_weights, w1, w3, w2, world)
        if config.debug and not torch.compiler.is_compiling():
            check_ids(topk_ids, w1.shape[0] * world)
    except ConfigError as error:
        _tell_peers(x, name, config, error)
        raise
    x = x.to(torch.bfloat16)
    needs = _needs(x, topk_weights, w1, w3, w2)
    if composite:
        return _apply_composite(x, topk_ids, topk_weights, w1, w3, w2, name, config.text, needs.bits)
    tensors = (x, topk_ids, topk_weights, w1, w3, w2)
    if isinstance(backend, StagedBackend) and _unseen(tensors):
        x, topk_ids, topk_weights, w1, w3, w2 = (t.contiguous() for t in tensors)
        y = run_staged(backend, MoECall(x, topk_ids, topk_weights, w1, w3, w2, group, config, needs))
    else:
        y = torch.ops.titan_megamoe.forward(*tensors, name, config.text, needs.bits)[0]
    if config.debug and y.is_cuda and not torch.compiler.is_compiling():
        torch.cuda.synchronize(y.device)
    return y


def _needs(x: Tensor, topk_weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Needs:
    if not torch.is_grad_enabled():
        return Needs()
    return Needs(*(t.requires_grad for t in (x, topk_weights, w1, w3, w2)))


@torch.compiler.assume_constant_result
def _is_composite(device_type: str, group: str, config: str) -> bool:
    """Whether autograd's own backward is used. Resolves the backend; raises if it cannot run."""
    return isinstance(_backend(device_type, group, config), CompositeBackend)


def _unseen(tensors: tuple[Tensor, ...]) -> bool:
    """Whether nothing (tracing, selective checkpointing, a tensor subclass) has to see an op in the call."""
    if _get_current_dispatch_mode() is not None:
        return False
    return all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)


def _backend(device_type: str, group: str, config: str) -> Backend:
    name = resolve_backend(torch.device(device_type), group_from_name(group), MegaMoEConfig.from_text(config))
    return get_backend(name)


@torch.compiler.disable
def _apply_composite(x, topk_ids, topk_weights, w1, w3, w2, group, config, needs) -> Tensor:
    backend = _backend(x.device.type, group, config)
    assert isinstance(backend, CompositeBackend)
    return backend.apply(_call(x, topk_ids, topk_weights, w1, w3, w2, group, config, needs))


@torch.compiler.disable
def _tell_peers(x: Tensor, group: str, config: MegaMoEConfig, error: ConfigError) -> None:
    """Peers of a rank that refuses its call must raise too, not wait for it."""
    if not group:
        return
    # The exchange raises here as on every rank; this rank raises its own reason instead.
    with contextlib.suppress(MegaMoEError):
        backend = _backend(x.device.type, group, config.text)
        backend.refuse(group_from_name(group), x.device, str(error), config.timeout_s)


def _call(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    group: str,
    config: str,
    needs: int,
) -> MoECall:
    """The call as the custom ops carry it: group by name, config as text, needs as bits."""
    return MoECall(
        x=x.contiguous(),
        topk_ids=topk_ids.contiguous(),
        topk_weights=topk_weights.contiguous(),
        w1=w1.contiguous(),
        w3=w3.contiguous(),
        w2=w2.contiguous(),
        group=group_from_name(group),
        config=MegaMoEConfig.from_text(config),
        needs=Needs.from_bits(needs),
    )


def _explicit(call: MoECall) -> ExplicitBackend:
    backend = get_backend(resolve_backend(call.x.device, call.group, call.config))
    assert isinstance(backend, ExplicitBackend)
    return backend


@torch.library.custom_op("titan_megamoe::forward", mutates_args=())
def _forward(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    group: str,
    config: str,
    needs: int,
) -> list[Tensor]:
    call = _call(x, topk_ids, topk_weights, w1, w3, w2, group, config, needs)
    with no_autocast(x.device):
        y, saved = _explicit(call).forward(call)
    return [y, *saved]


@_forward.register_fake
def _forward_fake(x, topk_ids, topk_weights, w1, w3, w2, group, config, needs):
    call = _call(x, topk_ids, topk_weights, w1, w3, w2, group, config, needs)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return [y, *_explicit(call).fake_saved(call)]


@torch.library.custom_op("titan_megamoe::backward", mutates_args=())
def _backward(
    dy: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    saved: list[Tensor],
    group: str,
    config: str,
    needs: int,
) -> list[Tensor]:
    call = _call(x, topk_ids, topk_weights, w1, w3, w2, group, config, needs)
    with no_autocast(x.device):
        grads = _explicit(call).backward(call, list(saved), dy.contiguous())
    # A custom op returns no None: what was not asked for is a tensor of size 0.
    return [dy.new_empty(0) if g is None else g for g in grads]


@_backward.register_fake
def _backward_fake(dy, x, topk_ids, topk_weights, w1, w3, w2, saved, group, config, needs):
    arguments = (x, topk_weights, w1, w3, w2)
    return [
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if needed else dy.new_empty(0)
        for t, needed in zip(arguments, Needs.from_bits(needs), strict=True)
    ]


def _setup_context(ctx, inputs, output) -> None:
    *tensors, group, config, needs = inputs
    saved = output[1:]
    ctx.save_for_backward(*tensors, *saved)
    ctx.group, ctx.config, ctx.needs = group, config, needs
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx, d_outputs):
    dy = d_outputs[0]
    if dy is None:
        # y did not enter the loss on this rank; its peers still need this rank's part of the backward.
        dy = torch.zeros_like(ctx.saved_tensors[0])
    x, topk_ids, topk_weights, w1, w3, w2, *saved = ctx.saved_tensors
    grads = torch.ops.titan_megamoe.backward(
        dy, x, topk_ids, topk_weights, w1, w3, w2, saved, ctx.group, ctx.config, ctx.needs
    )
    needs = Needs.from_bits(ctx.needs)
    dx, dweights, dw1, dw3, dw2 = (g if needed else None for g, needed in zip(grads, needs, strict=True))
    return dx, None, dweights, dw1, dw3, dw2, None, None, None


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)
for _op in (torch.ops.titan_megamoe.forward.default, torch.ops.titan_megamoe.backward.default):
    has_side_effect(_op)
