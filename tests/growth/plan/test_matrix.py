"""Every family against every row of what is exact, written to disk, loaded and run by Hugging Face.

One test per row: widths with tied and untied heads, under every way to break symmetry and with
identity blocks; every head that rides on a body; larger heads; regrouped keys; vocabularies;
bfloat16. Everything goes through `grow_checkpoint` and `from_pretrained`.
"""

import math

import pytest
import torch
import transformers

import growkern
from growkern.families.model import ModelSpec
from growkern.families.table_files import load_family, supported_families
from testbed.families import FAMILIES
from testbed.models import GPT2, LLAMA, as_stored, eager, outputs, random_model, relative_error
from testbed.relatives import RELATIVES

EXACT = 1e-12

GROUPED_QUERIES = [m for m in FAMILIES if "kv_heads" in load_family(m).config]
# sizes that are not multiples are exact under RMSNorm, and under LayerNorm before blocks
ANY_WIDTH = [
    m
    for m in FAMILIES
    if (norm := load_family(m).norm).kind == "rmsnorm"
    or (norm.placement == "pre" and not load_family(m).carries)
]
WIDTHS = [(m, "even") for m in FAMILIES] + [(m, "uneven") for m in ANY_WIDTH]


def width(model_type, kind):
    """The target sizes of one family: twice the hidden size, or 5/3 of it."""
    family = load_family(model_type)
    if kind == "even":
        return {family.config_field("stream"): 24}
    sizes = {family.config_field("stream"): 20, family.config_field("ffn"): 33}
    if model_type == "t5":
        return {**sizes, "num_heads": 5}
    if model_type in GROUPED_QUERIES:
        sizes |= {"num_attention_heads": 10, "num_key_value_heads": 5}
    return sizes


def deeper(model_type):
    """One layer more in every stack, as identity blocks."""
    family = load_family(model_type)
    class_name, sizes = FAMILIES[model_type]
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = ModelSpec(family, config, class_name)
    sizes = {family.config_field(key): model.size(key) + 1 for key in family.stacks.values()}
    return {**sizes, "depth": "identity"}


