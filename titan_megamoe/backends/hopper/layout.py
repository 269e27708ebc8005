"""Sizes of the words that ranks and kernels share; no imports, so that the host can size memory anywhere."""

MAIL_WORDS = 16
"""int32 words of one rank's announcement."""
STATE_WORDS = 64
"""int32 words of a rank's device state."""
RAISED_AT = 3
"""The state word that says that the host has raised the error of a failed call."""
PROGRESS_AT = 32
"""First of the state words in which communication blocks count their chunks."""
COMBINE_TOKENS = 16
"""Tokens whose partial sums one flag announces."""


def cdiv(n: int, d: int) -> int:
    """n / d, rounded up. Triton's own, which also works in kernels, costs the host several µs each time."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n, for n > 0; 0 for 0, like Triton's."""
    return 1 << (n - 1).bit_length() if n > 0 else 0
