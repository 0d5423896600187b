"""What a run is: frozen values, checked once when they are made, read from and written to TOML.

    [model]        path, tokenizer
    [data]         train, validation, sequence_length, masking_probability
    [training]     steps, batch_size, accumulation, learning_rate, warmup_steps, ...
    [output]       directory, tensorboard
    [two_stage]    layers_per_block, stage1_steps, seed, embeddings            (optional)
    [inheritance]  rate, end_step, temperature, kl_rows, teacher_weights       (optional)
    [teacher]      paths or cache                                              (with inheritance)

Paths are relative to the file they stand in.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from growkern.errors import GrowthError
from growkern.train.inheritance import InheritanceSchedule
from growkern.train.toml import read_toml, to_dataclass, to_toml


@dataclass(frozen=True)
class TwoStageConfig:
    """Stage 1: sub-models drawn anew in every optimizer step; stage 2: the whole model.

    layers_per_block: l_b, the layers that train in a stage-1 step; depths are its multiples.
    stage1_steps: optimizer steps of stage 1. seed: of the depths alone.
    embeddings: see `growkern.train.sub_model`.
    Source: bert2BERT (Chen et al. 2022), Algorithm 2.
    """

    layers_per_block: int
    stage1_steps: int
    seed: int = 0
    embeddings: Literal["frozen", "bottom"] = "frozen"

    def __post_init__(self) -> None:
        if self.layers_per_block < 1:
            raise GrowthError(f"layers_per_block is {self.layers_per_block}: it must be positive")
        if self.stage1_steps < 0:
            raise GrowthError(f"stage1_steps is {self.stage1_steps}: it must not be negative")
        if self.embeddings not in ("frozen", "bottom"):
            raise GrowthError(f"embeddings is {self.embeddings!r}: 'frozen' or 'bottom'")

    def depth(self, step: int, layers: int) -> int | None:
        """Layers that run in an optimizer step (counted from 0), or None in stage 2.

        A pure function of (seed, step): every process and every resumed run agrees without a word.
        """
        if step >= self.stage1_steps:
            return None
        blocks = math.ceil(layers / self.layers_per_block)
        digest = hashlib.blake2b(f"depth:{self.seed}:{step}".encode(), digest_size=8).digest()
        block = int.from_bytes(digest, "little") % blocks
        return min(layers, self.layers_per_block * (block + 1))


@dataclass(frozen=True)
class ModelSection:
    """Checkpoint directories; the tokenizer is the model's own unless it is named."""

    path: str
    tokenizer: str | None = None


@dataclass(frozen=True)
class TeacherSection:
    """Checkpoint directories of the teachers, or one cache that `growkern cache-teacher` wrote.

    A tokenizer beside a checkpoint, or the one a cache was made with, is compared.
    """

    paths: tuple[str, ...] = ()
    cache: str | None = None

    def __post_init__(self) -> None:
        if bool(self.paths) == bool(self.cache):
            raise GrowthError("give either paths (teachers that run) or cache (one that was run)")


@dataclass(frozen=True)
class DataSection:
    """UTF-8 text files or glob patterns; masking is for masked language models only."""

    train: tuple[str, ...]
    validation: tuple[str, ...] = ()
    sequence_length: int = 128
    masking_probability: float = 0.15


@dataclass(frozen=True)
class TrainingSection:
    """One optimizer and one schedule over all steps, both stages included.

    batch_size: examples of all processes together. eval_every and save_every: in optimizer steps, 0
    for the end only.
    """

    steps: int
    batch_size: int = 32
    accumulation: int = 1
    learning_rate: float = 1e-4
    warmup_steps: int = 0
    schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    keep_checkpoints: int = 2
    data_workers: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation", "log_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise GrowthError(f"training.{name} is {getattr(self, name)}: it must be positive")
        for name in (
            *("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm"),
            *("eval_every", "save_every", "data_workers"),
        ):
            # written so that NaN fails
            if not 0 <= getattr(self, name) < math.inf:
                raise GrowthError(f"training.{name} is {getattr(self, name)}: it must be 0 or more")


@dataclass(frozen=True)
class OutputSection:
    """Where checkpoints, the trained model and the logs go."""

    directory: str
    tensorboard: bool = True


@dataclass(frozen=True)
class Run:
    """A training run: `load_run` makes it from a file, `to_toml` turns it back into one."""

    model: ModelSection
    data: DataSection
    training: TrainingSection
    output: OutputSection
    two_stage: TwoStageConfig | None = None
    inheritance: InheritanceSchedule | None = None
    teacher: TeacherSection | None = None

    def __post_init__(self) -> None:
        if (self.inheritance is None) != (self.teacher is None):
            raise GrowthError("[inheritance] and [teacher] go together: give both or neither")
        stage1 = 0 if self.two_stage is None else self.two_stage.stage1_steps
        if stage1 > self.training.steps:
            raise GrowthError(
                f"two_stage.stage1_steps is {stage1}, more than the {self.training.steps} "
                "training.steps"
            )

    def to_toml(self) -> str:
        """The run as a TOML document; `load_run` of it gives an equal run."""
        return to_toml(self)


def load_run(path: str | Path) -> Run:
    """Read and check a run file.

    raises: GrowthError naming the file, the key and what is allowed; for an unknown key, the
        nearest known one.
    """
    path = Path(path)
    return to_dataclass(Run, read_toml(path), str(path))
