"""Process groups: passed through the custom op by name, and what is kept for each of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .errors import ConfigError

V = TypeVar("V")


def group_name(group: dist.ProcessGroup | None) -> str:
    """The name that `group_from_name` takes back; "" for a single rank that holds all experts."""
    return "" if group is None else group.group_name


def group_from_name(name: str) -> dist.ProcessGroup | None:
    """The process group of that name; None for ""."""
    return None if not name else distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def group_size(group: dist.ProcessGroup | None) -> int:
    """W. ConfigError on a rank that is not in the group it passes."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group is {group!r}: this rank is not in the group that was passed. Call mega_moe on the "
            "group's ranks only, or pass group=None where one rank holds all experts."
        )
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


class PerGroup(Generic[V]):
    """One value for each process group, and one for None; it goes with the group.

    Keyed by the group itself: torch gives a destroyed group's name to the next one.
    """

    def __init__(self, make: Callable[[], V]) -> None:
        self._make = make
        self._of: weakref.WeakKeyDictionary[dist.ProcessGroup, V] = weakref.WeakKeyDictionary()
        self._alone: V | None = None

    def get(self, group: dist.ProcessGroup | None) -> V:
        """The group's value, made on first use."""
        value = self.peek(group)
        if value is None:
            value = self._make()
            self.set(group, value)
        return value

    def peek(self, group: dist.ProcessGroup | None) -> V | None:
        """The group's value, or None."""
        return self._alone if group is None else self._of.get(group)

    def set(self, group: dist.ProcessGroup | None, value: V) -> None:
        if group is None:
            self._alone = value
        else:
            self._of[group] = value

    def drop(self, group: dist.ProcessGroup | None) -> None:
        if group is None:
            self._alone = None
        else:
            self._of.pop(group, None)
