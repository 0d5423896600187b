"""The objective of a run file, and the settings that it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from growkern.errors import GrowthError
from growkern.growth.source.config import read_config
from growkern.growth.source.loading import class_of
from growkern.train.dataset.options import DataSection
from growkern.train.loss.side import SIDE_LOSSES, check_side
from growkern.train.loss.vocabulary import tokenizer_fingerprint
from growkern.train.model.load import check_fits, has_tokenizer, load_tokenizer
from growkern.train.objectives.electra import check_pair
from growkern.train.objectives.names import OF_TWO_STACKS, Objective, choose
from growkern.train.objectives.span_corruption import span_counts
from growkern.train.run.file import Run


def choose_objective(run: Run, base: Path) -> Objective:
    """The objective of a run. Only the configs of its models are read.

    Args:
        run: the settings.
        base: folder that the paths in `run` are relative to.

    Raises:
        GrowthError: the model cannot be trained with it, or other settings do not fit it.
    """
    config = read_config(base / run.checkpoint, any_family=True)
    objective = choose(
        run.data.objective,
        class_of(base / run.checkpoint, config),
        targets=bool(run.data.target_column or run.data.labels_column),
    )
    if (objective == "rtd") != (run.model.generator is not None):
        raise GrowthError(
            f"{run.checkpoint} is trained with {objective!r}, and model.generator belongs to an "
            "ElectraForPreTraining: leave it out"
            if run.model.generator
            else f"{run.checkpoint} is a discriminator: give the directory of an "
            "ElectraForMaskedLM as model.generator"
        )
    check_side(
        SIDE_LOSSES.get(objective),
        two_stage=run.two_stage is not None,
        teacher=run.teacher is not None,
        cached=run.teacher is not None and not run.teacher.is_model,
        grows=bool(run.growth),
    )
    if objective in OF_TWO_STACKS and run.teacher is not None and not run.teacher.is_model:
        raise GrowthError(
            f"a teacher's cache or server has no decoder's predictions, which {objective!r} needs: "
            "give the paths of teachers"
        )
    if run.model.generator is not None:
        _check_both(run, base / run.model.generator, config)
    return objective


def _check_both(run: Run, directory: Path, discriminator: Any) -> None:
    """Refuse settings that a generator and a discriminator together do not fit."""
    if run.distributed is not None and run.distributed.sharding == "fsdp":
        raise GrowthError(
            "replaced-token detection is not sharded: set distributed.sharding to 'ddp'"
        )
    config = read_config(directory, any_family=True)
    if "ElectraForMaskedLM" not in (config.architectures or ()):
        raise GrowthError(f"model.generator {directory} is not an ElectraForMaskedLM: give one")
    check_pair(config, discriminator, shared_embeddings=run.model.shared_embeddings)


def check_generator(run: Run, base: Path, tokenizer: Any) -> None:
    """Check that a generator reads the rows and the tokens of the run, if there is one.

    Args:
        run: the settings.
        base: folder that the paths in `run` are relative to.
        tokenizer: of the run.

    Raises:
        GrowthError: the rows are too long for it, or it has another tokenizer.
    """
    if run.model.generator is None:
        return
    directory = base / run.model.generator
    check_fits(directory, tokenizer, run.data.sequence_length)
    if not has_tokenizer(directory):
        return
    if tokenizer_fingerprint(load_tokenizer(directory)) != tokenizer_fingerprint(tokenizer):
        raise GrowthError(
            f"the generator {directory} has another tokenizer than the run: every token must have "
            "the same id in both"
        )


def labelled_share(data: DataSection) -> tuple[float, int | None]:
    """The share of tokens with a label, and the tokens per row of a decoder beside an encoder.

    Args:
        data: with an objective other than "auto".

    Returns:
        The arguments of `TwoStageTrainer.flops_per_step`. Labels of a decoder are its tokens.
    """
    if data.objective == "span_corruption":
        return 1.0, span_counts(data.row_length, data.share, data.mean_span_length).target
    if data.objective in ("denoising", "pairs"):
        return 1.0, data.sequence_length
    return (1.0 if data.objective == "clm" else data.share), None
