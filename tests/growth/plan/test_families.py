"""Every family: the grown model, saved and loaded again, computes what its source computes."""

import pytest
import torch
import transformers

import growkern
from growkern.families.table_files import supported_families
from growkern.growth.plan.tensors.tensor import build_tensor
from testbed.families import BART, MODERN, NEOX, PYTHIA, ROTARY, SQUARE, T5, WINDOW
from testbed.models import BERT, GPT2, LLAMA, random_model, relative_error
from testbed.relatives import RELATIVES

EXACT = 1e-12

ENCODER = {**BERT, "layer_norm_eps": 1e-3}


def turning(share):
    """Rotary positions for this share of every head."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    return {"rope_parameters": rope}


PHI3 = {**ROTARY, "pad_token_id": 0}
ALL_BIASES = {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True}
GROUPS = {"num_attention_heads": 10, "num_key_value_heads": 5}
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
LAYERS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "use_sliding_window": True,
}
E1 = {"hidden_size": 24, "intermediate_size": 33}
U1 = {"hidden_size": 20, "intermediate_size": 33, **GROUPS}

CASES = [
    # class, sizes, source config, growth
    ("RobertaForMaskedLM", ENCODER, {"pad_token_id": 1}, E1),
    ("RobertaForSequenceClassification", ENCODER, {"pad_token_id": 1}, E1),
    ("ElectraForMaskedLM", ENCODER, {"embedding_size": 8}, E1),
    ("ElectraForPreTraining", ENCODER, {"embedding_size": 8}, E1),
    ("ElectraForPreTraining", ENCODER, {"embedding_size": 12}, E1),
    ("ElectraForMaskedLM", ENCODER, {"embedding_size": 12}, E1),
    ("ElectraForSequenceClassification", ENCODER, {"embedding_size": 8}, E1),
    ("GPT2ForSequenceClassification", GPT2, {"pad_token_id": 0}, {"n_embd": 20}),
    ("GPT2LMHeadModel", GPT2, {"n_inner": 31}, {"n_embd": 20, "n_inner": 40}),
    ("GPT2LMHeadModel", GPT2, {"layer_norm_epsilon": 0.1}, {"n_embd": 20}),
    ("LlamaForCausalLM", LLAMA, {"mlp_bias": False, "attention_bias": False}, {"hidden_size": 24}),
    ("LlamaModel", LLAMA, {}, {"hidden_size": 18, "num_attention_heads": 6}),
    ("GPTNeoXForCausalLM", NEOX, {}, {"hidden_size": 24}),
    ("GPTNeoXForCausalLM", NEOX, TIED, {"hidden_size": 20}),
    ("GPTNeoXForCausalLM", NEOX, {"use_parallel_residual": False}, {"hidden_size": 28}),
    ("GPTNeoXForSequenceClassification", NEOX, {"pad_token_id": 0}, {"hidden_size": 20}),
    ("T5ForConditionalGeneration", T5, {}, {"d_model": 24, "d_ff": 33}),
    ("T5ForConditionalGeneration", T5, UNTIED, {"d_model": 20, "num_heads": 5, "d_ff": 33}),
    (
        "T5ForConditionalGeneration",
        T5,
        {"feed_forward_proj": "gated-gelu"},
        {"d_model": 20, "num_heads": 5, "d_ff": 33, "num_layers": 4, "num_decoder_layers": 3},
    ),
    ("T5EncoderModel", T5, {}, {"d_model": 20}),
    ("T5ForSequenceClassification", T5, {"eos_token_id": 1}, {"d_model": 20}),
    ("BartForConditionalGeneration", BART, {}, {"d_model": 24, "encoder_ffn_dim": 33}),
    ("BartForConditionalGeneration", BART, {"scale_embedding": True}, {"d_model": 24}),
    ("BartForConditionalGeneration", BART, UNTIED, {"d_model": 24}),
    ("BartForCausalLM", BART, {"scale_embedding": True}, {"d_model": 24, "decoder_ffn_dim": 33}),
    ("BartForCausalLM", BART, UNTIED, {"d_model": 36}),
    ("BartForSequenceClassification", BART, {"eos_token_id": 1}, {"d_model": 36}),
    ("ModernBertForMaskedLM", MODERN, {}, {"hidden_size": 24, "num_hidden_layers": 6}),
    ("ModernBertForMaskedLM", MODERN, ALL_BIASES, {"hidden_size": 36, "intermediate_size": 33}),
    ("ModernBertForSequenceClassification", MODERN, {}, {"hidden_size": 24}),
    ("MistralForCausalLM", ROTARY, {"sliding_window": 4}, U1),
    (
        "Qwen2ForCausalLM",
        {**SQUARE, "num_attention_heads": 6},
        LAYERS,
        {**E1, "num_hidden_layers": 4},
    ),
    ("Qwen2ForCausalLM", SQUARE, TIED, U1),
    ("Qwen3ForCausalLM", ROTARY, LAYERS, {**U1, "num_hidden_layers": 3}),
    ("Qwen3ForCausalLM", ROTARY, TIED, U1),
    ("Qwen3ForSequenceClassification", ROTARY, {"pad_token_id": 0}, U1),
    ("Gemma2ForCausalLM", ROTARY, WINDOW, {"hidden_size": 24, "num_hidden_layers": 4}),
    ("Gemma2ForCausalLM", ROTARY, WINDOW, U1),
    ("Gemma2ForCausalLM", ROTARY, {**WINDOW, **UNTIED}, U1),
    ("Gemma3ForCausalLM", ROTARY, WINDOW, {**U1, "num_hidden_layers": 3}),
    ("Olmo2ForCausalLM", SQUARE, {"attention_bias": True}, {"hidden_size": 24}),
    ("Olmo2ForCausalLM", SQUARE, TIED, {**U1, "num_hidden_layers": 3}),
    ("Phi3ForCausalLM", SQUARE, {"pad_token_id": 0}, {**U1, "num_hidden_layers": 3}),
]


def test_every_family_is_covered():
    covered = {getattr(transformers, case[0]).config_class.model_type for case in CASES}
    assert {*covered, "bert", *RELATIVES} == set(supported_families())


@pytest.mark.parametrize("class_name, sizes, config, growth", CASES)
def test_grown_saved_and_loaded_model_is_exact(tmp_path, class_name, sizes, config, growth):
    source = random_model(class_name, sizes, **config)
    grown = growkern.grow(source, depth="identity", **growth)
    plan = grown.growth_plan
    assert plan.exact or class_name.startswith("Bart"), plan.findings
    grown.save_pretrained(tmp_path)
    loaded = getattr(transformers, class_name).from_pretrained(tmp_path, dtype=torch.float64)
    loaded.growth_plan = plan
    assert relative_error(source, loaded.eval()) <= EXACT


# ------------------------------------------------------------- larger heads

# 3 heads of 8 become 3 of 11
WIDER_HEADS = {"hidden_size": 33, "num_attention_heads": 3}

HEAD_DIM = [
    ("LlamaForCausalLM", LLAMA, TIED, {"head_dim": 12, **U1}),
    ("Qwen3ForCausalLM", ROTARY, {}, {"head_dim": 12, **U1}),
    ("Gemma2ForCausalLM", ROTARY, WINDOW, {"head_dim": 8, **U1}),
    ("T5ForConditionalGeneration", T5, {}, {"d_kv": 6, "d_model": 20}),
    ("GPT2LMHeadModel", GPT2, {}, {"n_embd": 21, "n_head": 3}),
    ("GPT2LMHeadModel", GPT2, {"scale_attn_weights": False}, {"n_embd": 21, "n_head": 3}),
    ("BartForConditionalGeneration", BART, {}, {"d_model": 24, "decoder_attention_heads": 6}),
    *(
        ("GPTNeoXForCausalLM", PYTHIA, {**turning(share), **config}, growth)
        for share in (0.25, 0.5, 1.0)
        for config, growth in (
            ({}, {"hidden_size": 48, "num_attention_heads": 3}),
            ({**TIED, "attention_bias": False}, {"hidden_size": 144, "num_attention_heads": 6}),
        )
    ),
    # as many entries turn as before, and one more that does not; an odd number of them
    ("GPTNeoXForCausalLM", PYTHIA, turning(0.75), {"hidden_size": 27, "num_attention_heads": 3}),
    ("GPTNeoXForCausalLM", PYTHIA, turning(0.4), {"hidden_size": 45, "num_attention_heads": 3}),
    ("GPTNeoXForCausalLM", PYTHIA, turning(0.0), {"hidden_size": 39, "num_attention_heads": 3}),
    *(("Phi3ForCausalLM", PHI3, turning(share), {"head_dim": 8}) for share in (0.25, 0.5, 1.0)),
    # a single pair, which no base changes
    ("Phi3ForCausalLM", PHI3, turning(0.5), {"head_dim": 6}),
    ("Phi3ForCausalLM", PHI3, TIED, {"head_dim": 12, **U1}),
    ("Phi3ForSequenceClassification", SQUARE, {"pad_token_id": 0}, {"head_dim": 4}),
    # it does not obey the factor
    ("LlamaForCausalLM", LLAMA, turning(0.5), {"head_dim": 8}),
    ("Olmo2ForCausalLM", ROTARY, {"attention_bias": True}, {"head_dim": 8}),
    ("Olmo2ForCausalLM", ROTARY, TIED, {"head_dim": 12, **U1}),
    ("Olmo2ForCausalLM", SQUARE, {}, {"head_dim": 4, "num_attention_heads": 8}),
    ("BartForCausalLM", BART, {}, {"d_model": 24, "decoder_attention_heads": 6}),
]


@pytest.mark.parametrize("class_name, sizes, config, growth", HEAD_DIM)
def test_larger_heads_attend_alike(tmp_path, class_name, sizes, config, growth):
    source = random_model(class_name, sizes, **config)
    grown = growkern.grow(source, **growth)
    plan = grown.growth_plan
    assert plan.exact, plan.findings
    assert any(finding.what.startswith("head_dim") for finding in plan.findings)
    assert relative_error(source, grown) <= EXACT
    grown.save_pretrained(tmp_path)
    loaded = getattr(transformers, class_name).from_pretrained(tmp_path, dtype=torch.float64)
    loaded.growth_plan = plan
    assert relative_error(source, loaded.eval()) <= EXACT


@pytest.mark.parametrize(
    "class_name, sizes, config, growth, power",
    [
        ("LlamaForCausalLM", LLAMA, {}, {"head_dim": 6}, 6 / 4),
        ("Olmo2ForCausalLM", ROTARY, {}, {"head_dim": 6, **U1}, 6 / 4),
        ("Phi3ForCausalLM", {**PHI3, "head_dim": 8}, turning(0.5), {"head_dim": 12}, 6 / 4),
        # an odd number of turning entries has a half pair, which the model completes
        ("Phi3ForCausalLM", PHI3, turning(0.75), {"head_dim": 6}, 4 / 3),
        ("GPTNeoXForCausalLM", PYTHIA, turning(0.5), WIDER_HEADS, 5 / 4),
        ("GPTNeoXForCausalLM", PYTHIA, turning(0.75), WIDER_HEADS, 8 / 6),
    ],
)
def test_a_head_dim_that_is_no_multiple_changes_theta(class_name, sizes, config, growth, power):
    source = random_model(class_name, sizes, **config)
    grown = growkern.grow(source, **growth)
    assert grown.config.rope_parameters["rope_theta"] == pytest.approx(10000.0**power)
    assert source.config.rope_parameters["rope_theta"] == 10000.0
    assert not grown.growth_plan.exact
    # transformers computes frequencies in float32
    assert relative_error(source, grown) <= 1e-7


@pytest.mark.parametrize(
    "class_name, sizes, rope, growth, why",
    [
        ("LlamaForCausalLM", LLAMA, {"rope_type": "yarn", "factor": 2.0}, {"head_dim": 8}, "yarn"),
        ("LlamaForCausalLM", LLAMA, {"rope_type": "default"}, {"head_dim": 7}, "head_dim=6 or 8"),
        (
            "Phi3ForCausalLM",
            {**PHI3, "head_dim": 6},
            turning(0.75)["rope_parameters"],
            {"head_dim": 7},
            "6 entries that turn in pairs and 2 that do not: give a head_dim of 8",
        ),
    ],
)
def test_rotary_positions_that_head_dim_cannot_grow_with(class_name, sizes, rope, growth, why):
    source = random_model(class_name, sizes)
    source.config.rope_parameters = {"rope_theta": 10000.0, **rope}
    with pytest.raises(growkern.GrowthError, match=why):
        growkern.plan(source, **growth)


@pytest.mark.parametrize(
    "class_name, sizes, source, target",
    [
        ("GPTNeoXForCausalLM", PYTHIA, {}, {"hidden_size": 48, "rotary_pct": 0.25}),
        ("LlamaForCausalLM", LLAMA, {"rope_theta": 5e5}, {"hidden_size": 24, "rope_theta": 1e4}),
        ("MistralForCausalLM", ROTARY, {"sliding_window": None}, {"sliding_window": 4}),
        ("MistralForCausalLM", ROTARY, {"sliding_window": 4}, {"sliding_window": None}),
        ("Gemma2ForCausalLM", ROTARY, WINDOW, {"attn_logit_softcapping": None}),
        ("Gemma2ForCausalLM", ROTARY, WINDOW, {"layer_types": ["full_attention"] * 2}),
    ],
)
def test_a_target_config_that_computes_something_else_is_refused(class_name, sizes, source, target):
    source = random_model(class_name, {**sizes, **source})
    given = type(source.config)(**{**source.config.to_dict(), **target})
    if "rope_theta" in target:
        given.rope_parameters = {"rope_type": "default", "rope_theta": target["rope_theta"]}
    elif "rotary_pct" in target:
        given.rope_parameters = {**given.rope_parameters, "partial_rotary_factor": 0.25}
    given.intermediate_size *= 2
    with pytest.raises(growkern.GrowthError, match=r"target_config\."):
        growkern.plan(source, target_config=given)


@pytest.mark.parametrize("class_name", ["Olmo2ForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM"])
def test_a_head_dim_that_is_asked_for_is_that_of_the_target(class_name):
    """Also where it is what the old number of heads would make of the new width."""
    source = random_model(class_name, SQUARE, pad_token_id=0)
    old = source.config.hidden_size // source.config.num_attention_heads
    asked = {"hidden_size": 2 * source.config.hidden_size, "head_dim": 2 * old}
    for how in (asked, dict(reversed(asked.items()))):
        grown = growkern.grow(source, **how)
        assert grown.growth_plan.size_changes()["head_dim"] == (old, 2 * old)
        heads = grown.config.num_attention_heads
        shape = list(grown.model.layers[0].self_attn.o_proj.weight.shape)
        assert shape == [asked["hidden_size"], heads * 2 * old]
        assert relative_error(source, grown) <= EXACT


def test_what_follows_from_the_sizes_is_written_into_a_target_config():
    source = random_model("LlamaForCausalLM", LLAMA)
    target = type(source.config)(**{**source.config.to_dict(), "head_dim": 6})
    grown = growkern.grow(source, target_config=target)
    assert grown.config.rope_parameters["rope_theta"] == pytest.approx(1e4**1.5)
    assert relative_error(source, grown) <= 1e-8


@pytest.mark.parametrize("heads", [(6, 2), (10, 5), (12, 3), (6, 6)])
@pytest.mark.parametrize("head_dim", [4, 6, 12])
def test_norms_over_all_heads_see_the_mean_square_they_saw(heads, head_dim):
    q_heads, kv_heads = heads
    how = {"num_hidden_layers": 3, "num_attention_heads": q_heads, "head_dim": head_dim}
    source = random_model("Olmo2ForCausalLM", ROTARY)
    plan = growkern.plan(source, **how, num_key_value_heads=kv_heads)
    for space in ("q_pre", "k_pre"):
        assert plan.layout.space(space).kappa == pytest.approx(1, abs=1e-15)


def test_aki_moves_whole_larger_heads_of_a_fused_matrix():
    """Head 1 of 2, from the layer above, against that layer's own rows."""
    source = random_model(
        "GPTNeoXForCausalLM", {**PYTHIA, "num_attention_heads": 1}, **turning(0.5)
    )
    how = {"hidden_size": 96, "num_attention_heads": 2, "symmetry": "none"}
    grown = growkern.grow(source, method="aki", **how)
    fpi = growkern.grow(source, **how)
    at = "gpt_neox.layers.{}.attention.query_key_value.weight"
    new, below, above = (
        model.get_parameter(at.format(layer)).reshape(2, 144, 96)
        for model, layer in ((grown, 0), (fpi, 0), (fpi, 1))
    )
    assert torch.equal(new[0], below[0]) and torch.equal(new[1], above[1])
    assert not torch.equal(below[1], above[1])


