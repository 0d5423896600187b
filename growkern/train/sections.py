"""The sections of a run file that a trainer in Python takes too, and those of its models and data.

Each is a dataclass that checks itself. Nothing here needs PyTorch, whose import takes seconds: a
wrong run file is told at once. `python -m docs.options` copies what the options of the losses mean
from `growkern/ops/loss/rows`. Types and defaults that differ in training are declared here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from growkern.arguments import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Limit,
    between,
    check_fields,
    check_steps,
)
from growkern.errors import GrowthError, nearest
from growkern.growth.options import ROUTERS, GrowthOptions, Moments
from growkern.ops.loss import (
    KL_OPTIONS,
    LABEL_OPTIONS,
    LIMITS as LOSS_LIMITS,
    Divergence,
    KLRows,
    Tail,
)
from growkern.train.file_rules import OF_BARE_ROWS
from growkern.train.rules import check

# more tokens than any row has
MOST = 1 << 40
Objective = Literal["auto", "mlm", "clm", "span_corruption", "denoising", "pairs"]
# what a model learns to predict
TASKS = {
    "mlm": "masked tokens",
    "clm": "the next token",
    "span_corruption": "masked spans",
    "denoising": "the text without noise",
    "pairs": "the target of each pair",
}
# special tokens that the collator adds to a row
ADDED = {"denoising": 2}
# share of the tokens that are masked, in the papers of BERT and T5, and in that of BART
MASKED_SHARE, DENOISING_SHARE = 0.15, 0.3
OptimizerChoice = Literal["auto", "adamw", "growth-adamw", "muon"]
Decay = Literal["linear", "constant", "switch"]
SPANS = Limit(lambda x: 1 <= x < math.inf, "be 1 or more")
NO_TENSOR_PARALLELISM = (
    "tensor parallelism is not supported by the trainer. transformers.Trainer hands it to "
    "accelerate, which refuses it on machines without a GPU, so counts, gradient norms and "
    'checkpoints could not be tested with it. Use sharding = "fsdp"; in a loop of your own, '
    'growkern.inherited_loss takes models that were loaded with tp_plan="auto"'
)


@dataclass(frozen=True)
class ModelSection:
    """The model to train.

    Args:
        path: checkpoint directory, or a model on the Hub, ORGANISATION/NAME; None with [growth].
        revision: branch, tag or commit of a model on the Hub in `path`.
        tokenizer: directory of the tokenizer; None takes the one of the checkpoint.
    """

    path: str | None = None
    revision: str | None = None
    tokenizer: str | None = None


def row_length(objective: Objective, length: int, share: float, mean_span: float) -> int:
    """The tokens of a row of text, of which the collator makes an input of `length` tokens.

    An input of "denoising" is shorter, its labels are not.
    """
    if objective == "span_corruption":
        return raw_length(length, share, mean_span)
    return length - ADDED.get(objective, 0)


class SpanCounts(NamedTuple):
    """The numbers of a corrupted row."""

    noise: int  # tokens that are taken out
    spans: int

    @property
    def target(self) -> int:
        """Tokens of the target: equation (2) of `spans.py`."""
        return self.noise + self.spans + 2


def span_counts(tokens: int, share: float, mean_span: float) -> SpanCounts:
    """The numbers of tokens and spans that are taken out of a row of 2 tokens or more."""
    noise = min(max(round(tokens * share), 1), tokens - 1)
    return SpanCounts(noise, min(max(round(noise / mean_span), 1), noise, tokens - noise))


def input_length(tokens: int, share: float, mean_span: float) -> int:
    """The tokens of the input that a row becomes: equation (1) of `spans.py`."""
    noise, spans = span_counts(tokens, share, mean_span)
    return tokens - noise + spans + 1


def raw_length(length: int, share: float, mean_span: float) -> int:
    """The longest row whose input has at most `length` tokens; 0 if there is none."""
    low, high = 1, length
    while input_length(high, share, mean_span) <= length:
        high *= 2
    # the length of the input never falls when a row gets longer
    while high - low > 1:
        middle = (low + high) // 2
        fits = input_length(middle, share, mean_span) <= length
        low, high = (middle, high) if fits else (low, middle)
    return low if low > 1 else 0


@dataclass(frozen=True)
class DataSection:
    """The data to train on: files, or a data set that the `datasets` library reads.

    Args:
        train: files or glob patterns. Plain text is read as UTF-8. Files of records (.jsonl, .json,
            .csv, .tsv, .parquet, .arrow) need the `datasets` library. Or a table of names and such
            lists: each row then holds the name of its source as "source", and each source may have
            a teacher of its own.
        validation: the same for evaluation; empty means no evaluation. Or a table of names and
            such lists, as in `{ law = ["law/*.txt"], news = ["news/*.txt"] }`: each is evaluated by
            itself, and logged as eval_law_loss and eval_news_loss. The first one is eval_loss too.
        dataset: in place of `train`: a name on the Hugging Face Hub, or a directory. The directory
            was written by `save_to_disk`, or holds files that `datasets.load_dataset` reads.
        dataset_config: the part of a data set that has several.
        revision: branch, tag or commit of a data set on the Hub.
        split: of the data set, to train on. Slices and sums such as "train[:90%]+extra" are
            allowed; of a stream, only for a directory of `save_to_disk`.
        validation_split: of the data set, for evaluation; None means no evaluation.
        text_column: column of the records that holds their text; of pairs, the text that is read.
        target_column: for models of an encoder and a decoder: column with the text to be written.
            Each record is a row, and both of its texts get the tokenizer's special tokens.
        input_ids_column: column with token ids. The text is not used then.
        labels_column: column with one label per token id, -100 for none. Without it the labels
            are made as for text. For models of an encoder and a decoder: column with the token ids
            to be written, of any number.
        attention_mask_column: column with 1 per token and 0 for padding, which is left out.
        packing: join the records and cut them into rows of `sequence_length` tokens. False keeps
            one row per record, or several of a longer text; a file of plain text is one record.
            None packs text, and keeps pairs and records of token ids.
        streaming: tokenise while training, without a cache. The training data is read again from
            its start when it ends. The validation data is cached.
        shuffle_window: a stream collects so many rows and gives them in random order; 0 keeps the
            order of the data.
        cache: directory for tokenised data; None takes the environment variable GROWKERN_TOKENS,
            or else the user's cache.
        sequence_length: tokens per row, or per input of the encoder with "span_corruption"; of
            pairs, the most tokens of either side.
        objective: how rows become batches: "mlm" (masked tokens), "clm" (the next token),
            "span_corruption" (T5), "denoising" (BART) or "pairs" (records with a text or token ids
            to be written). "auto" takes that of the model's class, and "pairs" for records of an
            encoder and a decoder.
        masking_probability: chance or share of the tokens that are masked, by an objective that
            masks some. None takes 0.15, and 0.3 with "denoising".
        mean_span_length: mean tokens per span, with "span_corruption" and "denoising".

    Raises:
        GrowthError: a value is out of range, or options contradict each other.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {
        # one token has no other one to predict it from
        "sequence_length": between(2, MOST),
        "shuffle_window": between(0, MOST),
        "masking_probability": Limit(lambda x: 0 < x <= 1, "lie in (0, 1]"),
        "mean_span_length": SPANS,
    }

    train: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    validation: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    dataset: str | None = None
    dataset_config: str | None = None
    revision: str | None = None
    split: str = "train"
    validation_split: str | None = None
    text_column: str = "text"
    target_column: str | None = None
    input_ids_column: str | None = None
    labels_column: str | None = None
    attention_mask_column: str | None = None
    packing: bool | None = None
    streaming: bool = False
    shuffle_window: int = 1000
    cache: str | None = None
    sequence_length: int = 128
    objective: Objective = "auto"
    masking_probability: float | None = None
    mean_span_length: float = 3.0

    def __post_init__(self) -> None:
        for key, names in (("train", self.train_names), ("validation", self.validation_names)):
            for name in names:
                if not re.fullmatch(r"[a-z0-9_]+", name):
                    raise GrowthError(
                        f"data.{key} has the name {name!r}: use small letters, digits and _"
                    )
        check("data", self)
        if self.dataset is None and not self.train:
            raise GrowthError("give data.train (files) or data.dataset (a data set)")
        check_fields(self, "data")
        if self.row_length < 2:
            raise GrowthError(
                f"data.sequence_length is {self.sequence_length}, too short for data.objective = "
                f"{self.objective!r}: give 8 or more"
            )

    @property
    def share(self) -> float:
        """The share of the tokens that are masked."""
        if self.masking_probability is not None:
            return self.masking_probability
        return DENOISING_SHARE if self.objective == "denoising" else MASKED_SHARE

    @property
    def row_length(self) -> int:
        """Tokens per row, before the collator of the objective adds and takes out tokens."""
        return row_length(self.objective, self.sequence_length, self.share, self.mean_span_length)

    @property
    def is_bare(self) -> bool:
        """Whether rows have no special tokens at their ends."""
        return self.objective in OF_BARE_ROWS

    @property
    def train_names(self) -> tuple[str, ...]:
        """The names of several training sources; empty for a single one."""
        return tuple(self.train) if isinstance(self.train, dict) else ()

    @property
    def validation_names(self) -> tuple[str, ...]:
        """The names of several validation sets; empty for a single one."""
        return tuple(self.validation) if isinstance(self.validation, dict) else ()

    @property
    def pack(self) -> bool:
        """Whether records are joined and cut into rows of one length."""
        if self.packing is not None:
            return self.packing
        return self.input_ids_column is None and self.target_column is None


