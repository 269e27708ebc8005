"""A time with its uncertainty, and the rates that times come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Estimate:
    """seconds, and by how many seconds each source of doubt may move them.

    Doubts with one key are one doubt: they add up (a GEMM rate that is 5 % low is low in every layer).
    Doubts with different keys are taken as independent: the half-range is the root of their squares' sum.
    bases: which of measured, published, assumed went into it.
    """

    seconds: float = 0.0
    doubt: Mapping[str, float] = field(default_factory=dict)
    bases: frozenset[str] = frozenset()

    def __add__(self, other: Estimate) -> Estimate:
        doubt = dict(self.doubt)
        for key, seconds in other.doubt.items():
            doubt[key] = doubt.get(key, 0.0) + seconds
        return Estimate(self.seconds + other.seconds, doubt, self.bases | other.bases)

    def __mul__(self, factor: float) -> Estimate:
        doubt = {key: seconds * factor for key, seconds in self.doubt.items()}
        return Estimate(self.seconds * factor, doubt, self.bases)

    __rmul__ = __mul__

    def __sub__(self, other: Estimate) -> Estimate:
        return self + other * -1.0

    def doubted(self, key: str, share: float, basis: str = "assumed") -> Estimate:
        """The same, with one more doubt of `share` of the seconds."""
        doubt = {key: abs(self.seconds) * share}
        return self + Estimate(0.0, doubt, frozenset([basis]) if self.seconds else frozenset())

    @property
    def half_range(self) -> float:
        return sum(seconds**2 for seconds in self.doubt.values()) ** 0.5


ZERO = Estimate()


def longer(a: Estimate, b: Estimate) -> Estimate:
    """The one that takes more seconds; the other one's doubts are left out."""
    return a if a.seconds >= b.seconds else b


def excess(a: Estimate, over: Estimate) -> Estimate:
    """What of `a` is left when `over` hides as much as it can; never negative."""
    return a - over if a.seconds > over.seconds else Estimate(0.0, {}, a.bases)


@dataclass(frozen=True)
class Rate:
    """A speed in units of work a second (FLOP/s, B/s): value ± share, and where it comes from."""

    key: str
    value: float
    share: float
    basis: str
    source: str

    def time(self, work: float) -> Estimate:
        seconds = work / self.value
        return Estimate(seconds, {self.key: seconds * self.share}, frozenset([self.basis]))