@pytest.mark.parametrize(
    "class_name, sizes", [("LlamaForCausalLM", LLAMA), ("GPTNeoXForCausalLM", PYTHIA)]
)
def test_linear_rotary_scaling_keeps_its_frequencies(class_name, sizes):
    rope = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}
    source = random_model(class_name, sizes, rope_parameters=rope)
    for times, error in ((2, EXACT), (1.5, 1e-7)):
        growth = {"hidden_size": int(24 * times), "num_attention_heads": 3}
        if class_name == "LlamaForCausalLM":
            growth = {"head_dim": int(4 * times)}
        assert relative_error(source, growkern.grow(source, **growth)) <= error


def test_heads_grow_only_where_asked():
    bert = random_model("BertForMaskedLM", BERT)
    with pytest.raises(growkern.GrowthError, match="num_attention_heads=3 for a head_dim of 5"):
        growkern.plan(bert, hidden_size=15)
    with pytest.raises(growkern.GrowthError, match=r"; or give .*fit: hidden_size=24 or"):
        growkern.plan(random_model("GPTNeoXForCausalLM", NEOX), hidden_size=27)
    # the width of a head is a size of its own here: it stays unless it is given
    olmo = random_model("Olmo2ForCausalLM", SQUARE)
    assert growkern.plan(olmo, hidden_size=24, num_attention_heads=6).target_config.head_dim == 2


