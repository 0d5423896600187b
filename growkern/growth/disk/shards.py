"""Plans the weight files of a checkpoint: the file and the offset of every tensor.

The plan of a growth knows names, dtype and shapes. So each file's safetensors header is written
first, and tensors, or rows of them, are written to their places in any order. The files equal those
of `save_pretrained` byte for byte: the same split into files, the same order inside a file, the
same JSON.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from growkern.growth.source.files import INDEX_FILE, STORED_DTYPES, Header


@dataclass(frozen=True)
class ShardLayout:
    """The files of a checkpoint.

    Attributes:
        tensors: where each tensor goes, in the model's order; `Header.file` is a bare file name.
        heads: per file its first bytes, length and JSON.
        sizes: per file its size, bytes.
        index: the text of the index file; "" where there is a single file.
    """

    tensors: Mapping[str, Header]
    heads: Mapping[str, bytes]
    sizes: Mapping[str, int]
    index: str

    def write_index(self, directory: Path) -> None:
        """Write the index file, if there are several files."""
        if self.index:
            (directory / INDEX_FILE).write_text(self.index, encoding="utf-8")


def lay_out(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    max_shard_size: int,
    stored: Mapping[str, str] | None = None,
) -> ShardLayout:
    """Split tensors over files of at most `max_shard_size` bytes and place them in those.

    Args:
        max_shard_size: bytes of tensors in one file; a larger tensor gets a file of its own.
        stored: name -> name in files, where they differ.
    """
    file_names = {name: (stored or {}).get(name, name) for name in shapes}
    shapes = {file_names[name]: shape for name, shape in shapes.items()}
    empty = {name: torch.empty(s, dtype=dtype, device="meta") for name, s in shapes.items()}
    split = split_torch_state_dict_into_shards(empty, max_shard_size=max_shard_size)
    code = next(code for code, known in STORED_DTYPES.items() if known == dtype)
    places, heads, sizes = {}, {}, {}
    for file, names in split.filename_to_tensors.items():
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        ends = [0]
        for name in sorted(names):
            ends.append(ends[-1] + math.prod(shapes[name]) * dtype.itemsize)
            shape, offsets = list(shapes[name]), ends[-2:]
            entries[name] = {"dtype": code, "shape": shape, "data_offsets": offsets}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        heads[file] = struct.pack("<Q", len(text)) + text
        sizes[file] = len(heads[file]) + ends[-1]
        for name, start in zip(sorted(names), ends[:-1], strict=True):
            at = len(heads[file]) + start
            places[name] = Header(file, name, shapes[name], dtype, at)
    index = ""
    if split.is_sharded:
        total = sum(math.prod(shape) for shape in shapes.values())
        metadata = {"total_parameters": total, **split.metadata}
        weight_map = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        index = json.dumps(weight_map, indent=2, sort_keys=True) + "\n"
    tensors = {name: places[stored_as] for name, stored_as in file_names.items()}
    return ShardLayout(tensors, heads, sizes, index)
