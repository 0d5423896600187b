"""The output directory of a run: which run it belongs to, and whether that run is finished.

`run.json` holds the identity of a run: its settings and fingerprints of its inputs. A run file that
gives the same one resumes the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from growkern.errors import GrowthError, warn
from growkern.files import PARTIAL, check_format, read_json, write_whole
from growkern.package import version
from growkern.publish.calls import LOCK_FILE, move
from growkern.publish.manifest import MANIFEST, recorded_in, why_kept
from growkern.train.dataset.cache import fingerprint
from growkern.train.run.file import Run, TrainingSection
from growkern.train.safety.checkpoints import checkpoints_in, damage, last_checkpoint, step_of
from growkern.train.safety.staging import MARKER, STAGING, close_staging, open_staging

# one of the longest run files makes this much
FORMAT = 1
MOST_BYTES = 1_000_000
CHECKPOINTS = r"(damaged-)?checkpoint-\d+"
# of a run, besides what the records of its checkpoints name
OF_A_RUN = (
    r"run\.json|\.run\.json\.\w+\.part|\.lock|manifest\.json"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)
# of TensorBoard
LOGS, EVENTS = "runs", "events.out.tfevents."
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


def check_output(output: Path, models: list[Path], texts: dict[str, list[Path]]) -> None:
    """Check that the output can be a directory and holds no input: overwriting would delete it."""
    if output.exists() and not output.is_dir():
        raise GrowthError(f"output.directory {output} is a file: choose another name")
    inputs = [*models, *(file for files in texts.values() for file in files)]
    for path in inputs:
        if output.resolve() in (path.resolve(), *path.resolve().parents):
            raise GrowthError(
                f"output.directory {output} contains {path}, which the run reads: choose another "
                "directory"
            )


def is_ours(output: Path, identity: dict[str, Any], overwrite: bool) -> bool:
    """Whether the output directory holds this run (True) or may be made new (False)."""
    # a process that was killed at its start leaves no more than these
    begun = (LOCK_FILE, PARTIAL.format(name=MARKER))
    names = [path.name for path in output.iterdir()] if output.is_dir() else []
    if all(any(fnmatch(name, pattern) for pattern in begun) for name in names):
        return False
    before = _marked(output)
    if before == identity:
        return True
    if not overwrite:
        raise GrowthError(
            f"{output} holds another run ({changes(before, identity)}): undo the changes or choose "
            "another directory. --overwrite would delete its checkpoints and its model"
            + _how_to_train_longer(before["run"], identity["run"])
        )
    if why := _why_kept(output):
        raise GrowthError(f"{output} must not be deleted: {why}: choose another directory")
    return False


def _how_to_train_longer(before: dict[str, Any], run: dict[str, Any]) -> str:
    sections = [settings.get("training") for settings in (before, run)]
    # sections without steps may grow longer
    old, new = (part.get("steps") if isinstance(part, dict) else None for part in sections)
    if not (isinstance(old, int) and isinstance(new, int) and old < new):
        return ""
    return (
        f'. With schedule = "{run["training"]["schedule"]}" more steps change the rates of those '
        "before. To train on, begin a new run with this directory as model.path and a short "
        'warm-up. Only "constant_with_warmup" can go on where it stopped'
    )


def begin(output: Path, identity: dict[str, Any]) -> None:
    """Empty the output directory and mark it as that of this run."""
    is_ours(output, identity, overwrite=True)
    output.mkdir(parents=True, exist_ok=True)
    for path in output.glob(PARTIAL.format(name=MARKER)):
        path.unlink()
    # without the marker the next start would refuse the rest
    if (output / MARKER).is_file():
        # first renamed, and records last: a kill leaves nothing that no record lists
        trash = open_staging(output)
        is_checkpoint = re.compile(CHECKPOINTS).fullmatch
        for path in sorted(
            output.iterdir(), key=lambda x: (bool(is_checkpoint(x.name)), x.name == MANIFEST)
        ):
            if path.name not in (MARKER, LOCK_FILE, STAGING):
                move(path, trash / path.name)
        close_staging(output)
    text = json.dumps({"format": FORMAT, "growkern": version(), **identity}, indent=1)
    write_whole(output / MARKER, lambda partial: partial.write_text(text, encoding="utf-8"))


def _why_kept(output: Path) -> str | None:
    """Why the directory of a run must not be deleted; None if it may be."""
    checkpoints = [path for path in output.iterdir() if re.fullmatch(CHECKPOINTS, path.name)]
    for path in checkpoints:
        if why := why_kept(
            path, "a checkpoint", lambda file: str(file) == MANIFEST, recorded_in(path)
        ):
            return f"{path.name}: {why}"
    # a run that is killed while it saves its model has no record of it yet
    saved = {name for path in checkpoints for name in recorded_in(path)}
    folders = {STAGING, *(path.name for path in checkpoints)}

    def is_known(file: PurePosixPath) -> bool:
        first, is_logged = file.parts[0], file.name.startswith(EVENTS)
        is_saved = file.as_posix() in saved or re.fullmatch(OF_A_RUN, file.as_posix()) is not None
        # a log is opened after its folder is made
        is_empty = (output / file).is_dir() and not (output / file).is_symlink()
        is_log = first == LOGS and (is_logged or is_empty)
        return first in folders or is_saved or is_log

    return why_kept(output, "a run", is_known, recorded_in(output))


def is_finished(output: Path) -> bool:
    """Whether the output directory holds the trained model, with every file as it was written."""
    wrong = damage(output)
    if wrong is None:
        return True
    if (output / MANIFEST).is_file():
        if not checkpoints_in(output):
            raise GrowthError(
                f"{output} holds a trained model that is damaged ({wrong}) and no checkpoints: "
                "restore it, or delete the directory to train again"
            )
        warn(
            f"the trained model in {output} is damaged ({wrong}): it is made again from the last "
            "whole checkpoint"
        )
    return False


def has_steps_left(output: Path, training: TrainingSection) -> bool:
    """Whether the file of a run asks for more steps than its directory has."""
    newest = last_checkpoint(output)
    if newest is None or not may_grow_longer(training):
        return False
    done = step_of(newest)
    if done > training.steps:
        raise GrowthError(
            f"training.steps is {training.steps}, but {newest} has {done} already: give {done} or "
            "more, or choose another directory"
        )
    return done < training.steps


def _marked(output: Path) -> dict[str, Any]:
    """The identity in the marker of a run."""
    marker = output / MARKER
    if not marker.is_file():
        raise GrowthError(
            f"{output} is not empty and not the directory of a run: choose another directory"
        )
    record = read_json(marker, MOST_BYTES, "run marker")
    if isinstance(record, dict) and "format" in record and "growkern" in record:
        check_format(marker, record, FORMAT, ())
        identity = {name: record.get(name) for name in ("run", "inputs")}
        if all(isinstance(table, dict) for table in identity.values()):
            return identity
    raise GrowthError(
        f"{marker} was not written by growkern, or is damaged: choose another directory"
    )


def identity_of(
    run: Run, texts: Mapping[str, Iterable[Path]], paths: Mapping[str, Path]
) -> dict[str, Any]:
    """The identity of a run; two runs are the same if these are equal.

    Args:
        texts: the local files of the data, by its use ("train", "validation").
        paths: what else the run reads, such as checkpoints, a tokenizer or a teacher cache, by
            the names in the run file.
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
    inputs = {f"data.{name}": _digest(files) for name, files in texts.items()}
    for name, path in paths.items():
        inputs[name] = _digest([path] if path.is_file() else sorted(path.glob("*.*")))
    return {"run": json.loads(json.dumps(values)), "inputs": inputs}


