"""A trainer trains twice, with every kind of teacher, as a model that runs as the teacher does."""

import contextlib
import copy
from dataclasses import dataclass

import pytest
import torch

import growkern
from growkern import InheritanceSchedule, ServedTeacher, TeacherCache, TwoStageTrainer
from testbed.tiny import VOCAB, arguments, build, losses_of
from tests.shared import walks
from tests.train.topk_teacher.server import serving

ROWS = 16


@dataclass(frozen=True)
class Rising(InheritanceSchedule):
    """No teacher at first, then one, and none at the end."""

    def alpha_at(self, step):
        return 0.0 if step < 3 or step >= 5 else 0.1 * step


SCHEDULES = {
    "falling": InheritanceSchedule(alpha=0.8, end_step=2, temperature=1.0),
    "rising": Rising(alpha=0.5, end_step=5, temperature=1.0),
}


def collate(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}


def data(sources=False):
    ids = torch.randint(5, VOCAB, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return [{**row, "source": "ab"[i % 2]} for i, row in enumerate(rows)] if sources else rows


@contextlib.contextmanager
def teacher_of(kind, model, folder):
    if kind == "served":
        with serving(model) as (_, url):
            yield ServedTeacher(url, VOCAB)
        return
    if kind == "cache":
        growkern.cache_teacher(
            model, data(), folder / "kept", k=VOCAB, temperature=1.0, collator=collate,
            dtype="float32", progress=False,
        )  # fmt: skip
    yield {
        "model": model,
        "two": [model, copy.deepcopy(model)],
        "sources": {"a": model, "b": copy.deepcopy(model)},
        "cache": TeacherCache(folder / "kept") if kind == "cache" else None,
    }[kind]


def losses(kind, schedule, workers, folder):
    """Of two runs of one trainer, and of an evaluation between them."""
    model = build("llama", layers=2, width=8, seed=9)
    with teacher_of(kind, model, folder) as teacher:
        trainer = TwoStageTrainer(
            build("llama", layers=2),
            arguments(
                folder / "run", max_steps=6, dataloader_num_workers=workers,
                remove_unused_columns=False, dataloader_persistent_workers=workers > 0,
            ),
            inheritance=SCHEDULES[schedule], teacher=teacher, data_collator=collate,
            train_dataset=data(kind == "sources"), eval_dataset=data()[:4],
        )  # fmt: skip
        trainer.train()
        found = losses_of(trainer)
        found.append(trainer.evaluate()["eval_loss"])
        trainer.train()
        return found + losses_of(trainer)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return {name: losses("model", name, 0, tmp_path_factory.mktemp(name)) for name in SCHEDULES}


# workers know nothing of models
ALL = [("two", schedule, 0) for schedule in SCHEDULES] + [
    (kind, schedule, workers)
    for kind in ("sources", "cache", "served")
    for schedule in SCHEDULES
    for workers in (0, 2)
]
SAMPLE = [ALL[i] for i in (0, 5, 7, 8, 10)]


@pytest.mark.parametrize(("kind", "schedule", "workers"), ALL if walks.times > 1 else SAMPLE)
def test_twice_in_one_process(kind, schedule, workers, expected, tmp_path):
    found = losses(kind, schedule, workers, tmp_path)
    assert found == pytest.approx(expected[schedule], rel=1e-4)
    first, second = found[:6], found[7:13]
    assert first != pytest.approx(second, rel=1e-3)
