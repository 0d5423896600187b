"""A cached teacher gives the live teacher's losses. A cache that does not fit is refused."""

import copy

import pytest
import torch
from typer.testing import CliRunner

from growkern import GrowthError, InheritanceSchedule, TeacherCache, TwoStageTrainer, run as train
from growkern.cli.commands import app
from growkern.train.objectives.language_modeling import MaskedLMCollator
from growkern.train.topk_teacher.teacher import TopKTeacher
from testbed.tiny import VOCAB, TinyTokenizer, arguments, build, losses_of
from tests.train.dataset.data import write_jsonl
from tests.train.run.test_run import workplace  # noqa: F401
from tests.train.test_trainer import STAGES
from tests.train.topk_teacher.test_teacher_cache import blocks_of, collator_of, make

SCHEDULE = InheritanceSchedule(alpha=0.8, end_step=6)


def train_with(
    path, family, teacher, *, schedule=SCHEDULE, collator=None, model=None, dataset=None, **options
):
    trainer = TwoStageTrainer(
        model or build(family, tied=True).double(),
        arguments(path, **options),
        two_stage=STAGES,
        inheritance=schedule,
        teacher=teacher,
        train_dataset=blocks_of() if dataset is None else dataset,
        eval_dataset=blocks_of(4, seed=3),
        data_collator=collator or collator_of(family),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "family, rows, workers", [("bert", "labels", 0), ("bert", "all", 2), ("llama", "labels", 0)]
)
def test_all_of_the_vocabulary_trains_as_the_live_teacher(family, rows, workers, tmp_path):
    """8 steps over 11 blocks in 6 batches: the second epoch has masks, and rows, of its own."""
    teacher = build(family, layers=2, width=8, seed=9).double()
    schedule = InheritanceSchedule(alpha=0.8, end_step=7, kl_rows=rows)
    options = {"schedule": schedule, "dataloader_num_workers": workers}
    live = train_with(tmp_path / "a", family, copy.deepcopy(teacher), **options)
    make(tmp_path / "c", family, model=teacher, k=VOCAB, rows=rows, dtype="float32", epochs=2)
    kept = train_with(tmp_path / "b", family, TeacherCache(tmp_path / "c"), **options)
    # what is kept is float32: the model's float64 losses agree to its rounding
    assert losses_of(kept) == pytest.approx(losses_of(live), rel=1e-5)
    for name, weight in kept.model.named_parameters():
        torch.testing.assert_close(weight, live.model.get_parameter(name), rtol=1e-4, atol=1e-4)
    assert kept.evaluate()["eval_loss"] == pytest.approx(live.evaluate()["eval_loss"], rel=1e-5)
    line = kept.state.log_history[0]
    assert {"kl", "label_loss", "top1_agreement"} <= set(line)
    assert line["flops"] < live.state.log_history[0]["flops"]


def test_the_k_tokens_get_all_of_the_probability(tmp_path):
    """tail="renormalise" as Knowledge Inheritance has it, against the whole teacher in float64."""
    teacher, blocks = build("bert", layers=2, width=8, seed=9).double(), blocks_of()
    make(tmp_path / "c", model=teacher, k=4, dtype="float32")
    schedule = InheritanceSchedule(end_step=6, tail="renormalise")
    kept = TopKTeacher(TeacherCache(tmp_path / "c"), schedule)
    batch = kept.trained(collator_of("bert"), blocks)([blocks[0], blocks[1]])
    labels = batch.pop("labels")
    hidden, weight = torch.randn(*labels.shape, 8).double(), torch.randn(VOCAB, 8).double()
    loss_of = kept.loss_function(batch, 1.0)
    loss = loss_of(hidden, weight, labels=labels, alpha=1.0, temperature=2.0)
    rows = labels != -100
    p, ids = (teacher(**batch).logits[rows] / 2).softmax(-1).topk(4)
    p = p / p.sum(-1, keepdim=True)
    log_q = (hidden[rows] @ weight.T / 2).log_softmax(-1).gather(1, ids)
    expected = 4 * (p * (p.log() - log_q)).sum(-1).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(GrowthError, match="tail is 'renormalise', but a model gives every token"):
        train_with(tmp_path / "a", "bert", teacher, schedule=schedule)
    with pytest.raises(GrowthError, match="infinite with tail 'renormalise'"):
        InheritanceSchedule(end_step=6, tail="renormalise", divergence="reverse")


def test_goes_round_the_masks_it_has(tmp_path):
    """One masking kept: later epochs draw it again, where a live run would draw anew."""
    make(tmp_path / "c", k=4)
    trainer = train_with(tmp_path / "a", "bert", TeacherCache(tmp_path / "c"))
    assert len(losses_of(trainer)) == 8
    collator, blocks = trainer.data_collator, blocks_of()
    first = collator.inner([blocks[0]])
    collator.set_epoch(5)
    assert torch.equal(collator.inner([blocks[0]])["input_ids"], first["input_ids"])


