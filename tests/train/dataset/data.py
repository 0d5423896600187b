"""Records, the loops that turn them into rows, a tokenizer, and the work of one of two ranks."""

import json
import sys
from collections import Counter

import numpy as np
import torch.distributed as dist
import transformers

from growkern import GrowthError, run as train
from growkern.train.dataset import cache
from testbed.tiny import VOCAB
from tests.train.distributed import run_ranks

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(VOCAB - 5))]
CLS, SEP = 2, 3


def tokenizer(words=WORDS):
    return transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})


def texts(count, seed=0):
    """Texts of 0 to 30 words."""
    rng = np.random.default_rng(seed)
    return [
        " ".join(f"w{i}" for i in rng.integers(0, VOCAB - 5, rng.integers(0, 31)))
        for _ in range(count)
    ]


def ids_of(text):
    return [WORDS.index(word) for word in text.split()]


def in_order(streaming):
    """Options of a stream that keeps the order of its rows, or of rows that are kept on disk."""
    return {"streaming": True, "shuffle_window": 0} if streaming else {}


def plain_rows(records, length):
    """The rows of texts by a plain loop: [CLS] and `length` - 1 tokens each; and the rest."""
    stream = [i for text in records for i in [*ids_of(text), SEP]]
    body = length - 1
    rows = [[CLS, *stream[i : i + body]] for i in range(0, len(stream) - body + 1, body)]
    return rows, stream[len(rows) * body :]


def write_jsonl(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def rows_of(dataset):
    return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]


def main(folder):
    """Runs by run files, for `testbed.forked_ranks`; and one that is refused.

    `opened-RANK.json` says how often files were opened by a run that grows and has a teacher, and
    by a finished one.
    """
    # the processes that wait ask after every step of the work
    cache.SECONDS = 0.0
    run_ranks.main(folder)
    opened, read = Counter(), {}
    sys.addaudithook(lambda event, args: opened.update([str(args[0])] if event == "open" else []))
    for name in ("grown", "cached"):
        opened.clear()
        state = train(folder / f"{name}.toml", progress=False)
        # the inputs of a finished run are the same, and its model is whole
        assert (state is None) == (name == "cached")
        files = [*folder.glob("*.jsonl"), *folder.glob("*/model.safetensors")]
        read[name] = {file.relative_to(folder).as_posix(): opened[str(file)] for file in files}
    (folder / f"opened-{dist.get_rank()}.json").write_text(json.dumps(read))
    try:
        train(folder / "refused.toml", progress=False)
    except GrowthError as error:
        (folder / f"refused-{dist.get_rank()}").write_text(str(error))
