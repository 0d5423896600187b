"""Trains a model as a run file says: `growkern.run(path)`.

The output directory belongs to one run. It holds `run.json` (which run it is), its `log.jsonl` and
the checkpoints `checkpoint-<step>`, with float32 weights. At the end it also holds the trained
model in the dtype of the checkpoint that the run began with, its tokenizer, the state
`trainer_state.json`, and `manifest.json` with the checksums of these files. A run is finished if
they are all as written.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PrinterCallback
from transformers.trainer_utils import TrainOutput

from growkern.arguments import path_of
from growkern.errors import FOUND, GrowthError, reason, say, warn, without_bars
from growkern.growth.optimizer import grow_optimizer_into
from growkern.publish import locked
from growkern.train.dataset import from_first, read_data
from growkern.train.distributed.shard import shard
from growkern.train.loop import (
    TwoStageTrainer,
    check_switches,
    grown_model,
    steps_per_epoch,
    trainer_of_run,
    unfilled_model,
)
from growkern.train.run.banner import end, header, print_lines
from growkern.train.run.file import load_runs
from growkern.train.run.generations import check_generations, check_growths
from growkern.train.run.resolve import (
    Checkpoint,
    ResolvedRun,
    claim_output,
    has_steps_left,
    identity_of,
    is_finished,
    is_ours,
    resolve,
)
from growkern.train.safety import SignalWatch, close_staging, last_checkpoint, step_of
from growkern.train.sections import DistributedOptions
from growkern.train.topk_teacher import TopKTeacher


def run(path: str | Path, *, overwrite: bool = False, progress: bool = True) -> TrainOutput | None:
    """Train as a run file says, or resume the same run from its last whole checkpoint.

    A file with several generations trains them in turn. Those that are finished are left alone.

    Under torchrun every process calls this function. Each batch is divided among the processes.
    Losses and weights are those of one process up to rounding, with three exceptions. Every process
    draws dropout masks of its own. It reads a part of a stream of its own. And Adam makes steps of
    gradients that are nothing but rounding, such as those of the biases of keys in attention, if
    its epsilon is smaller than they are.
    SIGINT, SIGTERM and SIGUSR1 save a checkpoint and end the run. The random numbers of the process
    are those of `training.seed` afterwards.

    Args:
        path: the run file.
        overwrite: delete the output directory first if it holds another run.
        progress: whether to print a header, log lines and an end, with progress bars where stderr
            is a terminal. Without it nothing but warnings is printed. `log.jsonl` in the output
            directory gets the log lines in any case.

    Returns:
        The output of `transformers.Trainer` (global_step, training_loss, metrics) of the last
        run, or None when nothing was left to train. The directory of a finished run is not changed.

    Raises:
        GrowthError: before any work, if the file, a path, a model or the directory cannot be used,
            or another process trains in the directory. During the run, if a step is not finite or
            the model cannot be saved.
        KeyboardInterrupt: SIGINT ended the run.
        Terminated: SIGTERM or SIGUSR1 ended the run.
    """
    path = path_of("path", path, "the name of a run file")
    command = resume_command(path)
    bars = without_bars(progress, ("huggingface_hub.utils", "datasets"))
    begun: list[Path] = []
    with SignalWatch(f"stopped; to resume: {command}"), bars, _telling_if_failed(command, begun):
        check_switches()
        result, base = None, path.parent
        runs = load_runs(path)
        # a single one is checked with its inputs, which says more
        if len(runs) > 1:
            check_generations(runs, base, overwrite=overwrite)
            check_growths(path, runs)
        for number, settings in enumerate(runs, start=1):
            resolved = resolve(settings, base, progress=progress)
            begun.append(resolved.output)
            output = resolved.output.parent if len(runs) > 1 else resolved.output
            after = f"growkern plot {shlex.quote(str(output))}"
            if number < len(runs):
                after = f"generation {number + 1} of {len(runs)}"
            result = _train(resolved, (command, after), overwrite=overwrite, progress=progress)
        return result


def _train(
    run: ResolvedRun, hints: tuple[str, str], *, overwrite: bool, progress: bool
) -> TrainOutput | None:
    output, (command, after) = run.output, hints
    is_first = os.environ.get("RANK", "0") == "0"
    # one process reads the inputs and a finished model, whatever their number
    identity, finished = from_first(lambda: _found(run, overwrite))
    if finished:
        if is_first:
            # a run that was killed after it had saved its model
            close_staging(output)
        if progress and is_first:
            done = f"{output} is trained already; nothing was done. To train anew, delete it"
            print_lines({"finished": done})
        return None

    with locked(output, "training in") if is_first else nullcontext():
        # another process may have been at work until now
        ours = is_ours(output, identity, overwrite)
        first_start = not ours or last_checkpoint(output) is None
        trainer = build_trainer(run, progress=progress, first_start=first_start)
        trainer.saver.hint = command
        if not progress:
            trainer.remove_callback(PrinterCallback)
        if first_start:
            _grow_optimizer(run, trainer)
        # after all checks, so that a refused run deletes nothing
        if not ours and is_first:
            claim_output(output, identity)
        _warn_of_others()
        checkpoint = trainer.saver.newest_whole()
        if progress and is_first:
            print_lines(header(run, trainer, checkpoint, command))
        result = _train_from(trainer, checkpoint)
        trainer.save_final_model(run.checkpoint.dtype)
        _warn_of_others()
        if progress and is_first:
            print_lines(end(output, trainer, after))
    return result


def _warn_of_others() -> None:
    """Warn of what processes other than the first have found alone. All processes call this."""
    found: list[Any] = [FOUND]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, FOUND)
    FOUND.clear()
    for message in dict.fromkeys(text for texts in found[1:] for text in texts):
        if message not in found[0]:
            ranks = [str(rank) for rank, texts in enumerate(found) if message in texts]
            warn(f"rank {', '.join(ranks)}: {message}")
    FOUND.clear()


@contextlib.contextmanager
def _telling_if_failed(command: str, begun: Sequence[Path]) -> Iterator[None]:
    """If a run fails, print what this process has found: the others may never come to compare.

    If another process has ended, one line takes the place of PyTorch's traceback of a hundred.
    """
    try:
        yield
    except Exception as error:
        # the first process has printed its own
        if (rank := os.environ.get("RANK", "0")) != "0":
            for message in dict.fromkeys(FOUND):
                say(f"growkern: warning: rank {rank}: {message}", sys.stderr)
        if not (why := _lost_process(error)):
            raise
        saved = next(filter(None, map(last_checkpoint, reversed(begun))), "none")
        raise GrowthError(f"{why}; last checkpoint: {saved}; to resume: {command}") from error


def _lost_process(error: Exception) -> str:
    """What an error says of another process; empty if that is not its cause."""
    if str(error).startswith("DataLoader worker"):
        return "a data worker was killed, which happens when memory is short"
    # gloo has no class of errors
    if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
        said = re.sub(r"^\[\S+\] ", "", reason(error)).split(". ")[0]
        return f"another process has ended, or cannot be reached ({said})"
    return ""


def _found(run: ResolvedRun, overwrite: bool) -> tuple[dict[str, Any], bool]:
    """The identity of a run, and whether its directory holds the trained model already."""
    identity, output = identity_of(run.settings, run.texts, run.inputs), run.output
    ours = is_ours(output, identity, overwrite)
    left = ours and has_steps_left(output, run.settings.training)
    return identity, ours and not left and is_finished(output)


def _grow_optimizer(run: ResolvedRun, trainer: TwoStageTrainer) -> None:
    """Give the trainer the grown state of the source's optimizer, if the run names one."""
    growth = run.settings.first_growth
    if growth is None or growth.optimizer is None:
        return
    optimizer, state = trainer.create_optimizer(), run.base / growth.optimizer
    try:
        grow_optimizer_into(trainer.model, optimizer, state, moments=str(growth.moments))
    except GrowthError as error:
        raise GrowthError(f"growth.optimizer cannot be used: {error}") from error


