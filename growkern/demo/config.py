"""The settings of the demo: its sizes, and the training runs that it compares."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """The sizes of a BERT. The fields have the names of transformers' `BertConfig`."""

    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    num_hidden_layers: int


@dataclass(frozen=True)
class Training:
    """The settings of a training run: a warm-up, then a rate that falls linearly to 0.

    As in bert2BERT, the small and the large model train for the same number of steps. All runs of
    the large model have the same settings. A run ends when it reaches the final loss of the run
    from scratch.

    Attributes:
        steps: optimizer steps.
        learning_rate: the peak of the schedule.
        warmup_steps: optimizer steps in which the rate rises from 0 to its peak.
        eval_every: optimizer steps between two evaluations.
        save_every: optimizer steps between two checkpoints.
    """

    steps: int
    learning_rate: float
    warmup_steps: int
    eval_every: int
    save_every: int


@dataclass(frozen=True)
class DemoConfig:
    """All settings of the demo except the seed.

    Attributes:
        name: of the preset.
        source: sizes of the small model.
        target: sizes of the large model.
        source_training: of the small model.
        target_training: of the large model, in all runs.
        vocab_size: tokens of the tokenizer.
        sequence_length: tokens per block.
        batch_size: blocks per step.
        masking_probability: chance of a token to be masked.
        eval_blocks: blocks of the validation set, the same in every evaluation.
        max_files: text files to read, None for all.
        layers_per_block: layers that train in a step of stage 1.
        stage1_share: share of the steps that are stage 1.
        inheritance_share: share of the steps in which the small model is a teacher.
    """

    name: str
    source: Size
    target: Size
    source_training: Training
    target_training: Training
    vocab_size: int = 1024
    sequence_length: int = 32
    batch_size: int = 32
    masking_probability: float = 0.15
    eval_blocks: int = 512
    max_files: int | None = None
    layers_per_block: int = 2
    stage1_share: float = 0.15
    inheritance_share: float = 0.44


@dataclass(frozen=True)
class Contestant:
    """A way to train the large model.

    Attributes:
        name: of its directory.
        title: in the table and the picture.
        growth: options of `growkern.grow`; None trains from scratch.
        two_stage: whether to train in two stages.
        inheritance: whether the small model is a teacher.
    """

    name: str
    title: str
    growth: dict[str, Any] | None = field(default=None, hash=False)
    two_stage: bool = False
    inheritance: bool = False


# the final loss of the first one is the loss that the others have to reach
CONTESTANTS = (
    Contestant("scratch", "scratch"),
    Contestant("direct_copy", "DirectCopy", {"method": "direct_copy"}),
    Contestant("fpi", "FPI", {"method": "fpi"}),
    Contestant("aki", "AKI", {"method": "aki"}),
    Contestant("aki_two_stage", "AKI + two-stage", {"method": "aki"}, two_stage=True),
    Contestant(
        "aki_two_stage_inheritance",
        "AKI + two-stage + inheritance",
        {"method": "aki"},
        two_stage=True,
        inheritance=True,
    ),
)

FULL = DemoConfig(
    name="full",
    source=Size(96, 4, 384, 3),
    target=Size(144, 6, 576, 5),
    source_training=Training(1500, 2e-3, 100, eval_every=100, save_every=300),
    target_training=Training(1500, 1e-3, 100, eval_every=50, save_every=100),
)

QUICK = DemoConfig(
    name="quick",
    source=Size(64, 4, 256, 2),
    target=Size(96, 6, 384, 4),
    source_training=Training(600, 2e-3, 50, eval_every=100, save_every=200),
    target_training=Training(600, 1e-3, 50, eval_every=25, save_every=100),
    vocab_size=512,
    eval_blocks=256,
    max_files=200,
)

MICRO = DemoConfig(
    name="micro",
    source=Size(16, 2, 32, 2),
    target=Size(24, 3, 48, 4),
    source_training=Training(6, 1e-2, 1, eval_every=3, save_every=3),
    target_training=Training(6, 1e-2, 1, eval_every=2, save_every=2),
    vocab_size=300,
    sequence_length=16,
    batch_size=4,
    eval_blocks=8,
    max_files=40,
)
