"""A dense model becomes a mixture: what is exact, and what is refused.

Truth: the dense model in transformers, in float64, with every parameter random.
"""

import shutil
from itertools import product

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import examples.centroids
import growkern
from growkern.errors import FunctionChangedWarning, GrowthError
from growkern.growth.disk import stream
from growkern.growth.plan.tensors.tensor import build_tensor
from growkern.train.run.file import load_run
from growkern.train.run.resolve import resolve
from growkern.train.run.start import build_model
from testbed.models import random_model, relative_error

SIZES = {
    "hidden_size": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    # defaults differ between the configs of siblings
    "rms_norm_eps": 1e-3,
}
HEADS = {"head_dim": 4}
MULTIPLIERS = {
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 3.0,
}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
# layers of these are dense or sparse
GROUPED = {"first_k_dense_replace": 2, "routed_scaling_factor": 2.5}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
PAIRS = {
    "Llama": ("mixtral", HEADS),
    "Mistral": ("mixtral", {**HEADS, "sliding_window": 7}),
    "Qwen2": ("qwen2_moe", {}),
    "Qwen3": ("qwen3_moe", HEADS),
    "Granite": ("granitemoe", MULTIPLIERS),
    "Glm4Moe": ("glm4_moe", {**HEADS, **GROUPED}),
    "DeepseekV3": ("deepseek_v3", {**LATENT, **GROUPED, "num_key_value_heads": 6, "v_head_dim": 5}),
}
WITH_SHARED = ("Qwen2", "Glm4Moe", "DeepseekV3")


def dense_model(name, dtype=torch.float64, **options):
    return random_model(f"{name}ForCausalLM", {**SIZES, **PAIRS[name][1]}, dtype=dtype, **options)


def sizes_of(kind, experts, chosen, width=None):
    fields = ("num_experts", "moe_intermediate_size")
    if kind in ("mixtral", "granitemoe"):
        fields = ("num_local_experts", "intermediate_size")
    elif not kind.startswith("qwen"):
        fields = ("n_routed_experts", "moe_intermediate_size")
    sizes = {fields[0]: experts, "num_experts_per_tok": chosen}
    if kind in ("deepseek_v3", "glm4_moe"):
        sizes["first_k_dense_replace"] = 1
        if experts % 4 == 0:
            # each group has a whole copy of the FFN, or more
            sizes |= {"n_group": 2, "topk_group": 1}
    return sizes | ({} if width is None else {fields[1]: width})


