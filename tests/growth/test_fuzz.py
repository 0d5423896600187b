"""Random growths of every family: the plan's words hold. The command takes more of them."""

import dataclasses
import functools

import pytest
import torch

from bench.fuzz_exactness import __main__ as command, check as checks
from bench.fuzz_exactness.cases import Case, draw
from bench.fuzz_exactness.check import check
from growkern.families.model import ModelSpec
from growkern.families.table_files import load_family
from growkern.growth import grow
from growkern.growth.plan import exactness
from growkern.growth.record import verify
from testbed.families import FAMILIES
from testbed.models import BERT, GPT2, LLAMA
from testbed.relatives import RELATIVES
from tests.shared import walks

# one failure names its part
PARTS, DRAWN = 4, 200 * walks.times
GEMMA = FAMILIES["gemma2"][1]
# its class makes a table of angles in the dtype of the weights
GPTJ = {**GPT2, "rotary_dim": 4, "pad_token_id": 0}
UNSET = {"suppress_tokens": None}


DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers")


def depth_of(case):
    return max(case.sizes.get(name, 0) for name in DEPTHS)


@functools.cache
def sample():
    """Numbers of cases, of which each has what none before it has. The others come every night.

    That is a kind of norms, an option or its value, a size that grows, a dtype, a depth, or a way.
    """
    seen, numbers = set(), []
    for number in range(DRAWN):
        case = draw(walks.start or 0, number)
        norm = load_family(case.family).norm
        has = {(norm.kind, norm.placement), ("deep", depth_of(case) > 5)}
        has |= {(name, x if isinstance(x, str | bool) else None) for name, x in case.how.items()}
        has |= {("from", case.dtype), ("to", case.how.get("dtype")), ("disk", case.on_disk)}
        has |= {("config", case.by_config), ("second", case.second)}
        has |= {*case.generation}
        if has - seen:
            numbers.append(number)
        seen |= has
    return numbers


@pytest.mark.parametrize("part", range(PARTS))
def test_the_words_of_plans_hold(part):
    numbers = sample()[part::PARTS]
    ended = [*command.outcomes(walks.start or 0, numbers)]
    failed = [case for case in ended if case[-1]]
    assert not failed, failed[0]
    # the others ask for nothing, or for what has no near sizes
    assert 2 * sum(case[2] in checks.WORDS for case in ended) >= len(numbers)


def test_a_wrong_word_is_found(monkeypatch):
    how = {"num_heads": 7, "scheme": "paper", "seed": 1}
    case = Case("T5ForConditionalGeneration", FAMILIES["t5"][1], how, on_disk=True)
    assert check(case) == "exact"
    # one relative bias then meets another order of heads in every layer
    monkeypatch.setattr(ModelSpec, "arranged_once", frozenset())
    with pytest.raises(AssertionError, match="planned exact, but outputs differ"):
        check(case)


def test_rounding_that_a_model_enlarges_is_none_of_the_growth():
    """Norms over two entries: in twelve layers, float32 moves outputs by more than 1e-4."""
    sizes = {"hidden_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4}
    sizes |= {"intermediate_size": 22, "num_hidden_layers": 12, "query_pre_attn_scalar": 6}
    sizes |= {"vocab_size": 50, "pad_token_id": 0, "hidden_act": "relu", "rms_norm_eps": 1e-4}
    sizes |= {"layer_types": ["full_attention"] * 12}
    how = {"intermediate_size": 48, "head_dim": 8, "symmetry": "split", "seed": 9}
    case = Case("Gemma3TextModel", sizes, how, on_disk=False, std=0.3, dtype=torch.float32)
    assert check(case) == "exact"


def test_the_error_of_norms_is_that_of_the_padded_text():
    """Padding enlarges it here threefold."""
    sizes = {**RELATIVES["jina_embeddings_v3"][1], "num_hidden_layers": 3}
    sizes |= {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 14, "head_dim": 2}
    how = {"hidden_size": 72, "num_hidden_layers": 5, "symmetry": "noise", "seed": 1}
    how |= {"identity_gain": 1e-3}
    case = Case("JinaEmbeddingsV3ForSequenceClassification", sizes, how, on_disk=False)
    assert check(case) == "approximate"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_head_with_an_ffn_of_its_own_adds_the_mean_once(dtype):
    how = {"hidden_size": 24, "stream": "padded", "carry": 0.01, "dtype": dtype}
    sizes = {**BERT, "layer_norm_eps": 1e-2}
    case = Case("BigBirdForQuestionAnswering", sizes, how, on_disk=False)
    assert check(case) == ("approximate" if dtype == torch.float64 else "changed")


# source and target dtypes; sums, scaled copies, and constants that the model rounds
WIDER = [
    Case("GPT2LMHeadModel", GPT2, {"n_embd": 20, "n_head": 5, "dtype": torch.float32}, False),
    Case("LlamaForCausalLM", LLAMA, {"hidden_size": 20, "dtype": torch.float64}, True),
    Case("Gemma2ForCausalLM", GEMMA, {"hidden_size": 24, "dtype": torch.float32}, False),
    Case("GPTJForCausalLM", GPTJ, {"n_embd": 24, "dtype": torch.float64}, False),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", WIDER, ids=lambda case: case.class_name)
def test_a_wider_dtype_is_exact(case, dtype):
    assert check(dataclasses.replace(case, dtype=dtype)) == "exact"


def test_a_mean_that_is_not_carried_is_found(monkeypatch):
    case = Case("BertModel", BERT, {"hidden_size": 20, "carry": 0.0}, on_disk=False)
    assert check(case) == "changed"
    width = exactness._width
    exact = {"level": "exact"}
    monkeypatch.setattr(
        exactness, "_width", lambda plan: [dataclasses.replace(f, **exact) for f in width(plan)]
    )
    with pytest.raises(AssertionError, match="planned exact, verify says changed"):
        check(case)
    monkeypatch.setattr(verify.verdict, "measured_level", lambda *_: ("exact", ""))
    with pytest.raises(AssertionError, match="planned exact, but outputs differ"):
        check(case)


def test_other_settings_of_generation_are_found(monkeypatch):
    settings = {"suppress_tokens": [5, 7]}
    case = Case("GPT2LMHeadModel", GPT2, {"n_embd": 24}, on_disk=False, generation=settings)
    assert check(case) == "exact"
    # both the plan's model without them, and a `verify` that does not look at them
    monkeypatch.setattr(grow, "fit_cache", lambda _, generation: generation.update(**UNSET))
    monkeypatch.setattr(verify.verdict, "differences", lambda *_: "")
    with pytest.raises(AssertionError, match="other tokens are suppressed"):
        check(case)


def test_float32_is_held_against_its_own_rounding(monkeypatch):
    """An error of 1e-5 is below the 1e-4 that `verify` allows, but it is no rounding."""
    case = Case("GPT2LMHeadModel", GPT2, {"n_embd": 24}, on_disk=False, dtype=torch.float32)
    assert check(case) == "exact"
    grow_and_verify = checks._grown

    def slightly_off(*arguments):
        grown, report = grow_and_verify(*arguments)
        grown.transformer.h[0].mlp.c_fc.weight.data *= 1 + 2e-5
        return grown, report

    monkeypatch.setattr(checks, "_grown", slightly_off)
    with pytest.raises(AssertionError, match="relative error"):
        check(case)
