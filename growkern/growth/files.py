"""Safetensors files of a checkpoint directory: headers first, every file checked before use."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from growkern.errors import GrowthError

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class Header:
    """One stored tensor; `read()` maps its file and copies it out."""

    file: str
    raw_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        with safetensors.safe_open(self.file, framework="pt") as shard:
            return shard.get_tensor(self.raw_name)


STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_headers(directory: Path) -> dict[str, Header]:
    """Every tensor of a checkpoint, by the name in the file.

    Raises:
        GrowthError: no weights, a missing, truncated or corrupt shard, an index that does not
            match its shards or leaves the directory, a dtype growth cannot handle.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        return _read_shard(_weights_file(directory))
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise GrowthError(f"{index}: not a safetensors index: {error!r}") from error
    headers: dict[str, Header] = {}
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise GrowthError(f"{index}: shard {shard!r} is not a plain file name")
        if not (directory / shard).is_file():
            raise GrowthError(f"{directory}: shard {shard} is missing; download it again")
        headers.update(_read_shard(directory / shard))
    for name, shard in weight_map.items():
        if name not in headers or Path(headers[name].file).name != shard:
            raise GrowthError(f"{index}: {name} is not in {shard}")
    return headers


def _weights_file(directory: Path) -> Path:
    file = directory / WEIGHTS_FILE
    if file.is_file():
        return file
    if any(directory.glob("*.bin")):
        raise GrowthError(
            f"{directory}: only pickled weights (*.bin); save the model as safetensors first: "
            "model.save_pretrained(directory)"
        )
    raise GrowthError(f"{directory}: no {WEIGHTS_FILE} and no {INDEX_FILE}")


def _read_shard(file: Path) -> dict[str, Header]:
    headers = {}
    try:
        with safetensors.safe_open(str(file), framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a mapping)
                piece = shard.get_slice(name)
                dtype = STORED_DTYPES.get(piece.get_dtype())
                if dtype is None:
                    raise GrowthError(
                        f"{file}: {name} has dtype {piece.get_dtype()}; growth handles F64, F32, "
                        "F16 and BF16"
                    )
                headers[name] = Header(str(file), name, tuple(piece.get_shape()), dtype)
    except safetensors.SafetensorError as error:
        raise GrowthError(f"{file}: truncated or corrupt safetensors file: {error}") from error
    return headers
