"""Mixtures of experts: what grows exactly, and what is refused.

Truth: the source in transformers, in float64 with eager experts, with every parameter random. Every
size of every family is in `tests.growth.plan.test_relatives`.
"""

import os
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

import growkern
from growkern.errors import GrowthError, GrowthWarning
from growkern.growth.plan.axes import asleep, axis_map
from growkern.growth.plan.tensors.tensor import build_tensor
from growkern.ops.expand.many import Work
from growkern.train.model.flops import ModelCost, TokenCounts
from growkern.train.model.sub_model import layer_stacks
from testbed.models import fold_back, random_model, relative_error
from testbed.relatives import LOCAL, ONE_GROUP, RELATIVES, WIDTHS
from tests.shared.delta import by_products

GATE = "model.layers.1.mlp.gate.weight"
LARGER = {"hidden_size": 20, "num_attention_heads": 10, "num_key_value_heads": 5}
WIDE = {"hidden_size": 20, "symmetry": "none"}
SIZES = {**LARGER, "moe_intermediate_size": 11, "num_experts": 12}


def qwen3_moe(dtype=torch.float64, **options):
    return random_model("Qwen3MoeForCausalLM", {**LOCAL, **WIDTHS}, dtype=dtype, **options)


@pytest.mark.parametrize(
    "symmetry, norm_topk_prob", [("noise", True), ("split", True), ("routing", False)]
)
def test_copies_of_experts_are_exact(symmetry, norm_topk_prob):
    """Several ways to break symmetry leave the logits of an expert's copies equal."""
    source = qwen3_moe(norm_topk_prob=norm_topk_prob, router_aux_loss_coef=0.03)
    grown = growkern.grow(source, **SIZES, symmetry=symmetry)
    assert grown.growth_plan.exact
    assert relative_error(source, grown) < 1e-12
    assert grown.config.num_experts_per_tok == 6
    # the auxiliary loss of the target counts every copy
    assert grown.config.router_aux_loss_coef == pytest.approx(0.01)


@pytest.mark.parametrize(
    "growth, why",
    [
        ({"num_experts": 7}, "num_experts=7 is no multiple of the.*_experts=4 or 8. Leave"),
        ({"num_experts": 8, "num_experts_per_tok": 3}, "_per_tok=3: .*experts=8 it must be 4"),
        ({"num_experts_per_tok": 3}, "with num_local_experts=4 it must be 2"),
        ({"hidden_size": 24, "num_expert": 8}, "no size 'num_expert' to grow"),
        ({"num_experts": 8, "num_local_experts": 12}, "given twice, as 8 and 12"),
    ],
)
def test_experts_that_change_the_function_are_refused(growth, why):
    with pytest.raises(GrowthError, match=why):
        growkern.plan(qwen3_moe(), **growth)


def test_sizes_of_experts_do_not_follow_the_hidden_size():
    source = random_model(*RELATIVES["qwen2_moe"][:2])
    config = growkern.plan(source, hidden_size=24).target_config
    assert config.intermediate_size == 40
    kept = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    for name in (*kept, "shared_expert_intermediate_size"):
        assert getattr(config, name) == getattr(source.config, name)


def test_new_experts_are_copies_where_other_rows_come_from_the_next_layer():
    source = qwen3_moe(mlp_only_layers=[])
    with pytest.warns(growkern.errors.FunctionChangedWarning):
        grown = growkern.grow(source, num_experts=8, method="aki", aki="eq16")
    for old, new in zip(source.model.layers, grown.model.layers, strict=True):
        assert torch.equal(new.mlp.gate.weight, old.mlp.gate.weight.repeat(2, 1))


@pytest.mark.parametrize(
    "options, layers, sparse",
    [
        # of two layers the first is dense: 0 0 1 and 0 1 0 1
        ({"mlp_only_layers": [0]}, 3, [False, False, True]),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, 4, [False, True, False, True]),
    ],
)
def test_layers_keep_their_kind(options, layers, sparse):
    source = qwen3_moe(**options)
    grown = growkern.grow(source, num_hidden_layers=layers, depth="identity")
    assert relative_error(source, grown) < 1e-12
    assert [hasattr(layer.mlp, "experts") for layer in grown.model.layers] == sparse


