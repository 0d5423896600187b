"""Muon: its momentum grows as a gradient, and its steps commute with even growth."""

import itertools
import math

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.utils import clip_grad_norm_
from torch.optim import _muon

import growkern
from growkern.growth.optimizer.moments import MUON_RULES
from growkern.growth.optimizer.muon import Muon
from testbed.models import BERT, GPT2, LLAMA, outputs, random_model
from testbed.relatives import RELATIVES
from tests.growth.optimizer.test_growth_adamw import largest_difference
from tests.growth.optimizer.test_optimizer import COPIED, GROUPS, TIED, UNTIED, loss_of

MUON = {"lr": 1e-2, "weight_decay": 0.1}
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}
RULES = [None, "original", "match_rms_adamw"]
MAX_NORM = 0.5
CASES = [
    ("GPT2LMHeadModel", GPT2, TIED, {"n_embd": 24}),
    ("GPT2LMHeadModel", GPT2, UNTIED, {"n_embd": 36, "n_inner": 96}),
    ("BertForMaskedLM", BERT, {}, {"hidden_size": 24}),
    ("LlamaForCausalLM", LLAMA, TIED, GROUPS),
]
# a matrix for each expert; all copies of an expert keep its weight
MIXTURE = (
    *RELATIVES["deepseek_v3"][:2],
    {"norm_topk_prob": False},
    {"hidden_size": 24, "num_local_experts": 16, "num_experts_per_tok": 6},
)


@pytest.fixture
def in_float64(monkeypatch):
    """PyTorch's polynomial of Muon in float64: by itself it rounds to bfloat16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())


def split(model):
    """The matrices of the blocks, and all other parameters, with their names."""
    named = list(model.named_parameters())
    inside = (x for x in named if ".h." in x[0] or ".layer" in x[0])
    blocks = {name for name, p in inside if p.ndim > 1 and not name.endswith("_proj_bias")}
    return [x for x in named if x[0] in blocks], [x for x in named if x[0] not in blocks]


def both(model, rule):
    matrices, rest = split(model)
    muon = Muon(matrices, **MUON, adjust_lr_fn=rule)
    return muon, torch.optim.AdamW(rest, **ADAMW)


def both_grown(model, rule, states):
    (matrices, rest), plan = split(model), model.growth_plan
    muon = growkern.GrowthMuon(matrices, plan, **MUON, adjust_lr_fn=rule)
    found = muon, growkern.GrowthAdamW(rest, plan, **ADAMW)
    for optimizer, state in zip(found, states, strict=True):
        optimizer.load_state_dict(growkern.grow_optimizer(state, plan))
    return found


def train(model, optimizers, steps, clip):
    for step in steps:
        model.zero_grad()
        loss_of(model, step).backward()
        assert clip(model) > MAX_NORM
        for optimizer in optimizers:
            optimizer.step()


def clip_source(model):
    return clip_grad_norm_(model.parameters(), MAX_NORM)


def clip_target(model):
    return growkern.growth_clip_norm_(model, MAX_NORM)


def source_after_steps(case, rule, steps=5):
    class_name, sizes, config, how = case
    source = random_model(class_name, sizes, std=0.2, **config)
    optimizers = both(source, rule)
    train(source, optimizers, range(steps), clip_source)
    return source, optimizers, growkern.grow(source, symmetry="none", **{**COPIED, **how})


@pytest.mark.parametrize(
    "case, rule",
    [*itertools.product(CASES, RULES), (MIXTURE, None)],
    ids=lambda x: f"{x[0]}-{x[3]}" if isinstance(x, tuple) else x,
)
def test_five_steps_then_growth_then_five_is_ten_steps_then_growth(case, rule, in_float64):
    """Of both optimizers, clipped, each over its own parameters."""
    source, optimizers, target = source_after_steps(case, rule)
    grown = both_grown(target, rule, [x.state_dict() for x in optimizers])
    before = outputs(source)["logits"]
    train(source, optimizers, range(5, 10), clip_source)
    train(target, grown, range(5, 10), clip_target)
    after = outputs(source)["logits"]
    assert (after - before).abs().max() > 0.1
    assert largest_difference(source, target) <= 1e-12
    assert (outputs(target)["logits"] - after).abs().max() <= 1e-12 * after.abs().max()


def test_experts_that_sleep_change_no_step(in_float64):
    class_name, sizes, options, _ = MIXTURE
    how = {"hidden_size": 24, "n_routed_experts": 12}
    case = (class_name, sizes, options, how)
    source, optimizers, target = source_after_steps(case, None, 1)
    grown = both_grown(target, None, [x.state_dict() for x in optimizers])
    train(source, optimizers, range(1, 2), clip_source)
    train(target, grown, range(1, 2), clip_target)
    expected = outputs(source)["logits"]
    assert (outputs(target)["logits"] - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_experts_take_the_steps_of_matrices(in_float64):
    rng = torch.Generator().manual_seed(0)
    for shape in ((3, 8, 5), (3, 5, 8)):
        stack = torch.nn.Parameter(torch.randn(shape, generator=rng, dtype=torch.float64))
        each = [torch.nn.Parameter(x.clone()) for x in stack.detach()]
        ours, theirs = Muon([stack], **MUON), torch.optim.Muon(each, **MUON)
        for _ in range(2):
            stack.grad = torch.randn(shape, generator=rng, dtype=torch.float64)
            for p, gradient in zip(each, stack.grad, strict=True):
                p.grad = gradient.clone()
            ours.step(), theirs.step()
        torch.testing.assert_close(stack, torch.stack(each))


def test_factors_of_even_growth():
    plan = growkern.plan(random_model("LlamaForCausalLM", LLAMA), **GROUPS)
    factors = growkern.growth_lr_multipliers(plan)
    for task in plan.tasks:
        found = factors[task.name].muon
        if len(task.shape) != 2:
            assert found == {}
            continue
        if ".layers." not in task.name:
            # an embedding is stored as (inputs, outputs)
            continue
        (a, b), (rows, cols) = task.shape, plan.small.shapes[task.source]
        assert found["none"] == pytest.approx(math.sqrt(a / rows / (b / cols)), rel=1e-14)
        for name in RULES[1:]:
            before, after = (_muon._adjust_lr(1.0, name, x) for x in ((rows, cols), (a, b)))
            assert found[name] == pytest.approx(found["none"] * before / after, rel=1e-14)
    assert set(MUON_RULES) == {"none", *RULES[1:]}


def test_unmatched_it_is_muon():
    source = random_model("BertForMaskedLM", BERT)
    models = [growkern.grow(source, hidden_size=20) for _ in range(2)]
    ours = growkern.GrowthMuon(split(models[0])[0], models[0].growth_plan, **MUON, matched=False)
    theirs = torch.optim.Muon(split(models[1])[0], **MUON)
    for model, optimizer in zip(models, (ours, theirs), strict=True):
        loss_of(model, 0).backward()
        optimizer.step()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())


def test_hooks_run_once_and_closures_too():
    target = growkern.grow(random_model("GPT2LMHeadModel", GPT2), n_embd=24)
    # PyTorch wraps the step of a class when its first optimizer is made
    torch.optim.Muon(split(target)[0])
    optimizer, seen = growkern.GrowthMuon(split(target)[0], target.growth_plan), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure():
        loss = loss_of(target, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert seen == ["before", "after"]
    assert len(optimizer.param_groups) == 1


def test_an_optimizer_of_the_grown_model_is_filled_in_place(tmp_path):
    """From each optimizer's own state, and from one checkpoint with both."""
    source, optimizers, target = source_after_steps(CASES[3], None)
    grown = both_grown(target, None, [x.state_dict() for x in optimizers])
    saved = get_optimizer_state_dict(source, list(optimizers))
    checkpoint.save({"optimizer": saved}, checkpoint_id=str(tmp_path))
    for number, optimizer in enumerate(grown):
        expected = optimizer.state_dict()
        for kept in (optimizers[number].state_dict(), saved, tmp_path):
            new = both_grown(target, None, [x.state_dict() for x in optimizers])[number]
            new.state.clear()
            growkern.grow_optimizer_into(target, new, kept)
            found = new.state_dict()["state"]
            assert found.keys() == expected["state"].keys()
            for key, entry in found.items():
                same = expected["state"][key]
                assert entry.keys() == same.keys() - {"growth_step"}
                assert all(torch.equal(entry[name], same[name]) for name in entry)


