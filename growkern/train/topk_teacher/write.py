"""Writes a teacher cache: runs a teacher once over a data set and stores its top k per row.

The data is read twice. The first pass collates and hashes every example. This gives the size of the
cache and the ends of its shards. It also reveals a collator that draws other masks each time. The
second pass runs the teacher, shard by shard.

A journal notes every shard with its checksum once it is on disk. An interrupted call resumes with
the shards that still have theirs. The same checksums make the manifest of the cache. The directory
gets its name at the end.
"""

import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from growkern.arguments import check_kind
from growkern.errors import GrowthError, nearest
from growkern.files import checksum
from growkern.growth.disk import Journal
from growkern.publish import why_kept, workplace, write_manifest
from growkern.train.loss import check_own_tokenizer, tokenizer_fingerprint
from growkern.train.model import load_language_model
from growkern.train.objectives import Collator
from growkern.train.topk_teacher.computed import (
    Contents,
    Examples,
    ModelTeacher,
    columns_that_count,
    kept_rows,
    survey,
)
from growkern.train.topk_teacher.store import (
    DTYPES,
    FORMAT,
    INDEX_FILE,
    ROWS,
    Arrays,
    CacheHeader,
    TeacherCache,
    pack_ids,
    read_header,
    shard_file,
    write_header,
    write_tensors,
)
from growkern.train.topk_teacher.teacher import TopKRows

SHARD_BYTES = 256 << 20
# the workplace beside the cache is .NAME.caching
KIND, START_OVER = "caching", "overwrite=True (--overwrite)"
# the names that a cache may hold
CACHE_FILES = re.compile(r"rows-\d+\.safetensors|(cache|manifest)\.json|index\.safetensors")


@dataclass(frozen=True)
class CacheReport:
    """The size of a new cache.

    Attributes:
        directory: of the cache.
        examples: number of examples, each masking counted.
        rows: number of rows.
        tokens: number of tokens in the examples, without padding.
        bytes: size of all files.
        seconds: time it took.
    """

    directory: Path
    examples: int
    rows: int
    tokens: int
    bytes: int
    seconds: float

    @property
    def bytes_per_row(self) -> float:
        """Bytes on disk per row, the index included."""
        return self.bytes / max(1, self.rows)

    @property
    def bytes_per_token(self) -> float:
        """Bytes on disk per token that was read, the index included."""
        return self.bytes / max(1, self.tokens)


