"""What config.json of a grown model tells software that is older than transformers 5."""

import json

import pytest
import torch
import transformers

import growkern
from growkern.families.table_files import load_family, supported_families
from testbed.models import random_model
from testbed.relatives import RELATIVES

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
GROUPED = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {
    "factor": 4.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT_TOKENS = {**TOKENS, "cls_token_id": 1, "sep_token_id": 2}
PLAIN, TWO = ["full_attention"], ["sliding_attention", "full_attention"]


def rope(theta, kind="default", **more):
    return {"rope_type": kind, "rope_theta": theta, **more}


def kinds(full, sliding):
    return {"full_attention": full, "sliding_attention": sliding}


# class, its config in the form of transformers 5, and the keys that say the same to version 4
CASES = {
    "llama": (
        "LlamaForCausalLM",
        {**GROUPED, "rope_parameters": rope(500.0, "llama3", **LLAMA3)},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    ),
    "mistral": (
        "MistralForCausalLM",
        {**GROUPED, "rope_parameters": rope(500.0)},
        {"rope_theta": 500.0},
    ),
    "qwen2": ("Qwen2ForCausalLM", {**GROUPED, "rope_parameters": rope(5.0)}, {"rope_theta": 5.0}),
    "qwen3": (
        "Qwen3ForCausalLM",
        {**GROUPED, "head_dim": 4, "rope_parameters": rope(500.0, "linear", factor=2.0)},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "olmo2": (
        "Olmo2ForCausalLM",
        {**GROUPED, **TOKENS, "rope_parameters": rope(500.0, "linear", factor=2.0)},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {**GROUPED, **TOKENS, "rope_parameters": rope(500.0, partial_rotary_factor=0.5)},
        {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        {**SIZES, "rope_parameters": rope(500.0, partial_rotary_factor=0.5)},
        {"rotary_emb_base": 500.0, "rotary_pct": 0.5},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**GROUPED, "head_dim": 4, "query_pre_attn_scalar": 4, "rope_parameters": rope(500.0)},
        {"rope_theta": 500.0},
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {
            **GROUPED,
            "head_dim": 4,
            "query_pre_attn_scalar": 4,
            "layer_types": 2 * TWO,
            "rope_parameters": kinds(rope(500.0, "linear", factor=8.0), rope(100.0)),
        },
        {
            "rope_theta": 500.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        {
            **SIZES,
            **BERT_TOKENS,
            "layer_types": 2 * TWO[::-1],
            "rope_parameters": kinds(rope(500.0), rope(100.0)),
        },
        {"global_rope_theta": 500.0, "local_rope_theta": 100.0, "global_attn_every_n_layers": 2},
    ),
}


def read(directory):
    return json.loads((directory / "config.json").read_text())


def edited(directory, *removed, **keys):
    """Change a config.json as an older version, or a person, would have written it."""
    config = {k: v for k, v in {**read(directory), **keys}.items() if k not in removed}
    (directory / "config.json").write_text(json.dumps(config))
    return config


def saved(class_name, config, directory):
    model = random_model(class_name, {}, dtype=torch.float32, **config)
    model.save_pretrained(directory)
    return model


@torch.no_grad()
def logits(model):
    ids = torch.arange(3, 51).reshape(2, 24)
    return model.eval()(input_ids=ids).logits


def test_every_family_with_rotary_positions_has_a_case():
    rotary = {n for n in supported_families() if load_family(n).attention.positions == "rotary"}
    assert rotary == {*CASES, *(n for n in RELATIVES if n in rotary)}
    # their frequencies are no option, or never had another form, or the older form would win
    without = {"dinov3_vit", "esm", "gptj", "roformer", "gemma4", "gemma4_text", "cohere2_moe"}
    without |= {"t5gemma"}
    assert {name for name in rotary if not load_family(name).older} == without


@pytest.mark.parametrize("family", CASES)
def test_older_keys_stand_beside_the_new_ones(family, tmp_path):
    class_name, config, older = CASES[family]
    model = saved(class_name, config, tmp_path / "small")
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "disk", hidden_size=32, progress=False)
    growkern.grow(model, hidden_size=32).save_pretrained(tmp_path / "memory")
    found = read(tmp_path / "disk")
    assert {key: found.get(key) for key in older} == older
    assert found["rope_parameters"] == read(tmp_path / "small")["rope_parameters"]
    assert found == read(tmp_path / "memory")
    again = type(model).from_pretrained(tmp_path / "disk")
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", CASES)
def test_a_source_of_version_4_stays_one(family, tmp_path):
    """Its config has the older keys alone, which transformers 5 drops when it reads them."""
    class_name, config, older = CASES[family]
    model = saved(class_name, config, tmp_path / "small")
    new_form = ("rope_parameters", "dtype", "layer_types", "_sliding_window_pattern")
    old = {**older, "torch_dtype": "float32", "rope_scaling": older.get("rope_scaling")}
    given = edited(tmp_path / "small", *new_form, **old, their_own_key=[1, {"a": 1.0}])
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "disk", hidden_size=32, progress=False)
    growkern.grow(tmp_path / "small", hidden_size=32).save_pretrained(tmp_path / "memory")
    assert (tmp_path / "disk/config.json").read_text() == (
        tmp_path / "memory/config.json"
    ).read_text()
    found = read(tmp_path / "disk")
    sizes = {*growkern.plan(tmp_path / "small", hidden_size=32).size_changes()}
    for key in given.keys() - sizes - {"transformers_version"}:
        assert found[key] == given[key], key
        assert type(found[key]) is type(given[key]), key
    again = type(model).from_pretrained(tmp_path / "disk")
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-3, atol=1e-3)


