"""Trains a model as a run file says: `growkern.run(path)`.

The output directory belongs to one run. It holds `run.json` (which run it is) and the checkpoints
`checkpoint-<step>`, with float32 weights. At the end it also holds the trained model in the dtype
of the checkpoint that the run began with, its tokenizer, the log history `trainer_state.json`, and
`manifest.json` with the checksums of these files. A run is finished if they are all as written.
"""

import os
import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from transformers.trainer_utils import TrainOutput

from growkern.errors import GrowthError
from growkern.growth.optimizer.into import grow_optimizer_into
from growkern.growth.source.config import read_config
from growkern.publish.lock import locked
from growkern.train.dataset.load import describe_data, load_data
from growkern.train.dataset.source import find_sources
from growkern.train.distributed.shard import check_replicas, join_processes
from growkern.train.loop.checks import check_arguments, check_block_size, check_switches
from growkern.train.loop.progress import last_losses
from growkern.train.loop.trainer import TwoStageTrainer
from growkern.train.model.load import (
    check_directory,
    check_fits,
    has_tokenizer,
    load_tokenizer,
    stored_dtype,
)
from growkern.train.optimizer.choose import check_optimizer
from growkern.train.run.arguments import (
    batch_of_a_process,
    check_best_metric,
    checked_arguments,
    describe_arguments,
    reports_of,
    training_arguments,
)
from growkern.train.run.build import build_model, build_teacher, check_growths, with_directories
from growkern.train.run.directory import begin, check_output, is_finished, is_ours
from growkern.train.run.file import Run, load_runs
from growkern.train.run.identity import identity_of
from growkern.train.run.messages import (
    PRECISIONS,
    describe_device,
    describe_growth,
    describe_model,
    describe_optimizer,
    describe_saving,
    print_lines,
    resume_command,
)
from growkern.train.run.objective import (
    check_generator,
    choose_objective,
    labelled_share,
)
from growkern.train.safety.checkpoints import (
    behind_link,
    close_staging,
    last_checkpoint,
    step_of,
)
from growkern.train.safety.signals import SignalWatch
from growkern.train.topk_teacher.facts import TopKRows
from growkern.train.topk_teacher.served import ServedTeacher
from growkern.train.topk_teacher.store import TeacherCache
from growkern.units import human


def run(path: str | Path, *, overwrite: bool = False, progress: bool = True) -> TrainOutput | None:
    """Train as a run file says, or resume the same run from its last whole checkpoint.

    A file with several generations trains them in turn. Those that are finished are left alone.

    Under torchrun every process calls this function. Each batch is divided among the processes.
    Losses and weights are those of one process up to rounding, with three exceptions. Every process
    draws dropout masks of its own. It reads a part of a stream of its own. And Adam makes steps of
    gradients that are nothing but rounding, such as those of the biases of keys in attention, if
    its epsilon is smaller than they are.
    SIGINT and SIGTERM save a checkpoint and end the run.

    Args:
        path: the run file.
        overwrite: delete the output directory first if it holds another run.
        progress: whether to print a header, progress bars and an end.

    Returns:
        The output of `transformers.Trainer` (global_step, training_loss, metrics) of the last
        run, or None when nothing was left to train. The directory of a finished run is not changed.

    Raises:
        GrowthError: before any work, if the file, a path, a model or the directory cannot be used,
            or another process trains in the directory. During the run, if a step is not finite or
            the model cannot be saved.
        KeyboardInterrupt: SIGINT ended the run.
        Terminated: SIGTERM ended the run.
    """
    command = resume_command(Path(path))
    with SignalWatch(f"stopped; to resume: {command}"):
        check_switches()
        result, base = None, Path(path).parent
        for one in load_runs(path):
            result = _train(one, base, command, overwrite=overwrite, progress=progress)
        return result


