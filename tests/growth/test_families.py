"""Every family: the grown model, saved and loaded again, computes what its source computes."""

import pytest
import torch
import transformers

import growkern
from growkern.families.load import supported_families
from tests.growth.models import BERT, GPT2, LLAMA, random_model, relative_error

EXACT = 1e-12

ENCODER = {**BERT, "layer_norm_eps": 1e-3}
ROTARY = {k: v for k, v in LLAMA.items() if not k.endswith("_bias")}
SQUARE = {k: v for k, v in ROTARY.items() if k != "head_dim"}
NEOX = {**SQUARE, "num_attention_heads": 3, "layer_norm_eps": 1e-3, "rotary_pct": 0.5}
MODERN = {
    **SQUARE,
    "num_attention_heads": 3,
    "num_hidden_layers": 4,
    "local_attention": 4,
    "norm_eps": 1e-3,
    "pad_token_id": 0,
}
T5 = {
    "vocab_size": 50,
    "d_model": 12,
    "d_kv": 4,
    "d_ff": 20,
    "num_heads": 3,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "layer_norm_epsilon": 1e-3,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 50,
    "d_model": 12,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 22,
    "max_position_embeddings": 16,
}
ALL_BIASES = {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True}
GROUPS = {"num_attention_heads": 10, "num_key_value_heads": 5}
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
WINDOW = {"sliding_window": 4, "query_pre_attn_scalar": 6}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
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
    ("BartForSequenceClassification", BART, {"eos_token_id": 1}, {"d_model": 36}),
    ("ModernBertForMaskedLM", MODERN, {}, {"hidden_size": 24, "num_hidden_layers": 6}),
    ("ModernBertForMaskedLM", MODERN, ALL_BIASES, {"hidden_size": 36, "intermediate_size": 33}),
    ("ModernBertForSequenceClassification", MODERN, {}, {"hidden_size": 24}),
    ("MistralForCausalLM", ROTARY, {"sliding_window": 4}, U1),
    ("Qwen2ForCausalLM", {**SQUARE, "num_attention_heads": 6}, LAYERS, {**E1, "num_hidden_layers": 4}),
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
    assert {*covered, "bert", "llama"} == set(supported_families())


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
