"""Weights are float32 in training whatever the checkpoint has."""

import pytest
import torch
import transformers

import growkern
from growkern import GrowthError, run as train
from growkern.errors import GrowthWarning
from tests.train.run.test_run import RUN, workplace  # noqa: F401
from tests.train.safety.runs import assert_same, small_model, small_trainer, weights_of

# steps of this size are lost on a bfloat16 number near 1
SLOW = {"learning_rate": 1e-4, "lr_scheduler_type": "constant"}


def half_model():
    """A BERT in bfloat16 whose norm weights are 1, as in a checkpoint of the Hub."""
    model = small_model()
    for name, p in model.named_parameters():
        if "LayerNorm.weight" in name:
            p.data.fill_(1.0)
    return model.bfloat16()


def norms_that_moved(before, after):
    names = [name for name in before if "LayerNorm.weight" in name]
    return [bool((before[n].float() != after[n].float()).any()) for n in names]


@pytest.mark.parametrize("precision", [None, "fp32", "bf16"])
def test_the_norms_of_a_bfloat16_checkpoint_train(tmp_path, precision):
    model = half_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = small_trainer(tmp_path, model, args=SLOW, precision=precision)
    # casting up is exact
    assert_same(weights_of(trainer), {name: v.float() for name, v in before.items()})
    trainer.train()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    moments = [v for s in trainer.optimizer.state_dict()["state"].values() for v in s.values()]
    assert {m.dtype for m in moments} == {torch.float32}
    assert all(norms_that_moved(before, weights_of(trainer)))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_pure_bfloat16_is_on_request_and_warns(tmp_path):
    model = half_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(GrowthWarning, match="norms hardly train"):
        trainer = small_trainer(tmp_path, model, args=SLOW, precision="pure-bf16")
    trainer.train()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(norms_that_moved(before, weights_of(trainer)))


def test_pure_bfloat16_of_a_grown_model_warns_once(tmp_path):
    model = growkern.grow(half_model(), hidden_size=32)
    with pytest.warns(GrowthWarning, match="bfloat16") as seen:
        trainer = small_trainer(tmp_path, model, args=SLOW, precision="pure-bf16")
        assert isinstance(trainer.create_optimizer(), growkern.GrowthAdamW)
    assert sum("bfloat16" in str(one.message) for one in seen) == 1


def test_a_resumed_run_keeps_float32_weights(tmp_path):
    straight = small_trainer(tmp_path, half_model(), precision="bf16")
    straight.train()
    again = small_trainer(tmp_path / "again", half_model(), precision="bf16")
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-4")
    assert {p.dtype for p in again.model.parameters()} == {torch.float32}
    assert_same(weights_of(again), weights_of(straight))


def test_bf16_is_the_autocast_of_the_arguments(tmp_path):
    found = []
    for options in ({"precision": "bf16"}, {"args": {"bf16": True}}, {}):
        trainer = small_trainer(tmp_path, **options)
        trainer.train()
        found.append((trainer.precision, trainer.accelerator.mixed_precision, weights_of(trainer)))
    assert [names for *names, _ in found] == [["bf16", "bf16"], ["bf16", "bf16"], ["fp32", "no"]]
    assert_same(found[0][2], found[1][2])
    assert any(not torch.equal(value, found[2][2][name]) for name, value in found[0][2].items())


def test_the_autocast_of_accelerate_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = small_trainer(tmp_path)
    assert (trainer.precision, trainer.accelerator.mixed_precision) == ("bf16", "bf16")
    for precision in ("fp32", "pure-bf16"):
        given = r"fp32', also where a run file says nothing, .*" if precision == "fp32" else ""
        match = given + "ACCELERATE_MIXED_PRECISION is 'bf16': unset it, or give precision = "
        with pytest.raises(GrowthError, match=match):
            small_trainer(tmp_path, precision=precision)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert small_trainer(tmp_path).precision == "fp32"


def test_float64_stays_float64(tmp_path):
    assert small_trainer(tmp_path, small_model().double()).model.dtype == torch.float64


def test_contradictions_and_unknown_names_are_refused(tmp_path):
    with pytest.raises(GrowthError, match="set bf16=True"):
        small_trainer(tmp_path, args={"bf16": True}, precision="fp32")
    with pytest.raises(GrowthError, match="did you mean 'bf16'"):
        small_trainer(tmp_path, precision="bf61")
    with pytest.raises(GrowthError, match="did you mean 'skip'"):
        small_trainer(tmp_path, on_nonfinite="skipp")
    with pytest.raises(GrowthError, match="save_minutes is nan"):
        small_trainer(tmp_path, save_minutes=float("nan"))


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_run_ends_in_the_dtype_of_its_checkpoint(workplace):  # noqa: F811
    model = transformers.BertForMaskedLM.from_pretrained(workplace / "model")
    model.bfloat16().save_pretrained(workplace / "model")
    text = RUN.replace("batch_size = 4", 'batch_size = 4\nprecision = "bf16"')
    (workplace / "run.toml").write_text(text)
    train(workplace / "run.toml", progress=False)
    final = transformers.BertForMaskedLM.from_pretrained(workplace / "out")
    last = transformers.BertForMaskedLM.from_pretrained(workplace / "out" / "checkpoint-6")
    assert final.dtype == torch.bfloat16
    assert last.dtype == torch.float32
    assert_same(final.state_dict(), last.bfloat16().state_dict())


def test_a_weight_too_large_for_the_dtype_keeps_float32(tmp_path):
    trainer = small_trainer(tmp_path)
    trainer.model.cls.predictions.bias.data[0] = 1e6
    with pytest.warns(GrowthWarning, match="does not fit"):
        trainer.save_final_model(torch.float16)
    saved = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    assert saved.dtype == torch.float32
    assert saved.cls.predictions.bias[0] == 1e6
