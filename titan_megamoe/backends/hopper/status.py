"""What a kernel reports when a call cannot go on, and the errors that the host makes of it.

The report is WORDS int32 in pinned host memory, written by the first block that finds the fault; the host
reads it without synchronising, at the next call and wherever it synchronises anyway.

    code, phase, peer, expected, seen, call number
"""

from __future__ import annotations

from torch import Tensor

from ...agreement import Phase
from ...errors import AgreementError, BoundError, ConfigError, MegaMoEError

WORDS = 8

TIMEOUT_OPEN = 1
TIMEOUT_COMBINE = 2
PEER_AHEAD = 3
SIGNATURE = 4
PEER_GAVE_UP = 5
BAD_ID = 6
ROUTED_ROWS = 7
OTHER_FORWARD = 8
TIMEOUT_TOKENS = 9
TIMEOUT_READ = 10
PEER_ENDED_EARLY = 11

_AWAITED = {
    TIMEOUT_OPEN: "to start the call",
    TIMEOUT_COMBINE: "to send its partial sums",
    TIMEOUT_TOKENS: "to publish its tokens",
    TIMEOUT_READ: "to end its recomputation of the call, which this rank has left without a result",
}

GENERATION_BITS = 20
"""A call number is generation · 2^20 + running number; a failed call starts a new generation."""


def describe(call: int) -> str:
    """A call's number as a message names it."""
    return f"{call & ((1 << GENERATION_BITS) - 1)} (generation {call >> GENERATION_BITS})"


def phase_name(signature: int) -> str:
    """The phase is the low 4 bits of a signature; the rest is a hash of the geometry."""
    value = signature & 15
    return Phase(value).name.lower() if value in {int(p) for p in Phase} else f"phase {value}"


def error_from(words: Tensor, rank: int, timeout_s: float, max_routed_rows: int) -> MegaMoEError:
    """The error that a report stands for. `words` is (WORDS,) int32 on the CPU, words[0] ≠ 0."""
    code, signature, peer, expected, seen, call = (int(v) for v in words[:6])
    where = f"rank {rank} of the expert-parallel group, {phase_name(signature)} call {describe(call)}"
    same = (
        "Every rank must make the same mega_moe calls in the same order; look for a rank that skips "
        "or adds a call, or has failed."
    )
    if code in _AWAITED:
        return AgreementError(
            f"{where}: waited {timeout_s:g} s for rank {peer} {_AWAITED[code]}; expected call "
            f"{describe(expected)}, last seen {describe(seen)}. {same} timeout_s sets the limit."
        )
    if code == PEER_AHEAD:
        return AgreementError(
            f"{where}: rank {peer} is in another call; expected {describe(expected)}, seen "
            f"{describe(seen)}. {same} Outputs of this call are invalid; the next call starts clean."
        )
    if code == SIGNATURE:
        kind = (
            f"it is in {phase_name(seen)}"
            if (expected ^ seen) & 15
            else "its shapes, requested gradients or config differ"
        )
        return AgreementError(
            f"{where}: rank {peer} made a call that does not belong to this one: {kind} (expected "
            f"signature {expected & 0xFFFFFFFF:#x}, seen {seen & 0xFFFFFFFF:#x}). {same} Outputs of "
            f"this call are invalid; the next call starts clean."
        )
    if code == PEER_GAVE_UP:
        return AgreementError(
            f"{where}: rank {peer} gave up or refused this call; its own error says why. Outputs of "
            f"this call are invalid; the next call starts clean."
        )
    if code == PEER_ENDED_EARLY:
        return AgreementError(
            f"{where}: rank {peer} has ended its recomputation of this call before the combine, this rank "
            "has not. Checkpoint with the same early_stop on every rank, and use dispatch modes (a FLOP "
            "counter, say) on all ranks or none. Outputs of this call are invalid."
        )
    if code == OTHER_FORWARD:
        return AgreementError(
            f"{where}: rank {peer} is in the backward of forward call {describe(seen)}, this rank in "
            f"that of forward call {describe(expected)}. {same} Outputs of this call are invalid."
        )
    if code == BAD_ID:
        return ConfigError(
            f"{where}: rank {peer} passed {seen} expert ids outside [-1, {expected}); ids must be in "
            f"[0, {expected}), or -1 for a dropped slot. Outputs of this call are invalid."
        )
    if code == ROUTED_ROWS:
        return BoundError(
            f"{where}: rank {peer} would compute {seen} routed rows, but max_routed_rows is "
            f"{max_routed_rows}. Raise MegaMoEConfig.max_routed_rows (memory grows with it) or balance "
            f"the routing. No token was dropped silently: outputs of this call are invalid."
        )
    return MegaMoEError(f"{where}: unknown report {[int(v) for v in words]}.")
