"""GrowthAdamW: growth and training commute, and new entries are eased in."""

import pytest
import torch

import growkern
from growkern.train.distributed.shards import create_optimizer_state
from testbed.models import BERT, GPT2, LLAMA, outputs, random_model
from tests.growth.optimizer.test_optimizer import COPIED, GROUPS, TIED, UNTIED, train

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-3}

EXPERTS = {
    **LLAMA,
    "num_local_experts": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
UNEVEN = {"hidden_size": 20, "num_attention_heads": 10, "num_key_value_heads": 10, **COPIED}
CASES = [
    ("GPT2LMHeadModel", GPT2, TIED, {"n_embd": 24, **COPIED}),
    ("GPT2LMHeadModel", GPT2, UNTIED, {"n_embd": 36, "n_inner": 50, **COPIED}),
    ("BertForMaskedLM", BERT, {}, {"hidden_size": 24, "intermediate_size": 33}),
    ("LlamaForCausalLM", LLAMA, TIED, GROUPS),
    ("LlamaForCausalLM", LLAMA, UNTIED, {**GROUPS, "intermediate_size": 33}),
    # matrices of experts, with gate and up side by side
    ("GptOssForCausalLM", EXPERTS, {}, {**GROUPS, "num_local_experts": 12}),
    # copies that differ in number, weighted
    ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 6}, TIED, UNEVEN),
]


def test_a_loaded_model_has_the_plan_of_its_directory(tmp_path):
    source = random_model("GPT2LMHeadModel", GPT2)
    large = growkern.grow(source, n_embd=20)
    large.save_pretrained(tmp_path / "large")
    loaded = type(source).from_pretrained(tmp_path / "large", dtype=torch.float64)
    expected = growkern.growth_lr_multipliers(large.growth_plan)
    for place in (loaded, tmp_path / "large", str(tmp_path / "large")):
        found = growkern.growth_lr_multipliers(growkern.growth_plan_of(place))
        assert found.keys() == expected.keys()
        for name, factors in found.items():
            assert all(map(torch.equal, factors.lr, expected[name].lr))
    source.save_pretrained(tmp_path / "small")
    assert growkern.growth_plan_of(tmp_path / "small") is None
    with pytest.raises(growkern.GrowthError, match=r"growth_plan_of\(model\): it is None if"):
        growkern.GrowthAdamW(source.named_parameters(), growkern.growth_plan_of(source))
    (tmp_path / "large" / "lineage.json").unlink()
    for place in (loaded, tmp_path / "large"):
        with pytest.raises(growkern.GrowthError, match=r"lineage\.json is missing"):
            growkern.growth_plan_of(place)
    with pytest.raises(growkern.GrowthError, match="no such directory"):
        growkern.growth_plan_of(tmp_path / "none")


def test_weights_in_bfloat16_are_named(recwarn):
    """Their norms do not move, as the warning says."""
    large = growkern.grow(random_model("GPT2LMHeadModel", GPT2), n_embd=24, dtype=torch.bfloat16)
    torch.nn.init.ones_(large.transformer.ln_f.weight)
    with pytest.warns(growkern.errors.GrowthWarning, match="weights themselves are bfloat16"):
        optimizer = growkern.GrowthAdamW(large.named_parameters(), large.growth_plan, lr=1e-4)
    large(input_ids=torch.arange(8)[None]).logits.square().mean().backward()
    optimizer.step()
    assert (large.transformer.ln_f.weight == 1).all()
    large.float()
    recwarn.clear()
    growkern.GrowthAdamW(large.named_parameters(), large.growth_plan)
    assert not recwarn.list


def groups(model):
    return growkern.decay_groups(model, 0.1)


def grown(source, optimizer, how, **options):
    """The grown model and its optimizer, with the source's state."""
    target = growkern.grow(source, symmetry="none", **{**COPIED, **how})
    plan = target.growth_plan
    new = growkern.GrowthAdamW(groups(target), plan, **{**OPTIONS, **options})
    if optimizer is not None:
        new.load_state_dict(growkern.grow_optimizer(optimizer.state_dict(), plan))
    return target, new


