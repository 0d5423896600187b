"""Reads the record of a checkpoint's checksums. Needs no PyTorch."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError
from growkern.files import ALGORITHM, check_format, read_json, stays_inside

FORMAT = 1
# an entry has 100 bytes; there is one for each tensor and file
MOST_BYTES = 64_000_000
# a piece is held in memory
MOST_PIECE_BYTES = 1 << 28
RECORDED = {"piece_bytes": int, "files": dict, "source": dict, "target": dict}


def read_checksums(file: Path) -> dict[str, Any]:
    """The record of checksums in a file; one that is damaged or another program's is refused."""
    if not file.is_file():
        raise GrowthError(f"{file.parent}: no {file.name}; only grow_checkpoint writes one")
    try:
        record = read_json(file, MOST_BYTES, "record of checksums")
        check_format(file, record, FORMAT, RECORDED)
        kinds = {name: type(record[name]) for name in RECORDED}
    except (KeyError, TypeError) as error:
        raise GrowthError(f"{file}: not a record of checksums: {error!r}") from error
    for name, kind in kinds.items():
        if kind != RECORDED[name]:
            raise GrowthError(f"{file}: not a record of checksums: {name} is a {kind.__name__}")
    if not 1 <= record["piece_bytes"] <= MOST_PIECE_BYTES:
        raise GrowthError(f"{file}: piece_bytes is {reprlib.repr(record['piece_bytes'])}")
    for name in record["files"]:
        if not stays_inside(name):
            raise GrowthError(f"{file}: {reprlib.repr(name)} is not a file of the checkpoint")
    if record.get("algorithm") != ALGORITHM:
        raise GrowthError(f"{file}: made with {record.get('algorithm')!r}, expected {ALGORITHM!r}")
    return record
