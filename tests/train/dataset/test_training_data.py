"""Data of every kind gives the rows of a plain loop; data that cannot be used is named."""

import os
import shutil

import datasets
import numpy as np
import pytest
import torch

from growkern import GrowthError
from growkern.train.dataset import source
from growkern.train.dataset.training_data import load_data, pack_text
from growkern.train.objectives.language_modeling import CausalLMCollator, MaskedLMCollator
from growkern.train.sections import DataSection
from testbed.tiny import VOCAB
from tests.train.dataset.data import (
    CLS,
    SEP,
    ids_of,
    in_order,
    plain_rows,
    rows_of,
    texts,
    tokenizer,
    write_jsonl,
)

TOKENIZER = tokenizer()
LENGTH = 8
TEXTS = texts(40)


@pytest.fixture
def load(tmp_path):
    def from_options(row_weights=None, **options):
        data = DataSection(**{"sequence_length": LENGTH, "cache": "cache"} | options)
        return load_data(data, TOKENIZER, base=tmp_path, row_weights=row_weights, progress=False)

    return from_options


def save(folder, kind):
    """40 records in two files, or a directory; the options that read them."""
    halves = [datasets.Dataset.from_dict({"text": half}) for half in (TEXTS[:20], TEXTS[20:])]
    whole = datasets.concatenate_datasets(halves)
    if kind in ("saved", "saved splits"):
        if kind == "saved splits":
            whole = datasets.DatasetDict({"train": whole, "test": halves[1]})
        whole.save_to_disk(folder / "saved")
        return {"dataset": "saved"}
    if kind == "directory":
        (folder / "d").mkdir()
        for name, half in zip(("train-0", "train-1"), halves, strict=True):
            half.to_parquet(folder / "d" / f"{name}.parquet")
        halves[1].to_parquet(folder / "d" / "validation-0.parquet")
        return {"dataset": "d"}
    for i, half in enumerate(halves):
        file = folder / f"part[{i}].{kind}"
        if kind in ("jsonl", "json"):
            write_jsonl(file, half)
        elif kind == "csv":
            half.to_csv(file)
        elif kind == "tsv":
            half.to_csv(file, sep="\t")
        elif kind == "parquet":
            half.to_parquet(file)
        elif kind == "arrow":
            half.save_to_disk(folder / f"saved{i}")
            shutil.copy(folder / f"saved{i}" / "data-00000-of-00001.arrow", file)
    return {"train": (f"part*.{kind}",)}


KINDS = ("jsonl", "json", "csv", "tsv", "parquet", "arrow", "saved", "saved splits", "directory")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_tokens_of_a_plain_loop(kind, streaming, load, tmp_path):
    data = load(**save(tmp_path, kind), **in_order(streaming)).train
    expected, _ = plain_rows(TEXTS, LENGTH)
    if streaming:
        rows = iter(data)
        assert [next(rows)["input_ids"].tolist() for _ in expected] == expected
    else:
        assert rows_of(data) == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_texts_that_share_no_rows(streaming, load, tmp_path):
    options = save(tmp_path, "jsonl") | in_order(streaming)
    data = load(**options, packing=False).train
    body, expected = LENGTH - 1, []
    for text in TEXTS:
        ids = [*ids_of(text), SEP]
        expected += [[CLS, *ids[i : i + body]] for i in range(0, len(ids), body)]
    assert {len(row) for row in expected} > {LENGTH, 2}
    rows = iter(data) if streaming else (data[i] for i in range(len(data)))
    assert [next(rows)["input_ids"].tolist() for _ in expected] == expected


def test_text_files_give_the_rows_they_gave_before(load, tmp_path, monkeypatch):
    """Without the datasets library, and in pieces."""
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("\n".join(TEXTS[i::3]))
    files = sorted(tmp_path.glob("*.txt"))
    expected = pack_text(files, TOKENIZER, LENGTH).tokens_NS.tolist()
    assert expected == plain_rows([file.read_text() for file in files], LENGTH)[0]
    assert rows_of(load(train=("*.txt",)).train) == expected
    monkeypatch.setattr("growkern.train.dataset.source.PIECE", 50)
    again = load(train=("*.txt",), cache="in_pieces").train
    assert rows_of(again) == expected
    assert pack_text(files, TOKENIZER, LENGTH).tokens_NS.tolist() == expected
    with pytest.raises(GrowthError, match="needs the datasets library: pip install datasets"):
        load(train=("*.txt",), streaming=True)
    write_jsonl(tmp_path / "a.jsonl", [{"text": "w1"}])
    with pytest.raises(GrowthError, match="needs the datasets library: pip install datasets"):
        load(train=("*.jsonl",))


