"""Resolves a run file: each name is looked up, each model opened and each setting checked once.

The output directory belongs to one run. `run.json` there holds its identity: its settings and
fingerprints of its inputs. A run file that gives the same one resumes the run.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from transformers.utils import CONFIG_NAME

from growkern.errors import GrowthError, reason, warn
from growkern.files import PARTIAL, check_format, read_json, write_whole
from growkern.growth.history import History
from growkern.growth.options import ROUTERS
from growkern.growth.plan import GrowthPlan, refuse_idle_options
from growkern.growth.source import (
    Source,
    Stamps,
    class_in,
    config_directory,
    load_model,
    located,
    open_source,
    read_config,
    scale_block,
)
from growkern.package import version
from growkern.publish import LOCK_FILE, MANIFEST, move, recorded_in, why_kept
from growkern.train.dataset import Reader, early_collator, find_sources, fingerprint, open_data
from growkern.train.distributed import check_replicas, join_processes
from growkern.train.loop import (
    Beginning,
    ExpertBalancing,
    later_plans,
    on_meta,
    plan_in_run,
)
from growkern.train.loss import check_tokenizers
from growkern.train.model import check_directory, check_fits, has_tokenizer, load_tokenizer
from growkern.train.objectives import choose
from growkern.train.rules import check
from growkern.train.run.arguments import (
    check_best_metric,
    checked_arguments,
    training_arguments,
)
from growkern.train.run.file import Run, TrainingSection
from growkern.train.safety import (
    MARKER,
    STAGING,
    behind_link,
    checkpoints_in,
    close_staging,
    damage,
    last_checkpoint,
    open_staging,
    step_of,
)
from growkern.train.sections import DataSection, Objective

# one of the longest run files makes this much
FORMAT = 1
MOST_BYTES = 1_000_000
CHECKPOINTS = r"(damaged-)?checkpoint-\d+"
# of a run, besides what the records of its checkpoints name
OF_A_RUN = (
    r"run\.json|\.run\.json\.\w+\.part|\.lock|manifest\.json|log\.jsonl"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|loss_vs_flops\.png"
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
    for path in [*models, *(file for files in texts.values() for file in files)]:
        if output.resolve() in (path.resolve(), *path.resolve().parents):
            raise GrowthError(
                f"output.directory {output} contains {path}, which the run reads: choose another "
                "directory"
            )


def is_ours(output: Path, identity: dict[str, Any], overwrite: bool) -> bool:
    """Whether the output directory holds this run (True) or may be made new (False).

    What `identity` leaves out counts as unchanged.
    """
    # a process that was killed at its start leaves no more than these
    begun = (LOCK_FILE, PARTIAL.format(name=MARKER))
    names = [path.name for path in output.iterdir()] if output.is_dir() else []
    if all(any(fnmatch(name, pattern) for pattern in begun) for name in names):
        return False
    before = _marked(output)
    identity = {**before, **identity}
    if before == identity:
        return True
    if not overwrite:
        raise GrowthError(
            f"{output} holds another run ({changes(before, identity)}): undo the changes or choose "
            "another directory. overwrite=True (--overwrite) would delete its checkpoints and model"
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


def claim_output(output: Path, identity: dict[str, Any]) -> None:
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
            # sizes stand beside the other keys of a growth
            before, after = ({**x, **x.get("sizes", {}), "sizes": 0} for x in (before, after))
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


@dataclass(frozen=True)
class Checkpoint:
    """A model that a run reads. Its config is read and checked once, long before its weights.

    Attributes:
        stamps: what was known of config.json before it was read.
    """

    directory: Path
    config: Any
    stamps: Stamps

    @classmethod
    def of(cls, directory: Path) -> Checkpoint:
        """Open a directory."""
        check_directory(directory)
        stamps = Stamps.of(config_directory(directory) / CONFIG_NAME)
        config = read_config(directory, any_family=True)
        # takes the quantisation out of the config that it is given, and the weights need it
        scale_block(copy.deepcopy(config), directory, dequantize=True)
        return cls(directory, config, stamps)

    def without_weights(self) -> Any:
        """The model on the meta device, which is enough for the checks of a run."""
        config, cls = copy.deepcopy(self.config), class_in(self.directory, self.config)
        scale_block(config, self.directory, dequantize=True)
        try:
            model = on_meta(cls.__name__, config, self.training_dtype)
        except Exception as error:
            # values in a config make classes raise all kinds of errors
            why = f"config.json makes no model: {reason(error)[:300]}"
            raise GrowthError(f"{self.directory}: {why}") from error
        # the record of its growth is there
        model.name_or_path = str(self.directory)
        return model

    def load(self, dtype: torch.dtype | None = None) -> Any:
        """The model; `dtype` is that of the checkpoint by default."""
        # a hard link or new permissions change nothing in it
        self.stamps.check(lambda: True)
        return load_model(self.directory, dtype, config=self.config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights as the config names it; float32 if it names none."""
        return self.config.dtype or torch.float32

    @property
    def training_dtype(self) -> torch.dtype:
        """The dtype in which the weights train: float32 in place of half precision."""
        return trained_dtype(self.config)


