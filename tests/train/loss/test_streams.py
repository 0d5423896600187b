"""Data sets that are read from start to end: labels, rows, passes, and resuming in any pass."""

from types import SimpleNamespace

import numpy as np
import pytest
from torch.utils.data import IterableDataset

from growkern import GrowthError, TwoStageTrainer
from growkern.errors import GrowthWarning
from growkern.train.loss.batches import check_stream
from growkern.train.objectives.language_modeling import MaskedLMCollator
from testbed.tiny import VOCAB, Batches, TinyTokenizer, arguments, build, losses_of
from tests.shared import walks
from tests.train.loss.epochs import Stream
from tests.train.loss.test_options import calls  # noqa: F401
from tests.train.safety.runs import assert_same, small_model, weights_of


class Blocks(IterableDataset):
    """Token rows for a collator that draws masks."""

    def __init__(self, rows):
        self.rows = np.random.default_rng(0).integers(5, VOCAB, (rows, 8)).astype(np.int32)

    def __iter__(self):
        return ({"input_ids": row} for row in self.rows)


class Once(IterableDataset):
    """A stream that cannot be read twice."""

    def __init__(self, rows):
        self.rows = iter(Stream(rows))

    def __iter__(self):
        return self.rows


def trainer_of(path, data, model=None, collator=None, **options):
    return TwoStageTrainer(
        model or build("bert", layers=1),
        arguments(path, **options),
        train_dataset=data,
        data_collator=collator,
    )


# ----------------------------------------------------------------------- labels


@pytest.mark.parametrize("steps, batch", [(3, 2), (2000, 10)])
def test_a_stream_without_a_label(steps, batch, tmp_path):
    """Looked for in the first 1000 examples, and at the latest in the last step."""
    data = Stream(30)
    for row in data.data.rows:
        row["labels"].fill_(-100)
    trainer = trainer_of(tmp_path, data, max_steps=steps, per_device_train_batch_size=batch)
    with pytest.raises(GrowthError, match=r"not a single label: .* first (6|1000) examples"):
        trainer.train()
    if steps == 3:
        assert trainer.state.global_step == 2


def test_a_stream_whose_first_label_is_late(tmp_path):
    data = Stream(30)
    for row in data.data.rows[:20]:
        row["labels"].fill_(-100)
    trainer = trainer_of(tmp_path, data, max_steps=11)
    trainer.train()
    assert trainer.state.global_step == 11


def test_a_stream_without_the_key(tmp_path):
    data = Stream(4)
    for row in data.data.rows:
        del row["labels"]
    with pytest.raises(GrowthError, match="have no 'labels'"):
        trainer_of(tmp_path, data).train()


# ------------------------------------------------------------------------- rows


def test_the_live_rows_of_a_stream_are_counted(calls, tmp_path):  # noqa: F811
    trainer_of(tmp_path, Stream(6), max_steps=6).train()
    assert len(calls) == 6
    assert all(limit == live for limit, live in calls)


def test_a_stream_costs_what_its_rows_cost(tmp_path):
    """The same loss and FLOPs as the same rows with an index."""
    found = []
    for data in (Stream(8), Batches(8)):
        trainer = trainer_of(tmp_path, data, max_steps=6)
        trainer.train()
        found.append((losses_of(trainer), trainer.state.total_flos))
    assert found[0] == found[1]


# ----------------------------------------------------------------------- passes


def test_each_pass_draws_its_own_masks(tmp_path):
    epochs = []

    class Collator(MaskedLMCollator):
        def set_epoch(self, epoch):
            epochs.append(epoch)
            super().set_epoch(epoch)

    trainer_of(tmp_path, Blocks(6), collator=Collator(TinyTokenizer(), 0.4), max_steps=11).train()
    # 3 steps per pass
    assert epochs == [0, 1, 2, 3]


ENDS = [(stop, accumulation) for accumulation in (1, 2) for stop in (2, 3, 4, 6, 7)]


# inside a pass, at its end, and in the next one
@pytest.mark.parametrize(
    "stop, accumulation", ENDS if walks.times > 1 else [(2, 2), (3, 1), (4, 2), (7, 1)]
)
def test_resumed_in_any_pass_it_ends_the_same(stop, accumulation, tmp_path):
    def trainer(path):
        return trainer_of(
            path, Blocks(6 * accumulation), small_model(), MaskedLMCollator(TinyTokenizer(), 0.4),
            gradient_accumulation_steps=accumulation, save_strategy="steps", save_steps=1,
        )  # fmt: skip

    straight = trainer(tmp_path)
    straight.train()
    again = trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=tmp_path / f"checkpoint-{stop}")
    assert_same(weights_of(again), weights_of(straight))
    assert losses_of(again) == losses_of(straight)


def test_an_accumulated_batch_that_is_not_full_is_left_out(tmp_path):
    """5 batches and accumulation 2: the same as 4 batches."""
    found = []
    for rows in (10, 8):
        trainer = trainer_of(tmp_path, Stream(rows), gradient_accumulation_steps=2, max_steps=5)
        if rows == 10:
            with pytest.warns(GrowthWarning, match="last 1 of 2 batches are left out"):
                trainer.train()
        else:
            trainer.train()
        found.append(weights_of(trainer))
    assert_same(*found)


def test_a_stream_that_ends_for_good(tmp_path):
    trainer = trainer_of(tmp_path, Once(6), max_steps=7)
    with pytest.warns(GrowthWarning, match="no more examples: the run ends after step 3 of 7"):
        trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize(("rows", "accumulation"), [(0, 1), (2, 2)])
def test_a_stream_too_short_for_a_step(rows, accumulation, tmp_path):
    trainer = trainer_of(tmp_path, Stream(rows), gradient_accumulation_steps=accumulation)
    with pytest.raises(GrowthError, match="not enough examples for a single step"):
        trainer.train()


# ---------------------------------------------------------------- several ranks


def test_a_stream_that_would_be_filled_up_is_refused():
    each = SimpleNamespace(num_processes=2, dispatch_batches=False)
    with pytest.raises(GrowthError, match="dispatch_batches=False repeats examples"):
        check_stream(Stream(3), each)
    check_stream(Batches(3), each)
    check_stream(Stream(3), SimpleNamespace(num_processes=2, dispatch_batches=None))
    check_stream(Stream(3), SimpleNamespace(num_processes=1, dispatch_batches=False))
