"""The families with tables of their own: a config of small sizes for each, and their class."""

from testbed.models import BERT, GPT2, LLAMA

ROTARY = {k: v for k, v in LLAMA.items() if not k.endswith("_bias")}
SQUARE = {k: v for k, v in ROTARY.items() if k != "head_dim"}
NEOX = {**SQUARE, "num_attention_heads": 3, "layer_norm_eps": 1e-2, "rotary_pct": 0.5}
PYTHIA = {**NEOX, "hidden_size": 24}
MODERN = {
    **SQUARE,
    "num_attention_heads": 3,
    "num_hidden_layers": 4,
    "local_attention": 4,
    "norm_eps": 1e-2,
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
    "layer_norm_epsilon": 1e-2,
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
WINDOW = {"sliding_window": 4, "query_pre_attn_scalar": 6}
ENCODER = {**BERT, "layer_norm_eps": 1e-2}
GROUPED = {**SQUARE, "pad_token_id": 0}
SLIDING = {"use_sliding_window": True, "sliding_window": 4}
# model type -> class with a vocabulary head, sizes
FAMILIES = {
    "bart": ("BartForConditionalGeneration", {**BART, "eos_token_id": 1}),
    "bert": ("BertForMaskedLM", ENCODER),
    "electra": ("ElectraForMaskedLM", {**ENCODER, "embedding_size": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**ROTARY, **WINDOW}),
    "gemma3_text": ("Gemma3ForCausalLM", {**ROTARY, **WINDOW}),
    "gpt2": (
        "GPT2LMHeadModel",
        {**GPT2, "layer_norm_epsilon": 1e-2, "n_inner": 20, "pad_token_id": 0},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {**NEOX, "pad_token_id": 0}),
    "llama": ("LlamaForCausalLM", {**LLAMA, "pad_token_id": 0}),
    "mistral": ("MistralForCausalLM", {**ROTARY, "pad_token_id": 0}),
    "modernbert": ("ModernBertForMaskedLM", MODERN),
    "olmo2": ("Olmo2ForCausalLM", GROUPED),
    "phi3": ("Phi3ForCausalLM", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", {**GROUPED, **SLIDING}),
    "qwen3": ("Qwen3ForCausalLM", {**ROTARY, **SLIDING, "pad_token_id": 0}),
    "roberta": ("RobertaForMaskedLM", {**ENCODER, "pad_token_id": 1}),
    "t5": ("T5ForConditionalGeneration", {**T5, "eos_token_id": 1}),
}
