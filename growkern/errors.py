"""The error a user can act on, and the warning."""

import difflib
from collections.abc import Iterable


class GrowthError(ValueError):
    """Input that cannot be used: names the tensor or field, what was found and how to fix it."""


class GrowthWarning(UserWarning):
    """Something that the user should know. The work continues."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """The end of an unknown-name message: the closest allowed name, or all of them."""
    options = sorted(allowed)
    close = difflib.get_close_matches(name, options, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; allowed: {', '.join(options)}"
