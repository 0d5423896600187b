"""What a run is made of, once its file is resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.source.config import read_config
from growkern.growth.source.refused import scale_block
from growkern.train.dataset.options import DataSection
from growkern.train.model.load import check_directory
from growkern.train.run.file import Run


@dataclass(frozen=True)
class Checkpoint:
    """A model that a run reads. Its config is read and checked once."""

    directory: Path
    config: Any

    @classmethod
    def of(cls, directory: Path) -> Checkpoint:
        """Open a directory.

        Raises:
            GrowthError: it holds no checkpoint, or a damaged one.
        """
        check_directory(directory)
        config = read_config(directory, any_family=True)
        scale_block(config, str(directory), dequantize=True)
        return cls(directory, config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights as the config names it; float32 if it names none."""
        return self.config.dtype or torch.float32

    @property
    def training_dtype(self) -> torch.dtype:
        """The dtype in which the weights train: float32 in place of half precision."""
        return torch.float32 if self.dtype.itemsize == 2 else self.dtype


@dataclass(frozen=True)
class ResolvedRun:
    """A run whose settings were checked against each other and against its models.

    Attributes:
        settings: of the file.
        base: folder that the paths in `settings` are relative to.
        output: directory of the run.
        model: to be trained, or to be grown at the start.
        generator: ELECTRA's, beside a discriminator.
        teachers: those that run in this process.
        tokenizer: of transformers.
        teacher_tokenizers: one per teacher that runs.
        data: with the objective of the model in place of "auto".
        texts: the local files of the data, by its use.
        inputs: what else the run reads, by the names in the file: a cache may lie elsewhere
            tomorrow.
        reports: integrations of transformers that get the logs.
        plan: of the growth at the start.
    """

    settings: Run
    base: Path
    output: Path
    model: Checkpoint
    generator: Checkpoint | None
    teachers: tuple[Checkpoint, ...]
    tokenizer: Any
    teacher_tokenizers: tuple[Any, ...]
    data: DataSection
    texts: Mapping[str, list[Path]]
    inputs: Mapping[str, Path]
    reports: tuple[str, ...]
    plan: GrowthPlan | None