def cache_teacher(
    model: Any,
    dataset: Any,
    directory: str | Path,
    *,
    k: int,
    temperature: float,
    rows: str = "labels",
    dtype: str = "float16",
    collator: Collator,
    epochs: int = 1,
    tokenizer: Any | None = None,
    vocab_size: int | None = None,
    batch_size: int = 32,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: bool = True,
) -> CacheReport:
    """Store a teacher's k likeliest tokens and their log-probs for every row of a data set.

    The log-probs come from float32 logits divided by `temperature`, with the softmax over the whole
    vocabulary. Open the directory with `growkern.TeacherCache`. Give the cache to
    `TwoStageTrainer`, or read its rows and train on them with `growkern.topk_kl_mlm_loss`.

    Args:
        model: a ...ForMaskedLM or ...ForCausalLM model, or its checkpoint directory. It runs in
            evaluation mode, in its own dtype, on its own device. Or a `ServedTeacher`.
        dataset: the training data, read by index; it has a length.
        directory: of the new cache. It appears when it is complete. Until then the work is in a
            hidden directory beside it, where a second equal call resumes.
        k: tokens per row, at most the size of the vocabulary.
        temperature: of the softmax, the same as in training.
        rows: "labels" stores rows with a label, "all" those of every real token.
        dtype: of the log-probs: "float16" (11 bits), "bfloat16" (8 bits) or "float32".
        collator: of the training run. Its masks must be the same in every run, as those of
            `MaskedLMCollator` are.
        epochs: maskings of each example, drawn with `collator.set_epoch`. Training cycles through
            them.
        tokenizer: that made the data. Stored as a checksum, and compared when training starts, and
            now with the one beside the teacher's weights.
        vocab_size: columns of the teacher's head; later columns are padding. None takes all.
        batch_size: examples per call of the teacher.
        shard_bytes: size of one file.
        overwrite: replace a cache that exists, or an unfinished one of something else.
        progress: whether to show progress bars.

    Raises:
        GrowthError: options, models or data do not fit together; the directory exists; an
            unfinished cache of something else is in the way; another process makes the same
            cache; the disk is too small or fails; the collator draws other masks each time; or
            the teacher gives NaN.
    """
    start_time = time.perf_counter()
    directory = Path(directory).resolve()
    check_cache_options(k, temperature, rows, dtype, epochs, batch_size)
    check_place(directory, overwrite)
    with workplace.Workplace(directory, KIND, may_replace) as place:
        if isinstance(model, (str, Path)):
            model = load_language_model(Path(model))
        teacher: TopKRows = model
        if isinstance(model, torch.nn.Module):
            if tokenizer is not None:
                check_own_tokenizer(model, tokenizer)
            teacher = ModelTeacher(model, k, temperature, rows, vocab_size)
        check_kind("model", teacher, TopKRows, "a language model, its directory or a ServedTeacher")
        causal = teacher.facts.causal
        vocabulary = columns_that_count(teacher.name, teacher.facts.vocab_size, vocab_size, k)
        examples = Examples(dataset, collator, epochs, batch_size)
        contents = survey(examples, rows, causal, vocabulary, progress)
        header = CacheHeader(
            format=FORMAT,
            k=k,
            temperature=float(temperature),
            rows=rows,
            dtype=dtype,
            vocab_size=vocabulary,
            causal=causal,
            epochs=epochs,
            examples=len(examples),
            teacher=teacher.fingerprint(),
            tokenizer=None if tokenizer is None else tokenizer_fingerprint(tokenizer),
            data=hashlib.sha256(contents.keys_E.tobytes()).hexdigest(),
        )
        _write(place, teacher, examples, header, contents, shard_bytes, overwrite, progress)
        place.publish(overwrite=overwrite)
    cache = TeacherCache(directory)
    seconds = time.perf_counter() - start_time
    total = int(contents.rows_E.sum())
    return CacheReport(directory, len(cache), total, contents.tokens, cache.bytes, seconds)


# ------------------------------------------------------------------ checks


def check_cache_options(
    k: int, temperature: float, rows: str, dtype: str, epochs: int, batch_size: int
) -> None:
    """Refuse options of `cache_teacher` that fit no teacher and no data."""
    for name, number in (("k", k), ("epochs", epochs), ("batch_size", batch_size)):
        if number < 1:
            raise GrowthError(f"{name} is {number}: it must be positive")
    if not 0 < temperature < float("inf"):
        raise GrowthError(f"temperature is {temperature}: it must be positive and finite")
    for name, value, allowed in (("rows", rows, ROWS), ("dtype", dtype, tuple(DTYPES))):
        if value not in allowed:
            raise GrowthError(f"{name} is {value!r}{nearest(str(value), allowed)}")


def check_place(directory: Path, overwrite: bool) -> None:
    """Refuse a directory, given as an absolute path, that no cache may be written to.

    Something is there that must not be replaced, or another process works there.
    """
    try:
        workplace.delete_leftovers(directory, KIND, may_replace)
        if not directory.exists():
            return
        if why := _why_kept(directory):
            raise GrowthError(f"{directory} exists and is never replaced: {why}: give another one")
        if not overwrite:
            raise GrowthError(f"{directory} exists: give another directory, or set overwrite")
    except OSError as error:
        raise GrowthError(f"{directory}: {error.strerror or error}") from error


