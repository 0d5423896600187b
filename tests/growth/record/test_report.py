"""The words and the table of `growkern.verify`."""

import io

import pytest
import torch
from rich.console import Console

import growkern
from tests.growth.models import BERT, LLAMA, random_model
from tests.growth.plan.test_families import T5


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


def test_names_of_tensors_are_whole_at_80_columns():
    _, text = verified("BertForMaskedLM", BERT, hidden_size=24)
    assert "position_embeddings.weight " in text

    def damage(model):
        model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data += 1

    report, text = verified("T5ForConditionalGeneration", T5, damage, d_model=24)
    name = "layer.0.SelfAttention.relative_attention_bias.weight"
    row = next(line for line in text.splitlines() if line.startswith(name))
    assert row.rstrip().endswith("FAIL") and "\u2026" not in text
    assert f"\nFAIL: encoder.block.0.{name}\n" in text and not report.ok