def test_a_depth_that_no_number_of_the_config_allows_is_refused():
    source = qwen3_moe(mlp_only_layers=[], decoder_sparse_step=2)
    with pytest.raises(GrowthError, match="the kinds of layers repeat every 2, so it can be 4"):
        growkern.plan(source, num_hidden_layers=3, depth="identity")


def test_a_plan_counts_what_a_token_uses():
    """Truth: the matrix products of a forward pass."""
    source = random_model(*RELATIVES["qwen2_moe"][:2], attn_implementation="eager")
    plan = growkern.plan(source, num_experts=12)
    grown, tokens = growkern.grow(source, num_experts=12), torch.arange(10)[None]
    for which, model in (("source", source), ("target", grown)):
        with FlopCounterMode(display=False) as counter:
            model(tokens)
        # 2 layers of 6 heads of 4 entries
        attention = 2 * 4 * 6 * 4 * 10**2
        assert counter.get_total_flops() - attention == 10 * plan.flops_per_token(which) // 3
        state = model.state_dict()
        idle = sum(x.numel() for name, x in state.items() if ".experts." in name) // 2
        assert plan.parameters(which, active=True) == plan.parameters(which) - idle
    assert "parameters per token" in str(plan)


def test_a_token_meets_the_state_of_a_delta_net_and_not_other_tokens(monkeypatch):
    """Truth: the products of a forward pass that computes token by token."""
    source = random_model(*RELATIVES["qwen3_next"][:2], attn_implementation="eager")
    how = {"num_experts": 12, "linear_num_value_heads": 6, "linear_value_head_dim": 12}
    plan, tokens = growkern.plan(source, **how), torch.arange(40)[None]
    for which, model in (("source", source), ("target", growkern.grow(source, **how))):
        chunked = model(tokens, use_cache=False).logits
        with monkeypatch.context() as patch, FlopCounterMode(display=False) as counter:
            by_products(patch)
            found = model(tokens, use_cache=False).logits
        torch.testing.assert_close(found, chunked, rtol=1e-4, atol=1e-4)
        total, cost = counter.get_total_flops(), ModelCost(model, layer_stacks(model))
        rows = 40 * cost.head_row(train=False)
        assert cost.forward(TokenCounts.of_rows(1, 40)) + rows == total
        # the other layer attends, with 6 heads of 8 entries
        attention = 4 * 6 * 8 * 40**2
        assert total - attention == 40 * plan.flops_per_token(which) // 3


def test_experts_that_grouped_products_do_not_take_are_named():
    config = transformers.MixtralConfig(**{**LOCAL, "hidden_size": 16, "intermediate_size": 24})
    with torch.device("meta"):
        source = transformers.MixtralForCausalLM(config)
    assert not growkern.plan(source, num_experts=8).portability()
    plan = growkern.plan(source, intermediate_size=36)
    assert "sides of 36: in 16 bits" in plan.portability()[0]
    dense = random_model(*RELATIVES["qwen3_5_text"][:2])
    # its convolutions have three axes too
    odd = growkern.plan(dense, intermediate_size=21).portability()
    assert not any("sides of" in line for line in odd)


def saved_by_names_in_memory(model, directory):
    model.save_pretrained(directory)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


# files with a tensor per expert, with other names, and with the names in memory
@pytest.mark.parametrize("model_type", ["mixtral", "granitemoe", "gpt_oss"])
def test_files_of_both_layouts_grow_to_the_files_that_transformers_writes(model_type, tmp_path):
    class_name, sizes, _ = RELATIVES[model_type]
    source = random_model(class_name, sizes, dtype=torch.float32)
    how = {"num_local_experts": 8, "intermediate_size": 33, "vocab_size": 60}
    source.save_pretrained(tmp_path / "parts", max_shard_size=3000)
    saved_by_names_in_memory(source, tmp_path / "whole")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grown = growkern.grow(source, **how)
    grown.save_pretrained(tmp_path / "truth", max_shard_size=7000)
    files = sorted(f.name for f in (tmp_path / "truth").glob("*.safetensors*"))
    assert len(files) > 3
    for layout in ("parts", "whole"):
        target = tmp_path / f"{layout}_grown"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            growkern.grow_checkpoint(
                tmp_path / layout, target, max_shard_size=7000, progress=False, **how
            )
        for file in files:
            assert (target / file).read_bytes() == (tmp_path / "truth" / file).read_bytes(), file
    assert growkern.verify(tmp_path / "whole", target).ok


