"""Growth in memory (`grow`), and from files to files (`grow_checkpoint`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor
from tqdm import tqdm

from growkern.arguments import path_of
from growkern.errors import FunctionChangedWarning, GrowthError, warn
from growkern.growth.disk import (
    Journal,
    ShardLayout,
    Stream,
    are_stored,
    check_space,
    check_target,
    free_target,
    lay_out,
    read_modules,
    write_checksums,
    write_companions,
    write_modules,
)
from growkern.growth.disk.staging import staging
from growkern.growth.models import (
    class_shapes,
    cpu_by_default,
    fit_cache,
    restore_buffers,
    tie,
    untrained_model,
)
from growkern.growth.optimizer import OPTIMIZER_FILE, OptimizerStream
from growkern.growth.options import parse_size
from growkern.growth.plan import (
    MEMORY_LIMIT,
    GrowthPlan,
    GrowthReport,
    Task,
    build_each,
    plan,
    workers_within,
)
from growkern.growth.record import (
    GrowthSettings,
    card_text,
    identity,
    lineage_text,
    record_when_saved,
    source_files,
    write_card,
    write_lineage,
)
from growkern.growth.source import located, refuse_unreadable
from growkern.growth.stored import check_names_and_shapes, refuse_overflow

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from typing_extensions import Unpack

    from growkern.growth.options import GrowthKeywords, Moments
    from growkern.publish import workplace

    Model = TypeVar("Model", bound=PreTrainedModel)

    class Keywords(GrowthKeywords, total=False):
        target_config: PretrainedConfig | None
        dtype: torch.dtype | None
        allow_nonfinite: bool
        revision: str | None
        family: str | Path | None
        backend: str | None
        progress: bool


@overload
def grow(source: Model, **keywords: Unpack[Keywords]) -> Model: ...


# transformers counts as Any where this package is checked
@overload
def grow(  # type: ignore[overload-cannot-match]
    source: str | Path, **keywords: Unpack[Keywords]
) -> PreTrainedModel: ...


def grow(
    source: str | Path | PreTrainedModel,
    *,
    target_config: PretrainedConfig | None = None,
    dtype: torch.dtype | None = None,
    allow_nonfinite: bool = False,
    revision: str | None = None,
    family: str | Path | None = None,
    backend: str | None = None,
    progress: bool = False,
    **how: Unpack[GrowthKeywords],
) -> PreTrainedModel:
    """Grow a trained model into a bigger one, in memory.

    Args:
        source: a `transformers.PreTrainedModel`, a checkpoint directory, or a model on the Hub,
            `ORGANISATION/NAME`, which is downloaded into the usual cache.
        target_config: the target's config; or give its sizes by the config's own names.
        dtype: dtype of the new weights; default the source's.
        allow_nonfinite: accept NaN and Inf in the source and grow them like other values.
        revision: branch, tag or commit of a model on the Hub.
        family: the TOML file of a table of your own, for a model that growkern has none for.
        backend: backend of the expansion kernel, see `growkern.expand`.
        progress: show a progress bar, where stderr is a terminal.
        **how: the fields of `growkern.growth.options.GrowthOptions` (method, depth, scheme,
            symmetry, seed, ...) and the target sizes (`hidden_size=1024`, ...);
            `pad_vocab_to_multiple_of=64` rounds the vocabulary up.

    Returns:
        A model of the source's class in evaluation mode, on the source's GPU or else on the CPU.
        All of its parameters are trainable. Its plan is `model.growth_plan`. `save_pretrained` also
        writes `lineage.json` and a model card, and `push_to_hub` sends them. If the model was
        trained or cast before, the record says so, and no card is written.

    Raises:
        GrowthError: the source or the sizes cannot be used; this is checked before any work.

    Source: bert2BERT (Chen et al., ACL 2022), Eq. 5-16 and Algorithm 1; `expand` for the kernel.
    """
    # whatever the caller's modes are, the model has numbers and can be trained
    with torch.inference_mode(False), cpu_by_default():
        grown = plan(
            located(source, revision),
            target_config=target_config,
            dtype=dtype,
            allow_nonfinite=allow_nonfinite,
            family=family,
            **how,
        ).without_second()
        refuse_unreadable(grown.source.stored, in_memory=True)
        # a config that transformers cannot build must fail before any work
        _shapes(grown)
        _warn_of_changes(grown)
        state = _build_all(grown, backend=backend, progress=progress)
        grown.source.refuse_changed()
        for name, tensor in state.items() if grown.may_overflow and not allow_nonfinite else ():
            refuse_overflow(name, tensor)
        model = _model_of(grown, state)
        record_when_saved(model, grown, backend, allow_nonfinite)
    return model


def _warn_of_changes(grown: GrowthPlan) -> None:
    """Say in one line what is lost of the source's function."""
    changes = [f"{f.what} ({f.why})" for f in grown.findings if f.level == "changed"]
    if changes:
        warn(
            f"the grown model computes another function than its source: {'; '.join(changes)}",
            FunctionChangedWarning,
        )


