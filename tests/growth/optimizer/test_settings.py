"""Settings that come with a loaded state take effect or are refused."""

import copy

import pytest
import torch

import growkern
from testbed.models import BERT, GPT2, outputs, random_model
from tests.growth.optimizer.test_growth_adamw import OPTIONS, groups, grown, largest_difference
from tests.growth.optimizer.test_optimizer import train


@pytest.mark.parametrize(
    "settings", [{"maximize": True}, {"amsgrad": True}, {"amsgrad": True, "maximize": True}]
)
@pytest.mark.parametrize("how", [{"n_embd": 24}, {"n_embd": 36, "n_inner": 50}])
def test_loaded_maximize_and_amsgrad_commute_with_growth(settings, how):
    source = random_model("GPT2LMHeadModel", GPT2, std=0.2)
    optimizer = torch.optim.AdamW(groups(source), **OPTIONS, **settings)
    train(source, optimizer, range(5))
    # the settings come with the state alone
    target, new = grown(source, optimizer, how)
    assert all(group[key] for group in new.param_groups for key in settings)
    before = outputs(source)["logits"]
    train(source, optimizer, range(5, 10))
    train(target, new, range(5, 10))
    assert (outputs(source)["logits"] - before).abs().max() > 0.1
    assert largest_difference(source, target) <= 1e-12


@pytest.mark.parametrize("settings", [{"maximize": True}, {"amsgrad": True}, {}])
def test_given_settings_are_those_of_adamw(settings):
    """From the first step, unmatched, with the state of AdamW."""
    source = random_model("BertForMaskedLM", BERT)
    ours, new = grown(source, None, {"hidden_size": 20}, matched=False, **settings)
    theirs = copy.deepcopy(ours)
    optimizer = torch.optim.AdamW(groups(theirs), **OPTIONS, **settings)
    train(ours, new, range(4))
    train(theirs, optimizer, range(4))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-13, atol=1e-15)
    # PyTorch shares the loaded tensors
    optimizer.load_state_dict(copy.deepcopy(new.state_dict()))
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(ours, new, range(4, 6))
    train(theirs, optimizer, range(4, 6))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-13, atol=1e-15)


def adam_state(weight_decay):
    source = random_model("GPT2LMHeadModel", GPT2)
    optimizer = torch.optim.Adam(source.named_parameters(), weight_decay=weight_decay)
    train(source, optimizer, range(2))
    return source, optimizer


def test_moments_with_weight_decay_in_them_are_refused(tmp_path):
    source, optimizer = adam_state(0.1)
    target = growkern.grow(source, n_embd=24)
    state, plan = optimizer.state_dict(), target.growth_plan
    new = torch.optim.AdamW(target.named_parameters())
    torch.save(state, tmp_path / "optimizer.pt")
    for moments in ("grow", "old_slices"):
        for given in (state, tmp_path):
            with pytest.raises(growkern.GrowthError, match="adds the decay to the gradients"):
                growkern.grow_optimizer_into(target, new, given, moments=moments)
        with pytest.raises(growkern.GrowthError, match='use moments="reset"'):
            growkern.grow_optimizer(state, plan, moments=moments)
    growkern.grow_optimizer_into(target, new, state, moments="reset")
    # Adam without decay is AdamW
    growkern.grow_optimizer(adam_state(0.0)[1].state_dict(), plan)


def test_coupled_decay_is_not_loaded_as_decoupled():
    source, optimizer = adam_state(0.1)
    target = growkern.grow(source, n_embd=24)
    state = growkern.grow_optimizer(optimizer.state_dict(), target.growth_plan, moments="reset")
    new = growkern.GrowthAdamW(target.named_parameters(), target.growth_plan)
    with pytest.raises(growkern.GrowthError, match=r"weight_decay=0.1.*decoupled_weight_decay"):
        new.load_state_dict(state)
    state["param_groups"][0]["decoupled_weight_decay"] = True
    new.load_state_dict(state)


# the groups of PyTorch before 2.7, in the order in which it wrote them
BEFORE_2_7 = {
    "Adam": ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach"),
    "AdamW": ("lr", "betas", "eps", "weight_decay", "amsgrad", "foreach", "maximize"),
}


