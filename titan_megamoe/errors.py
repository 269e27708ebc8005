"""Every error this package raises on purpose.

A message says what was found, what is needed and the fix. Errors about one rank's arguments are raised on
every rank of the group (see :mod:`titan_megamoe.agreement`), before anything is launched.
"""


class MegaMoEError(RuntimeError):
    """Base of all errors of titan_megamoe."""


class ConfigError(MegaMoEError, ValueError):
    """A configuration or an argument is wrong: the caller can mend it."""


class UnsupportedError(MegaMoEError):
    """A valid request that cannot run here; the message names what is missing."""


class AgreementError(MegaMoEError):
    """The ranks of a group made calls that do not belong together, or one of them refused its call."""


class BoundError(MegaMoEError):
    """A configured bound (`max_tokens_per_rank`, `max_routed_rows`) was passed."""
