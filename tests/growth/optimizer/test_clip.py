"""Clipping by the source's norm: clipped steps and growth commute."""

import math

import pytest
import torch
from torch import nn

import growkern
from testbed.models import BERT, GPT2, LLAMA, outputs, random_model
from testbed.tiny import Batches, arguments, build
from tests.growth.optimizer.test_growth_adamw import (
    CASES,
    OPTIONS,
    groups,
    grown,
    largest_difference,
)
from tests.growth.optimizer.test_optimizer import GROUPS, TIED, UNTIED, loss_of

MAX_NORM = 0.5


def train(model, optimizer, steps, clip):
    """Clipped steps, with the norms before clipping."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norms.append(clip(model).item())
        optimizer.step()
    return norms


def clip_source(model):
    return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def clip_target(model):
    return growkern.growth_clip_norm_(model, MAX_NORM)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_clipped_steps_and_growth_commute(case):
    class_name, sizes, config, how = case
    source = random_model(class_name, sizes, std=0.2, **config)
    optimizer = torch.optim.AdamW(groups(source), **OPTIONS)
    train(source, optimizer, range(5), clip_source)
    target, new = grown(source, optimizer, how)
    expected = train(source, optimizer, range(5, 10), clip_source)
    found = train(target, new, range(5, 10), clip_target)
    assert min(expected) > MAX_NORM
    assert found == pytest.approx(expected, rel=1e-12)
    after = outputs(source)["logits"]
    assert largest_difference(source, target) <= 1e-12
    assert (outputs(target)["logits"] - after).abs().max() <= 1e-12 * after.abs().max()


FACTORS = [
    *[("copies", "none", 1.0, 1.0), ("copies", "noise", 1.0, 1.05)],
    *[("copies", "routing", 1.15, 1.8), ("copies", "split", 1.7, 2.9)],
    *[("padded", "none", 1.05, 1.7), ("padded", "noise", 1.05, 1.4)],
    *[("padded", "routing", 1.15, 1.8), ("padded", "split", 1.4, 2.6)],
]


@pytest.mark.parametrize("stream, symmetry, least, most", FACTORS)
@pytest.mark.parametrize("class_name, sizes, how", [
    ("GPT2LMHeadModel", GPT2, {"n_embd": 24}),
    ("LlamaForCausalLM", LLAMA, {"hidden_size": 36}),
])  # fmt: skip
def test_the_norm_over_sources_is_as_said(class_name, sizes, how, stream, symmetry, least, most):
    source = random_model(class_name, sizes, std=0.2)
    target = growkern.grow(source, symmetry=symmetry, stream=stream, **how)
    for model in (source, target):
        loss_of(model, 0).backward()
    found = clip_target(target).item() / clip_source(source).item()
    assert least * (1 - 1e-12) <= found <= most * (1 + 1e-12)
    (said, *_) = growkern.moment_findings(target.growth_plan)
    is_exact = symmetry == "none" and stream == "copies"
    assert (said.level == "exact") is is_exact and "growth_clip_norm_" in said.why
    assert ("its norm is larger than the source's" in said.why) is not is_exact


@pytest.mark.parametrize("at_once", [1, 1 << 20])
@pytest.mark.parametrize("shape", [(5,), (4, 6), (3, 4, 5)])
@pytest.mark.parametrize("uneven", [(), (0,), (1,), (0, 1)])
def test_weighted_squares_are_those_of_the_weighted_tensor(monkeypatch, at_once, shape, uneven):
    from growkern.growth.optimizer import clip

    monkeypatch.setattr(clip, "ELEMENTS_AT_ONCE", at_once)
    rng = torch.Generator().manual_seed(1)
    gradient = torch.randn(shape, generator=rng, dtype=torch.float64)
    weight, vectors = torch.full(shape, 0.25, dtype=torch.float64), {}
    for dim in (d for d in uneven if d < len(shape)):
        vectors[dim] = torch.rand(shape[dim], generator=rng, dtype=torch.float64)
        weight = weight * vectors[dim].reshape([-1 if d == dim else 1 for d in range(len(shape))])
    weights = clip._Weights(0.25, vectors)
    found = clip._weighted_squares(gradient, weights)
    assert found.item() == pytest.approx((weight * gradient**2).sum().item(), rel=1e-14)


def test_gradients_below_the_maximum_and_an_infinite_maximum_change_nothing():
    target = growkern.grow(random_model("BertForMaskedLM", BERT), hidden_size=20)
    loss_of(target, 0).backward()
    before = [p.grad.clone() for p in target.parameters() if p.grad is not None]
    norms = {growkern.growth_clip_norm_(target, x).item() for x in (1e9, math.inf)}
    assert len(norms) == 1
    after = [p.grad for p in target.parameters() if p.grad is not None]
    assert all(map(torch.equal, before, after))


def test_new_layers_count():
    """What learns is clipped: a huge gradient in a new layer cannot pass."""
    source = random_model("GPT2LMHeadModel", GPT2)
    target = growkern.grow(source, n_embd=24, n_layer=3, depth="identity")
    loss_of(target, 0).backward()
    norm = growkern.growth_clip_norm_(target, math.inf)
    target.transformer.h[1].mlp.c_proj.weight.grad += 100
    assert growkern.growth_clip_norm_(target, math.inf) > 100 * norm


def test_another_plan_is_not_mixed_up_with_the_first():
    source = random_model("LlamaForCausalLM", LLAMA, **UNTIED)
    target = growkern.grow(source, **GROUPS, symmetry="none")
    loss_of(target, 0).backward()
    norms = [growkern.growth_clip_norm_(target, math.inf)]
    sizes = {**{k: getattr(target.config, k) for k in LLAMA}, "num_hidden_layers": 1}
    other = growkern.plan(random_model("LlamaForCausalLM", sizes, **UNTIED), num_hidden_layers=2)
    norms.append(growkern.growth_clip_norm_(target, math.inf, plan=other))
    plain = nn.utils.clip_grad_norm_(target.parameters(), math.inf)
    assert norms[0] != norms[1]
    # growth in depth alone gives every entry the weight 1
    assert norms[1].item() == pytest.approx(plain.item(), rel=1e-12)


def test_what_cannot_be_clipped_is_refused():
    source = random_model("GPT2LMHeadModel", GPT2, **TIED)
    with pytest.raises(growkern.GrowthError, match="no growth_plan: give plan"):
        growkern.growth_clip_norm_(source, 1.0)
    target = growkern.grow(source, n_embd=24)
    for wrong in (-1.0, math.nan):
        with pytest.raises(growkern.GrowthError, match="max_norm"):
            growkern.growth_clip_norm_(target, wrong)
    loss_of(target, 0).backward()
    target.transformer.ln_f.bias.grad[0] = math.nan
    with pytest.raises(growkern.GrowthError, match="norm of the gradients is nan"):
        growkern.growth_clip_norm_(target, 1.0, error_if_nonfinite=True)
    wte = target.transformer.wte.weight
    wte.grad = wte.grad.to_sparse()
    with pytest.raises(growkern.GrowthError, match="sparse=False"):
        growkern.growth_clip_norm_(target, 1.0)


@pytest.mark.parametrize("matched", [True, False])
def test_the_trainer_clips_by_the_sources_norm(matched, tmp_path):
    """Two runs of the trainer, of the source and of the grown model: one step apart by growth."""
    source = build("gpt2", width=12, layers=2).double()
    target = growkern.grow(source, n_embd=24, symmetry="none", stream="copies")
    runs = []
    for model in (source, target):
        optimizer = torch.optim.AdamW(groups(model), **OPTIONS)
        if model is target:
            options = {**OPTIONS, "matched": matched}
            optimizer = growkern.GrowthAdamW(groups(model), target.growth_plan, **options)
        trainer = growkern.TwoStageTrainer(
            model,
            arguments(tmp_path, max_steps=3, max_grad_norm=0.05, warmup_steps=0),
            train_dataset=Batches(8),
            optimizers=(optimizer, None),
        )
        trainer.train()
        lines = trainer.state.log_history
        runs.append([line["grad_norm"] for line in lines if "grad_norm" in line])
    assert min(runs[0]) > 0.05
    assert (runs[1] == pytest.approx(runs[0], rel=1e-9)) == matched
    assert (largest_difference(source, target) <= 1e-10) == matched


def test_a_clipped_model_can_be_converted():
    """`fully_shard` lets `model.to` swap parameters, which a weak reference to one would forbid."""
    source = random_model("GPT2LMHeadModel", GPT2, std=0.2, **TIED)
    target = growkern.grow(source, symmetry="none", n_embd=24)
    loss_of(target, 0).backward()
    clip_target(target)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        target.zero_grad()
        assert next(target.to(torch.float32).parameters()).dtype == torch.float32
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
