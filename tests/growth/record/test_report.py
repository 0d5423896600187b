"""The words and the table of `growkern.verify`."""

import dataclasses
import io

import pytest
import torch
import transformers
from rich.console import Console

import growkern
from growkern.families.table_files import load_family
from growkern.growth.outputs import as_model
from growkern.growth.record.verdict import rounding
from growkern.growth.source import open_source
from testbed.families import FAMILIES, NEOX, T5
from testbed.models import BERT, GPT2, LLAMA, random_model
from testbed.relatives import RELATIVES


def verified(class_name, sizes, change=lambda model: None, **how):
    """The report, and its text at 80 columns."""
    small = random_model(class_name, sizes, dtype=torch.float32)
    large = growkern.grow(small, **how)
    change(large)
    report = growkern.verify(small, large)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(report.table())
    return report, console.export_text()


@pytest.mark.filterwarnings("ignore::growkern.errors.FunctionChangedWarning")
def test_a_change_that_was_asked_for_differs_as_planned_and_another_fails():
    asked, text = verified("LlamaForCausalLM", LLAMA, num_hidden_layers=4, depth="stack")
    error = asked.outputs["relative error"]
    assert asked.ok and text.rstrip().endswith(f"differs, as planned: relative error {error:.1e}")
    forced, text = verified("BertForMaskedLM", BERT, hidden_size=16)
    error = forced.outputs["relative error"]
    assert not forced.ok and "as planned" not in text
    words = f"failed: outputs differ by {error:.1e}; the sizes force this change, which was not"
    assert forced.failure.startswith(f"{words} asked for: MLM head (")


@pytest.mark.parametrize("how", [{"num_hidden_layers": 4}, {"intermediate_size": 20}])
def test_an_ffn_that_a_flag_narrows_is_what_the_record_says(how):
    class_name, sizes, _ = RELATIVES["lfm2"]
    report, _ = verified(class_name, sizes | {"intermediate_size": 14}, **how)
    assert report.ok and report.level == "exact"


def test_an_approximate_growth_is_never_called_the_same_function():
    """Also where rounding alone would explain an error of this size."""
    report, text = verified("BertModel", BERT, hidden_size=20, carry=0.02)
    assert not report.plan.exact
    error, bound = report.outputs["relative error"], report.bound
    assert report.ok and report.level == "approximate" and 0 < error <= bound
    words = f"passed: approximate, as planned: relative error {error:.1e}, within the bound"
    assert f"{words} {bound:.1e}" in " ".join(text.split())
    planned = report.outputs["error of inexact norms"]
    assert bound == pytest.approx(rounding(torch.float32) + 2 * planned)
    assert error < rounding(torch.float32)
    exact, text = verified("BertForMaskedLM", BERT, hidden_size=24)
    assert exact.plan.exact and text.rstrip().endswith("passed: the same function, up to rounding")


def test_a_trained_model_is_compared_with_the_record_that_is_given(tmp_path):
    small = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    small.save_pretrained(tmp_path / "small")
    large = growkern.grow(tmp_path / "small", hidden_size=32)
    large.save_pretrained(tmp_path / "large")
    apart = type(large).from_pretrained(tmp_path / "large")
    apart.save_pretrained(tmp_path / "run")
    pair = (tmp_path / "small", tmp_path / "run")
    with pytest.raises(growkern.GrowthError, match=r"no lineage.json: .* add --lineage"):
        growkern.verify(*pair)
    for lineage in (tmp_path / "large", tmp_path / "large" / "lineage.json"):
        assert growkern.verify(*pair, lineage=lineage).ok
    with pytest.raises(growkern.GrowthError, match=r"small is no grown checkpoint, but .*large is"):
        growkern.verify(tmp_path / "large", tmp_path / "small")


CLASSIFIERS = [
    ("GPT2ForSequenceClassification", GPT2, {"n_embd": 24}),
    ("GPTNeoXForSequenceClassification", NEOX, {"hidden_size": 24}),
    ("LlamaForSequenceClassification", LLAMA, {"hidden_size": 20}),
]


@pytest.mark.parametrize("class_name, sizes, how", CLASSIFIERS)
def test_classifiers_without_a_padding_token_are_compared_text_by_text(class_name, sizes, how):
    """transformers refuses more than one row for them."""
    source = random_model(class_name, sizes)
    assert source.config.pad_token_id is None
    grown = growkern.grow(source, **how)
    assert growkern.verify(source, grown).level == "exact"
    tokens = torch.randint(50, (5, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        grown.score.weight[0] *= 1.5
        old, new = (
            torch.cat([model(row).logits for row in tokens.split(1)]) for model in (source, grown)
        )
    report = growkern.verify(source, grown, tokens=tokens)
    truth = ((new - old).abs().max() / old.abs().max()).item()
    assert not report.ok and report.outputs["relative error"] == pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("model_type", ["gemma3_text", "llama", "mistral", "qwen3"])
def test_larger_heads_of_a_classifier_without_a_padding_token_are_measured(model_type):
    sizes = {**FAMILIES[model_type][1], "pad_token_id": None}
    names = load_family(model_type).classes
    (class_name,) = (name for name in names if name.endswith("ForSequenceClassification"))
    (said,) = growkern.plan(random_model(class_name, sizes), head_dim=6).findings
    assert said.level == "approximate"


def test_texts_that_the_source_cannot_read_are_refused():
    """T5 classifies the last end token, which random texts have and these have not."""
    source = random_model("T5ForSequenceClassification", {**T5, "eos_token_id": 1})
    grown = growkern.grow(source, d_model=24)
    assert growkern.verify(source, grown).ok
    with pytest.raises(growkern.GrowthError, match=r"the source, fails on these tokens.*<eos>"):
        growkern.verify(source, grown, tokens=torch.full((2, 5), 7))


def test_tensors_that_transformers_makes_of_others_are_those_of_the_loaded_model(tmp_path):
    """Files name the layers of ViT-MAE's decoder otherwise than the class does."""
    class_name, sizes, _ = RELATIVES["vit_mae"]
    random_model(class_name, sizes).save_pretrained(tmp_path)
    loaded = getattr(transformers, class_name).from_pretrained(tmp_path, dtype=torch.float64)
    state = as_model(open_source(tmp_path)).state_dict()
    assert all(torch.equal(state[name], x) for name, x in loaded.state_dict().items())


def test_a_model_without_some_of_its_values_is_not_run():
    source = open_source(random_model("GPT2LMHeadModel", GPT2))
    dtypes = {name: x for name, x in source.dtypes.items() if name != "transformer.ln_f.weight"}
    with pytest.raises(growkern.GrowthError, match=r"no values for transformer\.ln_f\.weight"):
        as_model(dataclasses.replace(source, dtypes=dtypes))
