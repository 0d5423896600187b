"""Tokens on disk: made once, never used when damaged, never half."""

import multiprocessing
import os
import pickle
import shutil
import threading
import time

import pytest

from growkern import GrowthError
from growkern.errors import GrowthWarning
from growkern.publish.calls import Lock, lock_file_of
from growkern.train.dataset import cache, training_data as loading
from growkern.train.dataset.records import Reader
from growkern.train.dataset.training_data import load_data
from growkern.train.sections import DataSection
from tests.train.dataset.data import WORDS, plain_rows, rows_of, texts, tokenizer, write_jsonl

LENGTH = 8
TEXTS = texts(40)
ROWS = plain_rows(TEXTS, LENGTH)[0]


@pytest.fixture
def place(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": text, "other": "w1 w2"} for text in TEXTS])
    return tmp_path


@pytest.fixture
def reads(monkeypatch):
    """The number of records of each call of the reader."""
    found = []

    def read(self, records, inner=Reader.read):
        found.append(len(records))
        return inner(self, records)

    monkeypatch.setattr(Reader, "read", read)
    return found


def load(place, words=None, **options):
    how = {"train": ("a.jsonl",), "sequence_length": LENGTH, "cache": "cache"} | options
    return load_data(DataSection(**how), words or tokenizer(), base=place, progress=False).train


def caches(place):
    return sorted(place.glob("cache/[!.]*"))


def test_a_second_start_reads_the_cache(place, reads):
    assert rows_of(load(place)) == ROWS
    assert sum(reads) == len(TEXTS)
    again = load(place)
    assert rows_of(again) == ROWS and sum(reads) == len(TEXTS)
    assert all(type(x).__name__ == "memmap" for x in (again.starts, *again.columns.values()))
    (one,) = caches(place)
    assert [path.name for path in place.glob("cache/.*")] == []
    copy = pickle.loads(pickle.dumps(again))
    assert rows_of(copy) == ROWS and len(pickle.dumps(again)) < 1000
    assert one == again.directory


def test_other_data_tokenizers_and_settings_have_other_caches(place):
    load(place)
    load(place, sequence_length=LENGTH + 1)
    load(place, text_column="other")
    # as many words, two of them in each other's place
    words = tokenizer([*WORDS[:-2], WORDS[-1], WORDS[-2]])
    load(place, words)
    assert len(caches(place)) == 4
    load(place)
    load(place, words)
    assert len(caches(place)) == 4
    write_jsonl(place / "a.jsonl", [{"text": "w1 " * 300}])
    assert rows_of(load(place)) != ROWS and len(caches(place)) == 5


def test_a_file_that_is_read_in_another_way_has_another_cache(place):
    # its contents and its time stay
    (place / "a.jsonl").rename(place / "a.txt")
    as_text = rows_of(load(place, train=("a.txt",)))
    (place / "a.txt").rename(place / "a.jsonl")
    assert rows_of(load(place)) == ROWS != as_text


def test_files_that_move_to_another_split_have_another_cache(place):
    folder = place / "d"
    folder.mkdir()
    write_jsonl(folder / "dev.jsonl", [{"text": text} for text in TEXTS[:20]])
    write_jsonl(folder / "train.jsonl", [{"text": text} for text in TEXTS[20:]])
    how = {"train": (), "dataset": "d"}
    assert rows_of(load(place, **how)) == plain_rows(TEXTS[20:], LENGTH)[0]
    for old, new in (("dev", "train-0"), ("train", "train-1")):
        (folder / f"{old}.jsonl").rename(folder / f"{new}.jsonl")
    assert rows_of(load(place, **how)) == ROWS
    # the directory itself may move
    folder.rename(place / "e")
    load(place, train=(), dataset="e")
    assert len(caches(place)) == 2


@pytest.mark.parametrize("wrong", ["cut", "flipped", "missing", "no manifest", "no header"])
def test_a_damaged_cache_is_made_again(place, reads, wrong):
    directory = load(place).directory
    file = directory / "input_ids.bin"
    contents = bytearray(file.read_bytes())
    if wrong == "cut":
        file.write_bytes(contents[:-4])
    elif wrong == "flipped":
        contents[40] ^= 1
        file.write_bytes(contents)
    elif wrong == "missing":
        file.unlink()
    elif wrong == "no manifest":
        (directory / "manifest.json").unlink()
    else:
        (directory / "manifest.json").write_text("{}")
    before = sum(reads)
    with pytest.warns(GrowthWarning, match="is damaged .*: it is made again"):
        found = load(place)
    assert rows_of(found) == ROWS and sum(reads) == 2 * before
    assert caches(place) == [directory]
    assert sum(reads) == 2 * before and rows_of(load(place)) == ROWS


@pytest.mark.parametrize("name", ["mine.txt", "folder/starts.bin", "empty/"])
def test_a_damaged_cache_with_anything_else_in_it_is_kept(place, name):
    directory = load(place).directory
    (directory / "manifest.json").unlink()
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).mkdir() if name.endswith("/") else (directory / name).touch()
    with pytest.raises(GrowthError, match=f"{name.strip('/')} is no file of tokenised data"):
        load(place)
    assert (directory / name).exists()


