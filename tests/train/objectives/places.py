"""Run files, rows and batches of each objective, on real text and tiny models."""

import functools

import numpy as np
import torch

from examples.objectives import LENGTH, MODELS, TEXTS, make_model, make_tokenizer
from growkern import DataSection
from growkern.train.dataset.training_data import TokenBlocks, TrainingData

RUN = """
[model]
path = "model"
[data]
train = ["text/*.txt"]
validation = ["held_out.txt"]
sequence_length = {length}
cache = "tokens"
{data}
[training]
steps = {steps}
batch_size = 8
learning_rate = 3e-3
log_every = 1
save_every = {save_every}
{training}
[output]
directory = "out"
tensorboard = false
{more}
"""


@functools.cache
def tokenizer(kind):
    return make_tokenizer(kind)


def model_of(objective, **options):
    name, kind = MODELS[objective]
    return make_model(name, tokenizer(kind), **options)


def place_of(directory, objective, *, data="", training="", more="", steps=50):
    """Write the inputs of a run to a directory.

    Returns:
        The run file.
    """
    kind = MODELS[objective][1]
    torch.manual_seed(0)
    model_of(objective).save_pretrained(directory / "model")
    tokenizer(kind).save_pretrained(directory / "model")
    (directory / "text").mkdir()
    for file in TEXTS:
        (directory / "text" / f"{file.stem}.txt").write_text(file.read_text())
    (directory / "held_out.txt").write_text(TEXTS[0].read_text()[:6000])
    parts = {"data": data, "training": training, "more": more}
    text = RUN.format(length=LENGTH, steps=steps, save_every=max(1, steps // 2), **parts)
    (directory / "run.toml").write_text(text)
    return directory / "run.toml"


@functools.cache
def rows_of(kind, length):
    """Rows of real text without special tokens."""
    ids = tokenizer(kind)(TEXTS[0].read_text(), add_special_tokens=False)["input_ids"]
    count = len(ids) // length
    return TokenBlocks(np.asarray(ids[: count * length], np.int32).reshape(count, length))


def data_of(objective, **options):
    """Rows for an objective, and the collator that a run would use."""
    kind = MODELS[objective][1]
    section = DataSection(train=("text",), objective=objective, sequence_length=LENGTH, **options)
    rows = rows_of(kind, section.row_length)
    collator = TrainingData(section, None, False, rows, None).collator(tokenizer(kind), seed=3)
    return rows, collator
