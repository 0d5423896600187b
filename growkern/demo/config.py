"""The settings of the demo: its sizes, and the training runs that it compares."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """The sizes of a GPT-2. The fields have the names of transformers' `GPT2Config`."""

    n_layer: int
    n_embd: int
    n_head: int


@dataclass(frozen=True)
class Training:
    """The settings of a training run: a warm-up, then a constant learning rate.

    Under a rate that falls to 0, most of the loss falls at the end of the schedule. A run that ends
    where scratch ends could then hardly end earlier.

    As in bert2BERT, the small and the large model train for the same number of steps. All runs of
    the large model have the same settings. The run from scratch does all its steps, and the others
    end when they reach its final loss.

    Attributes:
        steps: optimizer steps.
        learning_rate: after the warm-up.
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
        training: of the small model, and of the large one in all runs.
        seeds: how often everything is trained, each time from other random weights.
        vocab_size: tokens of the tokenizer.
        sequence_length: tokens per block.
        batch_size: blocks per step.
        eval_blocks: blocks of the validation set, the same in every evaluation.
        max_files: text files to read, None for all.
        layers_per_block: layers that train in a step of stage 1.
        stage1_share: share of the steps that are stage 1.
        inheritance_share: share of the steps in which the small model is a teacher.
    """

    name: str
    source: Size
    target: Size
    training: Training
    seeds: int
    vocab_size: int = 1024
    sequence_length: int = 64
    batch_size: int = 16
    eval_blocks: int = 512
    max_files: int | None = None
    layers_per_block: int = 1
    stage1_share: float = 0.125
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
    source=Size(n_layer=4, n_embd=64, n_head=4),
    target=Size(n_layer=4, n_embd=128, n_head=8),
    # 100,800 labels: an evaluation takes about as long as 40 steps
    training=Training(700, 2e-3, 50, eval_every=100, save_every=100),
    seeds=2,
    eval_blocks=1600,
)

QUICK = DemoConfig(
    name="quick",
    source=FULL.source,
    target=FULL.target,
    training=Training(350, 2e-3, 50, eval_every=25, save_every=100),
    seeds=1,
    vocab_size=512,
    eval_blocks=256,
    max_files=300,
)

MICRO = DemoConfig(
    name="micro",
    source=Size(n_layer=2, n_embd=16, n_head=2),
    target=Size(n_layer=2, n_embd=32, n_head=4),
    training=Training(6, 1e-2, 1, eval_every=2, save_every=2),
    seeds=2,
    vocab_size=300,
    sequence_length=16,
    batch_size=4,
    eval_blocks=8,
    max_files=40,
)
