"""A stream gives the tokens of a plain loop, in an order that can be continued anywhere."""

import itertools
import json
from dataclasses import replace

import pytest
from torch.utils.data import DataLoader

import growkern
from growkern.errors import GrowthError, GrowthWarning
from growkern.train.dataset.stream import PLACE, PlacingCollator, StreamReader, TokenStream
from growkern.train.dataset.training_data import load_data
from growkern.train.sections import DataSection
from tests.train.dataset.data import CLS, SEP, ids_of, plain_rows, texts, tokenizer, write_jsonl

LENGTH, BATCH = 8, 3
TEXTS = texts(50)
TOKENIZER = tokenizer()


@pytest.fixture
def make(tmp_path):
    for i in range(3):
        write_jsonl(tmp_path / f"{i}.jsonl", [{"text": text} for text in TEXTS[i::3]])

    def from_options(rank=0, processes=1, **options):
        how = {"train": ("*.jsonl",), "sequence_length": LENGTH, "shuffle_window": 0}
        data = DataSection(streaming=True, **how | options)
        whole = load_data(data, TOKENIZER, base=tmp_path, progress=False).train
        return TokenStream(
            whole.records, whole.reader, rank=rank, processes=processes, window=data.shuffle_window
        )

    return from_options


# in the order of the files
IN_ORDER = TEXTS[0::3] + TEXTS[1::3] + TEXTS[2::3]


def take(stream, count):
    return [row["input_ids"].tolist() for row in itertools.islice(stream, count)]


def test_windows_give_each_row_once_a_pass(make):
    one, left = plain_rows(IN_ORDER, LENGTH)
    assert left
    rows = list(itertools.islice(make(shuffle_window=1000), len(one) + 1))
    # the row that ends in the second pass too
    expected = plain_rows(IN_ORDER * 2, LENGTH)[0][: len(one) + 1]
    found = [row["input_ids"].tolist() for row in rows]
    assert found != expected and sorted(found) == sorted(expected)
    assert sorted(row["pass"] for row in rows) == [0] * len(one) + [1]
    small = take(make(shuffle_window=5), 20)
    for i in range(0, 20, 5):
        assert sorted(small[i : i + 5]) == sorted(expected[i : i + 5])


@pytest.mark.parametrize("window", [0, 7, 1000])
def test_it_continues_behind_every_row(make, window):
    """Also behind rows that end in the middle of a record, at its end, and in the next pass."""
    straight = list(itertools.islice(make(shuffle_window=window), 130))
    for i in range(0, 120, 7):
        again = make(shuffle_window=window)
        again.places = {0: straight[i][PLACE].after}
        for row, expected in zip(again, straight[i + 1 :], strict=False):
            assert row["input_ids"].tolist() == expected["input_ids"].tolist()
            assert row["pass"] == expected["pass"]
            # the library has several states for one place
            found, wanted = (replace(x[PLACE].after, records=None) for x in (row, expected))
            assert found == wanted


def in_parts(processes):
    """The records of each process: whole files, or every so manieth record of all of them."""
    if processes == 3:
        return [TEXTS[i::3] for i in range(3)]
    return [IN_ORDER[rank::processes] for rank in range(processes)]


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_processes_share_the_records(make, processes):
    """Three files: fewer than processes, as many, or a number that two do not divide."""
    for rank, part in enumerate(in_parts(processes)):
        expected, _ = plain_rows(part * 2, LENGTH)
        assert take(make(rank=rank, processes=processes), len(expected)) == expected


def loader_of(stream, workers):
    def collate(rows):
        return {"rows": [row["input_ids"].tolist() for row in rows], "pass": rows[0]["pass"]}

    collator = PlacingCollator(collate)
    # a worker that waits for ever is a failure, not the end of all tests
    timeout = 60 if workers else 0
    return DataLoader(stream, BATCH, collate_fn=collator, num_workers=workers, timeout=timeout)


