"""Sums of a checkpoint's tensors: taken while it is grown, compared with the files at any time.

A tensor is summed in pieces of whole rows, about `PIECE_BYTES` each, and its own sum is that of the
pieces' sums. Pieces depend on the tensor alone, so that they can be taken in any order, by several
threads, before and after an interruption. XXH3 reads as fast as memory delivers (60 GB/s where
CRC-32 reads 4); it finds accidents, not forgeries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.growth.files import Header
from growkern.growth.source import open_source

CHECKSUMS_FILE = "checksums.json"
ALGORITHM = "xxh3_128"
# growing to 4.6 GB takes 7.1 s of processor time in pieces of 1 MB, 3.5 s in pieces of 4 MB, 2.4 s
# in these and 2.2 s in pieces of 32 MB, besides what the system takes to write
PIECE_BYTES = 16 << 20


def row_blocks(
    shape: tuple[int, ...], itemsize: int, piece_bytes: int = PIECE_BYTES
) -> list[tuple[int, int]]:
    """The pieces of a tensor, [start, stop) along its first axis; at least a row each."""
    count = shape[0] if shape else 1
    rows = max(1, piece_bytes // max(1, math.prod(shape[1:]) * itemsize))
    return [(start, min(start + rows, count)) for start in range(0, count, rows)]


def sum_bytes(data: Any) -> str:
    """The sum of a piece, 32 hexadecimal digits."""
    # files alone are summed: a model in memory grows without the package
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


def sum_rows(rows: Tensor) -> str:
    """The sum of a contiguous tensor's bytes."""
    return sum_bytes(rows.reshape(-1).view(torch.uint8).numpy())


def sum_pieces(sums: Iterable[str]) -> str:
    """The sum of a tensor from those of its pieces, in their order."""
    return sum_bytes("".join(sums).encode())


def sum_stored(header: Header, piece_bytes: int = PIECE_BYTES) -> str:
    """The sum of a stored tensor; a piece at a time is in memory."""
    blocks = row_blocks(header.shape, header.dtype.itemsize, piece_bytes)
    return sum_pieces(sum_rows(header.rows(*block)) for block in blocks)


# ----------------------------------------------------------- the record on disk


def write_checksums(directory: Path, source: Mapping[str, str], target: Mapping[str, str]) -> None:
    """Record the sums of what was read and of what was written, by the model's tensor names."""
    record = {
        "algorithm": ALGORITHM,
        "piece_bytes": PIECE_BYTES,
        "source": dict(sorted(source.items())),
        "target": dict(sorted(target.items())),
    }
    text = json.dumps(record, indent=1) + "\n"
    (directory / CHECKSUMS_FILE).write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class ChecksumReport:
    """Result of `verify_checksums`.

    Attributes:
        checked: tensors compared, by "source" and "target".
        wrong: "file: tensor" of each whose bytes are not the recorded ones.
    """

    checked: Mapping[str, int]
    wrong: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.wrong


def verify_checksums(directory: Path, source: Path | None = None) -> ChecksumReport:
    """Compare a grown checkpoint's tensors with the sums recorded when it was written.

    Args:
        directory: of the grown checkpoint.
        source: the directory it was grown from, to be compared too; None: it is not there.

    Raises:
        GrowthError: no record, or one that cannot be read; files that are no checkpoint.
    """
    record = _read_record(directory / CHECKSUMS_FILE)
    sides = {"target": directory} if source is None else {"target": directory, "source": source}
    wrong, checked = [], {}
    for side, where in sides.items():
        headers = open_source(where, allow_nonfinite=True).headers
        for name, expected in record[side].items():
            if name not in headers:
                wrong.append(f"{where}: {name} is missing")
            elif sum_stored(headers[name], record["piece_bytes"]) != expected:
                wrong.append(f"{headers[name].file}: {name}")
        checked[side] = len(record[side])
    return ChecksumReport(checked, tuple(wrong))


def _read_record(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise GrowthError(f"{file.parent}: no {file.name}; only grow_checkpoint writes one")
    try:
        record = json.loads(file.read_bytes())
        kinds = {name: type(record[name]) for name in ("piece_bytes", "source", "target")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise GrowthError(f"{file}: not a record of checksums: {error!r}") from error
    if kinds != {"piece_bytes": int, "source": dict, "target": dict} or record["piece_bytes"] < 1:
        raise GrowthError(f"{file}: not a record of checksums")
    if record.get("algorithm") != ALGORITHM:
        raise GrowthError(f"{file}: made with {record.get('algorithm')!r}, expected {ALGORITHM!r}")
    return record
