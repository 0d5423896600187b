"""The loss that is printed is a mean over labels that exist; never a 0 that stands for nothing."""

import math

import pytest

from growkern import InheritanceSchedule, TwoStageTrainer
from testbed.tiny import Batches, arguments, build, losses_of

EMPTY = (2, 3, 6, 7, 8)


def lines(path, every, empty=EMPTY, kl_rows="labels"):
    """The log lines of 9 steps of two rows each; the rows of some steps have no label."""
    data = Batches(18)
    for step in empty:
        for row in data.rows[2 * step : 2 * step + 2]:
            row["labels"].fill_(-100)
    trainer = TwoStageTrainer(
        build("bert", layers=2),
        arguments(path, max_steps=9, logging_steps=every),
        inheritance=InheritanceSchedule(alpha=0.5, decay="constant", kl_rows=kl_rows),
        teacher=build("bert", layers=1, seed=3),
        train_dataset=data,
    )
    trainer.train()
    return losses_of(trainer), [
        line["label_loss"] for line in trainer.state.log_history if "label_loss" in line
    ]


@pytest.mark.parametrize("kl_rows", ["labels", "all"])
def test_steps_without_a_label_are_left_out(kl_rows, tmp_path):
    steps, mlm = lines(tmp_path, 1, kl_rows=kl_rows)
    assert {i for i, loss in enumerate(steps) if math.isnan(loss)} == set(EMPTY)
    assert {i for i, loss in enumerate(mlm) if math.isnan(loss)} == set(EMPTY)
    threes, _ = lines(tmp_path, 3, kl_rows=kl_rows)
    expected = [sum(steps[:2]) / 2, sum(steps[4:6]) / 2]
    assert threes[:2] == pytest.approx(expected, rel=1e-5)
    assert math.isnan(threes[2])