@pytest.mark.parametrize(
    ("workers", "processes"), [(0, 1), (2, 1), (3, 1), (2, 2)], ids=lambda n: str(n)
)
def test_batches_after_a_kill_are_those_without_one(make, workers, processes, tmp_path):
    lanes = make(processes=processes).lanes(workers)
    assert lanes == max(1, workers)
    straight = list(itertools.islice(loader_of(make(processes=processes), workers), 25))
    reader = StreamReader(make(processes=processes), workers)
    for i, batch in enumerate(straight[:18]):
        reader.note([batch])
        if i not in (0, 1, 4, 11, 17):
            continue
        reader.save(tmp_path)
        resumed = make(processes=processes)
        again = StreamReader(resumed, workers)
        again.start(tmp_path)
        batches = iter(loader_of(resumed, workers))
        again.skip(batches)
        found = itertools.islice(batches, 5)
        assert [x["rows"] for x in found] == [x["rows"] for x in straight[i + 1 : i + 6]]


def test_a_second_run_begins_at_the_start(make, tmp_path):
    """Also on a stream that the first run had resumed."""
    first = list(itertools.islice(loader_of(make(), 0), 4))
    reader, stream = StreamReader(make(), 0), make()
    reader.note(first[:2])
    reader.save(tmp_path)
    for checkpoint, rows in ((tmp_path, first[2]["rows"]), (None, first[0]["rows"])):
        StreamReader(stream, 0).start(checkpoint)
        assert next(iter(loader_of(stream, 0)))["rows"] == rows


def test_workers_read_though_the_tokenizer_used_threads_before(make, monkeypatch):
    """Then a fork leaves the tokenizer without them, and nothing tells it."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    TOKENIZER(TEXTS * 4)
    batches = itertools.islice(loader_of(make(), 2), 4)
    assert [len(batch["rows"]) for batch in batches] == [BATCH] * 4


def test_data_workers_share_the_files(make):
    batches = list(itertools.islice(loader_of(make(), 3), 30))
    for lane in range(3):
        found = [row for batch in batches[lane::3] for row in batch["rows"]]
        assert found == plain_rows(TEXTS[lane::3] * 9, LENGTH)[0][: len(found)]
    assert make().lanes(8) == 3


def test_progress_of_other_processes_is_not_taken_over(make, tmp_path):
    StreamReader(make(processes=2), 3).save(tmp_path)
    StreamReader(make(processes=2), 3).start(tmp_path)
    for processes, workers in ((2, 2), (1, 3)):
        with pytest.warns(GrowthWarning, match="cannot be continued where it was"):
            StreamReader(make(processes=processes), workers).start(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2, "growkern": "9.1"}, "its format is 2, .* reads 1: use growkern 9.1"),
        ({"last": {"x": {}}}, "stream_0.json: not a place in a stream"),
        ({"last": {"0": {"before": {}, "after": {"page": 3}}}}, "not a place in a stream"),
    ],
    ids=["newer", "lane", "place"],
)
def test_a_place_that_cannot_be_read_is_refused(make, tmp_path, change, message):
    StreamReader(make(), 1).save(tmp_path)
    file = tmp_path / "stream_0.json"
    record = json.loads(file.read_text())
    assert record["format"] == 1 and record["growkern"] == growkern.__version__
    file.write_text(json.dumps(record | change))
    with pytest.raises(GrowthError, match=message):
        StreamReader(make(), 1).start(tmp_path)


def test_text_files_are_streamed(make, tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("\n".join(TEXTS[i::3]))
    stream = make(train=("*.txt",))
    whole = [" ".join(TEXTS[i::3]) for i in range(3)]
    expected, _ = plain_rows(whole * 2, LENGTH)
    assert take(stream, len(expected)) == expected
    assert stream.lanes(8) == 3


def test_rows_of_token_ids_are_streamed_as_they_are(make, tmp_path):
    records = [{"ids": ids_of(text)[: LENGTH - 1]} for text in TEXTS]
    write_jsonl(tmp_path / "ids.jsonl", records)
    stream = make(train=("ids.jsonl",), input_ids_column="ids")
    expected = [record["ids"] for record in records if record["ids"]]
    assert take(stream, 2 * len(expected)) == expected * 2
    assert CLS not in expected[0] and SEP not in expected[0]
    first = list(itertools.islice(stream, 60))
    for i in range(60 - 1):
        stream.places = {0: first[i][PLACE].after}
        assert take(stream, 1) == [first[i + 1]["input_ids"].tolist()]
