"""symmetry="split": moments are those of the target's own gradients, or start at zero."""

import pytest
import torch

import growkern
from growkern.growth.optimizer.moments import starts_at_zero
from testbed.models import GPT2, LLAMA, random_model
from tests.growth.optimizer.test_optimizer import (
    GROUPS,
    UNTIED,
    WITH_HEAD,
    adamw,
    assert_same_moments,
    grown_states,
    train,
)


@pytest.mark.parametrize("case", WITH_HEAD[::2], ids=lambda case: case[0])
def test_no_family_gets_moments_of_the_wrong_size(case):
    class_name, sizes, config, how = case
    source = random_model(class_name, sizes, std=0.2, **config)
    target, grown, own, _ = grown_states(source, {**how, "symmetry": "split"})
    plan = target.growth_plan
    first, *others = growkern.moment_findings(plan)
    assert first.level == "approximate"
    assert "split" in first.why
    found = [f for f in others if f.what == "weights that write the residual stream or heads"]
    assert [f.level for f in found] == ["changed"]
    if ";" in first.why:
        # another reason, such as an uneven LayerNorm, makes moments approximate
        return
    tasks = {task.name: task for task in plan.tasks}
    zero = [name for name in grown if starts_at_zero(plan, tasks[name], "grow")]
    for name in zero:
        entry = grown[name]
        assert not any(entry[key].any() for key in ("exp_avg", "exp_avg_sq", "step")), name
    names = set(own) & set(grown) - set(zero)
    # both stay: units of the FFN and readers have known gradients, the stream's writers do not
    assert zero
    assert names
    assert_same_moments(grown, own, names)


def test_where_the_shares_are_known_they_are_used():
    source = random_model("LlamaForCausalLM", LLAMA, std=0.2, **UNTIED)
    _, grown, _, _ = grown_states(source, {**GROUPS, "symmetry": "split"})
    moving = {
        name.replace("model.layers.0.", "").replace("model.layers.1.", "")
        for name, entry in grown.items()
        if entry["exp_avg"].any()
    }
    units = {f"mlp.{name}_proj.{kind}" for name in ("gate", "up") for kind in ("weight", "bias")}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight"}
    assert moving == units | norms | {"lm_head.weight"}


def test_a_sharded_optimizer_starts_the_same_moments_at_zero():
    source = random_model("GPT2LMHeadModel", GPT2, std=0.2, **UNTIED)
    optimizer = adamw(source)
    train(source, optimizer, range(2))
    target = growkern.grow(source, n_embd=24, symmetry="split")
    expected = growkern.grow_optimizer(optimizer.state_dict(), target.growth_plan)
    new = adamw(target)
    growkern.grow_optimizer_into(target, new, optimizer.state_dict())
    for number, entry in new.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, expected["state"][number][key]), (number, key)
