"""What plans say of other runtimes, and growth that avoids what they get wrong."""

import copy
import math

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from torch import nn
from transformers.pytorch_utils import Conv1D

import growkern
from growkern.families.table_files import load_family, supported_families
from testbed.families import FAMILIES
from testbed.models import GROUPED, Float64Everywhere, outputs, random_model

SIZES = {**GROUPED, "hidden_size": 32, "num_hidden_layers": 6}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
# the config class does not declare it, but all runtimes that know the family read it
READ = {
    *("apertus", "ernie4_5_moe", "exaone4", "exaone_moe", "glm4_moe", "granite", "nanochat"),
    *("dots1", "qwen3_moe", "smollm3"),
}
EVERY_3 = ["sliding_attention"] * 2 + ["full_attention"]


def model(name, dtype=torch.float64, **config):
    more = GEMMA if name.startswith("Gemma") else {}
    return random_model(name, {**SIZES, **more}, dtype=dtype, **config)


def lines(source, **how):
    return growkern.plan(source, **how).portability()


def said(source, word, **how):
    return [line for line in lines(source, **how) if word in line]


def computing_head_dim(grown):
    """What vLLM runs: the same weights, with heads of hidden_size / num_attention_heads."""
    config = copy.deepcopy(grown.config)
    vars(config).pop("head_dim", None)
    other = type(grown)._from_config(config, dtype=torch.float64).eval()
    other.load_state_dict(grown.state_dict())
    return other


def differ(a, b):
    with Float64Everywhere():
        a, b = outputs(a), outputs(b)
    return max((a[k] - b[k]).abs().max().item() / b[k].abs().max().item() for k in b)


def test_undeclared_families_are_those_whose_config_class_has_no_head_dim():
    for name in supported_families():
        family = load_family(name)
        # that of a wrapped model is of another family
        if (
            family.under is None
            and "head_dim" in family.config
            and family.config["head_dim"].field == "head_dim"
        ):
            fields = transformers.CONFIG_MAPPING[name].__dataclass_fields__
            is_computed = "head_dim" not in fields and name not in READ
            assert bool(family.runtimes.get("head_dim")) == is_computed, name


@pytest.mark.parametrize(
    ("name", "runtimes"),
    [
        ("Qwen2ForCausalLM", "vLLM gives"),
        ("Olmo2ForCausalLM", "vLLM and SGLang give"),
        ("Phi3ForCausalLM", "llama.cpp gives"),
    ],
)
def test_a_head_dim_that_runtimes_compute_is_said(name, runtimes):
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    source = model(name, **tokens)
    (line,) = said(source, "head_dim", head_dim=16)
    assert runtimes in line
    assert "head_dim=16 is not hidden_size=32 / num_attention_heads=4" in line
    assert "--portable" in line
    # an uneven width cannot keep head_dim with whole heads
    assert said(source, "head_dim", hidden_size=36)
    assert not lines(source, hidden_size=64)
    with pytest.raises(growkern.GrowthError, match=r"head_dim=8 is not hidden_size=36 / num_att"):
        growkern.plan(source, hidden_size=36, portable=True)


@pytest.mark.parametrize(
    ("name", "width", "said_of_it"),
    [
        ("Qwen3ForCausalLM", 64, None),
        (
            "Qwen3ForCausalLM",
            50,
            "num_attention_heads=4, num_key_value_heads=2 stay: to grow them, give "
            "--num-attention-heads --num-key-value-heads; heads follow where hidden_size is "
            "48 or 56",
        ),
        ("MixtralForCausalLM", 64, "intermediate_size=24 stay: to grow them, give --intermediate"),
    ],
)
def test_sizes_that_do_not_follow_are_said(name, width, said_of_it):
    found = said(model(name), "hidden_size grows, and", hidden_size=width)
    assert [said_of_it in line for line in found] == ([True] if said_of_it else [])