def trained_dtype(config: Any) -> torch.dtype:
    """The dtype in which the weights of a model train, see `Checkpoint.training_dtype`."""
    dtype: torch.dtype = config.dtype or torch.float32
    return torch.float32 if dtype.itemsize == 2 else dtype


@dataclass(frozen=True, kw_only=True)
class ResolvedRun(Beginning):
    """All that the trainer of a run file begins with, and what the run reads and writes.

    Its settings were checked against each other and against its models. `model` is on the meta
    device, and teachers and data are still to be read.

    Attributes:
        base: folder that the paths in `settings` are relative to.
        checkpoint: of the model that is trained, or grown at the start.
        teachers: those that run in this process.
        data: with the objective of the model in place of "auto".
        readers: what reads the data, by its use.
        texts: the local files of the data, by its use.
        inputs: what else the run reads, by the names in the file: a cache may lie elsewhere
            tomorrow.
        plan: of the growth at the start.
    """

    settings: Run
    base: Path
    output: Path
    checkpoint: Checkpoint
    teachers: tuple[Checkpoint, ...]
    data: DataSection
    readers: Mapping[str, Reader]
    texts: Mapping[str, list[Path]]
    inputs: Mapping[str, Path]
    plan: GrowthPlan | None


def locate(base: Path, name: str, revision: str | None = None) -> Path:
    """The directory of a model: in the folder of the run file, or else downloaded from the Hub."""
    place = base / name
    if place.exists():
        # refuses a revision
        located(place, revision)
        return place
    return Path(located(name, revision))