@pytest.mark.parametrize("symmetry", ["noise", "split", "routing"])
def test_a_part_of_all_experts_has_the_bits_of_the_whole(symmetry, tmp_path):
    qwen3_moe(torch.float32).save_pretrained(tmp_path)
    plan = growkern.plan(tmp_path, **SIZES, symmetry=symmetry)
    tasks = [task for task in plan.tasks if len(task.shape) == 3]
    assert len(tasks) == 2
    for task in tasks:
        whole = build_tensor(plan, task)
        for part in (
            (slice(3, 11), slice(0, task.shape[1]), slice(0, task.shape[2])),
            (slice(0, 12), slice(5, 9), slice(0, task.shape[2])),
            (slice(4, 12), slice(1, 10), slice(3, 11)),
        ):
            assert torch.equal(build_tensor(plan, task, part=part), whole[part])
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(plan.target_config)
    growkern.grow_into(model, tmp_path, symmetry=symmetry)
    grown = growkern.grow(tmp_path, **SIZES, symmetry=symmetry)
    for name, tensor in grown.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_all_experts_are_built_together(tmp_path, monkeypatch):
    """Thousands of small experts would otherwise take a millisecond each."""
    qwen3_moe(torch.float32).save_pretrained(tmp_path)
    plan = growkern.plan(tmp_path, **SIZES)
    calls, opened, open_file = [], [], os.open
    monkeypatch.setattr(Work, "run", lambda self: calls.append(self._calls.pop()))
    monkeypatch.setattr(os, "open", lambda *args: opened.append(args) or open_file(*args))
    for task in plan.tasks:
        if len(task.shape) == 3:
            build_tensor(plan, task)
    # gate and up have columns that copy and columns that add nothing
    assert len(calls) == 3
    # the plan read the names of the file's tensors and left it open
    assert not opened


def test_experts_of_a_baseline_differ_and_come_in_parts():
    source = qwen3_moe(torch.float32)
    plan = growkern.plan(source, **SIZES, method="direct_copy")
    task = next(t for t in plan.tasks if t.name.endswith("experts.down_proj"))
    whole, old = build_tensor(plan, task), source.get_parameter(task.source)
    assert torch.equal(whole[:4, :12, :7], old)
    assert not torch.equal(whole[4], whole[5])
    part = (slice(2, 9), slice(3, 20), slice(0, 11))
    assert torch.equal(build_tensor(plan, task, part=part), whole[part])


def damage(directory, change):
    state = load_file(directory / "model.safetensors")
    change(state)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


EXPERT = "model.layers.1.mlp.experts.{}.down_proj.weight"


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda s: s.pop(EXPERT.format(2)), r"experts\.2\.down_proj\.weight is missing"),
        (lambda s: s.update({EXPERT.format(4): s[EXPERT.format(3)].clone()}), "experts.4.*has 4"),
        (lambda s: s.update({EXPERT.format("03"): s[EXPERT.format(3)].clone()}), "there twice"),
        (lambda s: s.update({EXPERT.format(1): torch.zeros(12, 5)}), r"is \[12, 5\] torch.float32"),
        (
            lambda s: s.update({"model.layers.1.mlp.experts.down_proj": torch.zeros(4, 12, 7)}),
            "as a whole and in parts",
        ),
    ],
)
def test_files_with_other_experts_than_the_config_are_refused(change, why, tmp_path):
    qwen3_moe(torch.float32).save_pretrained(tmp_path)
    damage(tmp_path, change)
    with pytest.raises(GrowthError, match=why):
        growkern.plan(tmp_path, num_experts=8)


