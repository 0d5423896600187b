"""Trains a student beside frozen teachers: how strongly, for how long, and the teachers themselves.

Knowledge Inheritance (Qin et al. 2022, Eq. 5) adds the KL divergence from the teacher to the loss.
Its share of the loss at optimizer step t is

    alpha_t = max(0, alpha * (1 - t / S_d))                                  (1)

with the first share alpha, the inheritance rate of the paper, and the end step S_d. From t = S_d on
no teacher runs. The paper compares this with a constant share, and with a drop to 0 at S_d.

The paper's students begin at random, with alpha = 1. A student that was grown from its teacher
begins with the teacher's predictions. At alpha = 1 its first gradients are then nothing but
rounding, which Adam scales up to full steps. So alpha is 0.5 by default: the labels' gradient is a
hundred times the rounding of bfloat16.

Several teachers teach all rows together, or each the rows of a source of its own (Table 3 there). A
row has then the KL divergence from the teacher of its source alone, and a teacher runs on its own
examples only. All rows have the divisors that they would have with one teacher, so the losses of
the sources add up to the loss of the batch.

Student and teacher must mean the same token by each id. Tokenizers tell it for certain. They are
compared wherever both can be had. Otherwise there are three signs of another vocabulary: other
special ids in the configs, another model family, and a head with more columns than padding
explains.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from growkern.arguments import as_list
from growkern.errors import GrowthError, warn
from growkern.families import dense_families
from growkern.growth.history import directory_of
from growkern.ops.loss import LossParts
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss
from growkern.train.distributed import is_sharded
from growkern.train.loss.batch_rows import (
    TAUGHT_BY,
    LossRows,
    as_known,
    check_batch_keys,
    examples_of,
)
from growkern.train.model import (
    HeadInputs,
    check_causal,
    check_head,
    has_tokenizer,
    is_causal,
    load_tokenizer,
    teacher_inputs,
    teacher_options,
)
from growkern.train.objectives import SOURCE, Collator, OuterCollator
from growkern.train.rules import check
from growkern.train.sections import InheritanceSchedule

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")
# 8 columns suit tensor cores, and 128 is the default of Megatron
MULTIPLES = (8, 16, 32, 64, 128)
# columns kept free for later tokens: DeepSeek has 102400 for 100015 tokens, 2.4 % more
RESERVED_MULTIPLE, MOST_RESERVED = 64, 1 / 32
# the option that overrides the signs
GIVE_TOKENIZER = (
    "give teacher_tokenizer, and the student's tokenizer as processing_class. Otherwise choose a "
    "teacher with the student's vocabulary"
)
GIVE_SIZE = (
    "give vocab_size, the number of ids that mean the same token in both. Otherwise choose a "
    "teacher with the student's vocabulary"
)
# the loss of some examples, and where they are in the batch
Share = tuple[list[int], Callable[..., Any]]


class Teachers:
    """Frozen models whose predictions the student learns to match; without any it has labels alone.

    This is what a training loop asks of teachers of any kind.

    Attributes:
        known: tokens that all models know, if the student has further ones; else None.
        columns: of the data that they read beside the model's inputs.
        lacks_rows: whether a row with a label may be one that they cannot teach.
    """

    columns: tuple[str, ...] = ()
    lacks_rows = False

    def __init__(self, models: Sequence[Any], schedule: InheritanceSchedule | None) -> None:
        self.models = list(models)
        weights = None if schedule is None else schedule.teacher_weights
        for model in self.models:
            check_head(model)
        self.options = teacher_options(self.models)
        self.options["teacher_weights"] = weights if len(self.models) > 1 else None
        self.known: int | None = None

    def place(self, student: nn.Module, device: torch.device) -> None:
        """Move the teachers to a device, unless they are sharded. Nothing else of them changes.

        One that shares parameters with the student, or that sees the tokens it predicts, is
        refused.
        """
        trained = {id(parameter) for parameter in student.parameters()}
        for model in self.models:
            if any(id(parameter) in trained for parameter in model.parameters()):
                raise GrowthError(
                    "the teacher shares parameters with the model in training: pass a copy "
                    "(copy.deepcopy), or load it a second time"
                )
            if not is_sharded(model):
                model.to(device)
            if not model.config.is_encoder_decoder and is_causal(model):
                check_causal(model)

    def check_objective(self, causal: bool) -> None:
        """Do nothing: models that run were compared with the student's before."""

    def compare(self, student: Any, tokenizer: Any | None, own: Any | None) -> None:
        """Refuse another vocabulary than the student's, and set `known`.

        Args:
            tokenizer, own: of the student and of the teachers, as in `check_vocabularies`.
        """
        self.known = check_vocabularies(student, self.models, tokenizer, own)

    def common_vocabulary(self, student: Any, tokenizer: Any | None) -> int | None:
        """The vocabulary columns of the student without padding; None if all heads have one size.

        Heads that are padded to different sizes agree on the ids of the student's tokenizer only.
        """
        heads = [model.get_output_embeddings().weight.shape[0] for model in (student, *self.models)]
        if len(set(heads)) == 1:
            return None
        differ = (
            f"student and teacher vocabularies differ: heads of {heads[0]} and {heads[1:]} columns"
        )
        if tokenizer is None:
            raise GrowthError(
                f"{differ}. If they differ in padding only, pass the tokenizer as processing_class"
            )
        if len(tokenizer) > heads[0]:
            raise GrowthError(
                f"{differ}, but the tokenizer has {len(tokenizer)} ids: the student must have all"
            )
        return len(tokenizer)

    def collator(self, collator: Collator, *, sent: bool) -> Collator:
        """The collator of training and, frozen, of evaluation: teachers that run need no other.

        Args:
            sent: whether one process reads the batches and sends them to the others.
        """
        return collator

    def trained(self, collator: Collator, dataset: Any) -> Collator:
        """The collator of training alone."""
        return collator

    def loss_function(self, inputs: dict[str, Any], taught: bool) -> Callable[..., Any]:
        """`linear_kl_mlm_loss` for a batch, after running the teachers on its inputs.

        Without a KL term no teacher runs.
        """
        return loss_beside(self.predict(inputs) if taught else [], self.options)

    def predict(self, inputs: dict[str, Any]) -> list[HeadInputs]:
        """Run the teachers; hidden states, weight and bias of each output projection."""
        inputs = as_known(inputs, self.known)
        return [teacher_inputs(model, inputs) for model in self.models]