def test_a_theta_that_grows_grows_in_both_forms(tmp_path):
    saved(*CASES["qwen3"][:2], tmp_path / "small")
    edited(tmp_path / "small", "rope_parameters", rope_theta=500, rope_scaling=None)
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "big", head_dim=6, progress=False)
    found = read(tmp_path / "big")
    assert found["rope_theta"] == found["rope_parameters"]["rope_theta"] == 500**1.5
    assert found["rope_scaling"] is None


def test_keys_that_transformers_reads_otherwise_stay(tmp_path):
    """It makes `sliding_window` null without `use_sliding_window`; `null` follows from sizes."""
    config = {**GROUPED, "rope_parameters": rope(500.0)}
    saved("LlamaForCausalLM", config, tmp_path / "llama")
    saved("Qwen2ForCausalLM", config, tmp_path / "qwen2")
    edited(tmp_path / "llama", head_dim=None)
    edited(tmp_path / "qwen2", sliding_window=131072, use_sliding_window=False)
    for name in ("llama", "qwen2"):
        how = {"hidden_size": 24, "num_attention_heads": 4, "progress": False}
        growkern.grow_checkpoint(tmp_path / name, tmp_path / f"{name}-big", **how)
    assert read(tmp_path / "qwen2-big")["sliding_window"] == 131072
    assert read(tmp_path / "llama-big")["head_dim"] == 4
    assert growkern.verify(tmp_path / "llama", tmp_path / "llama-big").ok


def test_another_name_of_a_size_follows_it(tmp_path):
    """`num_hidden_layers` of BART means `encoder_layers`, and would set it when it is read."""
    sizes = {"vocab_size": 60, "d_model": 16, "max_position_embeddings": 32}
    sizes |= {f"{x}_{y}": 2 for x in ("encoder", "decoder") for y in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    saved("BartForConditionalGeneration", sizes, tmp_path / "small")
    edited(tmp_path / "small", num_hidden_layers=2, torch_dtype="float32")
    how = {"encoder_layers": 3, "decoder_layers": 4, "dtype": torch.bfloat16}
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "big", progress=False, **how)
    found = read(tmp_path / "big")
    assert (found["num_hidden_layers"], found["encoder_layers"]) == (3, 3)
    assert (found["torch_dtype"], found["dtype"]) == ("bfloat16", "bfloat16")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "big")
    assert (config.encoder_layers, config.decoder_layers) == (3, 4)


def test_a_config_that_was_edited_since_is_saved_as_it_is(tmp_path):
    """The older keys are those of the config that is saved, not of the growth."""
    class_name, config, _ = CASES["llama"]
    model = saved(class_name, config, tmp_path / "small")
    for source in (model, tmp_path / "small"):
        grown = growkern.grow(source, hidden_size=32)
        grown.config.rope_parameters = rope(900.0)
        grown.save_pretrained(tmp_path / "big")
        found = read(tmp_path / "big")
        assert found["rope_theta"] == 900.0
        assert "rope_scaling" not in found
        again = transformers.AutoConfig.from_pretrained(tmp_path / "big")
        assert again.rope_parameters == rope(900.0)


