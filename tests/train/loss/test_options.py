"""Options of the loss and counts of rows, from trainer arguments and run files to the loss."""

import pytest
import torch
import transformers

from growkern import GrowthError, InheritanceSchedule, LossOptions, TwoStageTrainer
from growkern.train.loss import batch_rows, inheritance
from growkern.train.run.file import Run
from testbed.forked_ranks import on_ranks
from testbed.tiny import MEASURED, Batches, arguments, build, losses_of
from tests.train.loss import epochs
from tests.train.loss.plain import plain_loss
from tests.train.run.test_config import COMPLETE, load  # noqa: F401
from tests.train.run.test_run import RUN, workplace  # noqa: F401

OPTIONS = [
    {"divergence": "reverse"},
    {"divergence": "jsd", "beta": 0.3},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"row_weights": "importance"},
    {"teacher_weights": (0.25, 0.75)},
    {"kl_rows": "all", "row_weights": "importance", "label_smoothing": 0.2},
]


class Weighted(Batches):
    def __init__(self, rows):
        super().__init__(rows)
        generator = torch.Generator().manual_seed(0)
        for row in self.rows:
            weights = torch.rand(row["labels"].shape, generator=generator, dtype=torch.float64)
            row["importance"] = weights


def stacked(data):
    return {key: torch.cat([row[key] for row in data.rows]) for key in data.rows[0]}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options))
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_every_option_reaches_the_loss_by_its_name(family, options, tmp_path):
    fields = LossOptions.__dataclass_fields__
    loss = LossOptions(**{k: v for k, v in options.items() if k in fields})
    rest = {k: v for k, v in options.items() if k not in fields}
    student = build(family, layers=2).double()
    teachers = [build(family, layers=1, width=8, seed=s).double() for s in (5, 6)]
    data = Weighted(4)
    batch = stacked(data)
    weights = batch.pop("importance")
    expected = plain_loss(
        student, teachers, batch, causal=family == "gpt2", alpha=0.7,
        **options | ({"row_weights": weights} if "row_weights" in options else {}),
    )  # fmt: skip
    # the loss of an evaluation has none of these options
    plain = plain_loss(student, [], batch, causal=family == "gpt2")
    trainer = TwoStageTrainer(
        student, arguments(tmp_path, max_steps=1, gradient_accumulation_steps=2), loss=loss,
        inheritance=InheritanceSchedule(alpha=0.7, end_step=1, **rest), teacher=teachers,
        train_dataset=data, eval_dataset=data,
    )  # fmt: skip
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.item(), rel=1e-9)
    trainer.train()
    assert losses_of(trainer) == pytest.approx([expected.item()], rel=1e-5)


def test_the_smoothing_of_the_training_arguments(tmp_path):
    data, student = Batches(2), build("bert").double()
    expected = plain_loss(student, [], stacked(data), causal=False, label_smoothing=0.1)
    args = arguments(tmp_path, max_steps=1, label_smoothing_factor=0.1)
    trainer = TwoStageTrainer(student, args, train_dataset=data)
    assert trainer.objective.loss.label_smoothing == 0.1
    trainer.train()
    assert losses_of(trainer) == pytest.approx([expected.item()], rel=1e-5)
    with pytest.raises(GrowthError, match="give one of them"):
        TwoStageTrainer(student, args, loss=LossOptions(label_smoothing=0.2))


def test_weights_that_the_batches_lack(tmp_path):
    with pytest.raises(GrowthError, match="batches have no 'importance'"):
        loss, data = LossOptions(row_weights="importance"), Batches(2)
        TwoStageTrainer(build("bert"), arguments(tmp_path), loss=loss, train_dataset=data)


LOSS = """
[loss]
label_smoothing = 0.1
z_loss = 1e-4
row_weights = "importance"
"""


def test_the_same_names_in_a_run_file(load, tmp_path):  # noqa: F811
    text = COMPLETE.replace("end_step = 44", 'end_step = 44\ndivergence = "jsd"\nbeta = 0.2')
    run = load(text + LOSS)
    assert run.loss == LossOptions(label_smoothing=0.1, z_loss=1e-4, row_weights="importance")
    assert (run.inheritance.divergence, run.inheritance.beta) == ("jsd", 0.2)
    assert isinstance(run, Run)
    with pytest.raises(GrowthError, match="no key 'z_los'; did you mean 'z_loss'"):
        load(COMPLETE + LOSS.replace("z_loss", "z_los"))
    for old, new, name in (("0.1", "1.0", "label_smoothing"), ("1e-4", "nan", "z_loss")):
        with pytest.raises(GrowthError, match=name):
            load(COMPLETE + LOSS.replace(old, new))


