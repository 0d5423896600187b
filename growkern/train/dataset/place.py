"""Where tokenised data and checksums of data are kept."""

import os
from pathlib import Path

VARIABLE = "GROWKERN_TOKENS"


def user_cache() -> Path:
    """The directory for tokenised data: `GROWKERN_TOKENS`, or a place in the user's cache."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "growkern" / "tokens"