# class, key, kinds of 6 layers, key of the source, layers of the target, key of the target
SIX = {**GROUPED, "num_hidden_layers": 6, "head_dim": 4}
EVERY_3 = ["sliding_attention"] * 2 + PLAIN
DENSE_FIRST = ["dense", "dense", "sparse"]
PATTERNS = {
    "gemma3 repeated": ("Gemma3ForCausalLM", "sliding_window_pattern", EVERY_3 * 2, 3, 11, None),
    "gemma3 in its first period": (
        "Gemma3ForCausalLM", "sliding_window_pattern", ["sliding_attention"] * 5 + PLAIN, 6, 7, 7,
    ),
    "gemma3 hidden": ("Gemma3ForCausalLM", "_sliding_window_pattern", EVERY_3 * 2, 3, 9, 3),
    "modernbert": (
        "ModernBertForMaskedLM", "global_attn_every_n_layers", (PLAIN + TWO[:1]) * 3, 2, 9, None,
    ),
    "modernbert all full": (
        "ModernBertForMaskedLM", "global_attn_every_n_layers", PLAIN * 6, 1, 9, 1,
    ),
    "olmo3": ("Olmo3ForCausalLM", "sliding_window_pattern", TWO[:1] * 5 + PLAIN, 6, 7, 7),
    "smollm3": ("SmolLM3ForCausalLM", "no_rope_layer_interval", [1] * 5 + [0], 6, 7, 7),
    "smollm3 repeated": (
        "SmolLM3ForCausalLM", "no_rope_layer_interval", [1, 1, 0] * 2, 3, 9, 3,
    ),
    "qwen2": ("Qwen2ForCausalLM", "max_window_layers", PLAIN * 3 + TWO[:1] * 3, 3, 8, 4),
    "qwen3": ("Qwen3ForCausalLM", "max_window_layers", PLAIN * 6, 6, 8, 8),
}  # fmt: skip


@pytest.mark.parametrize("case", PATTERNS)
def test_patterns_of_layers_follow_layer_types_or_go(case, tmp_path):
    class_name, key, layers, now, count, then = PATTERNS[case]
    config = {**SIX, "no_rope_layers" if 0 in layers else "layer_types": layers}
    if class_name.startswith("Smol"):
        config["pad_token_id"] = 0
    if class_name.startswith("Qwen"):
        config |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": now}
    if class_name.startswith("Modern"):
        config |= BERT_TOKENS
        del config["num_key_value_heads"], config["head_dim"]
    model = saved(class_name, config, tmp_path / "small")
    edited(tmp_path / "small", **{key: now})
    how = {"num_hidden_layers": count}
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "disk", progress=False, **how)
    growkern.grow(model, **how).save_pretrained(tmp_path / "memory")
    for place in ("disk", "memory"):
        assert read(tmp_path / place).get(key) == then
    again = type(model).from_pretrained(tmp_path / "disk")
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-3, atol=1e-3)


# family, key, what it counts, kinds of layers; key of the source, and of targets by their layers
COUNTS = [
    *(
        (name, "first_k_dense_replace", "mlp_layer_types", DENSE_FIRST, 2, {5: 4, 6: 4})
        for name in ("exaone_moe", "glm4_moe_lite", "hy_v3")
    ),
    ("exaone_moe", "first_k_dense_replace", "mlp_layer_types", DENSE_FIRST[::-1], 1, {5: None}),
    ("llama4_text", "no_rope_layer_interval", "no_rope_layers", [1, 0] * 2, 2, {8: 2, 9: None}),
]


@pytest.mark.parametrize("name, key, field, kinds, now, then", COUNTS)
def test_a_superseded_field_says_the_same(name, key, field, kinds, now, then, tmp_path):
    class_name, sizes, _ = RELATIVES[name]
    sizes = {**sizes, field: kinds, "num_hidden_layers": len(kinds)}
    if "layer_types" in sizes:
        sizes["layer_types"] = PLAIN * len(kinds)
    model = random_model(class_name, sizes)
    model.save_pretrained(tmp_path / "small")
    edited(tmp_path / "small", **{key: now})
    for count, expected in then.items():
        how = {"num_hidden_layers": count}
        growkern.grow_checkpoint(tmp_path / "small", tmp_path / str(count), progress=False, **how)
        growkern.grow(model, **how).save_pretrained(tmp_path / f"{count} in memory")
        for place in (str(count), f"{count} in memory"):
            config = read(tmp_path / place)
            assert config[field] != kinds and config.get(key) == expected, (count, place)