@pytest.mark.parametrize(("owner", "name"), [(Reader, "read"), (loading, "_key")])
def test_data_that_changes_while_it_is_tokenised_is_refused(owner, name, place, monkeypatch):
    """Or behind its fingerprint, under which its tokens would be found for the text before."""

    inner = getattr(owner, name)

    def changing(*args):
        found = inner(*args)
        write_jsonl(place / "a.jsonl", [{"text": text} for text in reversed(TEXTS)])
        return found

    with monkeypatch.context() as patched, pytest.raises(GrowthError, match="was changed while"):
        patched.setattr(owner, name, changing)
        load(place)
    assert not caches(place)


def test_an_error_in_the_middle_leaves_nothing(place, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "write_manifest", fail)
    with pytest.raises(GrowthError, match=r"the disk is full.*Set data.cache to another directory"):
        load(place)
    assert list((place / "cache").iterdir()) == []


def killed(place):
    def stop(*args):
        os._exit(9)

    cache.write_manifest = stop
    load(place)


def test_killed_before_its_end_it_is_made_by_the_next_start(place):
    process = multiprocessing.get_context("fork").Process(target=killed, args=(place,))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert caches(place) == []
    assert rows_of(load(place)) == ROWS
    assert [path.name for path in (place / "cache").iterdir()] == [caches(place)[0].name]


def test_too_little_space_is_noticed_before(place, reads, monkeypatch):
    free = shutil._ntuple_diskusage(10**12, 10**12, 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(GrowthError, match=r"GB to write, 0.00 GB free"):
        load(place)
    assert not reads


def test_two_runs_make_one_cache(place, reads, monkeypatch):
    """The second one waits for the first, which is nearly done here."""
    monkeypatch.setattr(cache, "POLL", 0.01)
    directory = load(place).directory
    moved = directory.with_name("moved")
    directory.rename(moved)
    lock = Lock(lock_file_of(directory), directory, "tokenising to")

    def finish():
        time.sleep(0.1)
        moved.rename(directory)
        lock.release()

    other = threading.Thread(target=finish)
    other.start()
    before = sum(reads)
    assert rows_of(load(place)) == ROWS
    other.join()
    assert sum(reads) == before


def test_the_place_of_the_cache(place, monkeypatch):
    monkeypatch.setenv("GROWKERN_TOKENS", str(place / "named"))
    assert load(place, cache=None).directory.parent == place / "named"
    monkeypatch.delenv("GROWKERN_TOKENS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "home"))
    assert load(place, cache=None).directory.parent == place / "home" / "growkern" / "tokens"
    (place / "file").touch()
    with pytest.raises(GrowthError, match=r"cannot be written to .*Set data.cache"):
        load(place, cache="file")


def test_little_is_in_memory(place, monkeypatch):
    """Rows are written while records are read."""
    lag = []

    def write(staged, rows, name, inner=cache._write_columns):
        def watched():
            for i, row in enumerate(rows):
                lag.append(read[0] - i * (LENGTH - 1) / 15)
                yield row

        yield from inner(staged, watched(), name)

    read = [0]

    def count(self, records, inner=Reader.read):
        read[0] += len(records)
        return inner(self, records)

    monkeypatch.setattr(cache, "_write_columns", write)
    monkeypatch.setattr(Reader, "read", count)
    write_jsonl(place / "a.jsonl", [{"text": text} for text in texts(600)])
    load(place)
    assert read[0] == 600 and max(lag) < 200
