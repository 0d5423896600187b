"""Every file that growkern reads, and the function that reads it. Run by hand, it lists them.

A reader must refuse whatever bytes its file has with a `GrowthError` of one line, or read them. The
kinds in `kinds.py` look at what is made of a few of these files; here the reading alone is tried,
for all of them, thousands of times a minute.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import growkern
from growkern.errors import GrowthError
from growkern.files import parse_json
from growkern.growth.disk.checksums import verify_checksums
from growkern.growth.disk.staging import Journal
from growkern.growth.optimizer.file import read_optimizer
from growkern.growth.record.lineage import plan_from_lineage, read_lineage
from growkern.growth.source.source import open_source
from growkern.publish.manifest import MANIFEST, write_manifest
from growkern.train.model.language_model import load_tokenizer
from growkern.train.objectives.language_modeling import CausalLMCollator
from growkern.train.run.file import load_run
from growkern.train.safety.checkpoints import damage
from growkern.train.topk_teacher.served import ServedTeacher
from testbed.tiny import VOCAB, TinyTokenizer
from tests.faults.work import save_source, tiny
from tests.train.run.test_config import COMPLETE
from tests.train.run.test_run import save_tokenizer

HOW = {"hidden_size": 8, "progress": False}
IDENTITY = {"work": "growing", "sizes": [4, 8]}
JOURNAL = [IDENTITY, ["source", "x", "ab"], ["target", "y", 0, 4, "cd"], ["lost", "y", 0, 4]]
ROW = {str(n): {"logprob": -1.5 * n} for n in range(1, 5)}
ANSWER = {"choices": [{"prompt_logprobs": [None, ROW, ROW]}]}


@dataclass(frozen=True)
class Reader:
    """A file, and what reads it.

    Attributes:
        file: its path in the folder that `prepare` fills.
        read: reads it; its argument is that folder.
    """

    file: str
    read: Callable[[Path], Any]


def prepare(folder: Path) -> None:
    """Fill a new folder with one valid file for each reader."""
    folder.mkdir(parents=True)
    save_source(folder, optimizer=True)
    source = folder / "source"
    model = tiny()
    model.save_pretrained(folder / "sharded", max_shard_size=300)
    model.save_pretrained(folder / "pieces")
    (folder / "pieces" / "model.safetensors").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(model.state_dict(), checkpoint_id=folder / "pieces", no_dist=True)
    save_tokenizer(folder / "words")
    growkern.grow_checkpoint(source, folder / "grown", **HOW)
    growkern.cache_teacher(
        tiny(vocab_size=VOCAB),
        [{"input_ids": [1, 2, 3, n]} for n in range(3)],
        folder / "cache",
        collator=CausalLMCollator(TinyTokenizer()),
        **{"k": 3, "temperature": 1.0, "progress": False},
    )
    shutil.copytree(folder / "cache", folder / "loose")
    (folder / "run.toml").write_text(COMPLETE)
    (folder / "journal").write_text("".join(json.dumps(line) + "\n" for line in JOURNAL))
    (folder / "vllm.json").write_text(json.dumps(ANSWER))


def _read_source(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> None:
        source = open_source(folder / name)
        for tensor in source.dtypes:
            source.read(tensor)

    return read


def _read_lineage(folder: Path) -> None:
    lineage = read_lineage(folder / "grown")
    plan_from_lineage(open_source(folder / "source"), lineage)


def _read_journal(folder: Path) -> None:
    with Journal(folder / "journal", IDENTITY):
        pass


def _read_cache(folder: Path) -> None:
    # with the checksums of what is there: they would refuse it before the other checks
    (folder / "loose" / MANIFEST).unlink()
    write_manifest(folder / "loose")
    cache = growkern.TeacherCache(folder / "loose")
    tokens = torch.tensor([[1, 2, 3, 0]])
    cache.batch({"input_ids": tokens, "labels": tokens})


def _read_answer(folder: Path) -> None:
    async def ask(*_: object) -> Any:
        try:
            return parse_json((folder / "vllm.json").read_bytes())
        except ValueError as error:
            raise GrowthError(f"the answer is not JSON: {error}") from error

    teacher = ServedTeacher.__new__(ServedTeacher)
    teacher.name, teacher.k, teacher.model, teacher._longest = "http://host", 4, "m", None
    teacher.facts, teacher._connection = SimpleNamespace(vocab_size=32), SimpleNamespace(ask=ask)
    asyncio.run(teacher._rows_of([1, 2, 3]))


READERS = {
    "weights": Reader("source/model.safetensors", _read_source("source")),
    "index": Reader("sharded/model.safetensors.index.json", _read_source("sharded")),
    "config": Reader("source/config.json", _read_source("source")),
    "generation": Reader("source/generation_config.json", _read_source("source")),
    "metadata": Reader("pieces/.metadata", _read_source("pieces")),
    "optimizer": Reader("source/optimizer.pt", lambda f: read_optimizer(f / "source")),
    "lineage": Reader("grown/lineage.json", _read_lineage),
    "checksums": Reader("grown/checksums.json", lambda f: verify_checksums(f / "grown")),
    "journal": Reader("journal", _read_journal),
    "header": Reader("loose/cache.json", _read_cache),
    "manifest": Reader("cache/manifest.json", lambda f: damage(f / "cache")),
    "keys": Reader("loose/index.safetensors", _read_cache),
    "rows": Reader("loose/rows-00000.safetensors", _read_cache),
    "vllm": Reader("vllm.json", _read_answer),
    "run": Reader("run.toml", lambda f: load_run(f / "run.toml")),
    "tokenizer": Reader("words/tokenizer.json", lambda f: load_tokenizer(f / "words")),
    "words": Reader("words/tokenizer_config.json", lambda f: load_tokenizer(f / "words")),
}

if __name__ == "__main__":
    print(*READERS, sep="\n")
