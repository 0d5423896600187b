"""Every growth of a run is planned before the run, against the model as it will be."""

import json
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

import growkern
from growkern import GrowthError, GrowthStep, InheritanceSchedule, TwoStageTrainer, run as train
from growkern.growth.optimizer.moments import growth_lr_multipliers
from growkern.growth.plan import plan_growth
from growkern.growth.record.lineage import growth_plan_of
from growkern.train.safety.export import export
from testbed.forked_ranks import on_ranks
from testbed.tiny import build
from tests.train.growth import ranks
from tests.train.growth.ranks import EVEN, FILE, GROWTH, STEPS, trainer_for
from tests.train.run.test_run import RUN, workplace  # noqa: F401
from tests.train.test_trainer import Batches, arguments

# behind `FILE`, with the order of the layers filled in
LISTED = """
[[growth]]
at_step = 2
depth = {order}
rate_factor = 1e-30
"""


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    # set here too: the fixture that makes the tests deterministic lives for one test
    torch.use_deterministic_algorithms(True, warn_only=True)
    trainer = trainer_for(tmp_path_factory.mktemp("straight"))
    trainer.train()
    return trainer


def test_the_tokenizers_special_tokens_go_through_two_growths(straight):
    config = straight.model.config
    assert straight.state.global_step == STEPS and config.n_embd == 64
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, 4, 5)


def test_two_processes_grow_twice_as_one_does(straight, tmp_path):
    on_ranks(2, ranks.__name__, tmp_path)
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    for name, weight in straight.model.state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=1e-7, atol=1e-9)


def test_a_run_that_grows_twice_ends_as_one_that_never_grew(straight, tmp_path):
    """The factors of both growths count, and the norm that clips is that of the first model."""
    never = trainer_for(tmp_path, growth=())
    never.train()
    ids = torch.arange(24).reshape(3, 8) % 30
    expected, found = (one.model.eval()(ids).logits for one in (never, straight))
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
    before = build("gpt2", layers=2, tied=True).double().eval()(ids).logits
    assert (before - expected).abs().max() > 0.1
    norms = [
        [line["grad_norm"] for line in one.state.log_history if "grad_norm" in line]
        for one in (never, straight)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-9) and max(norms[0]) > 0.5


def test_a_model_that_was_grown_before_the_run(tmp_path):
    """From memory and from disk; the growths before the run count too, on a resumed run as well."""
    small = build("gpt2", layers=2, tied=True).double()
    large = growkern.grow(small, n_embd=32, n_head=4, **EVEN)
    again = growkern.grow(large, n_embd=64, n_head=8, **EVEN)
    expected = growth_lr_multipliers(again.growth_plan)
    large.save_pretrained(tmp_path / "large")
    loaded = type(large).from_pretrained(tmp_path / "large")
    for number, model in enumerate((large, loaded)):
        trainer = trainer_for(tmp_path / str(number), growth=GROWTH[1:], model=model)
        assert trainer.optimizers.plan is not None
        trainer.train()
        found = growth_lr_multipliers(trainer.model.growth_plan)
        for name, factors in expected.items():
            assert all(map(torch.equal, found[name].lr, factors.lr)), name
        # back to the size of the start
        trainer.fit_to(tmp_path / str(number) / "checkpoint-6")
        assert trainer.optimizers.plan is not None and trainer.model.config.n_embd == 32


def test_checkpoints_and_exports_keep_the_record_of_all_growths(straight, tmp_path):
    run, model = Path(straight.args.output_dir), straight.model
    straight.save_model(str(tmp_path / "model"))
    export(run, tmp_path / "exported")
    # published, it says where it comes from
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "# GPT2LMHeadModel, grown with growkern" in card and "| n_embd | 32 | 64 |" in card
    expected = growth_lr_multipliers(model.growth_plan)
    for place in (tmp_path / "model", tmp_path / "exported", run / f"checkpoint-{STEPS}"):
        found = growth_lr_multipliers(growth_plan_of(type(model).from_pretrained(place)))
        for name, factors in expected.items():
            assert all(map(torch.equal, found[name].lr, factors.lr)), name
        wider = growkern.plan(place, n_embd=128, n_head=16, **EVEN)
        assert growkern.moment_findings(wider)[0].level == "exact"
    assert not (run / "checkpoint-2" / "lineage.json").exists()


class Changes(TrainerCallback):
    """Changes the config while the model trains."""

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 2:
            model.config.summary_first_dropout = 0.25


def test_the_attention_and_a_config_that_changes_in_training_stay(tmp_path):
    model = build("gpt2", layers=2, tied=True, attn_implementation="eager").double()
    assert model.config._attn_implementation == "eager"
    trainer = trainer_for(tmp_path, model=model, callbacks=[Changes()])
    trainer.train()
    assert trainer.model.config._attn_implementation == "eager"
    assert trainer.model.config.summary_first_dropout == 0.25
    assert trainer.model.config.n_embd == 64


# ------------------------------------------------------------------- refusals

FIRST = GrowthStep(at_step=3, sizes={"n_layer": 4})
SECOND = "growth 2 of 2 inside the run, the growth at step 6: "


