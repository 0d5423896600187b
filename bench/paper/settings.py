"""The sizes of models and runs. A setting fixes all but system, learning rate and seed."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import transformers

from bench.paper.models import FAMILIES, Size

VOCAB = 1024
# fields of a setting that only some runs depend on
OF_SOURCE = {"source", "source_steps", "source_rate"}
OF_TARGET = {"target", "steps", "rates", "rate_steps", "untrained_rate_steps"}
OF_SYSTEMS = {"name", "origin", "layers_per_block", "stage1_share", "inheritance_share"}


@dataclass(frozen=True)
class Setting:
    """Everything that all systems of a table share.

    Attributes:
        name: of the setting, in the folders of its jobs.
        family: a key of `FAMILIES`.
        source: the small model.
        target: the large model.
        source_steps: optimizer steps of the source, at `source_rate`.
        steps: optimizer steps of the longest runs of the large model.
        rate_steps: the same of the runs that choose a learning rate.
        untrained_rate_steps: the same for models that begin untrained, if they need longer to tell
            which rate is best; None: `rate_steps`.
        rates: the learning rates that every system chooses from.
        warmup: share of the steps in which the rate rises. Then it falls to 0.
        batch: rows in a step.
        length: tokens in a row.
        layers_per_block: l_b of the two stages.
        stage1_share: share of the steps that are stage 1 (E_b = 5 of 40 epochs in the paper).
        inheritance_share: share of the steps in which the source is a teacher.
        vocab: tokens of the tokenizer.
        validation_tokens: how much of the validation text is used, about; None: all of it.
        validation_passes: how often it is read. Each pass of a masked model has other masks, so
            that a sixth of the tokens gives enough labels.
        text: folder of the text that models are trained on: one of `TEXTS`.
        precision: of the arithmetic, as `growkern train` calls it.
        dropout: in all layers of the models.
        schedule, optimizer: as `growkern train` calls them.
        origin: the setting of which this is a variant.
    """

    name: str
    family: str
    source: Size
    target: Size
    source_steps: int
    steps: int
    rate_steps: int
    rates: tuple[float, ...]
    source_rate: float
    warmup: float
    batch: int
    length: int
    layers_per_block: int
    stage1_share: float = 5 / 40
    inheritance_share: float = 0.44
    vocab: int = VOCAB
    validation_tokens: int | None = None
    validation_passes: int = 1
    untrained_rate_steps: int | None = None
    text: str = "corpus"
    precision: Literal["fp32", "bf16"] = "fp32"
    dropout: float = 0.0
    schedule: Literal["linear", "warmup_stable_decay"] = "linear"
    optimizer: Literal["auto", "adamw", "muon"] = "auto"
    origin: Setting | None = None

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.batch * self.length

    @property
    def validation(self) -> str:
        """The file of the validation text."""
        tokens = "" if self.validation_tokens is None else f"-{self.validation_tokens}-tokens"
        times = f"{self.validation_passes}-times"
        return f"{self.text}/validation-of-{self.tokenizer}{tokens}-{times}.txt"

    @property
    def tokenizer(self) -> str:
        """The folder of the tokenizer."""
        with_sentinels = f"-{self.family}" if FAMILIES[self.family].sentinels else ""
        return f"tokenizer-{self.vocab}{with_sentinels}"

    @property
    def for_source(self) -> Setting:
        """The setting of the run that trains the source. Variants share it if they can."""
        return self._origin_without(OF_SYSTEMS | OF_TARGET)

    @property
    def for_scratch(self) -> Setting:
        """The setting of runs that need no source. Variants share it if they can."""
        return self._origin_without(OF_SYSTEMS | OF_SOURCE)

    def _origin_without(self, ignored: set[str]) -> Setting:
        """The setting of which this is a variant, if only ignored fields differ."""
        if self.origin is None:
            return self
        names = {field.name for field in fields(self)} - ignored
        same = all(getattr(self, name) == getattr(self.origin, name) for name in names)
        return self.origin._origin_without(ignored) if same else self

    def variant(self, label: str, **changes: Any) -> Setting:
        """The setting with some fields changed; itself if none differs."""
        if all(getattr(self, name) == value for name, value in changes.items()):
            return self
        return replace(self, name=f"{self.name}-{label}", origin=self, **changes)

    def config(self, size: Size, layers: int | None = None) -> Any:
        """The config of a model in transformers."""
        size = replace(size, layers=layers or size.layers)
        return FAMILIES[self.family].config(size, self.vocab, self.length, self.dropout)

    def target_sizes(self) -> dict[str, int]:
        """The sizes of the target by the names of its config, without those that stay."""
        small, large = map(FAMILIES[self.family].sizes, (self.source, self.target))
        return {name: size for name, size in large.items() if small.get(name) != size}

    @property
    def layers_name(self) -> str:
        """The config's name for the number of layers."""
        return next(iter(FAMILIES[self.family].sizes(self.target)))

    def untrained(self, size: Size, seed: int, layers: int | None = None) -> Any:
        """A model with random weights."""
        transformers.set_seed(seed)
        return FAMILIES[self.family].model_class(size)(self.config(size, layers))


