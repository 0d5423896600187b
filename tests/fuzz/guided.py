"""python -m tests.fuzz.guided READER CORPUS [SECONDS]: coverage-guided fuzzing of one reader.

Needs atheris (``pip install atheris``). libFuzzer keeps what reaches new lines of growkern in the
folder CORPUS, and writes an input that a reader does not refuse properly to the current directory.
Its last line has the number of inputs, and how many edges of growkern they reach. `test_fuzz.py`
reads the committed corpus again, without atheris.
"""

import json
import os
import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["growkern"]):
    from tests.fuzz import readers

import torch
import transformers

from tests.fuzz import mutate
from tests.fuzz.fuzz import problem


def mutated(data: bytes, most: int, seed: int) -> bytes:
    """A JSON file changed as values in half of the cases; other bytes as libFuzzer does it."""
    draw = random.Random(seed)
    if draw.random() < 0.5:
        try:
            changed = json.dumps(mutate.of_values(json.loads(data), draw)).encode()
            return changed[:most]
        except (ValueError, TypeError, RecursionError):
            pass
    return atheris.Mutate(data, most)


def main() -> None:
    name, corpus = sys.argv[1], Path(sys.argv[2])
    seconds = sys.argv[3] if len(sys.argv) > 3 else "60"
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as parent:
        folder, reader = Path(parent) / "files", readers.READERS[name]
        readers.prepare(folder)
        file = folder / reader.file
        corpus.mkdir(parents=True, exist_ok=True)
        (corpus / "valid").write_bytes(file.read_bytes())

        def one(data: bytes) -> None:
            file.write_bytes(data)
            wrong = problem(lambda: reader.read(folder))
            if wrong is not None:
                raise AssertionError(wrong)

        limits = [f"-max_total_time={seconds}", "-max_len=20000", "-timeout=60", "-rss_limit_mb=0"]
        atheris.Setup([sys.argv[0], *limits, str(corpus)], one, custom_mutator=mutated)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
