"""More experts and as many of them chosen as before: copies share the tokens of their expert."""

import pytest
import torch

import growkern
from growkern.growth.plan import OUTPUT_ERROR, build_tensor
from growkern.growth.plan.tensors import random_tensors
from testbed.models import LLAMA, outputs, random_model, relative_error

MIXTURE = {**LLAMA, "hidden_size": 24, "num_attention_heads": 6, "num_experts_per_tok": 2}
MIXTURE |= {"attention_bias": False, "mlp_bias": False}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 2}
# class, sizes, growth, the router's matrix
CASES = {
    "qwen3": (
        "Qwen3MoeForCausalLM",
        {**MIXTURE, "num_experts": 4, "moe_intermediate_size": 16, "norm_topk_prob": True},
        EIGHT,
        "mlp.gate",
    ),
    # weights of a softmax over all experts
    "olmoe": ("OlmoeForCausalLM", {**MIXTURE, "num_experts": 4}, EIGHT, "mlp.gate"),
    "mixtral": (
        "MixtralForCausalLM",
        {**MIXTURE, "num_local_experts": 4},
        {"num_local_experts": 12, "num_experts_per_tok": 2, "hidden_size": 36},
        "mlp.gate",
    ),
    # biases of the router and of experts stay
    "gpt_oss": (
        "GptOssForCausalLM",
        {**MIXTURE, "num_local_experts": 4},
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        "mlp.router",
    ),
}


# before a test sets another one
OWN = random_tensors.SPLIT


def split(name, strength, monkeypatch):
    """A source and its growth, with the rows of `random_tensors.SPLIT` times `strength`."""
    monkeypatch.setattr(random_tensors, "SPLIT", strength)
    class_name, sizes, how, _ = CASES[name]
    source = random_model(class_name, sizes)
    return source, growkern.grow(source, **how)


@pytest.mark.parametrize("name", CASES)
def test_the_function_stays_where_the_copies_are_far_apart(name, monkeypatch):
    """Every token then reaches the copies of the experts that it reached, with their weights."""
    assert relative_error(*split(name, 1e6, monkeypatch)) < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_a_shared_direction_moves_outputs_less_than_rows_that_are_nearly_equal(name, monkeypatch):
    def moved(strength):
        source, grown = split(name, strength, monkeypatch)
        old, new = (outputs(model)["logits"].log_softmax(-1) for model in (source, grown))
        return (old.exp() * (old - new)).sum(-1).mean().item()

    near, own = moved(1e-3), moved(OWN)
    assert own < near / 2


@pytest.mark.parametrize("name", CASES)
def test_copies_of_a_router_differ_by_one_row_for_all_experts(name):
    class_name, sizes, how, router = CASES[name]
    source = random_model(class_name, sizes)
    grown = growkern.grow(source, **how)
    # nothing lies in what other columns read
    rows = dict(grown.named_parameters())[f"model.layers.1.{router}.weight"].detach()[:, :24]
    first, *others = (rows[at : at + 4] for at in range(0, len(rows), 4))
    assert len({tuple((x - first)[0].tolist()) for x in others}) == len(others)
    for copy in others:
        added = copy - first
        torch.testing.assert_close(added, added[:1].expand_as(added), rtol=0, atol=1e-13)
        assert added[0].norm() > first.norm(dim=1).mean()
    down = next(p for n, p in grown.named_parameters() if "layers.1.mlp.experts.down_proj" in n)
    assert torch.equal(down[:4], down[4:8])


def test_the_plan_measures_the_change_and_verify_accepts_it():
    class_name, sizes, how, _ = CASES["qwen3"]
    source = random_model(class_name, sizes)
    grown = growkern.grow(source, **how)
    (finding,) = (f for f in grown.growth_plan.findings if "_experts" in f.what)
    assert finding.level == "changed"
    assert finding.asked
    assert 0 < finding.change < 10
    report = growkern.verify(source, grown)
    assert report.ok
    assert report.outputs[OUTPUT_ERROR] == pytest.approx(finding.change, rel=1e-6)


def test_parts_have_the_bits_of_the_whole():
    class_name, sizes, how, router = CASES["mixtral"]
    plan = growkern.plan(random_model(class_name, sizes), **how)
    (task,) = (t for t in plan.tasks if t.name == f"model.layers.1.{router}.weight")
    whole = build_tensor(plan, task)
    for part in (
        (slice(3, 11), slice(5, 30)),
        (slice(0, 12), slice(7, 9)),
        (slice(9, 9), slice(4)),
    ):
        assert torch.equal(build_tensor(plan, task, part=part), whole[part])


def test_the_choice_grows_with_the_experts_unless_its_size_is_given():
    class_name, sizes, _, _ = CASES["qwen3"]
    source = random_model(class_name, sizes)
    assert growkern.plan(source, num_experts=8).target_config.num_experts_per_tok == 4
    with pytest.raises(growkern.errors.GrowthError, match="num_experts_per_tok"):
        growkern.plan(source, num_experts=8, num_experts_per_tok=3)
    with pytest.raises(growkern.errors.GrowthError, match="_experts=6"):
        growkern.plan(source, num_experts=6, num_experts_per_tok=2)