def test_a_plan_says_that_code_of_a_model_is_not_run():
    source = model("LlamaForCausalLM")
    source.config.auto_map = {"AutoModelForCausalLM": "modeling_mine.Mine"}
    (line,) = said(source, "auto_map", num_hidden_layers=7)
    assert "does not run it" in line and "llama" in line


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"])
def test_families_that_declare_head_dim_are_left_alone(name):
    source = model(name, head_dim=8)
    assert not lines(source, head_dim=16)
    assert not lines(source, head_dim=16, portable=True)


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [
        ({"hidden_size": 64}, 8),
        ({"hidden_size": 48, "num_hidden_layers": 7}, 6),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}, 4),
    ],
)
def test_portable_keeps_what_runtimes_compute(sizes, heads):
    source = model("Qwen2ForCausalLM")
    grown = growkern.grow(source, portable=True, **sizes)
    assert grown.config.num_attention_heads == heads
    assert grown.config.rope_parameters == source.config.rope_parameters
    assert differ(computing_head_dim(grown), source) < 1e-12


@pytest.mark.parametrize(("small", "large"), [(4, 8), (4, 12), (2, 6), (6, 12)])
def test_whole_steps_of_pairs_leave_theta(small, large):
    """Every pair of the source turns as fast as one of the target."""
    plan = growkern.plan(model("LlamaForCausalLM", head_dim=small), head_dim=large)
    before, after = (config.rope_parameters for config in (plan.small.config, plan.large.config))
    assert before == after


def test_portable_refuses_another_theta():
    for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"):
        with pytest.raises(growkern.GrowthError, match="would change rope_theta"):
            growkern.plan(model(name, head_dim=8), head_dim=12, portable=True)


# class, config, layers of the target
PERIODS = [
    ("Gemma2ForCausalLM", {}, 8),
    ("Gemma3ForCausalLM", {"layer_types": EVERY_3 * 2}, 9),
    ("Gemma3ForCausalLM", {"num_hidden_layers": 7}, 13),
    ("ModernBertForMaskedLM", {}, 9),
    # one period is enough in a family that other software knows
    ("Cohere2ForCausalLM", {"num_hidden_layers": 4, "sliding_window": 4}, 8),
    # no runtime computes the kinds of its layers
    ("Olmo3ForCausalLM", {"layer_types": EVERY_3 * 2, "sliding_window": 4}, 9),
]


@pytest.mark.parametrize(("name", "config", "layers"), PERIODS)
@pytest.mark.parametrize("depth", ["identity", "stack"])
def test_whole_periods_are_added_where_they_fit(name, config, layers, depth):
    if name.startswith("Modern"):
        config = {**config, **dict.fromkeys(("pad_token_id", "eos_token_id"), 1)}
        config |= dict.fromkeys(("bos_token_id", "cls_token_id", "sep_token_id"), 2)
        config |= {"num_key_value_heads": None}
    source = model(name, **config)
    periods = {"Gemma2ForCausalLM": 2, "ModernBertForMaskedLM": 3, "Cohere2ForCausalLM": 4}
    period = periods.get(name)
    period = period or (3 if "layer_types" in config else 6)
    how = {"num_hidden_layers": layers, "depth": depth}
    if depth == "identity":
        (line,) = said(source, "no longer repeats", num_hidden_layers=layers + 1)
        depths = f"num_hidden_layers={layers} or {layers + period}"
        assert line.endswith(f"; {depths} adds whole periods")
    grown = growkern.grow(source, **how)
    old, new = source.config.layer_types, grown.config.layer_types
    assert new == [old[i % period] for i in range(layers)]
    assert not said(source, "no longer repeats", **how)
    plan = grown.growth_plan
    assert set(plan.layer_maps[""]) == set(range(source.config.num_hidden_layers))
    if depth == "identity":
        assert plan.exact
        assert len(plan.inserted) == layers - source.config.num_hidden_layers
        assert differ(grown, source) < 1e-12
    with pytest.raises(growkern.GrowthError, match=f"repeat every {period}, so portable=True tak"):
        growkern.plan(source, portable=True, num_hidden_layers=layers + 1)


def test_a_period_that_is_not_over_cannot_be_repeated():
    source = model("Gemma3ForCausalLM", num_hidden_layers=4)
    with pytest.raises(growkern.GrowthError, match="less than one period of 6 layers"):
        growkern.plan(source, num_hidden_layers=10, portable=True)


