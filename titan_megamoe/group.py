"""Process groups, passed through the custom op by name."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d


def group_name(group: dist.ProcessGroup | None) -> str:
    """The name that `group_from_name` takes back; "" for a single rank that holds all experts."""
    return "" if group is None else group.group_name


def group_from_name(name: str) -> dist.ProcessGroup | None:
    """The process group of that name; None for ""."""
    return None if not name else distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def group_size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()
