"""Adapters of PEFT: trained in a loop of one's own, and refused where they would be lost."""

import peft
import pytest
import torch

import growkern
from growkern import GrowthError, InheritanceSchedule, TwoStageTrainer, inherited_loss, run as train
from testbed.tiny import Batches, arguments, batch, build, randomise
from tests.train.run.test_run import RUN, workplace  # noqa: F401


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


@pytest.mark.parametrize("way", ["lora", "saved", "off", "merged"])
def test_the_loss_takes_a_head_with_an_adapter(way):
    """On the body and on the head, against PEFT's own logits."""
    model, teacher, data = build("llama", layers=2), build("llama", layers=2), batch()
    modules = ["q_proj"] if way == "saved" else ["q_proj", "lm_head"]
    saved = {"modules_to_save": ["lm_head"]} if way == "saved" else {}
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=modules, r=2, **saved)
    model = randomise(peft.get_peft_model(model, config), 5).double()
    randomise(teacher.double(), 6)
    if way == "off":
        model.base_model.disable_adapter_layers()
    if way == "merged":
        model.merge_adapter()
    inner = model.base_model.model
    options = {"alpha": 0.5, "temperature": 2.0}
    loss = inherited_loss(inner, teacher, data, **options)
    pair = model(input_ids=data["input_ids"]).logits, teacher(input_ids=data["input_ids"]).logits
    logits = [x[:, :-1].flatten(0, 1) for x in pair]
    labels = data["labels"][:, 1:].flatten()
    expected = growkern.kl_mlm_loss(logits[0], logits[1].detach(), labels, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    if way in ("lora", "saved"):
        trained = [x for x in model.parameters() if x.requires_grad]
        assert len(trained) == {"lora": 6, "saved": 5}[way]
        ours, theirs = (torch.autograd.grad(x, trained) for x in (loss, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    hidden = inner.model(input_ids=data["input_ids"]).last_hidden_state
    as_pair = inherited_loss((hidden, inner.lm_head), teacher, data, causal=True, **options)
    torch.testing.assert_close(as_pair, expected, rtol=1e-10, atol=1e-10)


def test_an_adapter_of_another_kind_on_the_head_is_refused():
    config = peft.LoraConfig(target_modules=["lm_head"], r=2, use_dora=True)
    model = peft.get_peft_model(build("llama", layers=1), config)
    with pytest.raises(GrowthError, match=r"adapter 'default' .* is not plain LoRA"):
        inherited_loss(model.base_model.model, None, batch())


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
    for work in (growkern.grow, growkern.plan):
        with pytest.raises(GrowthError, match=rf"the source \(\w+\) {advice}"):
            work(model, n_embd=32)


def test_the_advice_works(tmp_path):
    merged = adapted().merge_and_unload().requires_grad_()
    assert growkern.grow(merged, n_embd=32).config.n_embd == 32
    TwoStageTrainer(merged, arguments(tmp_path, max_steps=1), train_dataset=Batches(4)).train()


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
@pytest.mark.parametrize("role", ["model", "teacher"])
def test_directories_of_adapters_are_refused(workplace, role):  # noqa: F811
    adapted().save_pretrained(workplace / "adapter")
    match = r"adapter holds adapters of PEFT, .*merge_and_unload\(\)"
    (workplace / "run.toml").write_text(RUN.replace(f'"{role}"', '"adapter"'))
    with pytest.raises(GrowthError, match=match):
        train(workplace / "run.toml", progress=False)
    growth = '[growth]\nsource = "adapter"\nsizes = { hidden_size = 32 }'
    (workplace / "run.toml").write_text(RUN.replace('[model]\npath = "model"', growth))
    with pytest.raises(GrowthError, match=match):
        train(workplace / "run.toml", progress=False)
    with pytest.raises(GrowthError, match=match):
        growkern.grow_checkpoint(workplace / "adapter", workplace / "large", n_embd=32)
    assert not (workplace / "out").exists()
    # beside a whole model they would be left out
    (workplace / "adapter" / "adapter_config.json").rename(workplace / role / "adapter_config.json")
    (workplace / "run.toml").write_text(RUN)
    with pytest.raises(GrowthError, match=rf"{role} holds adapters of PEFT"):
        train(workplace / "run.toml", progress=False)