def test_splits_and_their_slices(load, tmp_path):
    save(tmp_path, "saved splits")
    data = load(dataset="saved", validation_split="test")
    assert rows_of(data.validation) == plain_rows(TEXTS[20:], LENGTH)[0]
    with pytest.raises(GrowthError, match="no split 'dev': it has train, test"):
        load(dataset="saved", split="dev")
    some = plain_rows(TEXTS[:10] + TEXTS[38:], LENGTH)[0]
    data = load(dataset="saved", split="train[:25%]+test[-2:]", validation_split="test[:10%]")
    assert rows_of(data.train) == some
    assert rows_of(data.validation) == plain_rows(TEXTS[20:22], LENGTH)[0]
    stream = load(
        dataset="saved", split="train[:25%]+test[-2:]", streaming=True, shuffle_window=0
    ).train
    assert [next(rows)["input_ids"].tolist() for rows in [iter(stream)] for _ in some] == some
    for wrong in ("train[:50", "dev[:50%]", "test[9:3]"):
        with pytest.raises(GrowthError, match=r"cannot be loaded|fewer tokens than one row"):
            load(dataset="saved", split=wrong)
    save(tmp_path, "directory")
    data = load(dataset="d", split="train[:10]", validation_split="validation")
    assert rows_of(data.train) == plain_rows(TEXTS[:10], LENGTH)[0]
    assert rows_of(data.validation) == plain_rows(TEXTS[20:], LENGTH)[0]
    with pytest.raises(GrowthError, match=r"cannot be loaded: .*dev"):
        load(dataset="d", split="dev")
    with pytest.raises(GrowthError, match=r"'train\[:10\]' is a slice, which cannot be streamed"):
        load(dataset="d", split="train[:10]", streaming=True)
    # the data for evaluation is cached in any case
    load(dataset="d", split="train", validation_split="train[:10]", streaming=True)


# ------------------------------------------------------------------ token ids


def id_records(count=12):
    rng = np.random.default_rng(1)
    found = []
    for i in range(count):
        size = int(rng.integers(1, LENGTH + 1))
        ids, padding = rng.integers(5, VOCAB, size), int(rng.integers(0, 3))
        labels = np.where(rng.random(size) < 0.5, ids, -100)
        found.append({
            "tokens": [*ids.tolist(), *[0] * padding],
            "targets": [*labels.tolist(), *[-100] * padding],
            "real": [1] * size + [0] * padding,
            "weight": [*rng.random(size).tolist(), *[0.0] * padding],
            "quality": i / 2,
        })  # fmt: skip
    return found


COLUMNS = {
    "input_ids_column": "tokens",
    "labels_column": "targets",
    "attention_mask_column": "real",
}


def real(record, name):
    return [x for x, keep in zip(record[name], record["real"], strict=True) if keep]


