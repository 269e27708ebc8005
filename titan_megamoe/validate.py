"""Host-side checks of the op's arguments: shapes, dtypes, devices. Nothing here touches a device."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ConfigError

_ACTIVATION_DTYPES = (torch.bfloat16, torch.float32)
_PLAIN = (Tensor, torch.nn.Parameter)
_ID_DTYPES = (torch.int32, torch.int64)


def check_arguments(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, world: int
) -> None:
    """Raise ConfigError on the first argument that `mega_moe` cannot take.

    x (T, H) bf16 or fp32; topk_ids (T, K) int32 or int64; topk_weights (T, K) fp32;
    w1, w3 (e, I, H) and w2 (e, H, I), one dtype, bf16 or fp32; all on one device.
    """
    tensors = {
        "x": x, "topk_ids": topk_ids, "topk_weights": topk_weights, "w1": w1, "w3": w3, "w2": w2,
    }  # fmt: skip
    for name, tensor in tensors.items():
        if type(tensor) in _PLAIN:
            continue
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{name} is a {type(tensor).__name__}; mega_moe needs a torch.Tensor.")
        if hasattr(tensor, "to_local"):
            raise ConfigError(
                f"{name} is a DTensor; mega_moe works on this rank's shard: pass {name}.to_local()."
            )
    _check_rank(x, "x", 2, "(T, H)")
    _check_rank(topk_ids, "topk_ids", 2, "(T, K)")
    for name in ("w1", "w3"):
        _check_rank(tensors[name], name, 3, "(E/EP, I, H)")
    _check_rank(w2, "w2", 3, "(E/EP, H, I)")
    _check_dtype(x, "x", _ACTIVATION_DTYPES)
    _check_dtype(topk_ids, "topk_ids", _ID_DTYPES)
    _check_dtype(topk_weights, "topk_weights", (torch.float32,), " Routing weights stay in fp32: keep "
                 "them out of autocast and of FSDP's input cast.")  # fmt: skip
    _check_dtype(w1, "w1", _ACTIVATION_DTYPES)

    num_tokens, hidden = x.shape
    if topk_ids.shape[0] != num_tokens:
        raise ConfigError(
            f"topk_ids has {topk_ids.shape[0]} rows but x has {num_tokens} tokens; both need T rows."
        )
    if topk_ids.shape[1] < 1:
        raise ConfigError("topk_ids has K = 0 columns; at least one slot per token is needed.")
    if topk_weights.shape != topk_ids.shape:
        raise ConfigError(
            f"topk_weights is {tuple(topk_weights.shape)} but topk_ids is {tuple(topk_ids.shape)}; both "
            f"must be (T, K)."
        )
    experts, intermediate, w_hidden = w1.shape
    if w_hidden != hidden:
        raise ConfigError(
            f"w1 is {tuple(w1.shape)} but x has H = {hidden}; w1 must be (E/EP, I, H), TorchTitan's layout."
        )
    if w3.shape != w1.shape:
        raise ConfigError(f"w3 is {tuple(w3.shape)} but w1 is {tuple(w1.shape)}; they must be equal.")
    if tuple(w2.shape) != (experts, hidden, intermediate):
        raise ConfigError(
            f"w2 is {tuple(w2.shape)} but w1 = {tuple(w1.shape)} asks for "
            f"{(experts, hidden, intermediate)}, (E/EP, H, I)."
        )
    if experts < 1:
        raise ConfigError(f"each of the {world} ranks needs at least one expert; w1 holds none.")
    for name in ("w3", "w2"):
        if tensors[name].dtype != w1.dtype:
            raise ConfigError(
                f"{name} is {_name(tensors[name].dtype)} but w1 is {_name(w1.dtype)}; expert weights "
                "share one dtype."
            )
    for name, tensor in tensors.items():
        if tensor.device != x.device:
            raise ConfigError(f"{name} is on {tensor.device} but x is on {x.device}; use one device.")


def check_ids(topk_ids: Tensor, num_experts: int) -> None:
    """Debug mode: read the ids on the host and raise ConfigError on one outside [-1, E). Synchronises."""
    if topk_ids.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(topk_ids))
    if low < -1 or high >= num_experts:
        bad = low if low < -1 else high
        row, slot = (int(v) for v in (topk_ids == bad).nonzero()[0])
        raise ConfigError(
            f"topk_ids[{row}, {slot}] is {bad}; ids must be in [0, {num_experts}), or -1 for a dropped slot."
        )


def _check_rank(tensor: Tensor, name: str, ndim: int, shape: str) -> None:
    if tensor.dim() != ndim:
        raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}.")


def _check_dtype(tensor: Tensor, name: str, allowed: tuple[torch.dtype, ...], hint: str = "") -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(map(_name, allowed))
        raise ConfigError(f"{name} is {_name(tensor.dtype)}; it must be {names}.{hint}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