def eager(model):
    """The same model, whose experts take float64 and every size."""
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize(
    "name, shared",
    [*((name, "zero") for name in PAIRS), *((name, "dense") for name in WITH_SHARED)],
)
def test_a_dense_model_becomes_an_exact_mixture(name, shared):
    """Every recipe, the last one together with more layers and with uneven width and heads."""
    source, kind = dense_model(name), PAIRS[name][0]
    larger = {"hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 10}
    if kind != "deepseek_v3":
        larger["num_key_value_heads"] = 5
    # noise that cancels, with parts of the FFN that are wider than their share
    noisy = {"symmetry": "noise", "hidden_size": 24}
    recipes = [(8, 4, 9, larger), (8, 4, 4, {}), (5, 3, None, {}), (8, 4, 11, noisy)]
    # how the FFN is split does not matter to experts whose outputs are zero
    for experts, chosen, width, more in recipes[: 1 if shared == "dense" else None]:
        sizes = {**sizes_of(kind, experts, chosen, width), **more}
        grown = growkern.grow(source, to=kind, shared_expert=shared, **sizes)
        assert grown.growth_plan.exact
        assert grown.config.model_type == kind
        assert relative_error(source, grown) < 1e-12
        state = grown.state_dict()
        outputs = (state[key] for key in state if key.endswith("experts.down_proj"))
        assert any(tensor.any() for tensor in outputs) == (shared == "zero")


@pytest.mark.parametrize("name, width", [("Llama", 16), ("Qwen3", 16), ("Qwen3", 8)])
def test_one_copy_of_the_ffn_alone_is_a_mixture(name, width):
    kind, more = PAIRS[name]
    small = random_model(f"{name}ForCausalLM", {**SIZES, **more})
    sizes = {"num_local_experts": 1}
    if kind == "qwen3_moe":
        sizes = {"moe_intermediate_size": width, "num_experts": 16 // width}
    large = growkern.grow(small, to=kind, num_experts_per_tok=16 // width, **sizes)
    assert large.config.model_type == kind and growkern.verify(small, large).ok
    assert relative_error(small, large) < 1e-12
    with pytest.raises(GrowthError, match="nothing grows"):
        growkern.plan(large, **sizes)


def test_only_fields_that_the_dense_model_has_are_copied():
    """A Llama keeps keys of other configs and ignores them. A Mixtral has a window."""
    source, sizes = dense_model("Llama", sliding_window=5, router_jitter_noise=0.5), (4, 2)
    grown = growkern.grow(source, to="mixtral", **sizes_of("mixtral", *sizes))
    assert grown.config.sliding_window is None and not grown.config.router_jitter_noise
    assert relative_error(source, eager(grown)) < 1e-12
    config = transformers.MixtralConfig(
        **{**SIZES, **HEADS, **sizes_of("mixtral", *sizes)}, sliding_window=5
    )
    config.rope_parameters = source.config.rope_parameters
    with pytest.raises(GrowthError, match="sliding_window=5 differs"):
        growkern.plan(source, target_config=config)
    config.sliding_window = None
    assert growkern.plan(source, target_config=config).exact


def test_some_layers_stay_dense():
    # a window that no layer uses
    source = dense_model("Qwen3", num_hidden_layers=3, **{**WINDOW, "max_window_layers": 3})
    sizes = sizes_of("qwen3_moe", 4, 2)
    grown = growkern.grow(source, to="qwen3_moe", mlp_only_layers=[1], **sizes)
    assert [hasattr(layer.mlp, "experts") for layer in grown.model.layers] == [True, False, True]
    assert relative_error(source, eager(grown)) < 1e-12
    config = transformers.Qwen3MoeConfig(
        **{**SIZES, **HEADS, **sizes}, moe_intermediate_size=16, norm_topk_prob=True
    )
    config.num_hidden_layers, config.decoder_sparse_step = 3, 3
    grown = growkern.grow(source, target_config=config)
    assert [hasattr(layer.mlp, "experts") for layer in grown.model.layers] == [False, False, True]
    assert relative_error(source, eager(grown)) < 1e-12


@pytest.mark.parametrize(
    "name, kind, field, value, deeper",
    [
        ("Qwen3", "qwen3_moe", "mlp_only_layers", [0], [0, 1]),
        ("Qwen3", "qwen3_moe", "mlp_only_layers", [2], [4]),
        ("DeepseekV3", "deepseek_v3", "first_k_dense_replace", 2, 4),
    ],
)
def test_a_target_config_counts_its_own_layers(name, kind, field, value, deeper):
    layers = {"first_k_dense_replace": 3} if name == "DeepseekV3" else {}
    source = dense_model(name, num_hidden_layers=3, **layers)
    sizes = {**sizes_of(kind, 4, 2), field: value, "num_hidden_layers": 5}
    config = growkern.plan(source, to=kind, **sizes).target_config
    assert getattr(config, field) == deeper
    assert getattr(growkern.plan(source, target_config=config).target_config, field) == deeper
    large = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    growkern.grow_into(large, source)
    assert relative_error(source, eager(large)) < 1e-12


@pytest.mark.parametrize(
    "source, options, why",
    [
        ({"attention_bias": True}, {}, "config.attention_bias: a MixtralForCausalLM has no place"),
        ({"mlp_bias": True}, {}, "config.mlp_bias: a MixtralForCausalLM has no place for"),
        ({}, {"to": "qwen3_moe"}, "to='qwen3_moe': a llama cannot become one.*'?mixtral'?"),
        ({}, {"num_local_experts": None}, "to='mixtral' needs num_local_experts or num_experts:"),
        ({}, {"intermediate_size": 7}, "does not split evenly into 3 .* 4 and 8"),
        ({}, {"intermediate_size": 4}, "give num_experts_per_tok=4, or intermediate_size=8"),
        ({}, {"num_experts_per_tok": 9}, "_per_tok=9: give at most num_local_experts=8$"),
        ({}, {"num_local_experts": None, "num_experts": 1}, "per_tok=2: .* at most num_experts=1$"),
        ({}, {"intermediate_size": 4, "symmetry": "noise"}, "_per_tok=8, or intermediate_size=16"),
        ({}, {"method": "aki"}, "takes method='fpi'"),
        ({}, {"intermediate_size": 8, "router": "zero"}, "does not keep experts together: 2"),
        ({}, {"symmetry": "noise", "num_experts_per_tok": 3}, "tok=3: 2 .*noise cancels.*of 2"),
        ({}, {"symmetry": "noise", "num_local_experts": 5}, "experts=5: 2 .*noise cancels.*of 2"),
        ({}, {"symmetry": "noise", "router": "zero"}, "router='zero' does not keep.*noise"),
        ({}, {"to": "", "router": "zero"}, "router='zero' has no effect"),
        ({}, {"to": "", "drop": 0.5}, "drop=0.5 has no effect"),
        ({}, {"drop": 1.5}, "drop is 1.5: it must lie in"),
    ],
)
def test_what_a_sibling_lacks_is_refused_by_name(source, options, why):
    given = {"to": "mixtral", **sizes_of("mixtral", 8, 2), **options}
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(GrowthError, match=why):
        growkern.plan(dense_model("Llama", **source), **given)


@pytest.mark.parametrize(
    "name, source, options, why",
    [
        ("Qwen3", WINDOW, {}, r"config.layer_types=.* lacks such layers"),
        ("Qwen3", {}, {"mlp_only_layers": [2]}, r"mlp_only_layers=\[2\]: .* 0 to 1"),
        ("Qwen3", {}, {"mlp_only_layers": "0"}, "mlp_only_layers='0': give a list"),
        ("Qwen3", {}, {"mlp_only_layers": [True]}, r"=\[True\]: give a list of numbers"),
        ("Qwen3", {}, {"norm_topk_prob": 0}, "norm_topk_prob=0: give True or False"),
        ("Qwen3", {}, {"num_experts": -4}, "experts=-4: expected a positive"),
        ("Glm4Moe", {}, {"n_routed_experts": -4}, "experts=-4: expected a positive"),
        ("Glm4Moe", {}, {"first_k_dense_replace": -1}, "=-1: give a whole number of 0 or more"),
        ("Qwen3", {}, {"mlp_only_layers": [0, 1]}, r"=\[0, 1\]: no layer of the 2 becomes"),
        ("Qwen3", {}, {"decoder_sparse_step": "2"}, "decoder_sparse_step='2': give a whole number"),
        ("Qwen3", {}, {"shared_expert": "dense"}, "has no expert that all tokens share"),
        (
            "Qwen2",
            {},
            {"shared_expert": "dense", "shared_expert_intermediate_size": 15},
            "shared_expert_intermediate_size=15: .* at least 16",
        ),
        ("DeepseekV3", {"first_k_dense_replace": 1}, {}, "layer 1 has experts already"),
        ("DeepseekV3", {}, {"topk_group": 3}, "n_group=2, topk_group=3: give groups"),
        (
            "DeepseekV3",
            {},
            {"n_routed_experts": 12, "moe_intermediate_size": 8, "symmetry": "noise"},
            "noise cancels.*multiples of 4, .* nearest sizes that fit: n_routed_experts=8 or 16",
        ),
        ("DeepseekV3", {}, {"moe_intermediate_size": 2}, "tok=8, or moe_intermediate_size=4"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name, source, options, why):
    kind = PAIRS[name][0]
    with pytest.raises(GrowthError, match=why):
        growkern.plan(dense_model(name, **source), to=kind, **{**sizes_of(kind, 8, 4), **options})


def test_weights_that_are_not_renormalised_are_exact_with_equal_rows_alone(tmp_path):
    source = dense_model("Qwen3", torch.float32)
    source.save_pretrained(tmp_path / "dense")
    how = {"to": "qwen3_moe", **sizes_of("qwen3_moe", 8, 3), "norm_topk_prob": False}
    grown = growkern.grow(source, **how, router="zero", dtype=torch.float64)
    assert grown.growth_plan.exact and not grown.config.norm_topk_prob
    assert relative_error(source.double(), eager(grown)) < 1e-12
    with pytest.warns(FunctionChangedWarning, match="norm_topk_prob=False"):
        growkern.grow_checkpoint(tmp_path / "dense", tmp_path / "moe", progress=False, **how)
    checked = growkern.verify(tmp_path / "dense", tmp_path / "moe")
    (stated,) = [f for f in checked.plan.findings if f.level == "changed"]
    found = checked.outputs[stated.measure]
    assert checked.ok and 0.01 < found / 1.5 < stated.change < 1.5 * found < 0.5


def test_a_target_config_that_changes_the_function_is_refused():
    sizes = {**SIZES, **HEADS, "num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=16)
    with pytest.raises(GrowthError, match="norm_topk_prob=False"):
        growkern.plan(dense_model("Qwen3"), target_config=config)


@pytest.mark.parametrize("name, width, dtype", [("Qwen3", 8, "float64"), ("Llama", 16, "bfloat16")])
def test_noise_cancels_in_pairs_of_experts(name, width, dtype):
    """Rows of the router are equal in a pair, and its down matrices add up bit for bit."""
    source, kind = dense_model(name, getattr(torch, dtype)), PAIRS[name][0]
    parts = 16 // width
    how = {"symmetry": "noise", "noise": 0.1, **sizes_of(kind, 4 * parts, 2 * parts, width)}
    plan = growkern.plan(source, to=kind, **how)
    assert plan.exact
    if dtype == "float64":
        grown = growkern.grow(source, to=kind, **how, hidden_size=20, num_attention_heads=10)
        assert relative_error(source, eager(grown)) < 1e-12
    tasks = {task.name: task for task in plan.tasks}
    task = tasks["model.layers.1.mlp.experts.down_proj"]
    down, part = build_tensor(plan, task), (slice(1, 3), slice(2, 9), slice(3, 7))
    assert torch.equal(build_tensor(plan, task, part=part), down[part])
    one, other = down.unflatten(0, (2, 2, parts)).double().unbind(1)
    whole = source.model.layers[1].mlp.down_proj.weight.double() * parts
    truth = torch.stack(whole.chunk(parts, 1))
    assert torch.equal(one + other, 2 * truth.expand_as(one))
    ratio = (one / truth).round(decimals=1)
    assert ratio.unique().tolist() == [0.9, 1.1]
    assert 0.3 < (ratio == 1.1).double().mean() < 0.7 and (ratio[0] != ratio[1]).any()
    rows = build_tensor(plan, tasks["model.layers.1.mlp.gate.weight"])
    assert torch.equal(rows, rows[:: 2 * parts].repeat_interleave(2 * parts, 0))
    assert len(rows.unique(dim=0)) == 2


def test_half_of_the_units_are_drawn_again():
    """Those units in gate, up and down alike; the others are copies, in parts of the FFN too."""
    how = {"to": "qwen3_moe", **sizes_of("qwen3_moe", 8, 2, 64), "hidden_size": 48}
    source = dense_model("Qwen3", intermediate_size=128)
    plans = [growkern.plan(source, **how, **options) for options in ({}, {"drop": 0.5})]
    tasks = {task.name: task for task in plans[1].tasks}
    kept = []
    for layer, name in product((0, 1), ("gate_up_proj", "down_proj")):
        task = tasks[f"model.layers.{layer}.mlp.experts.{name}"]
        old, new = (build_tensor(plan, task) for plan in plans)
        # the part of a process, cut along every axis
        part = (slice(3, 6), slice(7, 40), slice(5, 30))
        assert torch.equal(build_tensor(plans[1], task, part=part), new[part])
        if name == "down_proj":
            old, new = old.mT, new.mT
        is_kept = (old == new).all(-1)
        for one, whole, units in zip(*(x.split(64, 1) for x in (new, old, is_kept)), strict=True):
            assert units.sum(1).tolist() == [32] * 8
            kept.append(units)
            drawn, scale = one[~units].view(8, -1), whole.flatten(1).std(1)
            assert (drawn.mean(1) - whole.flatten(1).mean(1)).abs().max() < 0.15 * scale.max()
            torch.testing.assert_close(drawn.std(1), scale, rtol=0.1, atol=0)
            assert len(drawn.unique()) > 0.99 * drawn.numel()
    for first in (0, 3):
        assert all(torch.equal(kept[first], other) for other in kept[first + 1 : first + 3])
    # every expert of every layer draws its own
    assert len(torch.cat(kept[:4:3]).unique(dim=0)) == 16


@pytest.mark.parametrize("name", PAIRS)
def test_the_plan_says_how_far_a_change_moves_the_outputs(name):
    """With half of the units drawn again; and with layers that get new inputs."""
    source, kind = dense_model(name), PAIRS[name][0]
    how = {"to": kind, **sizes_of(kind, 8, 4, 8)}
    changes = {"drop": 0.5} if name != "Llama" else {"depth": "stack", "num_hidden_layers": 4}
    with pytest.warns(FunctionChangedWarning, match="outputs move by"):
        grown = growkern.grow(source, **how, **changes)
    (stated,) = [f for f in grown.growth_plan.findings if f.level == "changed"]
    found = growkern.verify(source, grown).outputs[stated.measure]
    assert 0.1 < found / 1.5 < stated.change < 1.5 * found
    assert stated.asked and f"{stated.change:.2g} of the largest output" in stated.why


def test_a_model_of_eight_billion_parameters_is_planned(tmp_path):
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "dtype": "bfloat16"}
    config = transformers.Qwen3Config(**sizes, **heads, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(tmp_path)
    how = {"to": "qwen3_moe", **sizes_of("qwen3_moe", 64, 8, 768)}
    with pytest.raises(GrowthError, match="=16, or moe_intermediate_size=1536"):
        growkern.plan(tmp_path / "config.json", **how)
    plan = growkern.plan(tmp_path / "config.json", **{**how, "num_experts_per_tok": 16})
    assert plan.exact
    dense, all_experts = plan.parameters("source"), plan.parameters("target")
    ffn = 36 * 3 * 4096 * 12288
    # 4 copies of the FFN, and a row of the router for each expert
    assert all_experts == dense + 3 * ffn + 36 * 64 * 4096
    assert plan.parameters("target", active=True) == dense + 36 * 64 * 4096


def test_a_directory_becomes_a_mixture(tmp_path, monkeypatch):
    """From disk to disk, interrupted and resumed."""
    source = dense_model("Qwen3", torch.float32)
    source.save_pretrained(tmp_path / "dense")
    how = {"to": "qwen3_moe", **sizes_of("qwen3_moe", 8, 4, 8), "num_hidden_layers": 3}
    build, calls = stream.build_tensor, []

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) > 12:
            raise KeyboardInterrupt
        return build(*args, **options)

    monkeypatch.setattr(stream, "build_tensor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        growkern.grow_checkpoint(tmp_path / "dense", tmp_path / "moe", progress=False, **how)
    monkeypatch.undo()
    report = growkern.grow_checkpoint(tmp_path / "dense", tmp_path / "moe", progress=False, **how)
    assert report.bytes_kept > 0
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "moe", output_loading_info=True
    )
    assert not any(info.values())
    assert relative_error(source.double(), eager(loaded.double())) < 1e-12
    checked = growkern.verify(tmp_path / "dense", tmp_path / "moe")
    assert checked.ok and checked.level == "exact"
    assert growkern.growth_plan_of(tmp_path / "moe").upcycling is not None


def test_moments_are_shared_by_the_experts(tmp_path):
    """Every expert sees 1 / N of the tokens, as a weight of 1 / k is given to each of k experts."""
    source, tokens = dense_model("Qwen2", torch.float32), torch.arange(40).view(2, 20)
    optimizer = torch.optim.AdamW(source.parameters(), lr=1e-3)
    source(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    names = [name for name, _ in source.named_parameters()]
    old = dict(zip(names, optimizer.state_dict()["state"].values(), strict=True))
    how = {"to": "qwen2_moe", **sizes_of("qwen2_moe", 4, 2)}
    grown = growkern.grow(source, **how)
    state = growkern.grow_optimizer(optimizer.state_dict(), grown.growth_plan)
    names = [name for name, _ in grown.named_parameters()]
    new = dict(zip(names, state["state"].values(), strict=True))
    mlp = "model.layers.1.mlp"
    for key, share in (("exp_avg", 1 / 4), ("exp_avg_sq", 1 / 16)):
        parts = [old[f"{mlp}.{part}_proj.weight"][key] for part in ("gate", "up")]
        for expert in new[f"{mlp}.experts.gate_up_proj"][key]:
            torch.testing.assert_close(expert, share * torch.cat(parts))
        down = old[f"{mlp}.down_proj.weight"][key]
        torch.testing.assert_close(new[f"{mlp}.experts.down_proj"][key][3], share * down)
        own = f"{mlp[:-3]}self_attn.q_proj.weight"
        torch.testing.assert_close(new[own][key], old[own][key])
        for made in ("gate", "shared_expert_gate", "shared_expert.down_proj"):
            assert not new[f"{mlp}.{made}.weight"][key].any()
    assert new[f"{mlp}.gate.weight"]["step"] == 0
    growkern.GrowthAdamW(grown.named_parameters(), grown.growth_plan)
    # from file to file it is the same
    source.save_pretrained(tmp_path / "dense")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    made, file = tmp_path / "moe", tmp_path / "optimizer.pt"
    growkern.grow_checkpoint(tmp_path / "dense", made, optimizer=file, progress=False, **how)
    # and by the plan of the record, which has no source
    recorded = growkern.grow_optimizer(optimizer.state_dict(), growkern.growth_plan_of(made))
    for grown in (torch.load(made / "optimizer.pt"), recorded):
        for number, entry in state["state"].items():
            assert torch.equal(entry["exp_avg_sq"], grown["state"][number]["exp_avg_sq"])


@pytest.mark.parametrize("name", ["Qwen2", "Glm4Moe"])
def test_a_mixture_whose_shared_expert_is_the_dense_ffn_goes_on(name, tmp_path):
    """Its routed experts start at zero: the dense model's optimizer knows no stacks of matrices."""
    source, tokens = dense_model(name, torch.float32), torch.arange(40).view(2, 20)
    optimizer = torch.optim.AdamW(source.parameters(), lr=1e-3)
    source(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    source.save_pretrained(tmp_path / "dense")
    file, made = tmp_path / "optimizer.pt", tmp_path / "moe"
    torch.save(optimizer.state_dict(), file)
    how = {"to": PAIRS[name][0], **sizes_of(PAIRS[name][0], 6, 2), "shared_expert": "dense"}
    growkern.grow_checkpoint(tmp_path / "dense", made, optimizer=file, progress=False, **how)
    grown = eager(transformers.AutoModelForCausalLM.from_pretrained(made))
    state, plan = torch.load(made / "optimizer.pt"), growkern.growth_plan_of(made)
    growkern.GrowthAdamW(grown.named_parameters(), plan).load_state_dict(state)
    resumed, direct = (torch.optim.AdamW(grown.parameters()) for _ in range(2))
    resumed.load_state_dict(state)
    growkern.grow_optimizer_into(grown, direct, file, plan=plan)
    for own, parameter in grown.named_parameters():
        entry = resumed.state[parameter]
        torch.testing.assert_close(direct.state[parameter], entry, rtol=0, atol=0)
        starts = own.endswith(("experts.gate_up_proj", "experts.down_proj"))
        assert entry["exp_avg"].any() or starts or "gate.weight" in own, own
        assert not (starts and entry["exp_avg"].any())
    checked = growkern.verify(tmp_path / "dense", made)
    assert checked.ok and checked.level == "exact"


# ------------------------------------------------------------------ centroids as a router


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    """A directory with a Qwen3 that does not mix tokens of three kinds, and with its centroids.

    Embeddings of a kind are close to each other, and layers add little to them.
    """
    folder = tmp_path_factory.mktemp("clustered")
    source = dense_model("Qwen3", torch.float32)
    kinds_V = torch.arange(SIZES["vocab_size"]) % 3
    with torch.no_grad():
        of_kinds = torch.randn(3, SIZES["hidden_size"], generator=torch.Generator().manual_seed(3))
        source.model.embed_tokens.weight.mul_(0.2).add_(of_kinds[kinds_V])
        for layer in source.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
    source.save_pretrained(folder / "dense")
    tokens_BS = torch.randint(
        SIZES["vocab_size"], (6, 12), generator=torch.Generator().manual_seed(4)
    )
    inputs = examples.centroids.inputs_of(source, tokens_BS.split(4))
    rows = {name: examples.centroids.rows_of(x, 3) for name, x in inputs.items()}
    save_file(rows, folder / "three.safetensors")
    return folder, source, tokens_BS, kinds_V[tokens_BS].flatten()


def inputs_of(model, tokens_BS, name):
    """What modules of this name read, in the order of the layers."""
    seen = []
    modules = [module for own, module in model.named_modules() if own.endswith(name)]
    hooks = [m.register_forward_pre_hook(lambda _, x: seen.append(x[0])) for m in modules]
    with torch.no_grad():
        model(tokens_BS)
    for hook in hooks:
        hook.remove()
    return [x.flatten(0, -2).double() for x in seen]


def test_centroids_are_those_of_the_kinds_of_inputs(clustered):
    folder, source, tokens_BS, kinds_T = clustered
    rows = load_file(folder / "three.safetensors")
    inputs = inputs_of(source, tokens_BS, "mlp.gate_proj")
    assert rows.keys() == {"layers.0", "layers.1"}
    for own_NH, x_TH in zip(rows.values(), inputs, strict=True):
        unit_TH = x_TH / x_TH.norm(dim=1, keepdim=True)
        means = torch.stack([unit_TH[kinds_T == kind].sum(0) for kind in range(3)])
        means = means / means.norm(dim=1, keepdim=True)
        wanted = means - means.mean(0)
        found = own_NH.double()
        # which cluster is the first is a matter of chance
        order = (found @ wanted.T).argmax(1)
        assert {*order.tolist()} == {0, 1, 2}
        assert torch.allclose(found / found.norm(), (wanted / wanted.norm())[order], atol=1e-5)
        logits_TN = x_TH @ own_NH.double().T
        # the scale is that of a sample
        assert 0.8 < logits_TN.square().mean() < 1.25


@pytest.mark.parametrize(
    "experts, width, more",
    [
        (3, None, {}),
        (12, 4, {"hidden_size": 20, "num_hidden_layers": 3}),
        (6, None, {"symmetry": "noise", "hidden_size": 24}),
    ],
)
def test_tokens_of_a_kind_choose_experts_of_their_own(clustered, experts, width, more):
    folder, source, tokens_BS, kinds_T = clustered
    chosen = experts // 3
    sizes = sizes_of("qwen3_moe", experts, chosen, width)
    how = {"to": "qwen3_moe", "router": folder / "three.safetensors", **sizes, **more}
    grown = growkern.grow(source, dtype=torch.float64, **how)
    assert grown.growth_plan.exact
    assert relative_error(source.double(), eager(grown)) < 1e-12
    rows = load_file(folder / "three.safetensors")["layers.0"].double()
    router = grown.model.layers[0].mlp.gate.weight
    old, new = (
        inputs_of(model, tokens_BS, "layers.0.mlp.gate" + end)[0]
        for model, end in ((source, "_proj"), (grown, ""))
    )
    logits_TN = new @ router.T
    # rows that belong together are equal, and read the stream as the dense model's do
    assert torch.equal(router, router[::chosen].repeat_interleave(chosen, 0))
    wanted = (old @ rows.T).repeat_interleave(chosen, 1)
    assert torch.allclose(logits_TN, wanted, rtol=0, atol=1e-5)
    which_T = logits_TN.argmax(1) // chosen
    assert len({*zip(which_T.tolist(), kinds_T.tolist(), strict=True)}) == 3


def test_a_file_of_centroids_is_recorded(clustered, tmp_path):
    folder, source, _, _ = clustered
    file = tmp_path / "rows.safetensors"
    file.write_bytes((folder / "three.safetensors").read_bytes())
    how = {"to": "qwen3_moe", "router": str(file), **sizes_of("qwen3_moe", 6, 2, 8)}
    growkern.grow_checkpoint(folder / "dense", tmp_path / "moe", progress=False, **how)
    state = growkern.grow(source.float(), **how).state_dict()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe").state_dict()
    assert all(torch.equal(state[name], x) for name, x in loaded.items())
    assert growkern.verify(folder / "dense", tmp_path / "moe").ok
    save_file({"layers.0": torch.ones(3, 12)}, file)
    with pytest.raises(GrowthError, match=r"rows.safetensors'.*has changed"):
        growkern.verify(folder / "dense", tmp_path / "moe")
    file.unlink()
    with pytest.raises(GrowthError, match=r"rows.safetensors'.*No such file"):
        growkern.verify(folder / "dense", tmp_path / "moe")
    # nothing else needs it
    assert growkern.growth_plan_of(tmp_path / "moe").options.router.startswith(str(file))


def test_what_does_not_fit_as_a_router_is_refused(clustered, tmp_path):
    folder, *_ = clustered
    file, other = folder / "three.safetensors", tmp_path / "other.safetensors"
    rows = load_file(file)
    wrong = [
        ({"layers.0": rows["layers.0"]}, {}, "cannot read 'layers.1'"),
        ({**rows, "layers.1": torch.ones(3, 11)}, {}, r"layers.1 .*must be \[3, 12\]"),
        ({**rows, "layers.1": torch.full((3, 12), torch.inf)}, {}, "finite"),
        (rows, {"num_experts": 4}, r"must be \[4, 12\].*4 rows"),
        (rows, {"router": "zeros"}, "router='zeros': give random, zero or a"),
        (rows, {"to": ""}, "has no effect"),
    ]
    for tensors, more, why in wrong:
        save_file(tensors, other)
        how = {"to": "qwen3_moe", **sizes_of("qwen3_moe", 3, 1), "router": other, **more}
        with pytest.raises(GrowthError, match=why):
            growkern.plan(folder / "dense", **how)


def test_a_run_file_uses_such_a_file(clustered, tmp_path):
    folder, *_ = clustered
    shutil.copytree(folder / "dense", tmp_path / "dense")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "small", "model", "grows"]
    tokenizer = transformers.BertTokenizer(vocab={w: i for i, w in enumerate(words)})
    tokenizer.save_pretrained(tmp_path / "dense")
    (tmp_path / "text.txt").write_text("a small model grows a model " * 40)
    file = tmp_path / "rows.safetensors"
    save_file({f"layers.{number}": torch.randn(2, 12) for number in range(2)}, file)
    (tmp_path / "run.toml").write_text(
        """
        [[growth]]
        source = "dense"
        to = "qwen3_moe"
        num_experts = 2
        num_experts_per_tok = 1
        router = "rows.safetensors"
        [data]
        train = ["text.txt"]
        objective = "clm"
        sequence_length = 8
        [training]
        steps = 1
        batch_size = 2
        learning_rate = 1e-3
        [output]
        directory = "out"
        """
    )
    model = build_model(resolve(load_run(tmp_path / "run.toml"), tmp_path), first_start=True)
    for number, layer in enumerate(model.model.layers):
        assert torch.equal(layer.mlp.gate.weight, load_file(file)[f"layers.{number}"])