# The best rate of most GPT-2 is the middle one. The highest was best for sources that were grown
# after 10 or 30 % of their training, so that theirs may be higher still. The lowest was best for a
# source trained four times as long, and for grown moments with a second warm-up.
RATES = (1e-3, 3e-3, 9e-3)
TINY_GPT = Setting(
    name="tiny-gpt",
    family="gpt2",
    source=Size(4, 64, 4),
    target=Size(4, 128, 8),
    # as many as the target's, as in the papers: a source that stands at the mark shows nothing
    source_steps=2000,
    steps=2000,
    rate_steps=500,
    rates=RATES,
    source_rate=3e-3,
    warmup=0.05,
    batch=16,
    length=64,
    layers_per_block=1,
    validation_tokens=110_000,
)
# 15 % of the tokens are labels: at least 100,000 in all passes
TINY_MASKED = replace(TINY_GPT, validation_tokens=175_000, validation_passes=4)
# In its first steps a masked model learns how frequent tokens are, and stays there until attention
# finds the neighbours. In rows of 64 bytes it stayed for all 4,000 steps of some runs, in rows of
# 32 for some hundred steps.
TINY_BERT = replace(
    TINY_MASKED,
    name="tiny-bert",
    family="bert",
    # a post-norm model takes lower rates than GPT-2
    rates=(1e-3, 2e-3, 4e-3),
    # a short run from scratch tells which rate leaves the plateau first
    untrained_rate_steps=2000,
    batch=32,
    length=32,
    vocab=261,
)
# Tokens are bytes, as for BERT; 32 more stand for spans. Its plateau is longer than BERT's: the
# decoder must find the place of a span in the encoder, and in rows of 32 it did not within 2,000
# steps. Two bytes of a row are labels.
TINY_T5 = replace(
    TINY_BERT,
    name="tiny-t5",
    family="t5",
    # the lowest of BERT's is best from scratch: one more below it
    rates=(5e-4, 1e-3, 2e-3, 4e-3),
    vocab=300,
    batch=64,
    length=16,
    validation_passes=5,
)
# A dense model that goes on, or becomes a mixture. The source has as many FLOPs as what follows.
# It is shallow, so that it has seen 10 tokens per parameter at its end.
TINY_QWEN = replace(
    TINY_GPT,
    name="tiny-qwen3",
    family="qwen3",
    source=Size(2, 64, 4),
    target=Size(2, 64, 4),
    source_steps=1600,
    steps=1600,
)
# for tests: it says nothing about the systems
MICRO_GPT = replace(
    TINY_GPT,
    name="micro-gpt",
    source=Size(4, 16, 2),
    target=Size(4, 32, 4),
    source_steps=8,
    steps=32,
    rate_steps=8,
    rates=(4e-3,),
    length=16,
    validation_tokens=None,
    vocab=300,
)
# For the minutes of `bench.gpt_110m`, which finds the steps by a probe. The rate was never tried.
GPT_110M = replace(
    TINY_GPT,
    name="gpt-110m",
    source=Size(12, 512, 8),
    target=Size(12, 768, 12),
    rates=(1e-3,),
    source_rate=1e-3,
    batch=64,
    length=512,
    layers_per_block=2,
    vocab=32_768,
    validation_tokens=150_000,
    precision="bf16",
)
SIZES = ("micro", "tiny")
SETTINGS = {
    ("micro", "gpt2"): MICRO_GPT,
    ("micro", "bert"): replace(MICRO_GPT, name="micro-bert", family="bert"),
    ("micro", "t5"): replace(MICRO_GPT, name="micro-t5", family="t5"),
    ("micro", "qwen3"): replace(
        MICRO_GPT, name="micro-qwen3", family="qwen3", target=MICRO_GPT.source
    ),
    ("tiny", "gpt2"): TINY_GPT,
    ("tiny", "bert"): TINY_BERT,
    ("tiny", "t5"): TINY_T5,
    ("tiny", "qwen3"): TINY_QWEN,
}
