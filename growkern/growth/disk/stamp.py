"""Marks a model card as one that growkern wrote, and tells whether somebody edited it since."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

# a card is read into memory
MOST_CARD_BYTES = 1_000_000
# the last line of a card that growkern wrote: the checksum of the lines above it
STAMP = "<!-- growkern rewrites this file as long as nobody edits it: {} -->\n"
STAMPED = re.compile(f"(.*\n){re.escape(STAMP).replace(re.escape('{}'), '([0-9a-f]{64})')}", re.S)


def stamped(text: str) -> str:
    """A card with the line that tells `is_unedited` whether it was edited since."""
    return text + STAMP.format(hashlib.sha256(text.encode()).hexdigest())


def is_unedited(text: str) -> bool:
    """Whether a card is as growkern wrote it."""
    found = STAMPED.fullmatch(text)
    return found is not None and stamped(found[1]) == text


def read_card(file: Path) -> str:
    """A card; "" if there is none that can be read."""
    try:
        is_small = file.is_file() and file.stat().st_size <= MOST_CARD_BYTES
        return file.read_text(encoding="utf-8") if is_small else ""
    except (OSError, ValueError):
        return ""