# ------------------------------------------------------- the rest of a family

# the last case of each class
EACH = {case[0]: case for case in CASES}.values()


def test_uneven_modernbert_carries_the_mean_through_its_embedding_norm():
    source = random_model("ModernBertModel", MODERN)
    coarse, fine = (
        relative_error(source, growkern.grow(source, hidden_size=20, carry=carry))
        for carry in (1e-1, 1e-2)
    )
    assert fine <= 1e-6
    assert 80 < coarse / fine < 125


@pytest.mark.parametrize("class_name", ["BertModel", "RobertaModel", "ElectraModel"])
@pytest.mark.parametrize("embedding", [8, 12])
def test_uneven_encoders_carry_the_mean(class_name, embedding):
    sizes = {**BERT, "embedding_size": embedding} if "Electra" in class_name else BERT
    source = random_model(class_name, sizes, pad_token_id=1)
    grown = growkern.grow(source, hidden_size=20, intermediate_size=40, carry=1e-2)
    assert relative_error(source, grown) <= 1e-6


def test_uneven_bart_says_what_it_cannot_carry():
    source = random_model("BartForConditionalGeneration", BART)
    grown = growkern.grow(
        source, d_model=24 - 4, decoder_attention_heads=10, encoder_attention_heads=5
    )
    assert any("no norm of bart" in finding.why for finding in grown.growth_plan.findings)
    assert 1e-4 < relative_error(source, grown) < 0.6


