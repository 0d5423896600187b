"""The resume journal: nothing is noted before it is on disk."""

import errno
import os

import pytest

from growkern.growth.disk.staging import Journal

IDENTITY = {"plan": "a"}
ROWS = {("w", 0, 3): "sum of w"}


def failing(monkeypatch, name, code=errno.ENOSPC):
    def fails(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, fails)


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_a_failed_append_is_not_taken_for_noted(tmp_path, monkeypatch, name):
    """And nothing follows it: its lines may be there in part, or in the page cache alone."""
    with Journal(tmp_path / "journal", IDENTITY) as journal:
        with monkeypatch.context() as patched:
            failing(patched, name)
            with pytest.raises(OSError, match="No space left"):
                journal.add({}, {"source": "sum"})
        assert journal.source_checksums == {}
        for call in (lambda: journal.add(ROWS, {}), lambda: journal.lose(("w", 0, 3))):
            with pytest.raises(OSError, match="No space left"):
                call()
    with Journal(tmp_path / "journal", IDENTITY) as journal:
        assert journal.marks == {}
        journal.add(ROWS, {"source": "sum"})
        assert journal.source_checksums == {"source": "sum"}
    with Journal(tmp_path / "journal", IDENTITY) as journal:
        assert journal.marks == ROWS and journal.source_checksums == {"source": "sum"}


def test_sources_stand_before_the_rows_made_of_them(tmp_path):
    with Journal(tmp_path / "journal", IDENTITY) as journal:
        journal.add(ROWS, {"source": "sum"})
    whole = (tmp_path / "journal").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "journal").write_bytes(whole[:size])
        with Journal(tmp_path / "journal", IDENTITY) as journal:
            assert journal.source_checksums or not journal.marks


def test_lost_rows_do_not_count_until_they_are_noted_again(tmp_path):
    with Journal(tmp_path / "journal", IDENTITY) as journal:
        journal.add(ROWS, {})
        journal.lose(("w", 0, 3))
    with Journal(tmp_path / "journal", IDENTITY) as journal:
        assert journal.marks == {}
        journal.add(ROWS, {})
    with Journal(tmp_path / "journal", IDENTITY) as journal:
        assert journal.marks == ROWS


@pytest.mark.parametrize("bite", [1, 7])
def test_the_disk_takes_a_line_in_bites(tmp_path, monkeypatch, bite):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:bite]))
    with Journal(tmp_path / "journal", IDENTITY) as journal:
        journal.add(ROWS, {"source": "sum"})
    with Journal(tmp_path / "journal", IDENTITY) as journal:
        assert journal.marks == ROWS and journal.source_checksums == {"source": "sum"}


def test_a_disk_that_takes_nothing_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", lambda file, data: 0)
    with pytest.raises(OSError, match="takes no more"):
        Journal(tmp_path / "journal", IDENTITY)