def _build_all(grown: GrowthPlan, *, backend: str | None, progress: bool) -> dict[str, Tensor]:
    state, total = {}, grown.parameters() * grown.dtype.itemsize
    with tqdm(
        total=total, desc="growing", unit="B", unit_scale=True, disable=None if progress else True
    ) as bar:

        def put(task: Task, tensor: Tensor) -> None:
            state[task.name] = tensor
            bar.update(tensor.nbytes)

        build_each(grown, put, device=_device(grown), backend=backend)
    return state


def _device(grown: GrowthPlan) -> torch.device:
    """The device that the grown model is built on: the source's GPU, else the CPU."""
    return grown.source.device if grown.source.device.type == "cuda" else torch.device("cpu")


def _model_of(grown: GrowthPlan, state: dict[str, Tensor]) -> Any:
    model = untrained_model(grown.large, grown.dtype)
    model.load_state_dict(state, strict=False, assign=True)
    tie(model, grown.large)
    model.growth_plan = grown
    if (generation := grown.generation) is not None:
        model.generation_config = generation
        fit_cache(grown.large, model.generation_config)
    # non-persistent buffers, such as rotary frequencies, are not in `state`: move them too
    model.to(_device(grown)).eval()
    # GPT-J's class computes its positions in the dtype of the weights, but not when it is loaded
    restore_buffers(model)
    return model


def _shapes(grown: GrowthPlan) -> dict[str, tuple[int, ...]]:
    """The shape of every target tensor, in the order of the model's `state_dict`."""
    large = grown.large
    shapes = {**large.as_stored(class_shapes(large, grown.dtype))}
    shapes |= {name: s for name, s in large.shapes.items() if name not in large.in_memory.shapes}
    check_names_and_shapes(large, shapes, large.class_name)
    own = {task.name for task in grown.tasks}
    return {name: shape for name, shape in shapes.items() if name in own}


