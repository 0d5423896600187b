"""Run files for an encoder and a decoder: pairs of texts, and of token ids."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from growkern import GrowthError, InheritanceSchedule, TwoStageConfig, TwoStageTrainer, run as train
from growkern.train.dataset.training_data import load_data
from growkern.train.sections import DataSection
from testbed.tiny import arguments, build
from tests.train.dataset.data import CLS, SEP, ids_of, in_order, texts, tokenizer, write_jsonl
from tests.train.run.test_run import save_tokenizer

LENGTH = 33
READ, WRITTEN = texts(20, seed=1), texts(20, seed=2)
PAIRS = [
    ([CLS, *ids_of(a), SEP], [CLS, *ids_of(b), SEP]) for a, b in zip(READ, WRITTEN, strict=True)
]
TEXTS = {"target_column": "summary"}
IDS = {"input_ids_column": "ids", "labels_column": "target", "attention_mask_column": "mask"}
RUN = """
[model]
path = "model"
[data]
train = ["pairs.jsonl"]
validation = ["pairs.jsonl"]
target_column = "summary"
sequence_length = 33
cache = "tokens"
[training]
steps = 5
batch_size = 4
learning_rate = 1e-2
log_every = 1
[two_stage]
layers_per_block = 1
stage1_steps = 2
[inheritance]
end_step = 4
[teacher]
paths = ["teacher"]
[trainer]
train_sampling_strategy = "sequential"
[output]
directory = "out"
report_to = "none"
"""


@pytest.fixture
def load(tmp_path):
    records = [
        {"text": a, "summary": b, "ids": [*x, 0, 0], "mask": [1] * len(x) + [0, 0], "target": y,
         "quality": i / 2}
        for i, (a, b, (x, y)) in enumerate(zip(READ, WRITTEN, PAIRS, strict=True))
    ]  # fmt: skip
    write_jsonl(tmp_path / "pairs.jsonl", records)

    def from_options(row_weights=None, pairs=True, **options):
        options = {"train": ("pairs.jsonl",), "sequence_length": LENGTH, "cache": "c"} | options
        return load_data(
            DataSection(**options), tokenizer(), base=tmp_path, row_weights=row_weights,
            encoder_decoder=pairs, progress=False,
        )  # fmt: skip

    return from_options


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("columns", [TEXTS, IDS])
def test_every_record_is_a_row_of_two_sides(columns, streaming, load):
    data = load("quality", **columns, **in_order(streaming))
    rows = iter(data.train) if streaming else data.train
    rows = [row for row, _ in zip(rows, PAIRS, strict=False)]
    for i, (row, (read, written)) in enumerate(zip(rows, PAIRS, strict=True)):
        assert row["input_ids"].tolist() == read and row["labels"].tolist() == written
        assert row["quality"].tolist() == [i / 2] * len(written)
    batch = data.collator(tokenizer(), causal=False)(rows[:3])
    for i, (read, written) in enumerate(PAIRS[:3]):
        for name, values, fill in (("input_ids", read, 0), ("labels", written, -100)):
            assert batch[name][i].tolist() == values + [fill] * (batch[name].shape[1] - len(values))
        assert int(batch["attention_mask"][i].sum()) == len(read)
    assert batch["quality"].shape == batch["labels"].shape


def test_a_run_file_trains_as_python_does(load, tmp_path):
    """Two stages with a teacher; the data of the Python run is made by a plain loop."""
    for name, layers, width in (("model", 2, 16), ("teacher", 1, 8)):
        build("t5", layers=layers, width=width, tied=True).save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name)
    (tmp_path / "run.toml").write_text(RUN)
    assert train(tmp_path / "run.toml", progress=True).global_step == 5
    log = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]

    def padded(rows, fill):
        longest = max(map(len, rows))
        return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])

    def collated(rows):
        read, written = zip(*rows, strict=True)
        ids = padded(read, 0)
        mask = padded([[1] * len(row) for row in read], 0)
        return {"input_ids": ids, "attention_mask": mask, "labels": padded(written, -100)}

    model = build("t5", layers=2, tied=True)
    trainer = TwoStageTrainer(
        model,
        arguments(
            tmp_path / "python", max_steps=5, per_device_train_batch_size=4, warmup_steps=0,
            max_grad_norm=1.0, weight_decay=0.01, use_cpu=True, per_device_eval_batch_size=4,
        ),
        two_stage=TwoStageConfig(1, 2), inheritance=InheritanceSchedule(end_step=4),
        teacher=build("t5", layers=1, width=8, tied=True), data_collator=collated,
        train_dataset=PAIRS, eval_dataset=PAIRS,
    )  # fmt: skip
    trainer.train()
    expected = [line for line in trainer.state.log_history if "label_loss" in line]
    found = [line for line in log if "label_loss" in line]
    for name in ("loss", "label_loss", "kl", "depth", "flops"):
        assert [line.get(name) for line in found] == [line.get(name) for line in expected], name
    evaluated = [line["eval_loss"] for line in log if "eval_loss" in line]
    assert evaluated[-1] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-6)
    for name, weight in load_file(tmp_path / "out" / "model.safetensors").items():
        np.testing.assert_array_equal(weight, model.state_dict()[name].numpy())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "needs what it reads and what it writes"),
        ({"input_ids_column": "ids"}, "needs what it reads and what it writes"),
        ({**IDS, "packing": True}, "would join the pairs"),
        ({**TEXTS, "packing": True}, "goes neither with token ids"),
        ({**TEXTS, "input_ids_column": "ids"}, "goes neither with token ids"),
        ({**TEXTS, "pairs": False}, "target_column is for models of an encoder and a decoder"),
        ({"target_column": "sum"}, r"no column 'sum' \(data.target_column\)"),
        ({"target_column": "target"}, r"'target' \(data.target_column\) holds a list, not a text"),
        ({**TEXTS, "sequence_length": 5}, r"tokens to be (read|written): remove it"),
    ],
)
def test_pairs_that_cannot_be_used(options, match, load):
    with pytest.raises(GrowthError, match=match) as refused:
        load(**options)
    assert "\n" not in str(refused.value)