def then(**options):
    return {"growth": [FIRST, GrowthStep(at_step=6, **options)]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (then(sizes={"n_layer": 3}), SECOND + "n_layer=3 is smaller than the source's 4"),
        (then(sizes={"n_layer": 4}), SECOND + ".*"),
        (then(sizes={"n_layers": 5}), SECOND + ".*n_layers"),
        (then(sizes={"n_embd": 31}), SECOND + ".*31"),
        (then(sizes={"n_layer": 5}, carry=0.5), SECOND + ".*carry"),
        (then(sizes={"vocab_size": 64}), SECOND + "student and teacher vocabularies differ"),
    ],
    ids=range(6),
)
def test_a_later_growth_is_refused_before_the_first_step(options, message, tmp_path):
    teacher = {
        "inheritance": InheritanceSchedule(alpha=0.5, end_step=8),
        "teacher": build("gpt2", layers=1, seed=2).double(), "processing_class": None,
    }  # fmt: skip
    with pytest.raises(GrowthError, match=message):
        trainer_for(tmp_path / "out", **teacher, **options)
    assert not list(tmp_path.rglob("checkpoint-*"))


THRICE = """
[[growth]]
source = "model"
num_hidden_layers = 4
[[growth]]
at_step = 3
num_hidden_layers = 5
[[growth]]
at_step = 5
"""


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("num_hidden_layers = 4", "growth 2 of 2 .*num_hidden_layers=4 is smaller than .* 5"),
        ("hidden_size = 17", "growth 2 of 2 inside the run, the growth at step 5: .*17"),
        ('num_hidden_layers = 6\nmaps = "balanced"', "growth 2 of 2 .*maps"),
    ],
)
def test_a_run_file_is_refused_before_its_data_is_read(workplace, last, message, monkeypatch):  # noqa: F811
    monkeypatch.setattr("growkern.train.run.start.read_data", None)
    text = RUN.replace('[model]\npath = "model"\n', "").replace("= true", "= false")
    (workplace / "run.toml").write_text(text + THRICE + last)
    with pytest.raises(GrowthError, match=message):
        train(workplace / "run.toml", progress=False)
    assert not (workplace / "out").exists()


@pytest.mark.parametrize(
    "kind, options, share",
    [
        ("linear", {}, "50%"),
        ("cosine", {}, "50%"),
        ("constant", {}, None),
        ("warmup_stable_decay", {"num_decay_steps": 1}, None),
        ("warmup_stable_decay", {"num_decay_steps": 4}, "50%"),
    ],
)
def test_a_schedule_that_has_fallen_before_a_growth_is_warned_of(kind, options, share, tmp_path):
    """Truth: each schedule's own rate after 2 of 4 steps, as a share of its peak."""
    schedule = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": options, "warmup_steps": 0}
    trainer = TwoStageTrainer(
        build("llama", layers=2),
        arguments(tmp_path, max_steps=4, save_strategy="steps", **schedule),
        train_dataset=Batches(8),
        growth=[GrowthStep(at_step=2, sizes={"num_hidden_layers": 3})],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    lines = [str(x.message) for x in caught if "growth at step 2" in str(x.message)]
    assert [share in line for line in lines] == ([] if share is None else [True])


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_a_list_of_layers_is_trained_through_a_run_file(workplace):  # noqa: F811
    """After the growth the rate is next to none: the layers stay those that the list names."""
    order = [0, 1, 2, 1, 0]
    (workplace / "run.toml").write_text(FILE + LISTED.format(order=order))
    train(workplace / "run.toml", progress=False)
    out = workplace / "out"
    small, large = (load_file(x / "model.safetensors") for x in (out / "checkpoint-2", out))
    layers = [name for name in small if ".layers.0." in name]
    assert layers and json.loads((out / "config.json").read_text())["num_hidden_layers"] == 5
    for name in layers:
        old, new = (
            [tensors[name.replace(".0.", f".{i}.")] for i in range(count)]
            for tensors, count in ((small, 3), (large, 5))
        )
        assert not torch.equal(old[0], old[1]) or "norm" in name
        for layer, place in zip(new, order, strict=True):
            assert torch.equal(layer, old[place]), (name, place)


def entered(call):
    """The files that a second call enters, and how often it plans. The first call imports."""
    call("first")
    codes, package = [], str(Path(growkern.__file__).parent)

    def see(frame, event, _argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            codes.append(frame.f_code)

    threading.setprofile(see)
    sys.setprofile(see)
    call("second")
    threading.setprofile(sys.setprofile(None))
    return {x.co_filename.removeprefix(package) for x in codes}, codes.count(plan_growth.__code__)


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_each_growth_is_planned_once_and_few_files_are_entered(workplace):  # noqa: F811
    toml = workplace / "run.toml"
    text = RUN.replace('[model]\npath = "model"\n', "") + THRICE + "num_hidden_layers = 6"

    def run(out):
        toml.write_text(text.replace('"out"', f'"{out}"'))
        train(toml, progress=False)

    def grow(out):
        out = workplace / f"large-{out}"
        growkern.grow_checkpoint(workplace / "model", out, progress=False, num_hidden_layers=5)

    for call, growths, limit in ((run, 3, 95), (grow, 1, 50)):
        files, plans = entered(call)
        assert plans == growths and len(files) <= limit, sorted(files)