def may_replace(directory: Path) -> bool:
    """Whether a directory is a cache or empty: nothing else is ever replaced."""
    return _why_kept(directory) is None


def _why_kept(directory: Path) -> str | None:
    why = why_kept(directory, "a teacher cache", lambda x: bool(CACHE_FILES.fullmatch(str(x))))
    if why is not None or not any(directory.iterdir()):
        return why
    try:
        read_header(directory)
    except GrowthError as error:
        return str(error)
    return None


def _shard_ends(first_E: np.ndarray, rows: int) -> list[int]:
    """The number after the last example of each shard. No example is split between shards."""
    ends, start = [], 0
    while start < len(first_E) - 1:
        end = int(np.searchsorted(first_E, first_E[start] + rows, "right")) - 1
        start = max(end, start + 1)
        ends.append(start)
    return ends


# ------------------------------------------------------------------- files


def _write(
    place: workplace.Workplace,
    teacher: TopKRows,
    examples: Examples,
    header: CacheHeader,
    contents: Contents,
    shard_bytes: int,
    overwrite: bool,
    progress: bool,
) -> None:
    """All files of the cache, in `place.new`. The journal vouches for shards of an earlier run."""
    first_E = np.concatenate([[0], np.cumsum(contents.rows_E)])
    total, checksums = int(first_E[-1]), dict[str, str]()
    ends = _shard_ends(first_E, max(1, shard_bytes // header.row_bytes))
    workplace.check_space(place.target, KIND, total * header.row_bytes)
    bar = tqdm(total=total, desc="teacher", unit=" rows", disable=not progress)
    with _journal(place, header, overwrite) as journal, bar:
        new = place.open_new()
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            file = shard_file(new, number)
            mark = file.name, start, end
            noted = journal.marks.get(mark)
            if noted is None or not file.is_file() or checksum(file) != noted:
                keys_E = contents.keys_E[start:end]
                write_tensors(file, _shard(teacher, examples, header, keys_E, start))
                noted = checksum(file)
                journal.add({mark: noted}, {})
            checksums[file.name] = noted
            bar.update(int(first_E[end] - first_E[start]))
    place.keep_only(checksums)
    write_header(new, header)
    _write_index(new, contents.keys_E, first_E, ends)
    write_manifest(new, checksums)


def _journal(place: workplace.Workplace, header: CacheHeader, overwrite: bool) -> Journal:
    """The notes of an equal call that was interrupted, or new ones."""
    try:
        return Journal(place.journal, asdict(header), START_OVER)
    except GrowthError:
        if not overwrite:
            raise
        place.clear()
        return Journal(place.journal, asdict(header), START_OVER)


def _write_index(
    staging: Path, keys_E: np.ndarray, first_E: np.ndarray, ends: Sequence[int]
) -> None:
    order = np.argsort(keys_E, kind="stable")
    index = {
        "keys": keys_E[order].astype(np.uint64),
        "order": order.astype(np.int64),
        "first_row": first_E.astype(np.int64),
        "shard_row": first_E[[0, *ends]].astype(np.int64),
    }
    write_tensors(staging / INDEX_FILE, index)


def _shard(
    teacher: TopKRows, examples: Examples, header: CacheHeader, keys_E: np.ndarray, start: int
) -> Arrays:
    """Run the teacher for the examples with these keys, the first of which is `start`."""
    parts, done = [], 0
    for batch in examples.batches(start, start + len(keys_E)):
        keys_B = keys_E[done : done + len(batch["input_ids"])]
        parts.append(kept_rows(teacher, batch, header, keys_B))
        done += len(keys_B)
    ids, logprobs = (torch.cat(x) for x in zip(*parts, strict=True))
    bits = torch.uint32 if logprobs.element_size() == 4 else torch.uint16
    return {
        "ids": pack_ids(ids.numpy(), header.id_bits),
        "logprobs": logprobs.view(bits).numpy(),
    }
