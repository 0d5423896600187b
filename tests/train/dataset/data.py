"""Records, the loops that turn them into rows, and a tokenizer with a table of words."""

import json

import numpy as np
import transformers

from tests.train.tiny import VOCAB

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(VOCAB - 5))]
CLS, SEP = 2, 3


def tokenizer():
    return transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)})


def texts(count, seed=0):
    """Texts of 0 to 30 words."""
    rng = np.random.default_rng(seed)
    return [
        " ".join(f"w{i}" for i in rng.integers(0, VOCAB - 5, rng.integers(0, 31)))
        for _ in range(count)
    ]


def ids_of(text):
    return [WORDS.index(word) for word in text.split()]


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