def test_a_bias_that_selects_experts_stays_in_float32(tmp_path):
    """Beside weights in bfloat16, where 5.03 is 5.03125."""
    class_name, sizes, _ = RELATIVES["deepseek_v3"]
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    source = random_model(class_name, sizes, dtype=torch.bfloat16)
    bias = 5.03 + torch.arange(8) / 100
    source.load_state_dict({name: bias}, strict=False, assign=True)
    source.save_pretrained(tmp_path / "small")
    how = {"n_routed_experts": 12, "hidden_size": 24, "qk_nope_head_dim": 7}
    grown = growkern.grow(source, **how)
    assert not grown.growth_plan.narrowed_tensors
    grown.save_pretrained(tmp_path / "truth")
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "large", progress=False, **how)
    files = [tmp_path / where / "model.safetensors" for where in ("truth", "large")]
    assert files[0].read_bytes() == files[1].read_bytes()
    with torch.device("meta"):
        into = type(source)._from_config(grown.growth_plan.target_config, dtype=torch.bfloat16)
    growkern.grow_into(into, tmp_path / "small")
    # each group of two has a third expert, which sleeps: its bias is lower by more than 1.07
    lowered = torch.stack([bias[0::2], bias[1::2], bias[0::2].double() - 1.01 * 1.07], 1).flatten()
    for state in (load_file(files[1]), grown.state_dict(), into.state_dict()):
        torch.testing.assert_close(state[name], lowered.float(), rtol=0, atol=1e-6)
        assert torch.equal(state[GATE], grown.state_dict()[GATE])
    assert growkern.verify(tmp_path / "small", tmp_path / "large").ok


@pytest.mark.parametrize(
    "model_type, options, growth",
    [
        ("deepseek_v3", {}, {"n_routed_experts": 16, "n_group": 8}),
        ("deepseek_v3", {}, {"n_routed_experts": 20, "n_group": 5, **WIDE}),
        ("deepseek_v3", ONE_GROUP, {"n_routed_experts": 11, "num_hidden_layers": 3}),
        ("glm4_moe", ONE_GROUP, {"n_routed_experts": 11, "moe_intermediate_size": 11}),
    ],
)
def test_new_experts_sleep_for_any_input(model_type, options, growth):
    """Scores near 0 and 1, so that a copy would be chosen if its bias were higher."""
    class_name, sizes, _ = RELATIVES[model_type]
    source = random_model(class_name, {**sizes, **options})
    gates = [layer.mlp.gate for layer in source.model.layers if hasattr(layer.mlp, "gate")]
    with torch.no_grad():
        for gate in gates:
            gate.weight.mul_(30)
            gate.e_score_correction_bias.mul_(3)
    grown = growkern.grow(source, depth="identity", **growth)
    assert grown.config.num_experts_per_tok == source.config.num_experts_per_tok
    assert relative_error(source, grown) < 1e-12
    plan, new = grown.growth_plan, grown.config.n_routed_experts - 8
    assert plan.exact
    assert f"the {new} new experts of each layer sleep" in " ".join(str(plan).split())
    task = next(task for task in plan.tasks if task.name == GATE)
    whole = build_tensor(plan, task)
    # a copy's row is the source's and noise of the same length, the same in any part
    axes = [axis_map(plan, task, *axis) for axis in zip(task.tensor.axes, task.shape, strict=True)]
    copies = source.get_parameter(task.source)[axes[0].index][:, axes[1].index] * axes[1].scale
    noise = (whole - copies).norm(dim=1) / copies.norm(dim=1)
    sleeps = asleep(plan, task)
    assert sleeps.sum() == new
    assert bool((noise[~sleeps] < 1e-9).all())
    assert noise[sleeps].min() > 0.5
    assert noise[sleeps].max() < 1.8
    part = (slice(3, 10), slice(5, 9))
    assert torch.equal(build_tensor(plan, task, part=part), whole[part])


SPARSE, DELTA = "deepseek_v3", "qwen3_next"
HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
BOTH = {"n_routed_experts": 16, "num_experts_per_tok": 6}