def largest_difference(source, target):
    """Of the target's parameters to what the source as it is now would grow into."""
    again = growkern.grow(source, **{**target.growth_plan.options.to_dict(), **sizes_of(target)})
    return max(
        (p - q).abs().max().item()
        for p, q in zip(again.parameters(), target.parameters(), strict=True)
    )


def sizes_of(target):
    return {name: new for name, (_, new) in target.growth_plan.size_changes().items()}


GEMMA = {key: x for key, x in LLAMA.items() if key != "mlp_bias"}


@pytest.mark.parametrize("class_name", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("how", [GROUPS, {"hidden_size": 20}])
def test_norms_that_multiply_by_1_plus_weight_decay_in_step(class_name, how):
    """With weight decay on everything, norms too: they are pulled to where the source's 0 is."""
    source = random_model(class_name, GEMMA, std=0.2, query_pre_attn_scalar=4)
    decay = {**OPTIONS, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(source.named_parameters(), **decay)
    train(source, optimizer, range(5))
    target = growkern.grow(source, symmetry="none", **{**COPIED, **how})
    new = growkern.GrowthAdamW(target.named_parameters(), target.growth_plan, **decay)
    new.load_state_dict(growkern.grow_optimizer(optimizer.state_dict(), target.growth_plan))
    train(source, optimizer, range(5, 10))
    train(target, new, range(5, 10))
    again = dict(growkern.grow(source, symmetry="none", **{**COPIED, **how}).named_parameters())
    norms = [(n, p) for n, p in target.named_parameters() if "norm" in n]
    assert len(norms) == 2 * (4 + 2 * ("3" in class_name)) + 1
    for name, p in norms:
        assert (p - again[name]).abs().max() <= 1e-12, name
    before, after = outputs(source)["logits"], outputs(target)["logits"]
    assert (after - before).abs().max() <= 1e-12 * before.abs().max()


def test_where_nothing_enters_a_norm_decay_leaves_a_gain():
    """To 0 the entries of a larger head could not learn; nowhere else there is anything to pull."""
    source = random_model("Gemma3ForCausalLM", GEMMA, query_pre_attn_scalar=4)
    plan = growkern.plan(source, head_dim=8, num_hidden_layers=3, depth="identity")
    tasks = {task.name: task for task in plan.tasks}
    for name, factors in growkern.growth_lr_multipliers(plan).items():
        is_pulled = "norm" in name and ".1." not in name
        assert bool(factors.centre) == is_pulled, tasks[name]
        assert all((centre > -1).all() for centre in factors.centre)
    plan = growkern.plan(random_model("LlamaForCausalLM", LLAMA), hidden_size=24)
    assert not any(f.centre for f in growkern.growth_lr_multipliers(plan).values())


@pytest.mark.parametrize("peak", [None, 1.0, 2.0])
@pytest.mark.parametrize("how", [{"n_embd": 20}, {"n_embd": 24, "n_layer": 3, "depth": "stack"}])
def test_new_entries_are_eased_in(how, peak):
    """Old entries move as without re-warm-up, new ones by 1/4, 2/4, 3/4, 4/4 of the peak."""
    options = {} if peak is None else {"rewarm_peak": peak}
    source = random_model("GPT2LMHeadModel", GPT2)
    target, _ = grown(source, None, how)
    steps = {}
    for rewarm in (0, 4):
        model, optimizer = grown(source, None, how, rewarm_steps=rewarm, **options)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        # the same gradient in every step: each is as long as the one before
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        steps[rewarm] = []
        for _ in range(5):
            before = {name: p.clone() for name, p in model.named_parameters()}
            optimizer.step()
            moved = {n: (p - before[n]).detach() for n, p in model.named_parameters()}
            steps[rewarm].append(moved)
    factors = growkern.growth_lr_multipliers(target.growth_plan)
    for number, (plain, eased) in enumerate(zip(steps[0], steps[4], strict=True)):
        # SPARKLING's peak, unless another is asked for
        share = (1.3 if peak is None else peak) * min(1.0, (number + 1) / 4)
        for name, step in plain.items():
            old = torch.ones_like(step, dtype=torch.bool)
            for vector in factors[name].old:
                old = old & vector
            assert bool(old.any()) == ("h.2." not in name)
            assert torch.allclose(eased[name], torch.where(old, step, share * step), atol=1e-15)
    block = factors["transformer.h.0.mlp.c_fc.weight"].old
    assert [int(vector.sum()) for vector in block] == [12, 48]


def test_rewarming_goes_on_after_a_restart():
    source = random_model("GPT2LMHeadModel", GPT2)
    runs = []
    for stops in ((), (2,)):
        model, optimizer = grown(source, None, {"n_embd": 20}, rewarm_steps=5)
        for step in range(4):
            if step in stops:
                state = optimizer.state_dict()
                optimizer = growkern.GrowthAdamW(
                    groups(model), model.growth_plan, **OPTIONS, rewarm_steps=5
                )
                optimizer.load_state_dict(state)
            train(model, optimizer, [step])
        runs.append(list(model.parameters()))
    assert all(torch.equal(p, q) for p, q in zip(*runs, strict=True))


@pytest.mark.parametrize("how", [{"n_embd": 24}, {"n_embd": 20}])
def test_a_backward_pass_through_weights_before_the_step_is_refused(how):
    """As with the optimizers of PyTorch: the gradient would be of neither model."""
    target = growkern.grow(random_model("GPT2LMHeadModel", GPT2), **how)
    optimizer = growkern.GrowthAdamW(target.named_parameters(), target.growth_plan)
    target(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    early = target(torch.ones(1, 4, dtype=torch.int64)).logits.sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


def test_state_of_zero_steps_counts_no_steps():
    model, optimizer = grown(random_model("GPT2LMHeadModel", GPT2), None, {"n_embd": 20})
    before = [p.clone() for p in model.parameters()]
    create_optimizer_state(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert all(state["growth_step"] == state["step"] == 0 for state in optimizer.state.values())


def test_factors_of_entries_without_a_share_are_their_neighbours():
    """Rates of 0 would never learn, negative ones would climb."""
    source = random_model("BertForMaskedLM", BERT)
    for how in ({"hidden_size": 20}, {"hidden_size": 24, "symmetry": "split"}, {"vocab_size": 60}):
        plan = growkern.plan(source, **how)
        for name, factors in growkern.growth_lr_multipliers(plan).items():
            for vector in (*factors.lr, *factors.eps):
                assert (vector > 0).all(), name
            assert all(0.1 < factor < 10 for factor in factors.muon.values()), name


@pytest.mark.parametrize(
    "options", [{"rewarm_steps": -1}, {"rewarm_peak": 0.0}, {"rewarm_peak": float("nan")}]
)
def test_rates_out_of_range_are_refused(options):
    with pytest.raises(growkern.GrowthError, match=r"rewarm_steps=.*positive peak"):
        grown(random_model("GPT2LMHeadModel", GPT2), None, {"n_embd": 24}, **options)


def test_unfit_parameters_are_refused():
    source = random_model("GPT2LMHeadModel", GPT2)
    target = growkern.grow(source, n_embd=24)
    plan = target.growth_plan
    with pytest.raises(growkern.GrowthError, match="needs named parameters"):
        growkern.GrowthAdamW(target.parameters(), plan)
    with pytest.raises(growkern.GrowthError, match=r"no parameter wte.weight"):
        growkern.GrowthAdamW(target.transformer.named_parameters(), plan)
    with pytest.raises(growkern.GrowthError, match=r"wte.weight has shape \[50, 12\].* plan says"):
        growkern.GrowthAdamW(source.named_parameters(), plan)
