"""A sub-model is the truncated model, bit for bit, and touches nothing else."""

import copy

import pytest
import torch

from growkern import GrowthError, TwoStageConfig
from growkern.train.model.sub_model import ModelPart, layer_stacks, sub_model
from testbed.models import random_model
from testbed.relatives import RELATIVES
from testbed.tiny import FAMILIES, batch, build, stack_of

EMBEDDINGS = ("bert.embeddings", "wte", "wpe", "embed_tokens")


def truncated(model, depth):
    """A model that really has `depth` layers only."""
    twin = copy.deepcopy(model)
    stack = stack_of(twin)
    del stack[depth:]
    twin.config.num_hidden_layers = depth
    return twin


def backward(model, inputs):
    logits = model(input_ids=inputs["input_ids"], use_cache=False).logits
    logits.square().mean().backward()
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("depth", [1, 2, 4, 5])
def test_equals_the_truncated_model_bit_for_bit(family, depth):
    model = build(family)
    truth, inputs = truncated(model, depth), batch()
    expected = backward(truth, inputs)
    with sub_model(layer_stacks(model), ModelPart(depth, 2, "bottom")):
        actual = backward(model, inputs)
    assert torch.equal(actual, expected)

    gradients = {name: p.grad for name, p in truth.named_parameters()}
    layers = list(stack_of(model))
    frozen = layers[: max(0, depth - 2)] + layers[depth:]
    if depth > 2:
        frozen += [m for name, m in model.named_modules() if name.endswith(EMBEDDINGS)]
    still = {id(p) for module in frozen for p in module.parameters()}
    for name, p in model.named_parameters():
        # an untied BERT has a bias that its head does not use
        if id(p) in still or name == "cls.predictions.bias":
            assert p.grad is None, name
        else:
            assert torch.equal(p.grad, gradients[name]), name


def test_the_stages_of_a_loop_of_ones_own():
    """Each step is the part that the trainer would take; then the whole model."""
    stages, model = TwoStageConfig(layers_per_block=2, stage1_steps=6), build("llama", layers=4)
    inputs, seen = batch(), set()
    for step in range(8):
        depth = stages.depth(step, 4) or 4
        seen.add(depth)
        model.zero_grad()
        with stages.sub_model(model, step):
            logits = backward(model, inputs)
        with torch.no_grad():
            assert torch.equal(logits, truncated(model, depth)(inputs["input_ids"]).logits)
        layers = enumerate(stack_of(model))
        trained = [i for i, layer in layers if layer.mlp.up_proj.weight.grad is not None]
        assert trained == list(range(depth - 2 if step < 6 else 0, depth))
    assert seen == {2, 4}
    for wrong in ("a", None, 1.5, -1):
        with pytest.raises(GrowthError, match="step"):
            stages.sub_model(model, wrong)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("depth", [2, 3])
def test_frozen_embeddings_get_the_tied_heads_gradient_alone(family, depth):
    tied, untied = build(family, tied=True), build(family, tied=False)
    untied.load_state_dict(tied.state_dict(), strict=False)
    head = untied.get_output_embeddings().weight
    head.data.copy_(tied.get_input_embeddings().weight)
    for model in (tied, untied):
        with sub_model(layer_stacks(model), ModelPart(depth, 2)):
            backward(model, batch())
    assert torch.equal(tied.get_input_embeddings().weight.grad, head.grad)
    for name, p in untied.named_parameters():
        if "embed" in name or "wte" in name or "wpe" in name:
            assert p.grad is None, name


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_above_do_not_run_and_layers_below_record_no_graph(family):
    model = build(family)
    calls = [0] * 5
    for i, layer in enumerate(stack_of(model)):

        def count(_module, _args, output, i=i):
            hidden = output[0] if isinstance(output, tuple) else output
            calls[i] += 1
            assert hidden.requires_grad == (i >= 1)

        layer.register_forward_hook(count)
    with sub_model(layer_stacks(model), ModelPart(3, 2)):
        model(input_ids=batch()["input_ids"], use_cache=False)
    assert calls == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_gives_the_same_gradients(family):
    plain, checkpointed = build(family), build(family)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (plain, checkpointed):
        model.train()
        with sub_model(layer_stacks(model), ModelPart(4, 2)):
            backward(model, batch())
    for (name, p), q in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def test_the_whole_model_is_visible_inside_and_restored_after_an_exception():
    model = build("bert")
    stack, names = stack_of(model), list(model.state_dict())
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        sub_model(layer_stacks(model), ModelPart(2, 1)),
    ):
        assert list(model.state_dict()) == names
        assert len(stack) == 2
        raise RuntimeError("on purpose")
    assert type(stack) is torch.nn.ModuleList and len(stack) == 5
    assert not hasattr(stack, "_shown")


@pytest.mark.parametrize("name", ["albert", "mpnet"])
def test_a_model_without_a_stack_is_refused(name):
    model = random_model(*RELATIVES[name][:2])
    with pytest.raises(GrowthError, match="two_stage=None"):
        layer_stacks(model)