def test_gemmas_scale_is_said_and_folded():
    source = model("Gemma2ForCausalLM", torch.bfloat16)
    (line,) = said(source, "query_pre_attn_scalar", head_dim=16)
    assert "query_pre_attn_scalar=8 is not head_dim=16: llama.cpp gives wrong outputs" in line
    plan = growkern.plan(source, head_dim=16, portable=True)
    assert plan.target_config.query_pre_attn_scalar == 16
    assert not plan.exact  # the weights of the queries are rounded
    assert not said(model("Gemma2ForCausalLM"), "is not head_dim", head_dim=16)


def test_a_larger_vocabulary_may_need_a_larger_tokenizer():
    source = model("LlamaForCausalLM")
    line, new = lines(source, vocab_size=64)
    assert "rows from 50 on are new" in new and "untrained" in new
    assert line.startswith("if the tokenizer has fewer than 64 tokens, add")
    assert not lines(source, hidden_size=64)


def test_portable_is_recorded(tmp_path):
    source = model("Gemma3ForCausalLM", torch.float32, layer_types=EVERY_3 * 2)
    source.save_pretrained(tmp_path / "small")
    how = {"num_hidden_layers": 9, "portable": True, "progress": False}
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "big", **how)
    assert growkern.verify(tmp_path / "small", tmp_path / "big").ok


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("Qwen3_5ForCausalLM", "mtp_num_hidden_layers"),
        ("Qwen3_5ForCausalLM", "num_nextn_predict_layers"),
    ],
)
def test_layers_that_are_left_out_are_not_counted(name, field):
    """Other software would look for their weights."""
    source = model(name, **{field: 1}, head_dim=8, num_hidden_layers=4)
    assert said(source, "second token", hidden_size=48) == [
        "layers that predict a second token are left out, as the model's class does not load them: "
        f"{field} 1 -> 0 in config.json"
    ]
    grown = growkern.grow(source, hidden_size=48)
    assert getattr(grown.config, field) == 0
    assert getattr(source.config, field) == 1
    assert not said(grown, "second token", hidden_size=64)


@torch.no_grad()
def test_runtimes_that_do_not_renormalise_experts_are_named_where_they_are_wrong():
    dense, how = model("Qwen2ForCausalLM"), {"num_experts": 4, "num_experts_per_tok": 2}
    grown = growkern.grow(dense, to="qwen2_moe", **how)
    elsewhere = copy.deepcopy(grown)
    for module in elsewhere.modules():
        if hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = False
    assert differ(grown, dense) < 1e-12
    assert differ(elsewhere, dense) > 1e-2
    for source in (dense, grown):
        sizes = {"to": "qwen2_moe", **how} if source is dense else {"hidden_size": 64}
        (line,) = said(source, "norm_topk_prob", **sizes)
        assert "llama.cpp" in line and "MLX" in line
    free = {"to": "qwen2_moe", **how, "norm_topk_prob": False}
    assert not said(dense, "norm_topk_prob", **free)
    # which read the field
    other = model("Qwen3ForCausalLM", head_dim=8)
    assert not said(other, "norm_topk_prob", to="qwen3_moe", **how)


# ------------------------------------------------------------------ what sizes divide by

LAYERS = {"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 64}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
MOE = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}


def empty(class_name, **sizes):
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        return model_class(model_class.config_class(**sizes))


def matrices(model):
    """The (inputs, outputs) of the matrices in the layers of a model."""
    for name, module in model.named_modules():
        if not any(part.isdigit() for part in name.split(".")):
            continue
        if isinstance(module, nn.Linear):
            yield module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            yield module.nx, module.nf


@pytest.mark.parametrize("name", ["bert", "gpt2", "gemma2", "llama", "olmo2", "phi3", "t5"])
def test_blocks_and_groups_are_those_of_the_matrices(name):
    model = empty(FAMILIES[name][0], **FAMILIES[name][1])
    found = [*matrices(model)]
    divides = growkern.plan(model, vocab_size=64).divides()
    assert divides["fp8_block"] == (math.gcd(128, *(n for pair in found for n in pair)),) * 2
    assert divides["group_size"] == (math.gcd(256, *(n for n, _ in found)),) * 2