def grown_on_disk(directory, source, how, loader=None):
    """The source, saved, grown there, and loaded without a tensor too many or too few."""
    source.save_pretrained(directory / "small")
    small, large = directory / "small", directory / "large"
    report = growkern.grow_checkpoint(small, large, progress=False, **how)
    loader = loader or type(source)
    loaded, info = loader.from_pretrained(large, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    loaded.growth_plan = report.plan
    return eager(as_stored(loaded, large).eval())


def test_every_family_has_its_row():
    assert FAMILIES.keys() | RELATIVES.keys() == set(supported_families())


# Both heads and every way to break symmetry for every family, the default at each kind of width.
PAIRS = {
    "even": [(True, "routing"), (False, "noise")],
    "uneven": [(True, "split"), (False, "routing")],
}


@pytest.mark.parametrize(
    "model_type, kind, tied, symmetry",
    [(model_type, kind, *pair) for model_type, kind in WIDTHS for pair in PAIRS[kind]],
)
def test_width_and_identity_depth_are_exact(model_type, kind, tied, symmetry, tmp_path):
    class_name, sizes = FAMILIES[model_type]
    source = random_model(class_name, sizes, tie_word_embeddings=tied)
    how = {**width(model_type, kind), **deeper(model_type), "symmetry": symmetry}
    if load_family(model_type).norm.placement == "post":
        # with the default of 1, inserted blocks are exact up to the norms' eps
        how["identity_gain"] = 1e-8
    grown = grown_on_disk(tmp_path, source, how)
    assert grown.growth_plan.exact, grown.growth_plan.findings
    assert grown.config.tie_word_embeddings == source.config.tie_word_embeddings
    assert relative_error(source, grown) <= EXACT


HEADS = [(m, name) for m in FAMILIES for name in load_family(m).classes if name != FAMILIES[m][0]]


@pytest.mark.parametrize("model_type, class_name", HEADS)
def test_every_head_on_a_known_body_is_exact(model_type, class_name, tmp_path):
    source = random_model(class_name, FAMILIES[model_type][1])
    is_body = not load_family(model_type).classes[class_name].heads
    loader = transformers.AutoModel if is_body and class_name != "T5EncoderModel" else None
    grown = grown_on_disk(tmp_path, source, width(model_type, "even"), loader)
    assert grown.growth_plan.exact, grown.growth_plan.findings
    assert type(grown) is type(source)
    assert relative_error(source, grown) <= EXACT
    report = growkern.verify(tmp_path / "small", tmp_path / "large")
    assert report.ok, report.failure


LAYOUTS = [(12, 4), (12, 2), (12, 3), (10, 5), (6, 6)]


# each layout for every second family
@pytest.mark.parametrize(
    "model_type, q_heads, kv_heads",
    [(m, *how) for i, m in enumerate(GROUPED_QUERIES) for how in LAYOUTS[i % 2 :: 2]],
)
def test_query_groups_become_any_consistent_layout(model_type, q_heads, kv_heads, tmp_path):
    class_name, sizes = FAMILIES[model_type]
    source = random_model(class_name, sizes)
    how = {"num_attention_heads": q_heads, "num_key_value_heads": kv_heads}
    # classes that derive head_dim, and those that want a multiple of the heads
    head_dim = 2 if ModelSpec.of(source.config, class_name).head_dim() == 2 else 5
    how["hidden_size"] = head_dim * q_heads
    grown = grown_on_disk(tmp_path, source, how)
    assert relative_error(source, grown) <= EXACT


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_vocabulary_padded_to_a_multiple_keeps_the_old_logits(model_type, tmp_path):
    class_name, sizes = FAMILIES[model_type]
    source = random_model(class_name, sizes)
    grown = grown_on_disk(tmp_path, source, {"vocab_size": 64})
    old, new = (outputs(model)["logits"] for model in (source, grown))
    assert new.shape[-1] == 64
    assert ((new[..., :50] - old).abs().max() / old.abs().max()).item() <= EXACT
    # by Jensen: a new logit is at most the mean of the old ones, which take 1/50 of the mass each
    rise = new.logsumexp(-1) - old.logsumexp(-1)
    assert rise.min().item() > 0 and rise.max().item() <= math.log1p(14 / 50)


def error_of_bfloat16(directory, model_type, how, **config):
    """Of weights of bfloat16 in float64, and whether the plan calls them exact."""
    class_name, sizes = FAMILIES[model_type]
    source = random_model(class_name, sizes, dtype=torch.bfloat16, **config)
    grown = grown_on_disk(directory, source, how)
    assert grown.dtype == torch.bfloat16
    small, large = (
        type(source).from_pretrained(directory / name, dtype=torch.float64).eval()
        for name in ("small", "large")
    )
    return relative_error(small, large), grown.growth_plan.exact


# one of the four ways for each family, another for the next one
WAYS = ("routing", "none", "noise", "split")


@pytest.mark.parametrize("model_type, symmetry", [(m, WAYS[i % 4]) for i, m in enumerate(FAMILIES)])
def test_powers_of_two_round_no_bfloat16(model_type, symmetry, tmp_path):
    """No sum of copies is off by a bit, where the hidden size is four times the source's.

    Its root, by which some families multiply, is then twice the source's.
    """
    # norms of 1 + weight cannot be halved without rounding, which a tied head asks for
    tied = {"tie_word_embeddings": False} if "gemma" in model_type else {}
    family = load_family(model_type)
    how = {family.config_field("stream"): 48, "symmetry": symmetry}
    if family.norm.centres or family.norm.plus_one:
        # a padded stream has means, which are rounded, and norms of half the weight
        how["stream"] = "copies"
    error, exact = error_of_bfloat16(tmp_path, model_type, how, **tied)
    assert exact and error <= EXACT


@pytest.mark.parametrize("symmetry", ["noise", "none"])
@pytest.mark.parametrize(
    "model_type, how",
    [
        ("gemma2", {"hidden_size": 48}),
        ("gemma3_text", {"hidden_size": 48}),
        ("t5", {"d_model": 24}),
        ("bert", {"hidden_size": 24, "intermediate_size": 60}),
        ("bert", {"hidden_size": 36}),
        ("gpt2", {"n_embd": 20}),
        ("llama", {"head_dim": 8}),
        ("llama", {"hidden_size": 20, "num_attention_heads": 10, "num_key_value_heads": 5}),
    ],
)
def test_other_shares_round_bfloat16_and_the_plan_says_so(model_type, how, symmetry, tmp_path):
    error, exact = error_of_bfloat16(tmp_path, model_type, {**how, "symmetry": symmetry})
    assert not exact and (error > EXACT or model_type == "gemma2")


@pytest.mark.parametrize("symmetry", ["routing", "noise", "split", "none"])
def test_float16_has_numbers_too_small_to_halve(symmetry):
    source = random_model("GPT2LMHeadModel", GPT2, dtype=torch.float64)
    for parameter in source.parameters():
        parameter.data *= 1e-3
    source = source.half()
    grown = growkern.grow(source, n_embd=48, symmetry=symmetry, stream="copies")
    is_exact = relative_error(source.double(), grown.double()) <= EXACT
    assert is_exact == grown.growth_plan.exact == (symmetry in ("routing", "split"))


def test_llama3_frequencies_stay_with_larger_heads(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 32}
    source = random_model("LlamaForCausalLM", LLAMA, rope_parameters=rope)
    assert relative_error(source, grown_on_disk(tmp_path, source, {"head_dim": 8})) <= EXACT


@pytest.mark.parametrize(
    "model_type", [m for m in FAMILIES if "layer_types" in load_family(m).per_layer]
)
def test_lists_with_one_entry_per_layer_follow_their_layers(model_type, tmp_path):
    class_name, sizes = FAMILIES[model_type]
    source = random_model(class_name, {**sizes, "num_hidden_layers": 4})
    kinds = source.config.layer_types = ["sliding_attention", *["full_attention"] * 3]
    how = {"num_hidden_layers": 6, "depth": "interleave"}
    grown = grown_on_disk(tmp_path, source, how)
    assert grown.config.layer_types == [kinds[layer * 4 // 6] for layer in range(6)]


def test_lists_that_transformers_does_not_know_follow_too(tmp_path):
    # MLX reads `is_moe_layer`; a list of another length is none of layers
    own = {"is_moe_layer": [0, 1, 0, 1], "block": [1, 2, 3], "num_hidden_layers": 4}
    source = random_model("LlamaForCausalLM", {**LLAMA, **own})
    how = {"num_hidden_layers": 6, "depth": "interleave"}
    grown = grown_on_disk(tmp_path, source, how).config
    assert (grown.is_moe_layer, grown.block) == ([0, 0, 1, 0, 0, 1], [1, 2, 3])


def test_numbers_of_layers_that_are_not_given_stay_so():
    # other software reads an empty list as a model without attention
    class_name, sizes, *_ = RELATIVES["lfm2"]
    source = random_model(class_name, sizes)
    assert source.config.full_attn_idxs is None
    for numbers in (None, [0]):
        source.config.full_attn_idxs = numbers
        large = growkern.plan(source, num_hidden_layers=6, depth="stack").large.config
        assert large.full_attn_idxs == (None if numbers is None else [0, 3])