class TeachersOfSources(Teachers):
    """Frozen models, one for the examples of each source, by the names of these."""

    columns = (SOURCE,)

    def __init__(self, models: Mapping[str, Any]) -> None:
        super().__init__(list(models.values()), None)
        self.names = tuple(models)

    def collator(self, collator: Collator, *, sent: bool) -> Collator:
        """Add the number of each example's teacher."""
        check("sources", sent=sent)
        return SourceCollator(collator, self.names)

    def loss_function(self, inputs: dict[str, Any], taught: bool) -> Callable[..., Any]:
        """The loss for a batch, after running each teacher on its examples.

        The numbers of the teachers are removed from the inputs. Without a KL term no teacher runs.
        """
        if taught:
            check_batch_keys(inputs, TAUGHT_BY)
        by = inputs.get(TAUGHT_BY) or ()
        shares: list[Share] = []
        for number, model in enumerate(self.models if taught else ()):
            examples = [i for i, teacher in enumerate(by) if teacher == number]
            # all processes have to run a sharded teacher, also one without examples
            if not examples and not is_sharded(model):
                continue
            own = examples_of(inputs, number) if examples else dict(inputs)
            del own[TAUGHT_BY]
            prediction = teacher_inputs(model, as_known(own, self.known))
            if examples:
                shares.append((examples, loss_beside([prediction], self.options)))
        inputs.pop(TAUGHT_BY, None)
        return partial(_sum, shares) if taught else loss_beside([])


def _sum(
    shares: Sequence[Share], hidden_BSH: Tensor, weight_VH: Tensor, **options: Any
) -> tuple[Tensor, LossParts]:
    """The loss of a batch from those of its shares, and the means of its parts."""
    rows = LossRows.of(options)
    counts = [mask_BS.sum().clamp(min=1) for mask_BS in rows.masks()]
    options = {"num_items": tuple(counts)} | options
    labelled_BS, kl_BS = rows.measured()
    total: Any = 0.0
    parts, sizes = [], []
    for examples, loss_of in shares:
        own = rows.of_examples(examples).options()
        loss, part = loss_of(hidden_BSH[examples], weight_VH, **options | own)
        total = total + loss
        parts.append(torch.stack([part.mlm, part.kl, part.top1_agreement, part.entropy]))
        mlm, kl = labelled_BS[examples], kl_BS[examples]
        sizes.append(torch.stack([x.sum() for x in (mlm, kl, kl, mlm | kl)]))
    sizes_P4 = torch.stack(sizes).to(parts[0].dtype)
    means_4 = (torch.stack(parts) * sizes_P4).sum(0) / sizes_P4.sum(0).clamp(min=1)
    return total, LossParts(*means_4.unbind())