def _train_from(trainer: TwoStageTrainer, checkpoint: Path | None) -> TrainOutput | None:
    """Train from a checkpoint, or from the start. None if the checkpoint is the end of the run.

    The trainer then holds the weights and the log history that the run ended with.
    """
    if checkpoint is None:
        return trainer.train()
    # at the end of the run Trainer itself would train one step too many
    if step_of(checkpoint) < trainer.args.max_steps or trainer.args.max_steps <= 0:
        return trainer.train(resume_from_checkpoint=checkpoint)
    trainer.take_end(checkpoint)
    return None


def build_trainer(
    run: ResolvedRun, *, progress: bool = True, first_start: bool = True
) -> TwoStageTrainer:
    """Load the models and the data of a run and make its trainer; see `build_model`."""
    settings = run.settings
    state = settings.first_growth and settings.first_growth.optimizer
    if first_start and state and not (run.base / state).exists():
        raise GrowthError(f"growth.optimizer cannot be used: {run.base / state}: no such file")
    # a dead server is noticed before the data is read, and unusable data before the model
    rows_of_teacher = _rows_of_teacher(run)
    if rows_of_teacher is not None:
        rows_of_teacher.check_objective(run.data.objective == "clm")
        rows_of_teacher.common_vocabulary(run.model, run.options["processing_class"])
    readers, seed = run.readers, settings.training.seed
    data: Any = read_data(run.data, readers, base=run.base, seed=seed, progress=progress)
    # only to refuse it before the model is read: the trainer counts the batches of its own loader
    run.in_steps(lambda: (steps_per_epoch(len(data.train), run.args), run.args.max_steps))
    model = build_model(run, first_start=first_start)
    teachers: Any = [_build_teacher(run, teacher) for teacher in run.teachers] or None
    if settings.teacher is not None and settings.teacher.names:
        teachers = dict(zip(settings.teacher.names, teachers, strict=True))
    options = {**run.options, "train_dataset": data.train, "eval_dataset": data.validation}
    teacher = rows_of_teacher or teachers
    return trainer_of_run(replace(run, model=model, teacher=teacher, options=options))


