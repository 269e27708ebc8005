"""Run inside torchrun: backend `deepep` on the CPU, with DeepEP's library replaced by gloo collectives.

Only the library below TorchTitan's functions is replaced, in its documented interface (intranode, v1):
layout, dispatch with and without a handle, combine with and without weights. So what is tested is our
backend and TorchTitan's code in it; DeepEP itself needs GPUs.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_megamoe.torchtitan import cpu_shim
from titan_megamoe.torchtitan.process_end import end_cpu_process

cpu_shim.apply()


class _Event:
    def __init__(self, *_: Any) -> None: ...

    def current_stream_wait(self) -> None: ...


class _Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


class _Buffer:
    """Tokens go once to each rank that holds one of their experts, in order of source rank and token."""

    num_sms = 20

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(count: int) -> None:
        _Buffer.num_sms = count

    @staticmethod
    def get_dispatch_config(ranks: int) -> _Config:
        return _Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        ranks = self.group.size()
        per_rank = num_experts // ranks
        owner = torch.where(topk_idx < 0, -1, topk_idx // per_rank)
        is_in = torch.stack([(owner == r).any(dim=1) for r in range(ranks)], dim=1)
        counts = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return is_in.sum(dim=0), None, counts, is_in, _Event()

    def dispatch(self, x: Tensor, handle: Any = None, **given: Any) -> tuple[Any, ...]:
        if handle is not None:
            is_in, received = handle
            return _exchange(x, is_in, received, self.group), None, None, None, handle, _Event()
        is_in, ids, weights = given["is_token_in_rank"], given["topk_idx"], given["topk_weights"]
        sizes: list[Any] = [None] * self.group.size()
        dist.all_gather_object(sizes, is_in.sum(dim=0).tolist(), group=self.group)
        received = [size[self.group.rank()] for size in sizes]
        recv = [_exchange(t, is_in, received, self.group) for t in (x, ids, weights)]
        per_rank = len(given["num_tokens_per_expert"]) // self.group.size()
        local = recv[1] - self.group.rank() * per_rank
        mine = (recv[1] >= 0) & (local >= 0) & (local < per_rank)
        local = torch.where(mine, local, -1)
        counts = torch.bincount(local[mine], minlength=per_rank).tolist()
        return recv[0], local, recv[2] * mine, counts, (is_in, received), _Event()

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, **_: Any
    ) -> tuple[Any, ...]:
        is_in, received = handle
        total = _return(x, is_in, received, self.group).to(x.dtype)
        weights = None if topk_weights is None else _return(topk_weights, is_in, received, self.group)
        return total, weights, _Event()


def _exchange(x: Tensor, is_in: Tensor, received: list[int], group: dist.ProcessGroup) -> Tensor:
    sent = [x[is_in[:, r]].contiguous() for r in range(group.size())]
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, torch.cat(sent), received, [len(s) for s in sent], group=group)
    return out


def _return(x: Tensor, is_in: Tensor, received: list[int], group: dist.ProcessGroup) -> Tensor:
    back = is_in.sum(dim=0).tolist()
    out = x.new_empty(sum(back), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), back, received, group=group)
    total = torch.zeros(len(is_in), *x.shape[1:])
    for r, rows in enumerate(out.split(back)):
        total[is_in[:, r]] += rows.float()
    return total


def _install() -> None:
    library, utils = types.ModuleType("deep_ep"), types.ModuleType("deep_ep.utils")
    library.Buffer, utils.EventHandle, utils.EventOverlap = _Buffer, _Event, _Event  # type: ignore[attr-defined]
    sys.modules |= {"deep_ep": library, "deep_ep.utils": utils}
    from torchtitan.distributed.deepep import deepep

    torch.library.impl(deepep._lib, "dispatch", "CPU")(deepep._dispatch_op_impl)
    torch.library.impl(deepep._lib, "combine", "CPU")(deepep._combine_op_impl)


def main() -> None:
    result = Path(sys.argv[3])
    dist.init_process_group("gloo")
    _install()
    from titan_megamoe import MegaMoEConfig, mega_moe
    from titan_megamoe.backends.base import MoECall, Needs
    from titan_megamoe.backends.deepep import DeepEPBackend

    rank, experts, top_k, hidden, intermediate = dist.get_rank(), 8, 2, 64, 96
    generator = torch.Generator().manual_seed(5)
    shapes = {"w1": (intermediate, hidden), "w3": (intermediate, hidden), "w2": (hidden, intermediate)}
    mine = slice(rank * experts // 2, (rank + 1) * experts // 2)
    weights = {
        k: torch.randn(experts, *s, generator=generator)[mine] * s[1] ** -0.5 for k, s in shapes.items()
    }
    generator.manual_seed(rank)
    tokens = 48 + 16 * rank
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    ids[3, 1] = ids[7, 0] = -1
    scores = torch.rand(tokens, top_k, generator=generator) + 0.1
    dy = torch.randn(tokens, hidden, generator=generator).bfloat16()

    def run(backend: str) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, scores, *weights.values())]
        config = MegaMoEConfig(backend=backend, comm_sms=24)
        group = dist.group.WORLD
        if backend == "reference":
            y = mega_moe(leaves[0], ids, *leaves[1:], group=group, config=config)
        else:
            # Past the op, which refuses DeepEP on the CPU.
            needs = Needs(True, True, True, True, True)
            call = MoECall(leaves[0], ids, *leaves[1:], group, config, needs)  # type: ignore[arg-type]
            y = DeepEPBackend().apply(call)
        y.backward(dy)
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    names = ("y", "x", "topk_weights", *weights)
    pairs = zip(names, run("deepep"), run("reference"), strict=True)
    out: dict[str, Any] = {
        name: float((a.float() - b.float()).norm() / b.float().norm()) for name, a, b in pairs
    }
    out["num_sms"] = _Buffer.num_sms
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, out)
    if rank == 0:
        result.write_text(json.dumps(everyone))
    dist.destroy_process_group()
    end_cpu_process()


if __name__ == "__main__":
    main()