KEYS = {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 10}
LOST = (
    "no tensor parallel 4, 8, which the source's sizes allow: make num_key_value_heads divide by 8"
)
ODD = {"hidden_size": 5000, "intermediate_size": 17501, "head_dim": 128}


@pytest.mark.parametrize(
    ("sizes", "expected", "to_blame"),
    [
        ({"num_hidden_layers": 3}, (8, 128, 256), ()),
        ({"intermediate_size": 28672}, (8, 128, 256), ()),
        (KEYS, (10, 128, 256), [LOST]),
        (ODD, (1, 1, 1), ["intermediate_size divide by 8", "hidden_size", "hidden_size"]),
    ],
)
def test_a_llama_of_8b_is_warned_of_sizes_that_divide_by_less(sizes, expected, to_blame):
    source = empty("LlamaForCausalLM", **LLAMA_8B, **LAYERS, num_key_value_heads=8)
    plan = growkern.plan(source, **sizes)
    kinds = ("tensor_parallel", "fp8_block", "group_size")
    pairs = zip((8, 128, 256), expected, strict=True)
    assert plan.divides() == {**dict(zip(kinds, pairs, strict=True)), "vocabulary": (512, 512)}
    warnings = [line for line in plan.portability() if "the source's sizes allow" in line]
    assert len(warnings) == len(to_blame)
    assert all(words in line for words, line in zip(to_blame, warnings, strict=True))
    odd = growkern.plan(source, vocab_size=source.config.vocab_size + 8)
    assert odd.divides()["vocabulary"] == (512, 8)
    assert "vocab_size divide by 512" in "".join(odd.portability())
    parallel, block, group = expected
    line = f"tensor parallel {parallel}; vocabulary 512; FP8 blocks {block}; group size {group}"
    assert line in str(plan)


def test_all_numbers_of_processes_that_are_lost_are_named():
    source = empty("GPT2LMHeadModel", n_embd=48, n_head=12, n_layer=1, vocab_size=64)
    (line,) = (x for x in growkern.plan(source, n_embd=80, n_head=20).portability() if "no t" in x)
    assert "no tensor parallel 3, 6, 12," in line and "n_head and n_inner divide by 12" in line
    assert "allow" not in str(growkern.plan(source, n_embd=96, n_head=24).portability())


def test_experts_and_their_units_count():
    more = {**LLAMA_8B, **LAYERS, **MOE, "num_key_value_heads": 4}
    source = empty("Qwen3MoeForCausalLM", **more, architectures=["Qwen3MoeForCausalLM"])
    plan = growkern.plan(source, num_experts=128)
    assert plan.divides()["expert_parallel"] == (64, 128)
    assert plan.divides()["tensor_parallel"] == (4, 4)
    # any number of processes counts that shares all of them
    assert growkern.plan(source, num_experts=192).divides()["expert_parallel"] == (64, 192)
    wider = growkern.plan(source, moe_intermediate_size=1000)
    assert wider.divides()["fp8_block"] == (128, 8)
    assert any("moe_intermediate_size" in line for line in wider.portability())


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram"])
def test_a_tokenizer_of_more_ids_than_the_vocabulary_is_told(kind, tmp_path):
    model("LlamaForCausalLM", torch.float32).save_pretrained(tmp_path)
    size, special = SIZES["vocab_size"], ["[UNK]", "[PAD]"]
    words = [*special[:1], *(f"w{i}" for i in range(size))]
    made = (
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
        if kind == "WordPiece"
        else models.Unigram([(word, 0.0) for word in words], 0)
    )
    tokenizer = Tokenizer(made)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    def told(**sizes):
        lines = growkern.plan(tmp_path, hidden_size=64, **sizes).portability()
        return [line for line in lines if "ids for a vocabulary" in line]

    (line,) = told()
    assert f"{tokenizer.get_vocab_size()} ids for a vocabulary of {size}," in line
    assert f"grow vocab_size to {size + 2}" in line and not told(vocab_size=size + 2)
    for damaged in ("[", "[]", '{"model": {"vocab": 3}, "added_tokens": []}'):
        (tmp_path / "tokenizer.json").write_text(damaged)
        assert not told()