def _train(
    run: Run, base: Path, command: str, *, overwrite: bool, progress: bool
) -> TrainOutput | None:
    batch_of_a_process(run)
    checked_arguments(run.trainer or {})
    sources = find_sources(run.data, base)
    texts = {name: list(source.files) if source else [] for name, source in sources.items()}
    settings, run = run, with_directories(run, base)
    for name in _checkpoint_directories(run):
        check_directory(base / name)
    choose_objective(run, base)
    reports_of(run.output)
    output = behind_link(base / run.output.directory)
    kept = [base / run.data.cache] if run.data.cache else []
    check_output(output, [*(base / name for name in _inputs(run)), *kept], texts)
    # by the names in the run file: a cache may lie elsewhere tomorrow
    named = zip(_inputs(settings), _inputs(run), strict=True)
    identity = identity_of(settings, texts, {name: base / place for name, place in named})
    is_first = os.environ.get("RANK", "0") == "0"
    if is_ours(output, identity, overwrite) and is_finished(output):
        if is_first:
            # a run that was killed after it had saved its model
            close_staging(output)
        if progress and is_first:
            print_lines({"finished": f"{output} is trained already; nothing was done"})
        return None

    with locked(output, "training in") if is_first else nullcontext():
        # another process may have been at work until now
        ours = is_ours(output, identity, overwrite)
        first_start = not ours or last_checkpoint(output) is None
        trainer = build_trainer(run, base, progress=progress, first_start=first_start)
        trainer.resume_hint = command
        check_best_metric(trainer, trainer.side.name if trainer.side else None)
        if first_start:
            _grow_optimizer(run, base, trainer)
        # after all checks, so that a refused run deletes nothing
        if not ours and is_first:
            begin(output, identity)
        trainer.accelerator.wait_for_everyone()
        checkpoint = trainer.newest_whole_checkpoint()
        if progress and is_first:
            print_lines(_header(run, base, trainer, checkpoint, command))
        result = _train_from(trainer, checkpoint)
        trainer.save_final_model(stored_dtype(base / run.checkpoint))
        if progress and is_first:
            print_lines(_end(output, trainer))
    return result


def _grow_optimizer(run: Run, base: Path, trainer: TwoStageTrainer) -> None:
    """Give the trainer the grown state of the source's optimizer, if the run names one."""
    growth = run.first_growth
    if growth is None or growth.optimizer is None:
        return
    optimizer, state = trainer.create_optimizer(), base / growth.optimizer
    try:
        grow_optimizer_into(trainer.model, optimizer, state, moments=str(growth.moments))
    except GrowthError as error:
        raise GrowthError(f"growth.optimizer cannot be used: {error}") from error


def train_or_resume(trainer: TwoStageTrainer) -> TrainOutput | None:
    """Train from the start, or from the last whole checkpoint in the output directory.

    Returns:
        The output of `transformers.Trainer`, or None when that checkpoint is the end of the run.
        The trainer then holds the weights and the log history that the run ended with.

    Raises:
        GrowthError: there are checkpoints, but all of them are damaged.
    """
    return _train_from(trainer, trainer.newest_whole_checkpoint())


def _train_from(trainer: TwoStageTrainer, checkpoint: Path | None) -> TrainOutput | None:
    if checkpoint is None:
        return trainer.train()
    # at the end of the run Trainer itself would train one step too many
    if step_of(checkpoint) < trainer.args.max_steps or trainer.args.max_steps <= 0:
        return trainer.train(resume_from_checkpoint=checkpoint)
    trainer.fit_to(checkpoint)
    trainer.take_end(checkpoint)
    return None


def _header(
    run: Run, base: Path, trainer: TwoStageTrainer, checkpoint: Path | None, command: str
) -> dict[str, str]:
    """The lines that describe a run before its first step."""
    training, data = run.training, run.data
    sequences = training.batch_size * training.accumulation
    objective = choose_objective(run, base)
    labelled = labelled_share(replace(data, objective=objective))
    flops = trainer.flops_per_step(sequences, data.sequence_length, *labelled)
    dtype = str(stored_dtype(base / run.checkpoint)).removeprefix("torch.")
    lines = {
        "model": describe_model(trainer.model, base / run.checkpoint),
        "data": describe_data(trainer.train_dataset, trainer.eval_dataset),
        "objective": objective if trainer.side is None else f"{objective}: {trainer.side.about}",
        "precision": f"{PRECISIONS[trainer.precision]}; the checkpoint is {dtype}",
        "optimizer": describe_optimizer(training.optimizer, trainer.optimizers.plan),
        "device": describe_device(trainer.args.device, trainer.args.world_size),
        "steps": f"{training.steps}, of {sequences} x {data.sequence_length} tokens",
        "FLOPs": ", ".join(f"{human(n)} in {name}" for name, n in flops.items()),
        "saves": describe_saving(
            base / run.output.directory,
            training.save_every,
            training.save_minutes,
            training.keep_checkpoints,
        ),
        "to resume": command,
    }
    if run.later_growths:
        lines["growth"] = describe_growth(run.later_growths)
    if run.trainer:
        lines["trainer"] = describe_arguments(run.trainer)
    if checkpoint is not None:
        lines["resumes"] = f"from {checkpoint}"
    return lines


