"""Checks that student and teacher mean the same token by each id.

Tokenizers tell it for certain. They are compared wherever both can be had. Otherwise there are
three signs of another vocabulary: other special ids in the configs, another model family, and a
head with more columns than padding explains.
"""

import hashlib
import json
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from growkern.arguments import as_list
from growkern.errors import GrowthError, warn
from growkern.families.load import dense_families
from growkern.growth.history import directory_of
from growkern.train.model import has_tokenizer, load_tokenizer

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