@pytest.mark.parametrize("packing", [None, True])
@pytest.mark.parametrize("weights", ["weight", "quality"])
def test_columns_of_token_ids(packing, weights, load, tmp_path):
    records = id_records()
    write_jsonl(tmp_path / "ids.jsonl", records)
    data = load(train=("ids.jsonl",), packing=packing, row_weights=weights, **COLUMNS)
    flat = {"input_ids": [], "labels": [], weights: []}
    lengths = []
    for record in records:
        ids = real(record, "tokens")
        lengths.append(len(ids))
        flat["input_ids"] += ids
        flat["labels"] += real(record, "targets")
        own = real(record, "weight") if weights == "weight" else [record["quality"]] * len(ids)
        flat[weights] += own
    if packing:
        lengths = [LENGTH] * (len(flat["labels"]) // LENGTH)
    assert len(data.train) == len(lengths)
    start = 0
    for i, length in enumerate(lengths):
        row = data.train[i]
        for name, values in flat.items():
            expected = np.float32(values[start : start + length])
            assert row[name].tolist() == expected.tolist()
        start += length
    rows = [data.train[i] for i in range(3)]
    batch = data.collator(TOKENIZER, causal=False)(rows)
    for i, row in enumerate(rows):
        size = len(row["input_ids"])
        assert batch["input_ids"][i, :size].tolist() == row["input_ids"].tolist()
        assert batch["labels"][i, :size].tolist() == row["labels"].tolist()
        assert batch[weights][i, :size].tolist() == row[weights].tolist()
        assert (batch["labels"][i, size:] == -100).all()
        assert (batch[weights][i, size:] == 0).all()
    assert ("attention_mask" in batch) == (not packing)


def test_token_ids_without_labels_are_masked_or_shifted(load, tmp_path):
    write_jsonl(tmp_path / "ids.jsonl", [{"input_ids": list(range(5, 13))}] * 4)
    data = load(train=("ids.jsonl",), input_ids_column="input_ids")
    assert rows_of(data.train) == [list(range(5, 13))] * 4
    assert type(data.collator(TOKENIZER, causal=True)) is CausalLMCollator
    assert type(data.collator(TOKENIZER, causal=False)) is MaskedLMCollator


def test_the_weight_of_a_text_goes_to_all_of_its_tokens(load, tmp_path):
    records = [{"text": text, "quality": i} for i, text in enumerate(TEXTS)]
    write_jsonl(tmp_path / "a.jsonl", records)
    data = load(train=("a.jsonl",), row_weights="quality")
    expected = [i for i, text in enumerate(TEXTS) for _ in [*text.split(), "[SEP]"]]
    found = [x for i in range(len(data.train)) for x in data.train[i]["quality"][1:].tolist()]
    assert found == expected[: len(found)] and len(expected) - len(found) < LENGTH
    collator = data.collator(TOKENIZER, causal=False)
    assert collator([data.train[0]])["quality"].dtype == torch.float32
    assert "quality" not in collator.frozen()([data.train[0]])


# ------------------------------------------------------------------- refusals

ONE = {"text": "w1", "ids": [5, 6], "many": [[5]], "number": 3}
IDS = {"input_ids_column": "ids"}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("record", "options", "match"),
    [
        (ONE, {"text_column": "txt"}, r"no column 'txt' \(data.text_column\): it has text, ids"),
        (ONE, {"text_column": "number"}, r"column 'number' .* holds an int, not a text"),
        (ONE, {"text_column": "ids"}, "holds a list, not a text .*input_ids_column"),
        (ONE | {"text": None}, {}, "a record without a value in column 'text'"),
        (ONE, {"input_ids_column": "text"}, "'text' .* must hold lists of integers, not str"),
        (ONE, {"input_ids_column": "many"}, "must hold lists of integers, not 2-d"),
        (ONE | {"ids": [5.5]}, IDS, "must hold lists of integers, not 1-d float"),
        (ONE | {"ids": [5, VOCAB]}, IDS, f"the id {VOCAB}, but the tokenizer has ids 0 .. "),
        (ONE | {"ids": [-1]}, IDS, "holds the id -1"),
        (ONE | {"l": [5]}, IDS | {"labels_column": "l"}, "1 values in a record of 2 token ids"),
        (ONE | {"l": [5, -99]}, IDS | {"labels_column": "l"}, "holds the id -99"),
        (ONE | {"ids": [5] * 9}, IDS, "a record has 9 token ids, .*data.packing = true"),
        (ONE, {"row_weights": "w"}, r"no column 'w' \(loss.row_weights\)"),
        (ONE, {"row_weights": "text"}, "must hold numbers or lists of numbers, not str"),
        (ONE, {"row_weights": "ids"}, "holds lists, but a text has no tokens yet"),
        (ONE | {"number": -1}, {"row_weights": "number"}, "negative or not finite"),
    ],
)
def test_records_that_cannot_be_used(record, options, match, streaming, load, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [record])
    with pytest.raises(GrowthError, match=match) as refused:
        next(iter(load(train=("a.jsonl",), streaming=streaming, **options).train))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, r"give data.train \(files\) or data.dataset"),
        ({"train": ("a",), "dataset": "b"}, "data.dataset is given beside files"),
        ({"validation": ("a",), "dataset": "b"}, "data.dataset is given beside files"),
        ({"train": ("a",), "revision": "main"}, "data.revision describes a data set"),
        ({"train": ("a",), "shuffle_window": 0}, "data.shuffle_window describes a stream"),
        ({"train": ("a",), "split": "train[:10%]"}, "data.split describes a data set"),
        (
            {"train": ("a",), "objective": "mlm", "mean_span_length": 4.0},
            "data.objective = 'mlm' masks no spans: leave out data.mean_span_length",
        ),
        ({"train": ("a",), "labels_column": "l"}, "data.labels_column belongs to token ids"),
        ({"dataset": "no/such/name"}, "is not a directory: give a directory or a name on the Hub"),
        ({"dataset": "file.txt"}, "is not a directory"),
        ({"dataset": "empty"}, "is an empty directory"),
        ({"train": ("file.txt",), "input_ids_column": "ids"}, "plain text, which has no column"),
        ({"train": ("file.txt", "b.jsonl")}, "mixes files of two kinds, .*file.txt and .*b.jsonl"),
        ({"train": ("b.jsonl", "c.csv")}, "mixes files of two kinds"),
        ({"train": ("d.jsonl.gz",)}, "d.jsonl.gz is neither text nor a file of records: unpack"),
        ({"train": ("c.csv",)}, "cannot be loaded|fewer tokens than one row"),
        ({"train": ("file.txt",)}, "data.train has fewer tokens than one row"),
    ],
)
def test_options_that_cannot_be_used(options, match, load, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("w1 w2")
    for name in ("b.jsonl", "c.csv", "d.jsonl.gz"):
        (tmp_path / name).touch()
    with pytest.raises(GrowthError, match=match) as refused:
        load(**options)
    assert "\n" not in str(refused.value)


def test_processes_that_cannot_wait_for_each_other(load, monkeypatch, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(GrowthError, match=r"2 processes were started, .* before load_data"):
        load(train=("a.jsonl",))


def test_a_stream_without_a_token_ends(load, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"ids": []}] * 3)
    with pytest.raises(GrowthError, match="no tokens for process 0 of 1"):
        next(iter(load(train=("a.jsonl",), streaming=True, **IDS).train))


