"""Trains a model as a run file says: `train(path)`.

The output directory belongs to one run. It holds `run.json` (which run it is) and the checkpoints
`checkpoint-<step>`. At the end it also holds the trained model, its tokenizer and the log history,
`trainer_state.json`.
"""

import dataclasses
import glob
import hashlib
import json
import os
import re
import shutil
from contextlib import nullcontext
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput

from growkern.errors import GrowthError
from growkern.publish.lock import LOCK_FILE, locked
from growkern.train.cached_teacher.store import TeacherCache
from growkern.train.config import DataSection, Run, load_run
from growkern.train.data import CausalLMCollator, MaskedLMCollator, TokenBlocks, pack_text
from growkern.train.load import check_directory, check_fits, is_causal, load_language_model
from growkern.train.trainer import TwoStageTrainer
from growkern.whole import PARTIAL, write_whole

MARKER = "run.json"


def train(
    path: str | Path, *, overwrite: bool = False, progress: bool = True
) -> TrainOutput | None:
    """Train as a run file says, or resume the same run from its last checkpoint.

    Under torchrun every process calls this function. Each batch is divided among the processes.

    Args:
        path: the run file.
        overwrite: delete the output directory first if it holds another run.
        progress: whether to show progress bars.

    Returns:
        The output of `transformers.Trainer` (global_step, training_loss, metrics), or None when
        nothing was left to train. The directory of a finished run is not changed.

    Raises:
        GrowthError: before any work, if the file, a path, a model or the directory cannot be used,
            or another process trains in the directory.
    """
    run, base = load_run(path), Path(path).parent
    _batch_of_a_process(run)
    texts = {name: _text_files(base, getattr(run.data, name)) for name in ("train", "validation")}
    for name in _checkpoint_directories(run):
        check_directory(base / name)
    if run.output.tensorboard and find_spec("tensorboard") is None:
        raise GrowthError(
            "output.tensorboard is true but TensorBoard is not installed: set it to false, or "
            "pip install 'growkern[train]'"
        )
    output = base / run.output.directory
    _check_output(output, [base / name for name in _input_directories(run)], texts)
    identity = _identity(run, base, texts)
    if _is_ours(output, identity, overwrite) and (output / TRAINER_STATE_NAME).is_file():
        return None

    is_first = os.environ.get("RANK", "0") == "0"
    with locked(output, "training in") if is_first else nullcontext():
        # another process may have been at work until now
        ours = _is_ours(output, identity, overwrite)
        trainer = build_trainer(run, base, texts, progress=progress)
        # after all checks, so that a refused run deletes nothing
        if not ours and trainer.is_world_process_zero():
            _start_over(output, identity)
        trainer.accelerator.wait_for_everyone()
        result = train_or_resume(trainer)
        trainer.save_model()
        trainer.save_state()
    return result


def train_or_resume(trainer: TwoStageTrainer) -> TrainOutput | None:
    """Train from the start, or from the last complete checkpoint in the output directory.

    Returns:
        The output of `transformers.Trainer`, or None when that checkpoint is the end of the run.
        The trainer then holds the weights and the log history of the checkpoint.
    """
    checkpoint = last_checkpoint(Path(trainer.args.output_dir))
    if checkpoint is None:
        return trainer.train()
    # at the end of the run Trainer itself would train one step too many
    if _step_of(checkpoint) < trainer.args.max_steps or trainer.args.max_steps <= 0:
        return trainer.train(resume_from_checkpoint=str(checkpoint))
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    return None


def build_trainer(
    run: Run, base: Path, texts: dict[str, list[Path]], *, progress: bool = True
) -> TwoStageTrainer:
    """Load the models, the tokenizer and the data of a run and make its trainer.

    Args:
        run: the settings.
        base: folder that the paths in `run` are relative to.
        texts: files of "train" and "validation", in this order.
        progress: whether to show progress bars.

    Raises:
        GrowthError: the models, the tokenizer and the data do not fit together.
    """
    tokenizer = AutoTokenizer.from_pretrained(base / (run.model.tokenizer or run.model.path))
    model = load_language_model(base / run.model.path)
    teacher_paths = [base / path for path in run.teacher.paths] if run.teacher else []
    for directory in (base / run.model.path, *teacher_paths):
        check_fits(directory, tokenizer, run.data.sequence_length)
    train_blocks, eval_blocks = (_blocks(texts[name], tokenizer, run.data) for name in texts)
    collator: Any = CausalLMCollator(tokenizer)
    if not is_causal(model):
        seed = run.training.seed
        collator = MaskedLMCollator(tokenizer, run.data.masking_probability, seed)
    return TwoStageTrainer(
        model,
        _arguments(run, base, evaluate=eval_blocks is not None, progress=progress),
        two_stage=run.two_stage,
        inheritance=run.inheritance,
        teacher=TeacherCache(base / run.teacher.cache)
        if run.teacher and run.teacher.cache
        else [load_language_model(one) for one in teacher_paths] or None,
        teacher_tokenizer=[
            AutoTokenizer.from_pretrained(one) for one in teacher_paths if _has_tokenizer(one)
        ],
        processing_class=tokenizer,
        train_dataset=train_blocks,
        eval_dataset=eval_blocks,
        data_collator=collator,
    )