@pytest.mark.parametrize("class_name, sizes, config, growth", CASES)
def test_blocks_are_the_whole_bit_for_bit(class_name, sizes, config, growth):
    source = random_model(class_name, sizes, dtype=torch.float32, **config)
    plan = growkern.plan(source, method="aki", **growth)
    rng = torch.Generator().manual_seed(0)
    for task in plan.tasks:
        whole = build_tensor(plan, task)
        cuts = [sorted(torch.randint(n + 1, (2,), generator=rng).tolist()) for n in task.shape]
        part = tuple(slice(a, b) for a, b in cuts)
        assert torch.equal(build_tensor(plan, task, part=part), whole[part]), task.name
        out = torch.full_like(whole, torch.nan).t().contiguous().t()
        assert torch.equal(build_tensor(plan, task, out=out), whole)


def test_blocks_of_a_carrying_encoder_and_of_the_baselines_too():
    source = random_model("BertForMaskedLM", BERT, dtype=torch.float32)
    for method in ("fpi", "fresh", "aki", "direct_copy", "random"):
        plan = growkern.plan(source, method=method, hidden_size=20, intermediate_size=40)
        for task in plan.tasks:
            whole = build_tensor(plan, task)
            for dim, size in enumerate(task.shape):
                before, after = [slice(None)] * dim, [slice(None)] * (whole.ndim - dim - 1)
                parts = ([*before, slice(i, i + 7), *after] for i in range(0, size, 7))
                pieces = [build_tensor(plan, task, part=part) for part in parts]
                assert torch.equal(torch.cat(pieces, dim), whole), (method, task.name)


