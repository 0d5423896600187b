"""Run a teacher once over a data set and keep its k likeliest tokens per row.

Two passes. The first collates the data and hashes every example: that says what the cache is of,
how large it gets and where its shards end, and it catches a collator that draws other masks each
time. The second runs the teacher, shard by shard. A shard that is there is whole; a run that was
killed goes on after the last one. The directory appears by a rename, at the end.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from growkern.errors import GrowthError, nearest
from growkern.train.cached_teacher.rows import (
    Contents,
    Examples,
    kept_rows,
    survey,
    weights_fingerprint,
)
from growkern.train.cached_teacher.store import (
    DTYPES,
    FORMAT,
    HEADER_FILE,
    INDEX_FILE,
    MAX_ID_BITS,
    ROWS,
    CacheHeader,
    TeacherCache,
    mapped,
    pack_ids,
    read_header,
    shard_file,
    write_header,
    write_tensors,
)
from growkern.train.head import check_head
from growkern.train.inheritance import tokenizer_fingerprint
from growkern.train.load import is_causal, load_language_model

SHARD_BYTES = 256 << 20


@dataclass(frozen=True)
class CacheReport:
    """What was kept: examples (each masking counted), rows, tokens they were made of, bytes."""

    directory: Path
    examples: int
    rows: int
    tokens: int
    bytes: int
    seconds: float

    @property
    def bytes_per_row(self) -> float:
        return self.bytes / max(1, self.rows)

    @property
    def bytes_per_token(self) -> float:
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
    collator: Callable[[Any], Any],
    epochs: int = 1,
    tokenizer: Any | None = None,
    vocab_size: int | None = None,
    batch_size: int = 32,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: bool = True,
) -> CacheReport:
    """Keep a teacher's k likeliest tokens and their log-probs for every row of a data set.

    The log-probs are those of float32 logits divided by `temperature`, normalised over the whole
    vocabulary. Read them with `growkern.TeacherCache`, train on them with
    `growkern.topk_kl_mlm_loss`, or give the directory to `TwoStageTrainer`.

    Args:
        model: a ...ForMaskedLM or ...ForCausalLM model, or its checkpoint directory. It runs in
            evaluation mode, in its own dtype, on its own device.
        dataset: what training reads: indexed, with a length.
        directory: where to. It appears when it is complete; until then the work is in a hidden
            directory beside it, and the same call goes on there.
        k: tokens per row, at most the vocabulary.
        rows: "labels" keeps rows with a label, "all" those of every real token.
        dtype: of the log-probs: "float16" (11 bits), "bfloat16" (8) or "float32".
        collator: what training collates with. A masked language model's teacher reads masked
            text, so the masks must be drawn the same way each time (`MaskedLMCollator` does).
        epochs: maskings kept of each example, by `collator.set_epoch`. Training goes round them.
        tokenizer: its token table is compared before training.
        vocab_size: columns from here on are padding of the teacher's head. Default: none are.
        shard_bytes: size of one file.

    Raises:
        GrowthError: options, models or data that do not fit, a directory that is there, a
            half-made cache of something else, too little disk space, a collator that does not
            draw the same masks twice, a teacher that gives NaN.
    """
    start_time = time.perf_counter()
    directory = Path(directory)
    _check_options(k, temperature, rows, dtype, epochs, batch_size)
    _check_target(directory, overwrite)
    if isinstance(model, (str, Path)):
        model = load_language_model(Path(model))
    check_head(model)
    causal = is_causal(model)
    vocabulary = _vocabulary(model, vocab_size, k)
    examples = Examples(dataset, collator, epochs, batch_size)
    contents = survey(examples, rows, causal, progress)
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
        teacher=weights_fingerprint(model),
        tokenizer=None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        data=hashlib.sha256(contents.keys_E.tobytes()).hexdigest(),
    )
    staging = _staging(directory, header, overwrite, int(contents.rows_E.sum()))
    first_E = np.concatenate([[0], np.cumsum(contents.rows_E)])
    ends = _shard_ends(first_E, max(1, shard_bytes // header.row_bytes))
    _write_shards(model, examples, header, staging, contents, ends, progress)
    _write_index(staging, contents.keys_E, first_E, ends)
    _swap_in(staging, directory)
    cache = TeacherCache(directory)
    seconds = time.perf_counter() - start_time
    total = int(first_E[-1])
    return CacheReport(directory, len(cache), total, contents.tokens, cache.bytes, seconds)


# ------------------------------------------------------------------ checks


def _check_options(
    k: int, temperature: float, rows: str, dtype: str, epochs: int, batch_size: int
) -> None:
    for name, number in (("k", k), ("epochs", epochs), ("batch_size", batch_size)):
        if number < 1:
            raise GrowthError(f"{name} is {number}: it must be positive")
    if not 0 < temperature < float("inf"):
        raise GrowthError(f"temperature is {temperature}: it must be positive and finite")
    for name, value, allowed in (("rows", rows, ROWS), ("dtype", dtype, tuple(DTYPES))):
        if value not in allowed:
            raise GrowthError(f"{name} is {value!r}{nearest(str(value), allowed)}")


def _check_target(directory: Path, overwrite: bool) -> None:
    if not directory.exists():
        return
    if not overwrite:
        raise GrowthError(f"{directory} exists: give another directory, or overwrite it")
    if not directory.is_dir() or any(directory.iterdir()):
        read_header(directory)  # nothing but a cache is replaced


def _vocabulary(model: Any, vocab_size: int | None, k: int) -> int:
    columns = model.get_output_embeddings().weight.shape[0]
    vocabulary = columns if vocab_size is None else vocab_size
    if not 0 < vocabulary <= columns or k > vocabulary or vocabulary > 1 << MAX_ID_BITS:
        raise GrowthError(
            f"k is {k} and vocab_size {vocabulary}, the teacher's head has {columns} columns: "
            f"k <= vocab_size <= columns must hold, and vocab_size <= {1 << MAX_ID_BITS}"
        )
    return vocabulary


def _shard_ends(first_E: np.ndarray, rows: int) -> list[int]:
    """The example after the last one of each shard; an example is never cut."""
    ends, start = [], 0
    while start < len(first_E) - 1:
        end = int(np.searchsorted(first_E, first_E[start] + rows, "right")) - 1
        start = max(end, start + 1)
        ends.append(start)
    return ends


# ------------------------------------------------------------------- files


def _staging(directory: Path, header: CacheHeader, overwrite: bool, rows: int) -> Path:
    """The directory to work in: new, or what an equal call left there."""
    staging = directory.parent / f".{directory.name}.caching"
    if staging.exists():
        same = (staging / HEADER_FILE).is_file() and read_header(staging) == header
        if not same and not overwrite:
            raise GrowthError(
                f"{staging} holds a half-made cache of something else: delete it, or overwrite"
            )
        if not same:
            shutil.rmtree(staging)
    size = rows * header.row_bytes
    parent = directory.resolve().parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < size:
        raise GrowthError(
            f"{directory}: {size / 1e9:.2f} GB to write, {free / 1e9:.2f} GB free on that disk"
        )
    if not staging.exists():
        staging.mkdir()
        write_header(staging, header)
    return staging


def _swap_in(staging: Path, directory: Path) -> None:
    """What is replaced is deleted after its replacement has its name."""
    for half in staging.glob("*.partial"):
        half.unlink()
    old = directory.parent / f".{directory.name}.old"
    if directory.exists():
        directory.rename(old)
    staging.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


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


def _is_whole(file: Path, rows: int) -> bool:
    try:
        return len(mapped(file)["ids"]) == rows
    except (GrowthError, KeyError):
        return False


def _write_shards(
    model: Any,
    examples: Examples,
    header: CacheHeader,
    staging: Path,
    contents: Contents,
    ends: Sequence[int],
    progress: bool,
) -> None:
    training, use_cache = model.training, getattr(model.config, "use_cache", None)
    model.eval()
    model.config.use_cache = False
    total = int(contents.rows_E.sum())
    bar = tqdm(total=total, desc="teacher", unit=" rows", disable=not progress)
    try:
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            file, rows = shard_file(staging, number), int(contents.rows_E[start:end].sum())
            if not _is_whole(file, rows):
                shard = [
                    kept_rows(model, batch, header, contents.keys_E[first : first + size])
                    for batch, first, size in _placed(examples.batches(start, end), start)
                ]
                ids, logprobs = (torch.cat(x) for x in zip(*shard, strict=True))
                packed = pack_ids(ids.numpy(), header.id_bits)
                bits = torch.uint32 if logprobs.element_size() == 4 else torch.uint16
                stored = logprobs.view(bits).numpy()
                write_tensors(file, {"ids": packed, "logprobs": stored})
            bar.update(rows)
    finally:
        bar.close()
        model.train(training)
        model.config.use_cache = use_cache


def _placed(
    batches: Iterator[dict[str, Any]], first: int
) -> Iterator[tuple[dict[str, Any], int, int]]:
    for batch in batches:
        size = len(batch["input_ids"])
        yield batch, first, size
        first += size
