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
