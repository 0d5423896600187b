"""Damaged files: refused in one line, or right.

`python -m tests.fuzz.fuzz DIRECTORY --cases 2000` takes more of them.
"""

from pathlib import Path

import pytest

from testbed import warm
from tests.fuzz import readers
from tests.fuzz.fuzz import problem
from tests.shared import walks

CORPUS = Path(__file__).with_name("corpus")
CASES = 100


def test_what_is_damaged_is_refused_or_right(tmp_path):
    how = "--cases", CASES * walks.times, "--seed", walks.start or 0
    done = warm.run("tests.fuzz.fuzz", tmp_path, *how, limit_s=600 * walks.times)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readers") / "files"
    readers.prepare(folder)
    return folder


@pytest.mark.parametrize("name", readers.READERS)
def test_files_that_guided_fuzzing_kept_are_refused_or_read(folder, name):
    """Between them they reach every part of a reader that `guided.py` has reached."""
    reader = readers.READERS[name]
    file = folder / reader.file
    valid = file.read_bytes()
    reader.read(folder)
    kept = sorted((CORPUS / name).iterdir())
    assert kept
    try:
        for case in kept:
            file.write_bytes(case.read_bytes())
            assert problem(lambda: reader.read(folder)) is None, case.name
    finally:
        file.write_bytes(valid)
