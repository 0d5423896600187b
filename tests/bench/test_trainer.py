"""The benchmark of the trainer, at a toy size: its trainers compute the same loss."""

import argparse
import copy

import pytest
import torch

from bench.speed import trainer as bench_trainer
from bench.speed.trainer import Clock, Turns, trained
from growkern import TwoStageConfig


def test_the_benchmark_has_a_row_per_comparison():
    sizes = {"width": 32, "layers": 2, "vocab": 50, "batch": 2, "length": 8}
    rows = list(bench_trainer.measure(argparse.Namespace(**sizes, steps=3)))
    assert [row["case"] for row in rows] == ["no teacher", "teacher", "stage 1"]
    assert all(row["ratio"] > 0 for row in rows)
    assert 0 < rows[-1]["FLOP share"] < 1


def test_both_distillations_have_the_same_loss():
    student, teacher = (bench_trainer.gpt2(width, 2, 50, 8) for width in (32, 16))
    ids = torch.randint(50, (2, 8))
    makers = bench_trainer.contenders(teacher, TwoStageConfig(1, 2))
    losses = []
    for name in (bench_trainer.DISTILLING, bench_trainer.BESIDE_TEACHER):
        clock = Clock(Turns(1), 0)
        trainer = trained(makers[name], copy.deepcopy(student), ids, 3, clock)
        losses.append(trainer.state.log_history[0]["loss"])
        assert len(clock.seconds) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