def loss_beside(
    predictions: Sequence[HeadInputs], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """`linear_kl_mlm_loss` with the arguments of the teachers filled in; it may be none.

    The options are those that depend on the teachers.
    """
    if not predictions:
        return partial(linear_kl_mlm_loss, teacher_hidden=None, teacher_weight=None)
    hidden, weight, bias = (list(column) for column in zip(*predictions, strict=True))
    return partial(
        linear_kl_mlm_loss,
        teacher_hidden=hidden,
        teacher_weight=weight,
        teacher_bias=bias,
        **options or {},
    )


def check_same_objective(name: str, teacher: bool, student: bool) -> None:
    """Check that a teacher and the student both predict the next token, or both masked tokens."""
    if teacher != student:
        objectives = ("masked tokens", "the next token")
        raise GrowthError(
            f"{name} predicts {objectives[teacher]}, but the student predicts "
            f"{objectives[student]}: choose a teacher with the student's objective"
        )


class SourceCollator(OuterCollator):
    """Adds the number of each example's teacher to the batches of another collator.

    That one makes one row per example, and does not see the sources. The names are those of the
    sources, in the order of their teachers. An evaluation has none.
    """

    def __init__(self, collator: Collator, names: Sequence[str]) -> None:
        super().__init__(collator)
        self.numbers = {name: i for i, name in enumerate(names)}

    def frozen(self) -> Collator:
        """The variant for evaluation, which has no teacher."""
        return SourceCollator(super().frozen(), ())

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch = self.inner(
            [{name: x for name, x in feature.items() if name != SOURCE} for feature in features]
        )
        if not self.numbers:
            return batch
        sources: list[Any] = [feature.get(SOURCE) for feature in features]
        strange = [name for name in sources if name not in self.numbers]
        if strange:
            raise GrowthError(
                f"an example has the {SOURCE!r} {strange[0]!r}, which no teacher has: give each "
                f"example one of {', '.join(map(repr, self.numbers))}, the keys of teacher"
            )
        if len(batch["labels"]) != len(features):
            raise GrowthError(
                f"{len(features)} examples make a batch of {len(batch['labels'])} rows: teachers "
                "of one source each need one row per example, so leave out packing by the collator"
            )
        return batch | {TAUGHT_BY: [self.numbers[name] for name in sources]}


def tokenizer_fingerprint(tokenizer: Any, ids: int | None = None) -> str:
    """The SHA-256 of the tokenizer's table of tokens and ids, or of its first `ids`."""
    items = tokenizer.get_vocab().items()
    table = json.dumps(sorted(item for item in items if ids is None or item[1] < ids))
    return hashlib.sha256(table.encode()).hexdigest()


def check_tokenizers(student: Any, teachers: Sequence[Any]) -> int | None:
    """Check that every teacher's tokenizer gives each token the same id as the student's.

    Tokens that only one of them has, such as an added padding token, are no difference.

    Returns:
        The tokens that all teachers know, if the student has further ones; else None.
    """
    if teachers and student is None:
        raise GrowthError(
            "teacher_tokenizer is given without the student's tokenizer: pass that as "
            "processing_class"
        )
    return least([_check_tokens(f"teacher {i}", student, x) for i, x in enumerate(teachers)])


def check_vocabularies(
    student: Any, teachers: Sequence[Any], tokenizer: Any | None, teacher_tokenizer: Any | None
) -> int | None:
    """Check that the teachers of a trainer have the vocabulary of the student.

    Args:
        tokenizer: of the student; None if it was not given.
        teacher_tokenizer: one, or one for each teacher; None compares what lies beside the models.

    Returns:
        As `check_tokenizers`.
    """
    if teacher_tokenizer is None:
        known = []
        for i, teacher in enumerate(teachers):
            name = f"teacher {i} ({type(teacher).__name__})"
            known.append(check_vocabulary(name, student, teacher, tokenizer, GIVE_TOKENIZER))
        return least(known)
    given = as_list(teacher_tokenizer)
    if len(given) != len(teachers):
        raise GrowthError(
            f"{len(given)} teacher_tokenizer for {len(teachers)} teachers that run: give one each"
        )
    return check_tokenizers(tokenizer, given)


def least(known: Sequence[int | None]) -> int | None:
    """The tokens that all teachers know; None stands for all."""
    return min((tokens for tokens in known if tokens is not None), default=None)


def check_vocabulary(
    name: str, student: Any, teacher: Any, tokenizer: Any | None, remedy: str
) -> int | None:
    """Check that a teacher has the vocabulary of the student, as far as that can be known.

    Args:
        tokenizer: of the student; None takes the one beside its weights.
        remedy: completes "If all ids agree, ..." for messages.

    Returns:
        The tokens that the teacher knows, if its tokenizer is known and the student's has more.
    """
    own, other = tokenizer or _tokenizer_of(student), _tokenizer_of(teacher)
    if hasattr(own, "get_vocab") and other is not None:
        return _check_tokens(name, own, other)
    ours, theirs = _special_ids(student), _special_ids(teacher)
    common = ours.keys() & theirs.keys()
    # one that agrees is enough: chat models end their text with another token than base models
    if common and all(ours[key].isdisjoint(theirs[key]) for key in common):
        key = min(common)
        raise GrowthError(
            f"{name} has the {key} {sorted(theirs[key])}, but the student's is "
            f"{sorted(ours[key])}, so it seems to have another vocabulary. If all ids agree, "
            f"{remedy}"
        )
    family, others = (getattr(model.config, "model_type", None) for model in (student, teacher))
    if family != others and others not in dense_families(str(family)):
        raise GrowthError(
            f"{name} is a {others} and the student a {family}, so it seems to have another "
            f"vocabulary. If all ids agree, {remedy}"
        )
    columns = columns_of(teacher)
    if tokenizer is not None and columns != columns_of(student):
        check_padding(name, columns, len(tokenizer), remedy)
    return None


def check_own_tokenizer(teacher: Any, tokenizer: Any) -> None:
    """Check that a tokenizer gives each token the id that the one beside a teacher gives."""
    own = _tokenizer_of(teacher)
    if own is not None:
        _check_tokens("the teacher", tokenizer, own)


def check_padding(name: str, columns: int, tokens: int, remedy: str) -> None:
    """Check that the columns of a teacher's head may be the student's tokens with padding.

    It warns if padding is taken for granted. `remedy` is as in `check_vocabulary`.
    """
    sizes = {-(-tokens // multiple) * multiple for multiple in MULTIPLES}
    free = columns - tokens
    is_reserved = columns % RESERVED_MULTIPLE == 0 and free <= tokens * MOST_RESERVED
    differ = (
        f"{name} has a vocabulary of {columns} tokens, and the student's tokenizer has {tokens}"
    )
    if free < 0 or (free > 0 and columns not in sizes and not is_reserved):
        raise GrowthError(
            f"{differ}: padding does not explain the difference. If all ids agree, {remedy}"
        )
    if free > 0:
        warn(
            f"{differ}: the last {free} are taken as padding, as no two tokenizers could be "
            f"compared. To have that done, {remedy}"
        )


def _check_tokens(name: str, student: Any, teacher: Any) -> int | None:
    """Refuse a token with two ids, and an id with two tokens; the result of `check_tokenizers`."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    tokens: dict[int, set[str]] = {}
    for token, i in ours.items():
        tokens.setdefault(i, set()).add(token)
    # in the order of ids: that of the table is another one in every process
    for token, i in sorted(theirs.items(), key=itemgetter(1)):
        here = ours.get(token, i)
        if here != i or token not in tokens.get(i, {token}):
            what = f"has the id {here}" if here != i else f"is not the token of {i}"
            raise GrowthError(
                f"{name} has another tokenizer than the student ({len(theirs)} and {len(ours)} "
                f"tokens): its token {token!r} has the id {i}, but {what} for the student. Every "
                "token must have the same id in both"
            )
    known = 1 + max(theirs.values(), default=-1)
    return known if max(tokens, default=-1) >= known else None


def _tokenizer_of(model: Any) -> Any | None:
    """The tokenizer beside the weights that a model was loaded from; None if there is none."""
    directory = directory_of(model)
    try:
        return load_tokenizer(directory) if directory and has_tokenizer(directory) else None
    except GrowthError:
        # not asked for, so a damaged one is no reason to stop
        return None


def columns_of(model: Any) -> int:
    """The columns of a model's logits."""
    columns: int = model.get_output_embeddings().weight.shape[0]
    return columns


def _special_ids(model: Any) -> dict[str, set[int]]:
    """The special ids in a model's config. Ids beyond its vocabulary are defaults of its class."""
    special, columns = {}, columns_of(model)
    for name in SPECIAL_IDS:
        value = getattr(model.config, name, None)
        several = value if isinstance(value, list | tuple) else [value]
        special[name] = {i for i in several if isinstance(i, int) and 0 <= i < columns}
    return {name: ids for name, ids in special.items() if ids}