def grow_checkpoint(
    source_dir: str | Path,
    target_dir: str | Path,
    *,
    target_config: PretrainedConfig | None = None,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    memory_limit: int | str = MEMORY_LIMIT,
    resume: bool = True,
    allow_nonfinite: bool = False,
    revision: str | None = None,
    family: str | Path | None = None,
    backend: str | None = None,
    progress: bool = True,
    optimizer: str | Path | None = None,
    moments: Moments = "grow",
    **how: Unpack[GrowthKeywords],
) -> GrowthReport:
    """Grow a checkpoint directory into another one, within a memory limit.

    Weights go from file to file in pieces, so the model may be larger than the memory. The target
    appears complete or not at all. A directory that it replaces is removed only afterwards. If a
    run is killed or the disk is full, repeat the call and it resumes.

    Files that loaders need are copied, others named. `lineage.json` records how the target was
    made. `checksums.json` holds the checksums of the files.

    Args:
        source_dir: directory with config.json and safetensors files, sharded or not; or a model on
            the Hub, `ORGANISATION/NAME`.
        target_dir: directory to create; must not exist unless `overwrite`.
        overwrite: replace an existing target.
        max_shard_size: as in `save_pretrained`: bytes, or a text such as "5GB".
        memory_limit: most memory for weights at any time: bytes, or a text such as "512MB" or
            "1GiB". Python, PyTorch and transformers need another 300 to 450 MB.
        resume: True: continue an interrupted growth into this target. False: start over.
        optimizer: the Trainer's optimizer.pt, or its directory. It is grown too, within the same
            limit, and appears together with the weights.
        moments: "grow", "old_slices" or "reset", as in `growkern.grow_optimizer`.
        target_config, dtype, allow_nonfinite, revision, family, backend, progress, **how: as in
            `grow`.

    Raises:
        GrowthError: before any work, if the source, sizes or optimizer cannot be used, the target
            exists, disk space or memory is too small, another run works on the target, or an
            interrupted run there was a different growth. Later, if a weight holds NaN or Inf or the
            disk is full. The target is unchanged in all cases.
    """
    start, shard_size = time.perf_counter(), parse_size("max_shard_size", max_shard_size)
    settings = GrowthSettings(backend, shard_size, allow_nonfinite)
    source_path = path_of("source_dir", source_dir, "a directory; growkern.grow takes models")
    target = path_of("target_dir", target_dir).resolve()
    if optimizer is None and moments != "grow":
        raise GrowthError(f"moments={moments!r} belongs to an optimizer: give optimizer, too")
    state_path = None if optimizer is None else path_of("optimizer", optimizer, "its file")
    limit = parse_size("memory_limit", memory_limit)
    free_target(source_path, target, overwrite)
    grown = plan(
        located(source_dir, revision),
        target_config=target_config,
        dtype=dtype,
        # the stream looks for NaN and Inf in every piece
        allow_nonfinite=True,
        family=family,
        **how,
    )
    refuse_unreadable(grown.source.stored)
    _warn_of_changes(grown)
    source_path = grown.source.directory or source_path  # of a model on the Hub, in the cache
    modules, workers = read_modules(grown), workers_within(grown, limit)
    state = None if state_path is None else OptimizerStream(grown, state_path, moments, limit)
    in_files = grown.large.stored_names, grown.large.transposed
    layout = lay_out(_shapes(grown), grown.dtypes, shard_size, *in_files)
    check_space(target, sum(layout.sizes.values()) + (state.nbytes if state else 0))
    # whatever the caller's default device is, pieces of weights have numbers
    with cpu_by_default(), staging(target, resume=resume) as staged:
        check_target(source_path, target, overwrite)
        kept = _write(
            *(staged, grown, layout, settings, source_path, modules, state, workers, progress)
        )
        staged.publish(overwrite=overwrite)
    size = grown.parameters() * grown.dtype.itemsize
    return GrowthReport(target, grown, size, time.perf_counter() - start, kept)


def _write(
    staged: workplace.Workplace,
    grown: GrowthPlan,
    layout: ShardLayout,
    settings: GrowthSettings,
    source_dir: Path,
    modules: Any,
    state: OptimizerStream | None,
    workers: int,
    progress: bool,
) -> int:
    """Write all files of a grown checkpoint. Returns the bytes that an earlier run had written."""
    source, directory = grown.source, staged.open_new()
    made_of = identity(grown, layout, settings)
    # made first: a long growth must not fail in the end
    card = card_text(grown, settings, is_sentence=modules is not None)
    record = lineage_text(grown, settings, made_of["source"])
    with Journal(staged.journal, made_of) as journal:
        stream = Stream(
            *(grown, layout, directory, journal),
            allow_nonfinite=settings.allow_nonfinite,
            backend=settings.backend,
        )
        stream.run(workers, progress=progress)
    # remove all other files, so that only files of this growth are published
    staged.keep_only(layout.sizes)
    copied = write_companions(directory, grown, layout, source_dir)
    write_modules(grown, modules, directory)
    write_lineage(record, directory)
    if state is not None:
        state.write(directory / OPTIMIZER_FILE)
    known = journal.source_checksums
    source.refuse_changed(
        lambda: source_files(source) == made_of["source"] and are_stored(source.headers, known)
    )
    # after all others, so that the checksums cover them
    write_checksums(directory, known, stream.tensor_checksums(), copied)
    # but not that of the card, which is there to be edited
    write_card(card, directory)
    return stream.bytes_kept