@pytest.mark.parametrize("class_name, sizes, config, growth", EACH)
def test_verify_passes_and_sees_a_wrong_tensor_of_every_kind(class_name, sizes, config, growth):
    source = random_model(class_name, sizes, dtype=torch.float32, **config)
    grown = growkern.grow(source, **growth)
    report = growkern.verify(source, grown)
    assert report.ok, report.failure
    state = grown.state_dict()
    last = {t.tensor.template: t.name for t in grown.growth_plan.tasks}
    for name in last.values():
        state[name].mul_(1.01)
    for group in growkern.verify(source, grown).groups:
        assert not group.ok or not bool(state[last[group.kind]].any()), group.kind


@pytest.mark.parametrize("class_name, sizes, config, growth", EACH)
def test_knowledge_of_the_next_layer_moves_whole_units(class_name, sizes, config, growth):
    """A source whose layers are all alike has nothing to take: AKI must then be FPI."""
    source = random_model(class_name, sizes, **config)
    first = {}
    for task in growkern.plan(source, **growth).tasks:
        if task.tensor.layer is not None:
            key = (task.tensor.stack, task.tensor.template)
            name = first.setdefault(key, task.source)
            if task.source in dict(source.named_parameters()):
                source.get_parameter(task.source).data.copy_(source.get_parameter(name).data)
    fpi, aki = (growkern.grow(source, method=m, symmetry="none", **growth) for m in ("fpi", "aki"))
    for name, value in fpi.state_dict().items():
        assert torch.equal(value, aki.state_dict()[name]), name