# -------------------------------------------------------------------- counts


@pytest.fixture
def calls(monkeypatch):
    """(max_rows, rows with a label or a KL term) of every call of the loss."""
    seen, original = [], inheritance.linear_kl_mlm_loss

    def loss(*args, labels, kl_rows, max_rows=None, **options):
        live = labels != -100
        if isinstance(kl_rows, torch.Tensor):
            live = live | kl_rows
        seen.append((max_rows, max(1, int(live.sum()))))
        return original(*args, labels=labels, kl_rows=kl_rows, max_rows=max_rows, **options)

    monkeypatch.setattr(inheritance, "linear_kl_mlm_loss", loss)
    return seen


@pytest.mark.parametrize("kl_rows", ["labels", "all"])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_loss_is_told_how_many_rows_are_live(family, kl_rows, calls, tmp_path):
    """With accumulation, after the teacher has ended, in evaluations, and from data workers."""

    def collator(features):
        # a custom one, with padding
        batch = transformers.default_data_collator(features)
        mask = torch.ones_like(batch["labels"])
        mask[0, 6:] = 0
        batch["labels"][0, 6:] = -100
        return transformers.BatchEncoding({**batch, "attention_mask": mask})

    trainer = TwoStageTrainer(
        build(family, layers=2),
        arguments(
            tmp_path, max_steps=3, gradient_accumulation_steps=2, dataloader_num_workers=1,
            per_device_eval_batch_size=3,
        ),
        inheritance=InheritanceSchedule(alpha=0.7, end_step=2, kl_rows=kl_rows),
        teacher=build(family, layers=1, seed=5),
        train_dataset=Batches(14),
        eval_dataset=Batches(5),
        data_collator=collator,
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    assert len(calls) == 6 + 2
    assert all(limit == live for limit, live in calls), calls


def test_batches_that_cannot_be_counted_stay_as_they_are():
    for batch in ({"input_ids": torch.ones(2, 3)}, {"labels": torch.ones(2, 3, device="meta")}):
        assert batch_rows.CountingCollator(lambda _, batch=batch: batch, causal=True)([]) is batch
    assert batch_rows.CountingCollator(lambda _: [1, 2], causal=True)([]) == [1, 2]


def test_packed_sequences_are_counted_apart():
    labels = torch.arange(9)[None]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    counts = batch_rows.count_rows({"labels": labels, "position_ids": positions}, causal=True)
    assert (counts.labelled, counts.pairs) == (8, 16 + 4 + 9)
    assert batch_rows.count_rows({"labels": labels}, causal=False).pairs is None
    counted = batch_rows.CountingCollator(lambda _: {"labels": labels}, causal=False)([])
    assert counted[batch_rows.ROW_COUNTS].labelled == 9


@pytest.mark.parametrize("axes, teachers", [(3, [1, 0, 1]), (3, [0, 1, 1, 1]), (4, [1, 0])])
def test_each_teacher_gets_the_positions_of_its_examples(axes, teachers):
    places = torch.arange(axes * len(teachers) * 5).view(axes, len(teachers), 5)
    batch = {"input_ids": places[0], "position_ids": places, batch_rows.TAUGHT_BY: teachers}
    own = batch_rows.examples_of(batch, 1)
    expected = [places[:, i] for i, teacher in enumerate(teachers) if teacher == 1]
    assert torch.equal(own["position_ids"], torch.stack(expected, 1))
    assert torch.equal(own["input_ids"], own["position_ids"][0])


# ------------------------------------------------------- the end of an epoch


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("epochs")
    on_ranks(2, epochs.__name__, folder)
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.parametrize("case", epochs.CASES)
def test_two_processes_are_one_at_the_end_of_an_epoch_too(on_two, case, tmp_path):
    alone = epochs.trained(case, tmp_path, 4)
    for ours, theirs in zip(on_two[case]["log"], alone["log"], strict=True):
        assert ours.keys() == theirs.keys()
        # attention over one long row of packed sequences costs more than over two short ones
        untested = {*MEASURED, *(["flops"] if "packed" in case else [])}
        for name in theirs.keys() - untested:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6), name
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(on_two[case]["weights"][name], weight, rtol=1e-7, atol=1e-9)
