"""Records a checksum of everything that a growth reads and writes, and compares them later.

A tensor is cut into pieces of whole rows, about `PIECE_BYTES` each. Its checksum is that of its
pieces' checksums. The pieces depend on the tensor alone. So several threads can process them in
any order, before and after an interruption. A file of weights also has a checksum of its header.
Any other file has one of all its bytes.

XXH3 runs at the speed of memory: 60 GB/s where CRC-32 reads 4. It detects damage, not tampering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.files import checksum
from growkern.growth.disk.staging import read_checksums
from growkern.growth.history import CHECKSUMS_FILE, LINEAGE_FILE, family_in
from growkern.growth.source import header_reader, open_source, weight_files
from growkern.growth.stored import PIECE_BYTES, StoredTensor, row_blocks
from growkern.publish import Differences, write_record

# of the record
NEVER_WITHOUT = ("config.json", LINEAGE_FILE)


def checksum_bytes(data: Any) -> str:
    """The checksum of some bytes, 32 hexadecimal digits."""
    # imported here, because a model in memory grows without the package
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


def checksum_rows(rows: Tensor) -> str:
    """The checksum of a contiguous tensor's bytes."""
    return checksum_bytes(rows.reshape(-1).view(torch.uint8).numpy())


def checksum_pieces(checksums: Iterable[str]) -> str:
    """The checksum of a tensor, from those of its pieces in their order."""
    return checksum_bytes("".join(checksums).encode())


def checksum_stored(tensor: StoredTensor, piece_bytes: int = PIECE_BYTES) -> str:
    """The checksum of a stored tensor. One piece at a time is in memory."""
    blocks = row_blocks(tensor.shape, tensor.dtype.itemsize, piece_bytes)
    return checksum_pieces(checksum_rows(tensor.rows(*block)) for block in blocks)


def are_stored(tensors: Mapping[str, StoredTensor], checksums: Mapping[str, str]) -> bool:
    """Whether the tensors in files have these checksums."""
    return all(checksum_stored(tensors[name]) == total for name, total in checksums.items())


# ----------------------------------------------------------- the record on disk


def write_checksums(
    directory: Path,
    source: Mapping[str, str],
    target: Mapping[str, str],
    known: Mapping[str, str] | None = None,
) -> None:
    """Record the checksums of the tensors that were read, and of every file in `directory`.

    `source` and `target` have those of tensors, by the model's names; `known` those of files that
    were computed when they were copied.
    """
    inside = [file for file in directory.rglob("*") if file.is_file()]
    names = sorted(file.relative_to(directory).as_posix() for file in inside)
    record = {
        "piece_bytes": PIECE_BYTES,
        "files": {n: (known or {}).get(n) or checksum_file(directory, n) for n in names},
        "source": dict(sorted(source.items())),
        "target": dict(sorted(target.items())),
    }
    write_record(directory / CHECKSUMS_FILE, record)


def checksum_file(directory: Path, name: str) -> str:
    """The checksum of a file; for a file of the model's tensors, of its header only."""
    read_header = _header_reader(name)
    file = directory / name
    return checksum(file) if read_header is None else checksum_bytes(read_header(file))


def _header_reader(name: str) -> Callable[[Path], bytes] | None:
    """How the header of a file of the model's tensors is read; None for any other file."""
    # the tensors of other files, in folders, have no checksums of their own
    return None if "/" in name else header_reader(Path(name))


def verify_checksums(directory: Path, source: Path | None = None) -> Differences:
    """Compare a grown checkpoint with the checksums that were recorded when it was written.

    Every recorded file must be there unchanged, with the recorded tensors and no others. A new file
    of weights is reported too, because a loader may read it. Other files may be added. With
    `source`, the directory it was grown from, the tensors of that are compared too.
    """
    record = read_checksums(directory)
    wrong = [*_wrong_files(directory, record["files"])]
    family = family_in(directory)
    try:
        headers = open_source(directory, allow_nonfinite=True, second=True).headers
        wrong += _wrong_tensors(directory, headers, record["target"], record["piece_bytes"])
        wrong += [
            f"{header.file}: {name} is not in the record"
            for name, header in headers.items()
            if name not in record["target"]
        ]
    except GrowthError as error:
        wrong.append(str(error))
    checked = {"target": len(record["target"]), "files": len(record["files"])}
    if source is not None:
        # not all of a source is read where weights are random
        opened = open_source(
            source, allow_nonfinite=True, family=family, dequantize=True, second=True
        )
        headers = opened.headers
        wrong += _wrong_tensors(source, headers, record["source"], record["piece_bytes"])
        checked["source"] = len(record["source"])
    return Differences(checked, tuple(wrong))


def _wrong_tensors(
    directory: Path,
    headers: Mapping[str, StoredTensor],
    checksums: Mapping[str, str],
    piece_bytes: int,
) -> Iterator[str]:
    for name, expected in checksums.items():
        if name not in headers:
            yield f"{directory}: {name} is missing"
        elif checksum_stored(headers[name], piece_bytes) != expected:
            yield f"{headers[name].file}: {name}"


def _wrong_files(directory: Path, checksums: Mapping[str, str]) -> Iterator[str]:
    for name, expected in checksums.items():
        file = directory / name
        if not file.is_file():
            yield f"{file} is missing"
            continue
        try:
            actual = checksum_file(directory, name)
        except (OSError, ValueError) as error:
            actual = str(error)
        if actual != expected:
            part = "file" if _header_reader(name) is None else "header"
            yield f"{file}: the {part} was changed"
    for name in NEVER_WITHOUT:
        if name not in checksums:
            yield f"{directory / name} is not in the record"
    for file in sorted(directory.iterdir()):
        is_weights = any(fnmatch(file.name, pattern) for pattern in weight_files())
        if is_weights and file.name not in checksums:
            yield f"{file}: weights were added"
