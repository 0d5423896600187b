"""`verify` compares the settings of generation, and the ids of tokens."""

import json

import pytest
import torch
import transformers

import growkern
from testbed.models import BERT, GPT2, random_model
from testbed.relatives import WHISPER

TOKENS = torch.tensor([[2, 7, 9, 4]])
WITH = {"repetition_penalty": 1.9, "suppress_tokens": list(range(40))}


def generating():
    source = random_model("GPT2LMHeadModel", GPT2)
    source.generation_config.update(**WITH)
    return source


def generated(model):
    tokens = torch.randint(3, 45, (2, 6), generator=torch.Generator().manual_seed(0))
    return model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)


def test_a_dropped_generation_config_is_no_longer_exact():
    source = generating()
    grown = growkern.grow(source, n_embd=24)
    assert generated(source).equal(generated(grown))
    report = growkern.verify(source, grown)
    assert report.ok and report.level == "exact"
    grown.generation_config = transformers.GenerationConfig()
    assert not generated(source).equal(generated(grown))
    report = growkern.verify(source, grown)
    assert not report.ok and report.level == "changed"
    assert "repetition_penalty, suppress_tokens; copy the source's" in report.failure


@torch.no_grad()
def test_numbers_of_layers_follow_their_layers(tmp_path):
    """Whisper's alignment_heads, by whose scores transformers finds the time of a word."""
    source, scores = random_model("WhisperForConditionalGeneration", WHISPER), []
    heads = [[0, 1], [1, 2], [1, 0]]
    source.generation_config = transformers.GenerationConfig(alignment_heads=heads, pad_token_id=0)
    source.save_pretrained(tmp_path / "small")
    how = {"decoder_layers": 4, "encoder_layers": 4}
    grown = growkern.grow(source, **how)
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "large", progress=False, **how)
    assert growkern.verify(tmp_path / "small", tmp_path / "large").ok
    pairs = transformers.GenerationConfig.from_pretrained(tmp_path / "large").alignment_heads
    assert pairs == grown.generation_config.alignment_heads == [[0, 1], [2, 2], [2, 0]]
    for model in (source, grown):
        model.config._attn_implementation = "eager"
        inputs = {"input_features": torch.ones(1, 5, 12).double(), "decoder_input_ids": TOKENS}
        found = model(**inputs, output_attentions=True).cross_attentions
        heads = model.generation_config.alignment_heads
        scores.append(torch.stack([found[layer][0, head] for layer, head in heads]))
    assert torch.allclose(*scores, atol=1e-12)
    source.generation_config.alignment_heads = "none"
    assert growkern.grow(source, **how).generation_config.alignment_heads == "none"


def save_tokenizer(place, words, kind):
    added = [{"content": word, "id": i} for i, word in enumerate(words) if kind == "added"]
    vocab = [[w, 0] for w in words] if kind == "Unigram" else {w: i for i, w in enumerate(words)}
    read = {"model": {"vocab": {} if added else vocab}, "added_tokens": added}
    (place / "tokenizer.json").write_text(json.dumps(read))


def test_files_that_were_edited_are_seen(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    generating().save_pretrained(small)
    growkern.grow_checkpoint(small, large, progress=False, n_embd=24)
    for kind in ("BPE", "Unigram", "added"):
        save_tokenizer(small, "abcde", kind)
        save_tokenizer(large, "abcdef", kind)
        assert growkern.verify(small, large).ok
        save_tokenizer(large, "abecd", kind)
        report = growkern.verify(small, large)
        assert not report.ok and report.level == "changed"
        assert "gives other outputs: other ids for 3 tokens; copy" in report.failure
    file = large / "generation_config.json"
    file.write_text(file.read_text().replace("1.9", "1.2"))
    report = growkern.verify(small, large)
    assert not report.ok and "repetition_penalty; copy" in report.failure


@pytest.mark.parametrize("settings", [{"use_cache": False}, {"repetition_penalty": 1.0}])
def test_settings_that_choose_no_token_may_differ(settings):
    source = random_model("GPT2LMHeadModel", GPT2)
    grown = growkern.grow(source, n_embd=24)
    grown.generation_config.update(**settings)
    assert growkern.verify(source, grown).level == "exact"


def test_models_that_generate_nothing_have_no_settings(tmp_path):
    source = random_model("BertForMaskedLM", BERT)
    source.save_pretrained(tmp_path / "small")
    grown = growkern.grow(tmp_path / "small", hidden_size=24)
    grown.generation_config = transformers.GenerationConfig(temperature=0.1)
    assert growkern.verify(source, grown).ok


@pytest.mark.parametrize(
    "class_name, sizes, how",
    [
        ("GPT2LMHeadModel", {**GPT2, "n_embd": 32, "n_head": 4}, {"n_embd": 64, "vocab_size": 64}),
        ("BertModel", {**BERT, "vocab_size": BERT["hidden_size"]}, {"hidden_size": 24}),
    ],
)
def test_a_vocabulary_as_large_as_the_hidden_size_is_no_difference(class_name, sizes, how):
    """Logits were taken for hidden states of this size, and hidden states for logits."""
    source = random_model(class_name, sizes)
    report = growkern.verify(source, growkern.grow(source, **how))
    assert report.ok and report.outputs["relative error"] < 1e-12, report.failure