# -------------------------------------------------------------------- the Hub


class Builder:
    """Records how it was made, and gives 40 texts."""

    hash = "hash"
    made: list

    def __init__(self, *args, **options):
        type(self).made = [args, options]
        self.config = type("Config", (), {"name": "plain", "data_files": None})

    def download_and_prepare(self):
        type(self).made.append("downloaded")

    def as_dataset(self, split):
        type(self).made.append(split)
        return datasets.Dataset.from_dict({"text": TEXTS})

    def as_streaming_dataset(self, split):
        return self.as_dataset(split).to_iterable_dataset()


def test_a_name_on_the_hub(load, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset_builder", Builder)
    options = {"dataset": "some/name", "dataset_config": "plain", "revision": "v1", "split": "all"}
    assert rows_of(load(**options).train) == plain_rows(TEXTS, LENGTH)[0]
    assert Builder.made == [("some/name", "plain"), {"revision": "v1"}, "downloaded", "all"]
    # without downloading it, also for the evaluation
    data = load(**options, streaming=True, shuffle_window=0, validation_split="dev")
    assert Builder.made == [("some/name", "plain"), {"revision": "v1"}, "dev"]
    assert rows_of(data.validation) == plain_rows(TEXTS, LENGTH)[0]
    assert next(iter(data.train))["input_ids"].tolist() == plain_rows(TEXTS, LENGTH)[0][0]


def test_no_network(load, monkeypatch):
    before = os.environ.get("HF_HUB_OFFLINE")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(GrowthError, match=r"'some/name' cannot be loaded: ") as refused:
        load(dataset="some/name")
    assert "\n" not in str(refused.value)
    assert os.environ.get("HF_HUB_OFFLINE") == before
