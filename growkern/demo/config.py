"""How large a demo is: frozen presets, and the runs that it compares."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """A BERT, by the names of its config."""

    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    num_hidden_layers: int


@dataclass(frozen=True)
class Training:
    """A training run: warm-up, then a rate that falls linearly to 0.

    The protocol is bert2BERT's: small and large model train for equally many steps, every run of
    the large model alike, and a run ends where it reaches the loss that scratch ends at.
    """

    steps: int
    learning_rate: float
    warmup_steps: int
    eval_every: int
    save_every: int


@dataclass(frozen=True)
class DemoConfig:
    """Everything that decides a demo's numbers, but for the seed and the machine.

    max_files: of the corpus, None for all. eval_blocks: blocks of the fixed validation set.
    layers_per_block, stage1_share: of the two stages. inheritance_share: part of the steps in
    which the source teaches.
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
    """A way to train the large model. growth: options of `growkern.grow`; None: from scratch."""

    name: str
    title: str
    growth: dict[str, Any] | None = field(default=None, hash=False)
    two_stage: bool = False
    inheritance: bool = False


# the first one sets the loss that the others have to reach
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
