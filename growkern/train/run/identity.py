"""Which run a directory belongs to: its settings and fingerprints of its inputs.

`run.json` holds the identity. A run file that gives the same one resumes the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from growkern.train.dataset.fingerprint import fingerprint
from growkern.train.run.file import Run, TrainingSection

# settings that may change when a run is started again: they do not change the steps
FREE = {
    "training": (
        *("log_every", "eval_every", "save_every", "save_minutes", "keep_checkpoints"),
        *("data_workers", "on_nonfinite"),
    ),
    "data": ("cache",),
    # these change where numbers are kept, not the numbers
    "distributed": (
        *("replicas", "reshard_after_forward", "cpu_offload", "activation_checkpointing"),
        "async_checkpoints",
    ),
}
MOST_CHANGES, MOST_CHARACTERS = 6, 60


def identity_of(
    run: Run, texts: Mapping[str, Iterable[Path]], paths: Mapping[str, Path]
) -> dict[str, Any]:
    """The identity of a run; two runs are the same if these are equal.

    Args:
        run: the settings.
        texts: the local files of the data, by its use ("train", "validation").
        paths: what else the run reads, such as checkpoints, a tokenizer or a teacher cache, by
            the names in the run file.

    Returns:
        Values for JSON: the settings, and a fingerprint of each input by its name.
    """
    values = dataclasses.asdict(run)
    del values["output"]
    for section, names in FREE.items():
        for name in names:
            # each data worker reads a part of a stream
            orders = name == "data_workers" and run.data.streaming
            if values[section] is not None and not orders:
                del values[section][name]
    if may_grow_longer(run.training):
        del values["training"]["steps"]
    inputs = {f"data.{name}": _of_texts(files) for name, files in texts.items()}
    inputs |= {name: _of_path(path) for name, path in paths.items()}
    return {"run": json.loads(json.dumps(values)), "inputs": inputs}


def may_grow_longer(training: TrainingSection) -> bool:
    """Whether more steps leave the steps before them as they were."""
    return training.schedule == "constant_with_warmup"


def _of_texts(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(fingerprint(file).encode())
    return digest.hexdigest()


def _of_path(path: Path) -> str:
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.glob("*.*")):
        if file.is_file():
            digest.update(fingerprint(file).encode())
    return digest.hexdigest()


def changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """How an identity differs from an earlier one, as a phrase.

    Args:
        old: as read from a file: two tables of anything.
        new: of the run that is about to start.
    """
    found = []
    for section, after in new["run"].items():
        before = old["run"].get(section)
        if isinstance(before, dict) and isinstance(after, dict):
            found += _changed_values(section, before, after)
        elif before != after:
            found.append(f"[{section}] is {'left out' if after is None else 'new'}")
    found += [
        f"the files of {name} changed"
        for name, value in new["inputs"].items()
        if old["inputs"].get(name, value) != value
    ]
    found = found or ["its run.json is of another version of growkern"]
    more = len(found) - MOST_CHANGES
    return "; ".join(found[:MOST_CHANGES] + ([f"and {more} more"] if more > 0 else []))


def _changed_values(section: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"{section}.{name} {_short(before.get(name))} -> {_short(after.get(name))}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]


def _short(value: Any) -> str:
    text = "none" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