def test_nothing_is_read_once_the_teacher_is_gone(tmp_path, monkeypatch):
    make(tmp_path / "c", k=4)
    cache, asked = TeacherCache(tmp_path / "c"), []
    real = cache.batch
    monkeypatch.setattr(cache, "batch", lambda batch: asked.append(1) or real(batch))
    train_with(tmp_path / "a", "bert", cache, schedule=InheritanceSchedule(end_step=2))
    # two for the check before training; of 8 batches the loader fetches two ahead
    assert 2 + 2 <= len(asked) <= 2 + 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"schedule": InheritanceSchedule(end_step=6, temperature=1.0)}, "temperature"),
        ({"schedule": InheritanceSchedule(end_step=6, kl_rows="all")}, "kl_rows"),
        ({"schedule": InheritanceSchedule(end_step=6, teacher_weights=(0.5, 0.5))}, "one teacher"),
        ({"collator": MaskedLMCollator(TinyTokenizer(), 0.4, seed=1)}, "not in"),
        ({"model": build("bert", layers=2, width=8, vocab_size=40)}, "a vocabulary of 48 tokens"),
        ({"model": build("bert", layers=2, width=8, vocab_size=64)}, "a vocabulary of 48 tokens"),
    ],
    ids=["temperature", "kl_rows", "teachers", "collator", "vocabulary below", "vocabulary above"],
)
def test_a_cache_that_does_not_fit_is_refused_before_training(change, message, tmp_path):
    make(tmp_path / "c", k=4)
    with pytest.raises(GrowthError, match=message):
        train_with(tmp_path / "a", "bert", TeacherCache(tmp_path / "c"), **change)


def test_a_run_file_names_a_cache(workplace, monkeypatch):  # noqa: F811
    """The commands' own path: the text, the masks and the seed of the run find their rows."""
    text = str(workplace / "text")
    arguments = ["cache-teacher", str(workplace / "teacher"), f"{text}/a.txt", f"{text}/b.txt"]
    arguments += ["--out", str(workplace / "kept"), "--k", str(VOCAB), "--temperature", "2"]
    arguments += ["--sequence-length", "16", "--dtype", "float32", "--epochs", "2"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    live = train(workplace / "run.toml", progress=False)
    file = workplace / "run.toml"
    text = file.read_text().replace('paths = ["teacher"]', 'cache = "kept"')
    (workplace / "kept.toml").write_text(text.replace('"out"', '"out2"'))
    kept = train(workplace / "kept.toml", progress=False)
    assert kept.training_loss == pytest.approx(live.training_loss, rel=1e-5)
    assert train(workplace / "kept.toml", progress=False) is None
    (workplace / "kept.toml").write_text(text.replace('"out"', '"kept"'))
    with pytest.raises(GrowthError, match="which the run reads"):
        train(workplace / "kept.toml", progress=False)
    (workplace / "kept.toml").write_text(text.replace("[output]", 'paths = ["teacher"]\n[output]'))
    with pytest.raises(GrowthError, match="give one of paths"):
        train(workplace / "kept.toml", progress=False)


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_cache_is_made_of_the_data_of_a_run_file(workplace):  # noqa: F811
    """Records of token ids: the run finds its rows, its masks and its temperature."""
    ids = torch.randint(5, VOCAB, (12, 16), generator=torch.Generator().manual_seed(0)).tolist()
    write_jsonl(workplace / "ids.jsonl", [{"ids": one, "quality": 2.0} for one in ids])
    text = (workplace / "run.toml").read_text()
    text = text.replace('train = ["text/*.txt"]', 'train = ["ids.jsonl"]\ninput_ids_column = "ids"')
    text = text.replace('validation = ["text/a.txt"]', 'cache = "tokens"')
    text = text.replace("eval_every = 3\n", "")
    text = text.replace("end_step = 4", "end_step = 4\ntemperature = 1.5")
    text = text.replace("[training]", '[loss]\nrow_weights = "quality"\n[training]\nseed = 3')
    (workplace / "run.toml").write_text(text)
    text = text.replace('paths = ["teacher"]', 'cache = "kept"').replace('"out"', '"out2"')
    (workplace / "kept.toml").write_text(text)
    arguments = ["cache-teacher", workplace / "teacher", "--run", workplace / "kept.toml"]
    arguments += ["--out", workplace / "kept", "--k", VOCAB, "--dtype", "float32", "--epochs", "2"]
    run_app(*arguments)
    live = train(workplace / "run.toml", progress=False)
    kept = train(workplace / "kept.toml", progress=False)
    assert kept.training_loss == pytest.approx(live.training_loss, rel=1e-5)
    for more, match in (
        (["--temperature", 2], "--run FILE says what --temperature would"),
        (["--seed", 0], "--run FILE says what --seed would"),
    ):
        with pytest.raises(GrowthError, match=match):
            run_app(*arguments, *more)
    stream = text.replace('cache = "tokens"', "streaming = true")
    (workplace / "kept.toml").write_text(stream.replace('cache = "kept"', 'paths = ["teacher"]'))
    with pytest.raises(GrowthError, match="kept exists: give another directory"):
        run_app(*arguments)
    with pytest.raises(GrowthError, match="streams its data, whose rows do not repeat"):
        run_app(*arguments, "--overwrite")
    with pytest.raises(GrowthError, match="give TEXT, or a run file"):
        run_app(*arguments[:2], *arguments[4:], "--overwrite")


def run_app(*words):
    app([str(word) for word in words], standalone_mode=False)
