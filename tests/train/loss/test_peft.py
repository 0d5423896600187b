"""Adapters of PEFT: trained in a loop of one's own, and refused where they would be lost."""

import peft
import pytest
import torch

from growkern import (
    GrowthError,
    InheritanceSchedule,
    TwoStageTrainer,
    grow,
    grow_checkpoint,
    inherited_loss,
    plan,
)
from growkern import run as train
from tests.train.run.test_run import RUN, workplace  # noqa: F401
from tests.train.test_trainer import Batches, arguments
from tests.train.tiny import batch, build, randomise


def adapted(model=None):
    """A model with random LoRA matrices in every attention."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=2)
    config.fan_in_fan_out = True
    wrapped = peft.get_peft_model(model or build("gpt2", layers=2), config)
    return randomise(wrapped, 5)


def test_the_loss_takes_the_model_with_its_adapters():
    """The same loss and gradients as the model's own, for the adapters alone."""
    model, data = adapted(), batch()
    expected = model(**data).loss
    expected.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora" in name for name in trained)
    model.zero_grad()
    loss = inherited_loss(model.base_model.model, None, data)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, p in model.named_parameters():
        if name in trained:
            torch.testing.assert_close(p.grad, trained[name])
        else:
            assert p.grad is None
    with pytest.raises(GrowthError, match=r"PeftModelForCausalLM: .* its base_model.model"):
        inherited_loss(model, None, data)


@pytest.mark.parametrize("inner", [False, True])
def test_models_with_adapters_are_refused(inner, tmp_path):
    model = adapted()
    model = model.base_model.model if inner else model
    advice = r"has adapters of PEFT, .* use merge_and_unload\(\).requires_grad_"
    data = {"train_dataset": Batches(4)}
    with pytest.raises(GrowthError, match=rf"the model \(\w+\) {advice}"):
        TwoStageTrainer(model, arguments(tmp_path), **data)
    with pytest.raises(GrowthError, match=rf"the teacher \(\w+\) {advice}"):
        schedule = InheritanceSchedule(end_step=2)
        student = build("gpt2", layers=2)
        TwoStageTrainer(student, arguments(tmp_path), inheritance=schedule, teacher=model, **data)
    for work in (grow, plan):
        with pytest.raises(GrowthError, match=rf"the source \(\w+\) {advice}"):
            work(model, n_embd=32)


def test_the_advice_works(tmp_path):
    merged = adapted().merge_and_unload().requires_grad_()
    assert grow(merged, n_embd=32).config.n_embd == 32
    TwoStageTrainer(merged, arguments(tmp_path, max_steps=1), train_dataset=Batches(4)).train()


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
@pytest.mark.parametrize("role", ["model", "teacher"])
def test_directories_of_adapters_are_refused(workplace, role):  # noqa: F811
    adapted().save_pretrained(workplace / "adapter")
    match = r"adapter holds adapters of PEFT, .*AutoPeftModelForCausalLM.*merge_and_unload\(\)"
    (workplace / "run.toml").write_text(RUN.replace(f'"{role}"', '"adapter"'))
    with pytest.raises(GrowthError, match=match):
        train(workplace / "run.toml", progress=False)
    growth = '[growth]\nsource = "adapter"\nsizes = { hidden_size = 32 }'
    (workplace / "run.toml").write_text(RUN.replace('[model]\npath = "model"', growth))
    with pytest.raises(GrowthError, match=match):
        train(workplace / "run.toml", progress=False)
    with pytest.raises(GrowthError, match=match):
        grow_checkpoint(workplace / "adapter", workplace / "large", n_embd=32)
    assert not (workplace / "out").exists()
    # beside a whole model they would be left out
    (workplace / "adapter" / "adapter_config.json").rename(workplace / role / "adapter_config.json")
    (workplace / "run.toml").write_text(RUN)
    with pytest.raises(GrowthError, match=rf"{role} holds adapters of PEFT"):
        train(workplace / "run.toml", progress=False)