@pytest.mark.parametrize("kind", BEFORE_2_7)
def test_coupled_decay_of_older_versions_is_seen(kind):
    source, optimizer = adam_state(0.1)
    target = growkern.grow(source, n_embd=24)
    state = optimizer.state_dict()
    (group,) = state["param_groups"]
    keys = (*BEFORE_2_7[kind], "capturable", "differentiable", "fused", "params", "param_names")
    state["param_groups"] = [{key: group[key] for key in keys}]
    new = growkern.GrowthAdamW(target.named_parameters(), target.growth_plan)
    if kind == "AdamW":
        new.load_state_dict(growkern.grow_optimizer(state, target.growth_plan))
        return
    with pytest.raises(growkern.GrowthError, match="set the group's decoupled_weight_decay"):
        growkern.grow_optimizer(state, target.growth_plan)
    reset = growkern.grow_optimizer(state, target.growth_plan, moments="reset")
    with pytest.raises(growkern.GrowthError, match=r"is of torch\.optim\.Adam with weight_decay"):
        new.load_state_dict(reset)


def test_states_of_radam_are_refused():
    source = random_model("GPT2LMHeadModel", GPT2)
    optimizer = torch.optim.RAdam(source.named_parameters())
    train(source, optimizer, range(2))
    target = growkern.grow(source, n_embd=24)
    with pytest.raises(growkern.GrowthError, match=r"RAdam.*moments=\"reset\""):
        growkern.grow_optimizer(optimizer.state_dict(), target.growth_plan)
    theirs = torch.optim.RAdam(target.named_parameters())
    train(target, theirs, range(2))
    new = growkern.GrowthAdamW(target.named_parameters(), target.growth_plan)
    with pytest.raises(growkern.GrowthError, match=r"the loaded group 0 is of torch\.optim\.RAdam"):
        new.load_state_dict(theirs.state_dict())


def test_amsgrad_that_is_turned_on_later_is_named():
    target, new = grown(random_model("GPT2LMHeadModel", GPT2), None, {"n_embd": 24})
    train(target, new, range(2))
    for group in new.param_groups:
        group["amsgrad"] = True
    with pytest.raises(growkern.GrowthError, match="make a new GrowthAdamW with amsgrad=True"):
        train(target, new, range(2, 3))


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"decoupled_weight_decay": False}, r"the given group 1.*weight_decay=0.1.*decoupled"),
        ({"differentiable": True}, "the given group 1 has differentiable=True"),
    ],
)
def test_groups_that_cannot_be_followed_are_refused(setting, message):
    """They were ignored: the decay stayed decoupled."""
    target = growkern.grow(random_model("GPT2LMHeadModel", GPT2), n_embd=24)
    named = list(target.named_parameters())
    groups = [{"params": named[:3]}, {"params": named[3:], "weight_decay": 0.1, **setting}]
    with pytest.raises(growkern.GrowthError, match=message):
        growkern.GrowthAdamW(groups, target.growth_plan)
    # without decay there is nothing to couple
    if "differentiable" not in setting:
        groups[1]["weight_decay"] = 0.0
        growkern.GrowthAdamW(groups, target.growth_plan)


def test_settings_that_cannot_be_followed_are_refused():
    target, new = grown(random_model("GPT2LMHeadModel", GPT2), None, {"n_embd": 24})
    train(target, new, range(2))
    for settings, message in (
        ({"differentiable": True}, "differentiable=True"),
        ({"amsgrad": True}, "lacks max_exp_avg_sq"),
    ):
        state = new.state_dict()
        state["param_groups"] = [{**group, **settings} for group in state["param_groups"]]
        with pytest.raises(growkern.GrowthError, match=message):
            new.load_state_dict(state)


def test_step_counts_of_another_place_come_to_the_cpu():
    """A fused AdamW keeps them on the GPU; reading them there would wait for it at every step."""
    target, new = grown(random_model("GPT2LMHeadModel", GPT2), None, {"n_embd": 24})
    train(target, new, range(2))
    state = new.state_dict()
    state["param_groups"] = [
        {**group, "fused": True, "capturable": True} for group in state["param_groups"]
    ]
    new.load_state_dict(state)
    assert not any(group["capturable"] or group["fused"] for group in new.param_groups)
    train(target, new, range(2, 4))
    assert all(entry["step"] == 4 for entry in new.state.values())