def _end(output: Path, trainer: TwoStageTrainer) -> dict[str, str]:
    """Where the model is, and what to do next."""
    step = trainer.state.global_step
    lines = {
        "finished": f"{step} steps, {last_losses(trainer.state.log_history, step)}",
        "model": f"{output} ({str(trainer.model.dtype).removeprefix('torch.')})",
        "next": f"growkern plot {shlex.quote(str(output))}",
    }
    if trainer.steps.skipped:
        lines["skipped"] = f"{trainer.steps.skipped} steps that were not finite"
    return lines


def build_trainer(
    run: Run,
    base: Path,
    *,
    progress: bool = True,
    first_start: bool = True,
) -> TwoStageTrainer:
    """Load the models, the tokenizer and the data of a run and make its trainer.

    Args:
        run: the settings.
        base: folder that the paths in `run` are relative to.
        progress: whether to show progress bars.
        first_start: False if a checkpoint will be loaded, so that nothing need be grown.

    Raises:
        GrowthError: the models, the tokenizer and the data do not fit together.
    """
    tokenizer = load_tokenizer(base / (run.model.tokenizer or run.checkpoint))
    teacher_paths = [base / path for path in run.teacher.paths] if run.teacher else []
    for directory in teacher_paths:
        if not has_tokenizer(directory):
            raise GrowthError(
                f"the teacher {directory} has no tokenizer files, so its tokens cannot be compared "
                "with those of the run: copy the files of the teacher's tokenizer there"
            )
    objective = choose_objective(run, base)
    for directory in (base / run.checkpoint, *teacher_paths):
        check_fits(directory, tokenizer, run.data.sequence_length)
    check_generator(run, base, tokenizer)
    _check_sizes(run, base)
    _join_others(run)
    # before any work: arguments that cannot be used are noticed at once
    evaluate = bool(run.data.validation or run.data.validation_split)
    args = training_arguments(run, base, evaluate=evaluate, progress=progress)
    check_arguments(args, {})
    sharded = run.distributed is not None and run.distributed.sharding == "fsdp"
    check_optimizer(args, run.training.optimizer, sharded=sharded)
    # a dead server is noticed before the data is read, and unusable data before the model
    rows_of_teacher = _rows_of_teacher(run, base)
    data = load_data(
        replace(run.data, objective=objective),
        tokenizer,
        base=base,
        row_weights=run.loss.row_weights if run.loss else None,
        seed=run.training.seed,
        progress=progress,
    )
    collator = data.collator(tokenizer, seed=run.training.seed)
    model = build_model(run, base, first_start=first_start)
    return TwoStageTrainer(
        model,
        args,
        two_stage=run.two_stage,
        inheritance=run.inheritance,
        teacher=rows_of_teacher
        or [build_teacher(one, run.distributed) for one in teacher_paths]
        or None,
        teacher_tokenizer=[load_tokenizer(one) for one in teacher_paths],
        loss=run.loss,
        growth=run.later_growths,
        optimizer=run.training.optimizer,
        optimizer_options=run.optimizer,
        processing_class=tokenizer,
        train_dataset=data.train,
        eval_dataset=data.validation,
        data_collator=collator,
        precision=run.training.precision,
        on_nonfinite=run.training.on_nonfinite,
        save_minutes=run.training.save_minutes,
    )


def _check_sizes(run: Run, base: Path) -> None:
    """Check growths and the blocks of stage 1, before data and model are read."""
    check_growths(run, base)
    layers = getattr(read_config(base / run.checkpoint, any_family=True), "num_hidden_layers", None)
    if layers is not None and not run.growth:
        check_block_size(run.two_stage, layers)


def _rows_of_teacher(run: Run, base: Path) -> TopKRows | None:
    """A teacher that is known by its likeliest tokens, if the run has one."""
    section = run.teacher
    if section is not None and section.cache:
        return TeacherCache(base / section.cache)
    if section is not None and section.url and section.k:
        return ServedTeacher(section.url, section.k, model=section.served_model)
    return None


def _join_others(run: Run) -> None:
    """Start communication with the other processes of torchrun, if there are any."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if run.distributed is not None:
        check_replicas(run.distributed.replicas, processes)
    if processes > 1:
        accelerator = torch.accelerator.current_accelerator()
        join_processes("cpu" if accelerator is None else accelerator.type)


def _checkpoint_directories(run: Run) -> list[str]:
    generator = [run.model.generator] if run.model.generator else []
    return [run.checkpoint, *generator, *(run.teacher.paths if run.teacher else ())]


def _inputs(run: Run) -> list[str]:
    others = [run.model.tokenizer, run.teacher.cache if run.teacher else None]
    others.append(run.first_growth.optimizer if run.first_growth else None)
    return _checkpoint_directories(run) + [one for one in others if one]