def build_model(run: ResolvedRun, *, first_start: bool) -> Any:
    """The model of a run, sharded if the run says so. All processes call this.

    A grown model never exists whole and never on disk. It is built without memory, sharded, and
    each process computes the parts that it holds. Only the first start grows: a resumed run gets
    memory for its parts and loads them from its checkpoint.
    """
    options = run.settings.distributed or DistributedOptions()
    start = run.checkpoint
    dtype = start.training_dtype
    # None: the weights are not rounded, whatever their config says
    wanted = dtype if dtype != start.dtype else None
    if run.plan is None:
        return shard(start.load(wanted), options)
    if first_start:
        return grown_model(run.plan, options, dtype)
    name, config = run.plan.large.class_name, run.plan.target_config
    return unfilled_model(name, config, run.plan, options, dtype)


def _build_teacher(run: ResolvedRun, teacher: Checkpoint) -> Any:
    """A teacher, spread over the processes as the student is."""
    model, options = teacher.load().requires_grad_(False), run.settings.distributed
    if options is None or not run.settings.is_sharded:
        return model
    # its activations are not kept, and it is not worth compiling
    return shard(model, replace(options, activation_checkpointing=False, compile_blocks=False))


def _rows_of_teacher(run: ResolvedRun) -> TopKTeacher | None:
    """A teacher that is known by its likeliest tokens, if the run has one."""
    section, schedule = run.settings.teacher, run.settings.inheritance
    if section is None or schedule is None or section.is_model:
        return None
    if section.cache:
        from growkern.train.topk_teacher import TeacherCache

        return TopKTeacher(TeacherCache(run.base / section.cache), schedule)
    from growkern.train.topk_teacher import ServedTeacher

    size = section.vocab_size
    served = ServedTeacher(
        str(section.url), section.k or 0, model=section.served_model, vocab_size=size,
        tokenizer=run.options["processing_class"] if size else None,
    )  # fmt: skip
    return TopKTeacher(served, schedule)


def resume_command(file: Path) -> str:
    """The command that starts a run again, with the launcher that has started it."""
    command = f"growkern train {shlex.quote(str(file))}"
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return command
    # srun may also have started torchrun
    if "SLURM_PROCID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"srun --ntasks={processes} ... (as before) {command}"
    local = os.environ.get("LOCAL_WORLD_SIZE", str(processes))
    launcher = f"torchrun --nproc_per_node={local}"
    if int(local) < processes:
        launcher += " ... (as before, on every node)"
    return f"{launcher} -m {command}"