def test_a_decoder_alone_grows_without_an_encoder(tmp_path):
    source = random_model("BartForCausalLM", BART)
    how = {"decoder_layers": 4, "depth": "identity", "identity_gain": 1e-8}
    grown = growkern.grow(source, d_model=24, decoder_attention_heads=6, **how)
    plan = grown.growth_plan
    assert plan.exact, plan.findings
    assert relative_error(source, grown) <= EXACT
    assert not [name for name in (*plan.size_changes(), *plan.layer_maps) if "encoder" in name]
    # transformers counts the layers of the cache there
    assert grown.config.encoder_layers == 4
    grown.save_pretrained(tmp_path)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert not any(info.values()), info
    assert relative_error(source, loaded.eval()) <= EXACT


def test_sizes_of_an_encoder_that_is_not_there_do_not_matter():
    source = random_model("BartForCausalLM", BART)
    with pytest.raises(growkern.GrowthError, match=r"no size 'encoder_layers' .*'decoder_layers'"):
        growkern.plan(source, encoder_layers=4)
    other = {"encoder_layers": 7, "encoder_attention_heads": 1, "encoder_ffn_dim": 5}
    target = transformers.BartForCausalLM.config_class(**{**BART, **other}, is_decoder=True)
    target.is_encoder_decoder = False
    with pytest.raises(growkern.GrowthError, match="nothing grows: give a larger d_model"):
        growkern.plan(source, target_config=target)
    target.d_model = 24
    target.decoder_attention_heads = 12
    assert relative_error(source, growkern.grow(source, target_config=target)) <= EXACT
