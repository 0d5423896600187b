"""Teachers of one source each, against the plain loss of the examples of each source."""

import copy

import pytest
import torch

from growkern import GrowthError, InheritanceSchedule, TwoStageTrainer
from growkern.train.loss.inheritance import TeachersOfSources
from growkern.train.run.file import load_runs
from testbed.tiny import Batches, arguments, build, losses_of
from tests.train.loss.plain import plain_loss
from tests.train.run.test_run import RUN, train, workplace  # noqa: F401

SOURCES = ("law", "news", "news", "law", "law", "law")


class Named(Batches):
    """Rows that say which source they are from."""

    def __init__(self, sources=SOURCES):
        super().__init__(len(sources))
        self.sources = sources

    def __getitem__(self, i):
        return super().__getitem__(i) | {"source": self.sources[i]}


def collate(features):
    keys = ("input_ids", "labels", "attention_mask")
    return {k: torch.stack([f[k] for f in features]) for k in keys if k in features[0]}


def trained(path, model, teacher, data, kl_rows="labels", **options):
    """One step of three micro-batches of two examples with plain gradient descent."""
    options = {"max_steps": 1, "gradient_accumulation_steps": 3, "optim": "sgd"} | options
    trainer = TwoStageTrainer(
        model,
        arguments(path, warmup_steps=0, learning_rate=1.0, use_cpu=True, **options),
        inheritance=InheritanceSchedule(alpha=0.5, decay="constant", kl_rows=kl_rows),
        teacher=teacher,
        train_dataset=data,
        data_collator=collate,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(("family", "kl_rows"), [("gpt2", "labels"), ("bert", "all")])
def test_each_row_learns_from_the_teacher_of_its_source(family, kl_rows, tmp_path):
    model = build(family, layers=2)
    teachers = {"law": build(family, layers=1, seed=3), "news": build(family, layers=1, seed=4)}
    twin = copy.deepcopy(model).double()
    data = Named()
    trainer = trained(tmp_path, model, teachers, data, kl_rows)

    causal, rows = family == "gpt2", data.rows
    labels = torch.cat([row["labels"] for row in rows])
    items = int((labels[:, 1:] if causal else labels).ne(-100).sum())
    terms = {"label_loss": 0.0, "kl": 0.0}
    kl_items = items if kl_rows == "labels" else labels.numel()
    for source, teacher in teachers.items():
        own = [row for row, name in zip(rows, SOURCES, strict=True) if name == source]
        batch = {k: torch.cat([row[k] for row in own]) for k in own[0]}
        kind = {"causal": causal, "kl_rows": kl_rows}
        truth = [copy.deepcopy(teacher).double()]
        terms["label_loss"] += plain_loss(twin, [], batch, **kind, num_items=items)
        terms["kl"] += plain_loss(twin, truth, batch, **kind, alpha=1.0, num_items=kl_items)
    expected = (terms["label_loss"] + terms["kl"]) / 2
    expected.backward()
    assert losses_of(trainer) == pytest.approx([expected.item()], rel=1e-5)
    line = trainer.state.log_history[0]
    assert {name: line[name] for name in terms} == pytest.approx(
        {name: term.item() for name, term in terms.items()}, rel=1e-5
    )
    gradients = dict(twin.named_parameters())
    for name, after in model.named_parameters():
        before = gradients[name]
        grad = 0 if before.grad is None else before.grad
        # a step of plain gradient descent with a rate of 1
        expected_W = (before - grad).detach().float()
        torch.testing.assert_close(after.detach(), expected_W, atol=2e-6, rtol=0)


def test_a_teacher_costs_the_flops_of_its_own_examples(tmp_path):
    counts = {}
    teacher = build("gpt2", layers=1, seed=3)
    for name, given in {"one": teacher, "apart": {"law": teacher, "news": teacher}}.items():
        trainer = trained(tmp_path / name, build("gpt2", layers=2), given, Named())
        counts[name] = trainer.state.log_history[0]["flops"]
    assert counts["apart"] == counts["one"]


@pytest.mark.parametrize(
    ("sources", "error"),
    [
        ((*SOURCES[:-1], "poems"), "'poems', which no teacher has: give each example one of 'law'"),
        ((None, *SOURCES[1:]), "'source' None, which"),
    ],
)
def test_examples_without_a_teacher_are_refused(sources, error, tmp_path):
    teachers = {name: build("gpt2", layers=1, seed=3) for name in ("law", "news")}
    with pytest.raises(GrowthError, match=error):
        trained(tmp_path, build("gpt2", layers=2), teachers, Named(sources))


def test_batches_that_are_sent_or_not_marked_are_refused(tmp_path, monkeypatch):
    teachers = {name: build("gpt2", layers=1, seed=3) for name in ("law", "news")}
    with pytest.raises(GrowthError, match="have no 'taught_by'"):
        TeachersOfSources(teachers).loss_function({"input_ids": torch.zeros(1, 4).long()}, 0.5)
    monkeypatch.setattr("growkern.train.loop.trainer.are_sent", lambda *_: True)
    with pytest.raises(GrowthError, match="set dispatch_batches=False"):
        trained(tmp_path, build("gpt2", layers=2), teachers, Named())


@pytest.fixture
def named_run(workplace):  # noqa: F811
    (workplace / "teacher").rename(workplace / "lawyer")
    build("llama", layers=2, width=8, seed=5).save_pretrained(workplace / "reporter")
    for file in (workplace / "lawyer").iterdir():
        if "token" in file.name or file.name == "vocab.txt":
            (workplace / "reporter" / file.name).write_bytes(file.read_bytes())
    text = RUN.replace(
        'train = ["text/*.txt"]', 'train = { law = ["text/a.txt"], news = ["text/b.txt"] }'
    ).replace('paths = ["teacher"]', 'paths = { news = "reporter", law = "lawyer" }')
    (workplace / "run.toml").write_text(text)
    return workplace / "run.toml"


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_a_run_file_names_sources_and_their_teachers(named_run, capsys):
    output = train(named_run)
    assert output.global_step == 6
    assert "tokens of law, " in capsys.readouterr().out


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("news = [", "other = [", "one teacher to each source, under the same name"),
        ("end_step = 4", "end_step = 4\nteacher_weights = [0.5, 0.5]", "share no rows"),
        ("sequence_length", "streaming = true\nsequence_length", "a stream has no names"),
        ("law = [", '"Law 1" = [', "use small letters, digits and _"),
    ],
)
def test_names_that_do_not_fit_are_refused(old, new, error, named_run):
    named_run.write_text(named_run.read_text().replace(old, new, 1))
    with pytest.raises(GrowthError, match=error):
        load_runs(named_run)
