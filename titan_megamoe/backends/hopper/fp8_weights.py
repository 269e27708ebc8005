"""Quantized weights, made once per optimizer step and reused by forward, recompute and backward.

An entry belongs to the storages of w1, w3 and w2 (the objects, not their addresses), the place of the tensors
in them, their versions, and a generation. So it is found again when FSDP frees a layer's gathered weights and
gathers them once more into the same storage, and not by another layer's weights that take over the freed
address. A storage that dies takes its entry with it.

FSDP gathers new values without advancing a version, and a write to a DTensor does not advance that of its
local tensor. Hence the generation: every optimizer's step advances it, and `new_weight_generation` does for
anyone who changes weights otherwise (a checkpoint loaded between steps, an average swapped in).

While a CUDA graph is captured nothing is reused: a replay must quantize the weights of its own time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...generation import new_weight_generation, weight_generation
from .fp8_quantize import QuantizedWeight, quantize_weights

_hooked = False


def _hook_optimizers() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        register_optimizer_step_post_hook(lambda *_: new_weight_generation())


@dataclass(frozen=True)
class _Entry:
    storages: tuple[StorageWeakRef, ...]
    w13: QuantizedWeight
    w2: QuantizedWeight
    stream: torch.cuda.Stream | None
    made: torch.cuda.Event | None

    @property
    def num_bytes(self) -> int:
        return self.w13.num_bytes + self.w2.num_bytes

    def usable(self, generation: int, of: int) -> bool:
        return generation == of and not any(s.expired() for s in self.storages)


class WeightCache:
    """Quantized (w1 | w3) and w2 of the layers that were used last.

    Args:
        max_bytes: bound on what entries occupy; the least recently used leave first. One entry is always
            kept: a layer's backward directly after its recompute finds it.
        quantize: `quantize_weights` or its like.
    """

    def __init__(
        self, max_bytes: int, quantize: Callable[[list[Tensor]], QuantizedWeight] = quantize_weights
    ) -> None:
        _hook_optimizers()
        self.max_bytes = max_bytes
        self.quantize = quantize
        self._entries: OrderedDict[tuple[tuple[object, ...], ...], tuple[int, _Entry]] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """What the entries occupy."""
        return sum(entry.num_bytes for _, entry in self._entries.values())

    def get(self, w1: Tensor, w3: Tensor, w2: Tensor) -> tuple[QuantizedWeight, QuantizedWeight]:
        """w1 and w3 (e, I, H) one after the other, and w2 (e, H, I), quantized on the current stream."""
        weights = (w1, w3, w2)
        if w1.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.quantize([w1, w3]), self.quantize([w2])
        key = tuple(_facts(w) for w in weights)
        found = self._entries.get(key)
        if found is not None and found[1].usable(weight_generation(), found[0]):
            self._entries.move_to_end(key)
            return _on_current_stream(found[1])
        self._drop_stale(key)
        entry = _make(weights, self.quantize)
        self._entries[key] = (weight_generation(), entry)
        while self.num_bytes > self.max_bytes and len(self._entries) > 1:
            self._entries.popitem(last=False)
        return entry.w13, entry.w2

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def _drop_stale(self, key: tuple[tuple[object, ...], ...]) -> None:
        """Free what is of no more use, or was made of `key`'s tensors before somebody wrote to them."""
        now, places = weight_generation(), _places(key)
        stale = [
            k
            for k, (made, entry) in self._entries.items()
            if not entry.usable(now, made) or _places(k) == places
        ]
        for other in stale:
            del self._entries[other]


def _places(key: tuple[tuple[object, ...], ...]) -> tuple[tuple[object, ...], ...]:
    """Where the weights of a key lie, whatever their version."""
    return tuple(facts[:-1] for facts in key)


def _facts(w: Tensor) -> tuple[object, ...]:
    version = 0 if w.is_inference() else w._version
    return (
        w.untyped_storage()._cdata,
        w.storage_offset(),
        tuple(w.shape),
        tuple(w.stride()),
        w.dtype,
        version,
    )


def _make(
    weights: tuple[Tensor, Tensor, Tensor], quantize: Callable[[list[Tensor]], QuantizedWeight]
) -> _Entry:
    w1, w3, w2 = weights
    w13, w2_quantized = quantize([w1, w3]), quantize([w2])
    stream = made = None
    if w1.is_cuda:
        stream, made = torch.cuda.current_stream(w1.device), torch.cuda.Event()
        made.record(stream)
    storages = tuple(StorageWeakRef(w.untyped_storage()) for w in weights)
    return _Entry(storages, w13, w2_quantized, stream, made)


def _on_current_stream(entry: _Entry) -> tuple[QuantizedWeight, QuantizedWeight]:
    if entry.stream is not None and entry.made is not None:
        stream = torch.cuda.current_stream(entry.stream.device)
        if stream != entry.stream:
            stream.wait_event(entry.made)
            for tensor in (*entry.w13, *entry.w2):
                tensor.record_stream(stream)
    return entry.w13, entry.w2