def test_states_of_another_optimizer_are_refused():
    source, (muon, adamw), target = source_after_steps(CASES[0], None)
    plan = target.growth_plan
    grown_muon, grown_adamw = both_grown(target, None, [muon.state_dict(), adamw.state_dict()])
    everything = torch.optim.AdamW(source.named_parameters())
    loss_of(source, 0).backward()
    everything.step()
    with pytest.raises(growkern.GrowthError, match=r"is a GrowthMuon, but .* the state of Adam"):
        growkern.grow_optimizer_into(target, grown_muon, everything.state_dict())
    with pytest.raises(growkern.GrowthError, match="group 0 is not of Muon"):
        grown_muon.load_state_dict(grown_adamw.state_dict())
    with pytest.raises(growkern.GrowthError, match="needs named parameters"):
        growkern.GrowthMuon([p for _, p in split(target)[0]], plan)
    unnamed = torch.optim.Muon([p for _, p in split(source)[0]])
    with pytest.raises(growkern.GrowthError, match="make the optimizer from named parameters"):
        growkern.grow_optimizer(unnamed.state_dict(), plan)


@pytest.mark.parametrize(
    "how",
    [
        {"symmetry": "none"},
        {"symmetry": "none", "intermediate_size": 33},
        {"symmetry": "routing"},
        {"symmetry": "noise"},
        {"symmetry": "split"},
        {"symmetry": "none", "method": "aki"},
        {"method": "random"},
    ],
    ids=str,
)
def test_findings_are_exact_if_and_only_if_steps_and_growth_commute(how, in_float64):
    source = random_model("LlamaForCausalLM", LLAMA, std=0.2)
    sizes, optimizers = {**GROUPS, **how}, both(source, None)
    train(source, optimizers, range(2), clip_source)
    target = growkern.grow(source, **sizes)
    grown = both_grown(target, None, [x.state_dict() for x in optimizers])
    train(source, optimizers, range(2, 4), clip_source)
    train(target, grown, range(2, 4), clip_target)
    old, new = outputs(source)["logits"], outputs(target)["logits"]
    commute = (new - old).abs().max() <= 1e-12 * old.abs().max()
    found = growkern.moment_findings(target.growth_plan, optimizer="muon")[-1]
    assert (found.what, found.level == "exact") == ("steps of Muon", bool(commute)), found.why