def last_checkpoint(directory: Path) -> Path | None:
    """The latest complete checkpoint of a directory, or None."""
    # the state file is written last: an interrupted checkpoint has none
    whole = [
        path
        for path in directory.glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-\d+", path.name) and _is_json(path / TRAINER_STATE_NAME)
    ]
    return max(whole, key=_step_of, default=None)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True


def _check_output(output: Path, models: list[Path], texts: dict[str, list[Path]]) -> None:
    """Check that no input lies in the output directory, which overwriting would delete."""
    inputs = [*models, *(file for files in texts.values() for file in files)]
    for path in inputs:
        if output.resolve() in (path.resolve(), *path.resolve().parents):
            raise GrowthError(
                f"output.directory {output} contains {path}, which the run reads: choose another "
                "directory"
            )


def _is_ours(output: Path, identity: dict[str, Any], overwrite: bool) -> bool:
    """Whether the output directory holds this run (True) or may be made new (False).

    Raises:
        GrowthError: it holds something else.
    """
    # a process that was killed at its start leaves no more than these
    begun = (LOCK_FILE, PARTIAL.format(name=MARKER))
    names = os.listdir(output) if output.is_dir() else []
    if all(any(fnmatch(name, pattern) for pattern in begun) for name in names):
        return False
    marker = output / MARKER
    if not marker.is_file():
        raise GrowthError(
            f"{output} is not empty and not the directory of a run: choose another directory"
        )
    if _is_json(marker) and json.loads(marker.read_text()) == identity:
        return True
    if not overwrite:
        raise GrowthError(f"{output} holds another run: choose another directory, or --overwrite")
    return False


def _start_over(output: Path, identity: dict[str, Any]) -> None:
    """Delete what another run left, and say which run this is.

    The old marker stays until the new one replaces it: killed in between, the directory is still
    that of a run, and may be overwritten.
    """
    for path in output.iterdir():
        if path.name in (MARKER, LOCK_FILE):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    text = json.dumps(identity, indent=1)
    write_whole(output / MARKER, lambda partial: partial.write_text(text, encoding="utf-8"))


def _identity(run: Run, base: Path, texts: dict[str, list[Path]]) -> dict[str, Any]:
    """The settings and a checksum of the inputs; two runs are the same if these are equal."""
    values = dataclasses.asdict(run)
    del values["output"]
    for name in ("log_every", "keep_checkpoints", "data_workers"):
        del values["training"][name]
    digest = hashlib.sha256()
    for files in texts.values():
        digest.update(str(len(files)).encode())
        for file in files:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    for name in _input_directories(run):
        for file in sorted((base / name).glob("*.*")):
            whole = file.suffix == ".json"
            digest.update(file.read_bytes() if whole else str(file.stat().st_size).encode())
    return {"run": json.loads(json.dumps(values)), "inputs": digest.hexdigest()}


def _checkpoint_directories(run: Run) -> list[str]:
    return [run.model.path, *(run.teacher.paths if run.teacher else ())]


def _input_directories(run: Run) -> list[str]:
    cache = run.teacher.cache if run.teacher else None
    return _checkpoint_directories(run) + ([cache] if cache else [])


def _has_tokenizer(directory: Path) -> bool:
    return (directory / "tokenizer_config.json").is_file()


def _text_files(base: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The files that match the patterns, in the order of the patterns, sorted within each.

    Raises:
        GrowthError: no file matches a pattern.
    """
    files: list[Path] = []
    for pattern in patterns:
        found = sorted(glob.glob(str(base / pattern), recursive=True))
        found = [name for name in found if Path(name).is_file()]
        if not found:
            raise GrowthError(f"no text file matches {base / pattern}")
        files += map(Path, found)
    return files


def _blocks(files: list[Path], tokenizer: Any, data: DataSection) -> TokenBlocks | None:
    return pack_text(files, tokenizer, data.sequence_length) if files else None


def _batch_of_a_process(run: Run) -> int:
    """The blocks of a micro-batch that each process of torchrun gets."""
    batch, processes = run.training.batch_size, int(os.environ.get("WORLD_SIZE", "1"))
    if batch % processes:
        raise GrowthError(
            f"training.batch_size is {batch}: it must be a multiple of the {processes} processes"
        )
    return batch // processes


def _arguments(run: Run, base: Path, *, evaluate: bool, progress: bool) -> TrainingArguments:
    training = run.training
    return TrainingArguments(
        output_dir=str(base / run.output.directory),
        max_steps=training.steps,
        per_device_train_batch_size=_batch_of_a_process(run),
        per_device_eval_batch_size=_batch_of_a_process(run),
        gradient_accumulation_steps=training.accumulation,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        lr_scheduler_type=training.schedule,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        bf16=training.precision == "bf16",
        use_cpu=not torch.accelerator.is_available(),
        seed=training.seed,
        data_seed=training.seed,
        logging_steps=training.log_every,
        logging_first_step=True,
        eval_strategy="steps" if evaluate else "no",
        eval_steps=training.eval_every or training.steps,
        save_strategy="steps",
        save_steps=training.save_every or training.steps,
        save_total_limit=training.keep_checkpoints,
        dataloader_num_workers=training.data_workers,
        report_to="tensorboard" if run.output.tensorboard else "none",
        disable_tqdm=not progress,
        # pinning memory gives a warning in every epoch without an accelerator
        dataloader_pin_memory=torch.cuda.is_available(),
    )