@pytest.mark.parametrize(
    "family, growth, why",
    [
        (SPARSE, {**BOTH, "n_routed_experts": 12}, "=12 is no multiple .*=8 or 16"),
        (SPARSE, {**BOTH, "n_group": 4}, "n_group=4: with n_routed_experts=16 it must be 8"),
        (SPARSE, {"n_group": 8}, "n_group=8: with n_routed_experts=8 it must be 4, .* none$"),
        (SPARSE, {"n_routed_experts": 11}, "n_group=4: .* 2 of each of .* 4 groups; .*=8 or 12$"),
        (SPARSE, {"n_routed_experts": 17, "n_group": 5}, "17 does not fit n_group=5: .*=15 or 20"),
        (SPARSE, {"qk_rope_head_dim": 8}, "no size 'qk_rope_head_dim' to grow"),
        (SPARSE, {"num_hidden_layers": 4, "depth": "stack"}, "layer 1 .* sparse by .*'identity'"),
        (DELTA, {"linear_key_head_dim": 8}, "no size 'linear_key_head_dim' to grow"),
        (DELTA, {"linear_num_value_heads": 5}, "=5 is not a multiple of .*; nearest .*=6$"),
        (DELTA, HEADS, "shrinks from 2 to 1"),
    ],
)
def test_sizes_of_attention_and_groups_that_do_not_fit_are_refused(family, growth, why):
    source = random_model(*RELATIVES[family][:2])
    with pytest.raises(GrowthError, match=why):
        growkern.plan(source, **growth)


def test_random_copies_of_a_latent_vector_change_its_norm():
    """The matrix that writes it writes the keys that turn, too."""
    plan = growkern.plan(
        random_model(*RELATIVES["deepseek_v3"][:2]), kv_lora_rank=13, scheme="paper"
    )
    assert [(f.level, f.what) for f in plan.findings] == [("changed", "entries of latent_pre")]


def test_latent_queries_do_not_come_from_nothing():
    class_name, sizes, options = RELATIVES["deepseek_v3"]
    source = random_model(class_name, {**sizes, **options})
    with pytest.raises(GrowthError, match="no size 'q_lora_rank'"):
        growkern.plan(source, q_lora_rank=16)


def test_layers_that_predict_a_second_token_are_left_out_if_they_are_not_whole(tmp_path):
    class_name, sizes, _ = RELATIVES["deepseek_v3"]
    random_model(class_name, sizes, dtype=torch.float32).save_pretrained(tmp_path)
    more = {"eh_proj.weight": [12, 24], "mlp.experts.0.up_proj.weight": [7, 12], "norm": [12]}
    more = {f"model.layers.2.{name}": torch.zeros(shape) for name, shape in more.items()}
    damage(tmp_path, lambda state: state.update(more))
    with pytest.warns(GrowthWarning, match="it lacks .*: layers that predict"):
        assert not more.keys() & growkern.plan(tmp_path, hidden_size=24).source.dtypes.keys()
    damage(tmp_path, lambda state: state.update({"model.layers.3.norm": torch.zeros(2)}))
    with pytest.raises(GrowthError, match=r"no rule for tensor model.layers.3.norm"):
        growkern.plan(tmp_path, hidden_size=24)


def test_a_window_of_zero_is_none(tmp_path):
    """As transformers writes the config of a Qwen2 MoE."""
    config = transformers.Qwen2MoeConfig(architectures=["Qwen2MoeForCausalLM"])
    assert config.sliding_window == 0
    config.save_pretrained(tmp_path)
    assert growkern.plan(tmp_path, num_experts=120).exact


@pytest.mark.parametrize("symmetry", ["split", "noise"])
def test_weights_of_copies_that_add_up_are_divided(symmetry, tmp_path):
    """A router by sigmoids that does not normalise gives every copy the weight of its expert."""
    class_name, sizes, _ = RELATIVES["deepseek_v3"]
    source = random_model(class_name, sizes, norm_topk_prob=False)
    experts = {"n_routed_experts": 24, "num_experts_per_tok": 9}
    grown = growkern.grow(source, hidden_size=20, **experts, symmetry=symmetry)
    assert grown.growth_plan.exact
    assert relative_error(source, grown) < 1e-12
    plan = growkern.plan(source, **experts, moe_intermediate_size=11, symmetry=symmetry)
    task = next(t for t in plan.tasks if t.tensor.axes[0] == "read:experts")
    whole, old = build_tensor(plan, task), source.get_parameter(task.source)
    torch.testing.assert_close(whole[:8, :, 4:7], old[..., 4:7] / 3)
    part = (slice(5, 19), slice(2, 9), slice(1, 11))
    assert torch.equal(build_tensor(plan, task, part=part), whole[part])
    plan, state = grown.growth_plan, grown.state_dict()
    own = next(t for t in plan.tasks if t.name == task.name)
    torch.testing.assert_close(fold_back(plan, own, state[task.name]), old.detach())