def may_grow_longer(training: TrainingSection) -> bool:
    """Whether more steps leave the steps before them as they were."""
    return training.schedule == "constant_with_warmup"


def _digest(files: Iterable[Path]) -> str:
    """One fingerprint of several files; folders among them are left out."""
    digest = hashlib.sha256()
    for file in files:
        if file.is_file():
            digest.update(fingerprint(file).encode())
    return digest.hexdigest()


def changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """How an identity differs from an earlier one, as a phrase."""
    phrases = []
    for section, after in new["run"].items():
        before = old["run"].get(section)
        if isinstance(before, dict) and isinstance(after, dict):
            phrases += [
                f"{section}.{name} {_short(before.get(name))} -> {_short(after.get(name))}"
                for name in {**before, **after}
                if before.get(name) != after.get(name)
            ]
        elif before != after:
            phrases.append(f"[{section}] is {'left out' if after is None else 'new'}")
    phrases += [
        f"the files of {name} changed"
        for name, value in new["inputs"].items()
        if old["inputs"].get(name, value) != value
    ]
    phrases = phrases or ["its run.json is of another version of growkern"]
    more = len(phrases) - MOST_CHANGES
    return "; ".join(phrases[:MOST_CHANGES] + ([f"and {more} more"] if more > 0 else []))


def _short(value: Any) -> str:
    text = "none" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