def resolve(run: Run, base: Path, *, progress: bool = True) -> ResolvedRun:
    """Look up and open what a run names, and check all of it. Nothing is written.

    Paths in the settings are relative to `base`. Several processes all call this.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    check("processes", batch=run.training.batch_size, processes=processes)
    if run.distributed is not None:
        check_replicas(run.distributed.replicas, processes)
    checked_arguments(run.trainer or {})
    sources = find_sources(run.data, base)
    texts = {name: list(source.files) if source else [] for name, source in sources.items()}
    _warn_of_seen(run.data, texts)
    model, source = _opened(run, base)
    names = run.teacher.directories if run.teacher else ()
    teachers = tuple(Checkpoint.of(locate(base, name)) for name in names)
    data = replace(run.data, objective=_objective(run, model))

    of_words = locate(base, *run.words)
    inputs = {run.checkpoint: model.directory}
    inputs |= {name: teacher.directory for name, teacher in zip(names, teachers, strict=True)}
    inputs |= other_inputs(run, base, of_words)
    output = behind_link(base / run.output.directory)
    kept = [base / run.data.cache] if run.data.cache else []
    check_output(output, [*inputs.values(), *kept], texts)

    opened = {checkpoint.directory: checkpoint.config for checkpoint in (*teachers, model)}
    tokenizer = load_tokenizer(of_words, opened.get(of_words))
    plan, planned = plans_of(run, source, model.training_dtype, base)
    length = run.data.sequence_length
    check_fits(model.directory, tokenizer, length, plan.target_config if plan else model.config)
    words = [_words_of(teacher, length) for teacher in teachers]
    check_tokenizers(tokenizer, words)
    readers = open_data(data, sources, tokenizer, run.loss.row_weights if run.loss else None)
    if processes > 1:
        # the arguments ask for the devices of all processes
        join_processes()
    args = training_arguments(run, output, progress=progress)
    collator = early_collator(data, readers, tokenizer, run.training.seed)
    resolved = ResolvedRun(
        settings=run,
        base=base,
        output=output,
        checkpoint=model,
        teachers=teachers,
        data=data,
        readers=readers,
        texts=texts,
        inputs=inputs,
        plan=plan,
        model=_student(model, plan),
        args=args,
        options={"processing_class": tokenizer, "data_collator": collator},
        teacher_tokenizer=words or None,
        planned=planned,
        **_of_settings(run, base),
    )
    resolved = _checked(resolved)
    check_best_metric(args, run.data.validation_names)
    return resolved


def _of_settings(run: Run, base: Path) -> dict[str, Any]:
    """What a trainer begins with that the file says itself."""
    return {
        "two_stage": run.two_stage,
        "inheritance": run.inheritance,
        "loss": run.loss,
        "optimizer": run.training.optimizer,
        "optimizer_options": run.optimizer,
        "growth": [growth.inside(base) for growth in run.later_growths],
        "precision": run.training.precision,
        "on_nonfinite": run.training.on_nonfinite,
        "save_minutes": run.training.save_minutes,
        # so that the curves of small and grown models begin alike
        "evaluates_first": "eval_on_start" not in (run.trainer or {}),
    }


def _warn_of_seen(data: DataSection, texts: Mapping[str, list[Path]]) -> None:
    """Warn of validation text that is trained on: its loss says nothing of other text."""
    seen = [f"the split {data.split!r}"] if data.split == data.validation_split else []
    if data.dataset is None:
        train, validation = (
            [file for name, files in texts.items() if name.startswith(use) for file in files]
            for use in ("train", "validation")
        )
        # files of equal sizes alone are read
        sizes = {file.stat().st_size for file in validation}
        known = {fingerprint(file) for file in train if file.stat().st_size in sizes}
        seen = [str(file) for file in validation if known and fingerprint(file) in known]
    if seen:
        warn(f"{seen[0]} is training text and validation text: the validation loss will be too low")


def _opened(run: Run, base: Path) -> tuple[Checkpoint, Source | None]:
    """The model that a run begins with, and the same as a source if it will grow."""
    place = locate(base, run.checkpoint, run.revision)
    if not run.growths:
        return Checkpoint.of(place), None
    check_directory(place)
    stamps = Stamps.of(config_directory(place) / CONFIG_NAME)
    source = source_of(run, place)
    return Checkpoint(place, source.config, stamps), source


def source_of(run: Run, place: Path) -> Source:
    """The model that a run begins with, opened for growth."""
    growth = run.first_growth
    # training alone takes any weights
    dequantize = not run.growths or (growth is not None and growth.how.dequantize)
    # grown values are checked, not those of the source
    return open_source(place, allow_nonfinite=True, dequantize=dequantize)


def other_inputs(run: Run, base: Path, of_words: Path) -> dict[str, Path]:
    """What a run reads besides models and texts, by the names in the file."""
    growth = run.first_growth
    routers = [step.router for step in run.growths if step.router not in ROUTERS]
    named = (run.teacher and run.teacher.cache, growth and growth.optimizer, *routers)
    inputs = {run.model.tokenizer: of_words} if run.model.tokenizer else {}
    return inputs | {name: base / name for name in named if name}


def _objective(run: Run, model: Checkpoint) -> Objective:
    """The objective of a run."""
    has_targets = bool(run.data.target_column or run.data.labels_column)
    return choose(run.data.objective, class_in(model.directory, model.config), targets=has_targets)


def _student(model: Checkpoint, plan: GrowthPlan | None) -> Any:
    """The model that a run trains, on the meta device."""
    if plan is not None:
        student = on_meta(plan.large.class_name, plan.target_config, model.training_dtype)
        student.growth_plan = plan
        return student
    return model.without_weights()


def _checked(run: ResolvedRun) -> ResolvedRun:
    """A run after the checks of its trainer and of the callbacks that its settings ask for."""
    settings = run.settings
    if settings.training.expert_balancing is not None:
        balancing = ExpertBalancing(settings.training.expert_balancing)
        balancing.watch(run.model)
        run.options["callbacks"] = [balancing]
    runs = settings.teacher is None or settings.teacher.is_model
    models = [teacher.without_weights() for teacher in run.teachers] if runs else None
    has_length = not run.data.streaming
    return run.together(models, sharded=settings.is_sharded, has_length=has_length)


def _words_of(teacher: Checkpoint, length: int) -> Any:
    """The tokenizer of a teacher that reads rows of a length. It may lack tokens of the run's."""
    if not has_tokenizer(teacher.directory):
        raise GrowthError(
            f"the teacher {teacher.directory} has no tokenizer files, so its tokens cannot be "
            "compared with those of the run: copy the files of the teacher's tokenizer there"
        )
    words = load_tokenizer(teacher.directory, teacher.config)
    check_fits(teacher.directory, words, length, teacher.config)
    return words


def plans_of(
    run: Run, source: Source | None, dtype: torch.dtype, base: Path
) -> tuple[GrowthPlan | None, tuple[GrowthPlan, ...]]:
    """The growth at the start, and those inside the run, planned against each other."""
    if source is None:
        return None, ()
    first, planned = run.first_growth, None
    small, history = source.spec, source.history
    if first is not None:
        how = first.inside(base).how
        planned = plan_in_run(source, how, first.sizes, dtype)
        refuse_idle_options(planned)
        small, history = planned.large, History(planned)
    growths = [growth.inside(base) for growth in run.later_growths]
    return planned, tuple(later_plans(small, history, dtype, growths))