@dataclass(frozen=True)
class DistributedOptions:
    """How a model is spread over the processes of torchrun.

    The number of processes changes results by rounding only, as the start of a run says.
    Dropout is the exception: every process draws its own.

    Args:
        sharding: "ddp": every process holds the whole model. "fsdp": every process holds a part of
            each parameter, gradient and optimizer state (FSDP2). Each block is a group of its own;
            embeddings, head and all tied weights are in the root group.
        replicas: with "fsdp", the number of copies of the model. The processes of a copy shard it
            among them (HSDP). 1 shards over all processes.
        param_dtype: with "fsdp", the dtype of the gathered parameters and of the arithmetic. The
            shards and the optimizer state stay float32.
        reduce_dtype: with "fsdp", the dtype in which gradients are added up over the processes.
        reshard_after_forward: with "fsdp", free the gathered parameters of a block after its
            forward pass and gather them again for the backward pass.
        cpu_offload: with "fsdp", keep shards, gradients and optimizer state in CPU memory.
        activation_checkpointing: keep only the inputs of each block, and run it again in the
            backward pass.
        async_checkpoints: with "fsdp", copy the state of a checkpoint to CPU memory, and write it
            while training continues. During the write the copy takes as much CPU memory as the
            process holds of weights and optimizer state. Off, training waits for the disk.
        compile_blocks: compile every block with `torch.compile`.
        tensor_parallel: must be 1.

    Raises:
        GrowthError: options that exclude each other, or tensor parallelism.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {"replicas": Limit(lambda x: x >= 1, "be positive")}

    sharding: Literal["ddp", "fsdp"] = "ddp"
    replicas: int = 1
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    async_checkpoints: bool = True
    activation_checkpointing: bool = False
    compile_blocks: bool = False
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "distributed")
        if self.tensor_parallel != 1:
            raise GrowthError(
                f"distributed.tensor_parallel is {self.tensor_parallel}: {NO_TENSOR_PARALLELISM}"
            )
        check("distributed", self)


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of `growkern.GrowthAdamW` and of Muon. Those of AdamW are in `[trainer]`.

    Args:
        rewarm_steps, rewarm_peak: of new entries alone, as in `growkern.GrowthAdamW`. The rate of
            all entries rises again with `rewarm_steps` of a growth inside the run.
        muon_lr: with optimizer = "muon", the peak of the learning rate of the matrices. None: as
            for all other parameters.
        momentum, nesterov, ns_steps: of Muon, as in `torch.optim.Muon`.
        adjust_lr_fn: of Muon, as in `torch.optim.Muon`. "match_rms_adamw" makes steps as large as
            those of AdamW, so both can share a learning rate. "original" is PyTorch's default, and
            needs a `muon_lr` of its own.

    Raises:
        GrowthError: a value is out of range.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {
        "rewarm_steps": NOT_NEGATIVE,
        "rewarm_peak": POSITIVE,
        "muon_lr": NOT_NEGATIVE,
        "momentum": Limit(lambda x: 0 <= x < 1, "lie in [0, 1)"),
        "ns_steps": between(1, 99),
    }

    rewarm_steps: int = 0
    rewarm_peak: float = 1.3
    muon_lr: float | None = None
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"

    def __post_init__(self) -> None:
        check_fields(self, "optimizer")


def check_choice(choice: str, own: OptimizerOptions | None) -> None:
    """Refuse an optimizer that there is not, and options of another one."""
    choices = get_args(OptimizerChoice)
    if choice not in choices:
        raise GrowthError(f"optimizer is {choice!r}{nearest(choice, choices)}")
    check("optimizer", own=own or OptimizerOptions(), choice=choice)


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of the training loss. The loss of an evaluation is always plain cross-entropy.

    Give them by name. Options that concern a teacher are those of `growkern.InheritanceSchedule`.

    Args:
        label_smoothing: share of the label that is spread over the whole vocabulary, in [0, 1).
        z_loss: factor of the squared log of the softmax's denominator.
        row_weights: name of the key of the batches that holds one weight per label, (B, S) float.
            The loss is still divided by the number of labels, those of weight 0 included. To
            leave a label out of that number, mask it. None weighs all labels alike.

    Raises:
        GrowthError: a value is out of range.
    """

    LIMITS: ClassVar[dict[str, Limit]] = LOSS_LIMITS

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    row_weights: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def arguments(self) -> dict[str, float]:
        """The arguments of `growkern.inherited_loss`: all options but the name of the weights."""
        return {name: getattr(self, name) for name in LABEL_OPTIONS}

    def with_smoothing(self, factor: float) -> LossOptions:
        """These options with the `label_smoothing_factor` of `transformers.TrainingArguments`.

        Raises:
            GrowthError: both are given and differ.
        """
        if factor in (0, self.label_smoothing):
            return self
        if self.label_smoothing:
            raise GrowthError(
                f"label_smoothing is {self.label_smoothing} in the options of the loss, but "
                f"label_smoothing_factor is {factor}: give one of them"
            )
        return replace(self, label_smoothing=factor)

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys of the batches that it needs beside the labels."""
        return (self.row_weights,) if self.row_weights else ()


@dataclass(frozen=True)
class InheritanceSchedule:
    """How strongly, for how long and on which rows the student follows its teachers.

    Args:
        alpha: weight of the KL term, 0 to 1. At the float 0 no teacher is read, at the float 1 no
            label. With a 0-d tensor, torch.compile makes one graph for all values, and nothing
            waits for the value. A changing float needs ``dynamic=True`` for one graph, and is
            compiled again at 0 and 1.
        end_step: the optimizer step from which the share is 0; None with "constant".
        decay: of the share: "linear" falls in a straight line from `alpha` to 0 at `end_step`;
            "constant" stays at `alpha` to the end of the run; "switch" stays at `alpha` up to
            `end_step`.
        temperature: of the softmax of student and teachers in the KL term.
        kl_rows: rows with the KL term: "labels" (rows with a label) or "all" (in training every
            real token). The losses of tensors also take a bool mask of the labels' shape.
        teacher_weights: one number per teacher, sum 1. Default: equal.
        divergence: "forward", KL(teacher || student), infinite if the student alone gives
            probability 0 to a token. "reverse", KL(student || teacher), infinite if the teacher
            alone does. "jsd", the generalised Jensen-Shannon divergence of GKD (Agarwal et al.
            2024), always finite. A token of probability 0 in both adds nothing.
        beta: of "jsd", in (0, 1): small values are close to "forward". Default: 0.5.
        tail: of a teacher known by its k likeliest tokens, the use of its remaining probability.
            "bucket", the default, compares it as a whole with the student's. "renormalise" spreads
            it over the k tokens, as Knowledge Inheritance does, with a wrong gradient for small k.

    Raises:
        GrowthError: a value is out of range.
    """

    LIMITS: ClassVar[dict[str, Limit]] = LOSS_LIMITS | {"alpha": SHARE}

    alpha: float = 0.5
    end_step: int | None = None
    temperature: float = 2.0
    kl_rows: KLRows = "labels"
    teacher_weights: tuple[float, ...] | None = None
    divergence: Divergence = "forward"
    beta: float | None = None
    decay: Decay = "linear"
    tail: Tail | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check("inheritance", self)
        if self.decay != "constant" and (self.end_step is None or self.end_step < 1):
            raise GrowthError(
                f"inheritance end_step is {self.end_step}: give the optimizer step at which the "
                "alpha reaches 0, for example 0.44 of all steps"
            )
        if self.teacher_weights is not None and not (abs(sum(self.teacher_weights) - 1) <= 1e-6):
            raise GrowthError(f"teacher_weights {self.teacher_weights} must sum to 1")

    def alpha_at(self, step: int) -> float:
        """The share of the KL term at an optimizer step, counted from 0."""
        if self.end_step is None:
            return self.alpha
        if self.decay == "switch":
            return self.alpha if step < self.end_step else 0.0
        return max(0.0, self.alpha * (1 - step / self.end_step))

    def arguments(self) -> dict[str, Any]:
        """The arguments of the losses that say how student and teachers are compared."""
        return {name: getattr(self, name) for name in KL_OPTIONS}


@dataclass(frozen=True, kw_only=True)
class GrowthStep(GrowthOptions):
    """A growth at the start of a run or inside it, without a detour over the disk.

    Inside a run the weights, the learning-rate schedule, the order of the data and all counts go
    on, and the optimizer's state if `moments` says so. StackBERT (Gong et al. 2019) is a list of
    these. With `new_layers_steps` the list is MSLT (Yang et al. 2020).

    The other fields are those of `growkern.growth.options.GrowthOptions`.

    Args:
        sizes: the sizes of the large model by the names of its config. In a run file they may also
            stand beside the other keys, as in `num_hidden_layers = 12`. `mlp_only_layers` is a
            list.
        at_step: optimizer steps that come before this growth; 0 is the start of the run.
        source: directory of the checkpoint that is grown, at the start only; or a model on the Hub,
            ORGANISATION/NAME.
        revision: branch, tag or commit of a source on the Hub.
        moments: "grow" and "old_slices" grow the optimizer's state, see
            `growkern.grow_optimizer_into`. "reset" starts it at zero. With stacked layers that
            ended at a lower loss than grown moments.
        optimizer: the state of the source's optimizer, at the start only: the `optimizer.pt` of a
            Trainer or a directory with one, or a directory of `torch.distributed.checkpoint`.
        rewarm_steps: inside a run, optimizer steps after the growth in which the learning rate
            rises from near 0 to that of its schedule again.
        rate_factor: inside a run, factor of all learning rates from this growth on. Those of
            several growths are multiplied.
        new_layers_steps: inside a run, optimizer steps after the growth in which only the layers
            above those of the smaller model train, together with the head.

    Inside a run the depth "auto" is "stack", and at its start "identity".

    Raises:
        GrowthError: a value is unknown or out of range, or the values contradict each other.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {
        **GrowthOptions.LIMITS,
        **dict.fromkeys(("at_step", "rewarm_steps", "new_layers_steps"), NOT_NEGATIVE),
        "rate_factor": POSITIVE,
    }

    sizes: dict[str, int | tuple[int, ...]]
    at_step: int = 0
    source: str | None = None
    revision: str | None = None
    moments: Moments = "reset"
    optimizer: str | None = None
    rewarm_steps: int = 0
    rate_factor: float = 1.0
    new_layers_steps: int = 0

    def __post_init__(self) -> None:
        if self.at_step and self.depth == "auto":
            object.__setattr__(self, "depth", "stack")
        super().__post_init__()
        # a list of layers says how many there are
        if not self.sizes and isinstance(self.depth, str):
            raise GrowthError("a growth needs sizes, such as num_hidden_layers = 12")
        check("growth", self)

    @property
    def grows_moments(self) -> bool:
        """Whether the optimizer's state grows too."""
        return self.moments != "reset"

    def inside(self, base: Path) -> GrowthStep:
        """The same growth; the file of a new router lies in a folder."""
        return self if self.router in ROUTERS else replace(self, router=str(base / self.router))

    @property
    def how(self) -> GrowthOptions:
        """The options of the growth, without its place in a run."""
        return GrowthOptions(**{x.name: getattr(self, x.name) for x in fields(GrowthOptions)})


def check_order(growth: Sequence[GrowthStep], steps: int) -> None:
    """Check the growths of a run against each other."""
    places = [step.at_step for step in growth]
    for before, after in pairwise(places):
        if after <= before:
            raise GrowthError(
                f"a growth at step {after} follows one at step {before}: give them in the order of "
                "their steps"
            )
    if places and places[-1] >= steps:
        raise GrowthError(
            f"the growth at step {places[-1]} would come after the run, which has {steps} steps"
        )
    for step, end in zip(growth, [*places[1:], steps], strict=False):
        at, start = f"the growth at step {step.at_step}:", step.at_step
        given = {f"{at} rewarm_steps": step.rewarm_steps}
        check_steps(steps - start, given, "steps that the run has left")
        alone = {f"{at} new_layers_steps": step.new_layers_steps}
        check_steps(end - start, alone, "steps to the next growth or the end of the run")
