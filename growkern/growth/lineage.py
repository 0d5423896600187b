"""How a grown checkpoint was made: written beside it, read to check or to repeat it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers

from growkern.errors import GrowthError
from growkern.growth.checksums import CHECKSUMS_FILE
from growkern.growth.files import METADATA_FILE, STORED_DTYPES, read_header_bytes
from growkern.growth.options import GrowthOptions
from growkern.growth.plan import GrowthPlan, plan_growth
from growkern.growth.shards import ShardLayout
from growkern.growth.source import Source

LINEAGE_FILE = "lineage.json"
DTYPES = {str(d).removeprefix("torch."): d for d in STORED_DTYPES.values() if d.is_floating_point}


def source_files(source: Source) -> dict[str, dict[str, Any]]:
    """What tells apart two states of a source's files without reading their weights."""
    found = {}
    for name in sorted({header.file for header in source.headers.values()}):
        file = Path(name)
        is_metadata = file.name == METADATA_FILE
        header = file.read_bytes() if is_metadata else read_header_bytes(file)
        found[file.name] = {
            "size": file.stat().st_size,
            "modified": file.stat().st_mtime_ns,
            "header": hashlib.sha256(header).hexdigest(),
        }
    return found


def identity(plan: GrowthPlan, layout: ShardLayout, backend: str | None) -> dict[str, Any]:
    """All that decides a growth's bytes: two runs that agree in it make the same files."""
    layout_hash = hashlib.sha256(b"".join(layout.heads.values()) + layout.index.encode())
    return {
        **plan.to_dict(),
        "target config": json.loads(plan.target_config.to_json_string(use_diff=False)),
        "source": source_files(plan.source),
        "backend": backend or "",
        "max_shard_size": layout_hash.hexdigest(),
    }


def write_lineage(plan: GrowthPlan, files: Mapping[str, Any], directory: Path) -> None:
    """Record how `directory` was made out of these source files."""
    versions = {m.__name__: m.__version__ for m in (torch, transformers, safetensors)}
    lineage = {
        **plan.to_dict(),
        "versions": versions,
        "source": str(plan.source.directory.resolve() if plan.source.directory else ""),
        "source_files": files,
        "checksums": CHECKSUMS_FILE,
    }
    text = json.dumps(lineage, indent=2) + "\n"
    (directory / LINEAGE_FILE).write_text(text, encoding="utf-8")


def plan_from_lineage(source: Any, directory: Path) -> GrowthPlan:
    """The plan that made `directory` out of `source`, read back from its lineage file.

    Raises:
        GrowthError: no lineage file, or one that does not fit the source.
    """
    file = directory / LINEAGE_FILE
    if not file.is_file():
        raise GrowthError(f"{directory}: no {LINEAGE_FILE}; only grown checkpoints have one")
    try:
        lineage = json.loads(file.read_text(encoding="utf-8"))
        options = GrowthOptions(**lineage["options"])
        sizes = {name: pair[1] for name, pair in lineage["sizes"].items()}
        before = {name: pair[0] for name, pair in lineage["sizes"].items()}
        dtype = DTYPES[lineage["dtype"]]
    except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
        raise GrowthError(f"{file}: not a growth record: {error!r}") from error
    for name, value in before.items():
        if getattr(source.config, name, None) not in (value, None):
            raise GrowthError(
                f"{file}: made from a model with {name}={value}, this source has "
                f"{getattr(source.config, name)}"
            )
    return plan_growth(source, options, sizes, dtype=dtype)
