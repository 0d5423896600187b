"""Collators of users: plain functions, and objects that follow the epochs or have a frozen form."""

import pytest
import torch
from torch.utils.data import IterableDataset

from growkern import InheritanceSchedule, TeacherCache, TwoStageTrainer
from growkern.train.cached_teacher.teacher import CachedCollator, CachedTeacher
from growkern.train.data import evaluation_collator
from tests.train.test_teacher_cache import blocks_of, collator_of, make
from tests.train.test_trainer import Batches, arguments, losses_of
from tests.train.tiny import build


def stack(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class Following:
    """Notes the epochs it is told; has no base class and no frozen form."""

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __call__(self, rows):
        return stack(rows)


class WithFrozen(Following):
    def frozen(self):
        return stack


def test_a_plain_function_and_an_object_train_alike(tmp_path):
    following, losses = Following(), []
    for collator in (stack, following):
        trainer = TwoStageTrainer(
            build("bert"),
            arguments(tmp_path, max_steps=5),
            train_dataset=Batches(4),
            eval_dataset=Batches(2),
            data_collator=collator,
        )
        trainer.train()
        assert trainer.data_collator is collator
        losses.append((losses_of(trainer), trainer.evaluate()["eval_loss"]))
    assert losses[0] == losses[1]
    # 2 steps per epoch
    assert following.epochs == [0, 1, 2]


def test_evaluation_takes_the_frozen_form_where_there_is_one():
    following = Following()
    assert evaluation_collator(stack) is stack
    assert evaluation_collator(following) is following
    assert evaluation_collator(WithFrozen()) is stack


@pytest.mark.parametrize("inner", [stack, Following()], ids=["function", "object"])
def test_a_cache_goes_round_an_inner_collator_only_if_it_follows(inner, tmp_path):
    make(tmp_path / "c", k=4, epochs=2)
    collator = CachedCollator(inner, TeacherCache(tmp_path / "c"))
    for epoch in range(4):
        collator.set_epoch(epoch)
    assert getattr(inner, "epochs", [0, 1, 0, 1]) == [0, 1, 0, 1]
    assert collator.frozen() is inner


class Stream(IterableDataset):
    def __iter__(self):
        yield from iter([])


def test_data_without_an_index_is_not_looked_up_beforehand(tmp_path):
    make(tmp_path / "c", k=4)
    cache = TeacherCache(tmp_path / "c")
    teacher = CachedTeacher(cache, InheritanceSchedule(end_step=2))
    asked = []
    cache.batch = lambda batch: asked.append(1) or (torch.zeros(1), torch.zeros(1))
    teacher.collator(collator_of("bert"), Stream())
    assert not asked
    teacher.collator(collator_of("bert"), blocks_of())
    assert len(asked) == 2
