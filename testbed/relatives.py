"""The families whose tables are close to another's: one line each, with a config of small sizes.

`tests.growth.plan.test_relatives` grows them in every size. The whole matrix is theirs with
`--walks`, and every night in `bench.fuzz_exactness`.
"""

import copy
from typing import Any

from growkern.families import Family
from testbed.models import BERT, GPT2, IMAGE, LLAMA

ENCODER = {**BERT, "layer_norm_eps": 1e-2, "pad_token_id": 1}
GPT_J = {**GPT2, "layer_norm_epsilon": 1e-2, "pad_token_id": 0}
ROTARY = {k: v for k, v in LLAMA.items() if not k.endswith("_bias")} | {"pad_token_id": 0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HALF = {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}
TURNED = {**ENCODER, "rope_parameters": ROPE}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
FULL = {"layer_types": ["full_attention", "full_attention"], "sliding_window": None}
ROPELESS = {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 4}
DISTIL = {
    "vocab_size": 50,
    "dim": 12,
    "n_heads": 3,
    "hidden_dim": 20,
    "n_layers": 2,
    "max_position_embeddings": 18,
    # its head for spans takes no other number
    "num_labels": 2,
}
FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.4,
    "logits_scaling": 2.0,
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
    "eos_token_id": 1,
}
WHISPER = {
    **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
    **{
        "max_target_positions": 17,
        "max_source_positions": 6,
        "num_mel_bins": 5,
        "classifier_proj_size": 9,
    },
    **{"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 2},
}
# queries grow from the fourth position on
LATER = {
    "rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4}
}
OPT = {
    "vocab_size": 50,
    "hidden_size": 12,
    "word_embed_proj_dim": 12,
    "num_attention_heads": 3,
    "ffn_dim": 20,
    "num_hidden_layers": 2,
    "max_position_embeddings": 18,
}
# its head_dim follows from the others
STABLE = {k: v for k, v in ROTARY.items() if k != "head_dim"} | {
    "num_attention_heads": 6,
    "hidden_size": 24,
    "layer_norm_eps": 1e-2,
    **HALF,
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
    "eos_token_id": 1,
}
T5GEMMA = {
    **{**ROTARY, **KINDS, "query_pre_attn_scalar": 6},
    **{"rope_parameters": ROPE, "bos_token_id": 2, "eos_token_id": 1},
}
# models with images. A tower for these is no larger than one patch needs
TOWER = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "patch_size": 4}
GEMMA3 = {
    "text_config": {**ROTARY, **KINDS},
    "vision_config": {**TOWER, "num_attention_heads": 2, "image_size": 8},
    "mm_tokens_per_image": 4,
    "image_token_index": IMAGE,
}
MISTRAL3 = {
    "text_config": {**ROTARY, "model_type": "mistral"},
    "vision_config": {**TOWER, "num_attention_heads": 2, "head_dim": 4, "image_size": 16},
    "image_token_index": IMAGE,
}
# of the eight entries of a head, one pair each turns with time and height, and two with the width
QWEN_VL = {
    "text_config": {
        **{k: v for k, v in ROTARY.items() if k != "head_dim"},
        **{"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1},
        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]},
    },
    "vision_config": {
        **{"depth": 1, "hidden_size": 8, "intermediate_size": 16, "num_heads": 2, "patch_size": 4},
        **{"out_hidden_size": 24, "window_size": 16},
    },
    **{"image_token_id": IMAGE, "video_token_id": 48, "vision_start_token_id": 47},
}
# both layers of the tower write into the outputs of the text's first layers
QWEN3_VL = {
    "text_config": {
        **ROTARY,
        **{"num_hidden_layers": 3, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 1]}},
    },
    "vision_config": {
        **{"depth": 2, "hidden_size": 8, "intermediate_size": 16, "num_heads": 2, "patch_size": 4},
        **{"out_hidden_size": 12, "num_position_embeddings": 16},
        "deepstack_visual_indexes": [0, 1],
    },
    **{"image_token_id": IMAGE, "video_token_id": 48, "vision_start_token_id": 47},
}
BIASES = {"attention_bias": True, "mlp_bias": True}
# four experts, of which two are chosen
LOCAL = {**ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {**ROTARY, "num_experts": 4, "num_experts_per_tok": 2}
# without a head_dim of their own
WHOLE = {k: v for k, v in EXPERTS.items() if k != "head_dim"} | {"num_attention_heads": 3}
WHOLE |= {"num_key_value_heads": 3}
WIDTHS = {"moe_intermediate_size": 7, "mlp_only_layers": [0]}
SLIDING = {"use_sliding_window": True}
GROUPS = {
    **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 7, "first_k_dense_replace": 1},
}
DELTA = {
    **{"layer_types": ["full_attention", "linear_attention"], "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6},
}
# no layer is dense
MOE3_5 = {**EXPERTS, **DELTA, "head_dim": 8, "moe_intermediate_size": 7}
MOE3_5 |= {"shared_expert_intermediate_size": 6}
# six of the eight entries of a head turn, one pair each with time, height and width
SECTIONS = {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.75, "mrope_section": [1, 1, 1]}}
TOWER3_5 = {k: v for k, v in QWEN3_VL["vision_config"].items() if "deepstack" not in k}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False}
LATENT = {
    **{"num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 10, "kv_lora_rank": 9},
    **{"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
}
# each layer attends to three tokens that it chooses
INDEXED = {
    **{k: v for k, v in ROTARY.items() if k != "head_dim"},
    **{**GROUPS, **LATENT, "n_shared_experts": 1},
    **{"index_topk": 3, "index_head_dim": 6, "index_n_heads": 2},
    "layer_types": ["indexed_attention"] * 2,
}
# four of the ten entries of a head turn, and queries grow from the fourth position on
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale_all_dim": 1.0},
    **{"mscale": 1.0, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.1},
    "partial_rotary_factor": 0.4,
}
PATCHES = {
    **{"image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": 3, "encoder_stride": 4},
    **{"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2},
    "layer_norm_eps": 1e-2,
}
# the end of a text is its highest token
CLIP_TEXT = {**BERT, "layer_norm_eps": 1e-2, "projection_dim": 7, "eos_token_id": 2}
CLIP_IMAGES = {
    **{k: v for k, v in PATCHES.items() if k not in ("num_labels", "encoder_stride")},
    **{"intermediate_size": 20, "projection_dim": 7},
}
CLIP = {"text_config": CLIP_TEXT, "vision_config": CLIP_IMAGES, "projection_dim": 7}
SIGLIP = {"text_config": {**CLIP_TEXT, "projection_size": 12}, "vision_config": CLIP_IMAGES}

# a block without a norm before its attention, and kinds of layers
MODERN = {
    **{k: v for k, v in ROTARY.items() if k not in ("head_dim", "num_key_value_heads")},
    **{"num_attention_heads": 3, "num_hidden_layers": 4, "local_attention": 4, "norm_eps": 1e-2},
}
NEO = {
    **{"vocab_size": 50, "hidden_size": 12, "num_heads": 3, "num_layers": 2, "window_size": 3},
    **{"max_position_embeddings": 16, "attention_types": [[["global"], 1], [["local"], 1]]},
    **{"layer_norm_epsilon": 1e-2, "intermediate_size": 20, "pad_token_id": 0},
}
GEMMA4_EXPERTS = {
    **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
    "moe_intermediate_size": 7,
}
# full layers have heads of their own size, and keys that are values too; each has inputs of its own
GEMMA4 = {
    **{**ROTARY, **KINDS, "global_head_dim": 8, "num_global_key_value_heads": 1},
    **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 5},
    **{**GEMMA4_EXPERTS, "vocab_size_per_layer_input": 50},
}
# the last layers take the keys of others, as in E2B and E4B
GEMMA4_SMALL = {
    **{**GEMMA4, "attention_k_eq_v": False, "use_double_wide_mlp": True},
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": KINDS["layer_types"] * 2},
}
GEMMA4_TOWER = {
    **{**TOWER, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4},
    **{"position_embedding_size": 8, "pooling_kernel_size": 2},
}
GEMMA4_SOUND = {
    **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 6},
    **{"subsampling_conv_channels": [8, 4], "use_clipped_linears": False},
}
MAMBA = {"mamba_num_heads": 6, "mamba_head_dim": 3, "ssm_state_size": 4, "n_groups": 2}
BAMBA = {
    **{"mamba_n_heads": 4, "mamba_d_head": 6, "mamba_n_groups": 2, "mamba_d_state": 5},
    **{"mamba_chunk_size": 4, "mamba_d_conv": 3},
}
MAMBA2 = {
    **{"vocab_size": 50, "hidden_size": 12, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-2},
    **{"num_heads": 4, "head_dim": 6, "n_groups": 2, "state_size": 5, "conv_kernel": 3},
    **{"chunk_size": 4, "pad_token_id": 0},
}
NEMOTRON_H = {
    **{k: v for k, v in ROTARY.items() if k not in ("num_hidden_layers", "rms_norm_eps")},
    **{k: v for k, v in GROUPS.items() if k != "first_k_dense_replace"},
    **{**MAMBA, "moe_shared_expert_intermediate_size": 6, "layer_norm_epsilon": 1e-2},
    **{"conv_kernel": 3, "chunk_size": 4},
    "layers_block_type": ["full_attention", "linear_attention", "moe", "mlp"],
}
BLOOM = {
    **{"vocab_size": 50, "hidden_size": 12, "n_head": 3, "n_layer": 2, "pad_token_id": 0},
    "layer_norm_epsilon": 1e-2,
}
ESM = {
    **{"vocab_size": 50, "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2},
    **{"intermediate_size": 20, "max_position_embeddings": 40, "layer_norm_eps": 1e-2},
    **{"position_embedding_type": "rotary", "token_dropout": True},
    **{"mask_token_id": 48, "pad_token_id": 1},
}
MPT = {
    **{"vocab_size": 50, "d_model": 12, "n_heads": 3, "n_layers": 2, "max_seq_len": 40},
    **{"layer_norm_epsilon": 1e-2, "pad_token_id": 0},
}
LLAMA4 = {
    **{**LOCAL, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 13},
    **{"attention_chunk_size": 5, "layer_types": ["chunked_attention", "full_attention"]},
}
# four patches become one token
LLAMA4_TOWER = {
    **{"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32},
    **{"image_size": 8, "patch_size": 4, "vision_output_dim": 6, "projector_input_dim": 6},
    "projector_output_dim": 6,
}
BY_KIND = {"sliding_attention": ROPE, "full_attention": {**ROPE, "rope_theta": 50000.0}}
PARTIAL_BY_KIND = {kind: {**rope, "partial_rotary_factor": 0.5} for kind, rope in BY_KIND.items()}

# model type -> class with a vocabulary head, sizes, options of a second source
RELATIVES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "apertus": (
        "ApertusForCausalLM",
        {**ROTARY, "rope_parameters": ROPE},
        {"attention_bias": True},
    ),
    "arcee": ("ArceeForCausalLM", ROTARY, BIASES),
    "camembert": ("CamembertForMaskedLM", ENCODER, {}),
    "cohere2": (
        "Cohere2ForCausalLM",
        {**ROTARY, **KINDS, "layer_norm_eps": 1e-2},
        {"attention_bias": True},
    ),
    "cohere2_vision": (
        "Cohere2VisionForConditionalGeneration",
        {
            "text_config": {**ROTARY, **KINDS, "layer_norm_eps": 1e-2, "model_type": "cohere2"},
            "vision_config": {**TOWER, "num_attention_heads": 2, "image_size": 8},
            **{"alignment_intermediate_size": 14, "image_token_id": IMAGE},
        },
        {},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {**{k: v for k, v in ROTARY.items() if k != "head_dim"}, **GROUPS, **LATENT},
        {**ONE_GROUP, "q_lora_rank": None, "attention_bias": True},
    ),
    "cwm": ("CwmForCausalLM", {**ROTARY, **KINDS, "rope_parameters": ROPE}, {"mlp_bias": True}),
    "dots1": (
        "Dots1ForCausalLM",
        {**ROTARY, **KINDS, **GROUPS, "n_shared_experts": 2},
        {**ONE_GROUP, "attention_bias": True, "n_shared_experts": 1},
    ),
    "data2vec-text": ("Data2VecTextForMaskedLM", ENCODER, {}),
    "dinov2": (
        "Dinov2ForImageClassification",
        {**PATCHES, "mlp_ratio": 2},
        {"qkv_bias": False, "use_mask_token": False},
    ),
    "dinov2_with_registers": (
        "Dinov2WithRegistersForImageClassification",
        {**PATCHES, "mlp_ratio": 2, "num_register_tokens": 2},
        {"qkv_bias": False},
    ),
    "distilbert": ("DistilBertForMaskedLM", DISTIL, {"sinusoidal_pos_embds": True}),
    "ernie": ("ErnieForMaskedLM", ENCODER, {"use_task_id": True, "task_type_vocab_size": 2}),
    "ernie4_5": ("Ernie4_5ForCausalLM", ROTARY, {"use_bias": True}),
    "eurobert": ("EuroBertForMaskedLM", ROTARY, BIASES),
    "exaone4": ("Exaone4ForCausalLM", {**ROTARY, **KINDS}, FULL),
    "exaone4_5": (
        "Exaone4_5_ForConditionalGeneration",
        {
            "text_config": {**ROTARY, **KINDS, "model_type": "exaone4"},
            "vision_config": {
                **{**QWEN_VL["vision_config"], "num_key_value_heads": 1},
                "out_hidden_size": ROTARY["hidden_size"],
            },
            "image_token_id": IMAGE,
        },
        {"text_config": {**ROTARY, **FULL, "model_type": "exaone4"}},
    ),
    "flex_olmo": ("FlexOlmoForCausalLM", EXPERTS, {"norm_topk_prob": True, "attention_bias": True}),
    "gemma": ("GemmaForCausalLM", ROTARY, {"attention_bias": True}),
    "gemma3": ("Gemma3ForConditionalGeneration", GEMMA3, {}),
    "glm": ("GlmForCausalLM", {**ROTARY, **HALF}, {"attention_bias": False}),
    "glm4": ("Glm4ForCausalLM", {**ROTARY, **HALF}, {"attention_bias": False}),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {**ROTARY, **GROUPS, **HALF},
        {**ONE_GROUP, "use_qk_norm": True, "attention_bias": True},
    ),
    "gptj": ("GPTJForCausalLM", {**GPT_J, "rotary_dim": 2}, {"n_inner": 33}),
    "gpt_oss": ("GptOssForCausalLM", {**LOCAL, **KINDS, "rope_parameters": ROPE}, {}),
    "granite": ("GraniteForCausalLM", {**ROTARY, **FACTORS}, BIASES),
    "granitemoe": ("GraniteMoeForCausalLM", {**LOCAL, **FACTORS}, {"attention_bias": True}),
    "jais2": ("Jais2ForCausalLM", {**ROTARY, "layer_norm_eps": 1e-2}, BIASES),
    "mbart": ("MBartForConditionalGeneration", BART, {"scale_embedding": True}),
    "ministral": ("MinistralForCausalLM", {**ROTARY, **KINDS}, {}),
    "ministral3": ("Ministral3ForCausalLM", {**ROTARY, **LATER}, {"sliding_window": 4}),
    "mixtral": ("MixtralForCausalLM", LOCAL, {"sliding_window": 4}),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        MISTRAL3,
        {
            "text_config": {**ROTARY, **LATER, "model_type": "ministral3"},
            "multimodal_projector_bias": True,
        },
    ),
    "mpnet": ("MPNetForMaskedLM", ENCODER, {}),
    "mt5": ("MT5ForConditionalGeneration", T5, {"feed_forward_proj": "relu"}),
    "nemotron": ("NemotronForCausalLM", {**ROTARY, "norm_eps": 1e-2, **HALF}, BIASES),
    # wider norms without weights cannot serve a tied head
    "olmo": ("OlmoForCausalLM", {**ROTARY, "tie_word_embeddings": False}, {"attention_bias": True}),
    "olmoe": ("OlmoeForCausalLM", WHOLE, {"norm_topk_prob": True, "attention_bias": True}),
    "olmo3": ("Olmo3ForCausalLM", {**ROTARY, **KINDS}, {"attention_bias": True}),
    "opt": ("OPTForCausalLM", OPT, {"enable_bias": False}),
    "phi": ("PhiForCausalLM", {**ROTARY, "layer_norm_eps": 1e-2, **HALF}, {}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**EXPERTS, **WIDTHS, **KINDS, **SLIDING, "shared_expert_intermediate_size": 6},
        {"norm_topk_prob": True, "qkv_bias": False, "mlp_only_layers": []},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**LOCAL, **WIDTHS},
        {"norm_topk_prob": True, "attention_bias": True, "mlp_only_layers": [1]},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {**EXPERTS, **WIDTHS, **DELTA, "head_dim": 8, "shared_expert_intermediate_size": 6},
        {"attention_bias": True, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "qwen3_5_text": (
        "Qwen3_5ForCausalLM",
        {**ROTARY, **DELTA, "head_dim": 8},
        {"attention_bias": True},
    ),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", MOE3_5, {"attention_bias": True}),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {
            **QWEN3_VL,
            "text_config": {**ROTARY, **DELTA, "head_dim": 8, **SECTIONS},
            "vision_config": TOWER3_5,
        },
        {},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {**QWEN3_VL, "text_config": {**MOE3_5, **SECTIONS}, "vision_config": TOWER3_5},
        {},
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {
            **QWEN_VL,
            "vision_config": {
                **{"depth": 1, "embed_dim": 8, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4},
                "hidden_size": 24,
            },
        },
        {},
    ),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", QWEN_VL, {}),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        QWEN3_VL,
        {"text_config": {**QWEN3_VL["text_config"], "attention_bias": True}},
    ),
    "seed_oss": ("SeedOssForCausalLM", ROTARY, {**BIASES, "attention_out_bias": True}),
    "smollm3": ("SmolLM3ForCausalLM", {**ROTARY, **ROPELESS}, BIASES),
    "stablelm": (
        "StableLmForCausalLM",
        STABLE,
        {"use_qkv_bias": True, "use_parallel_residual": True},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", {**ROTARY, "norm_epsilon": 1e-2}, {"use_bias": False}),
    "umt5": ("UMT5ForConditionalGeneration", T5, {"feed_forward_proj": "relu"}),
    "vaultgemma": (
        "VaultGemmaForCausalLM",
        {**ROTARY, **KINDS, "query_pre_attn_scalar": 6},
        {"attention_bias": True},
    ),
    "voxtral": (
        "VoxtralForConditionalGeneration",
        {
            "text_config": {**ROTARY, "model_type": "llama"},
            "audio_config": {
                **{k: v for k, v in TOWER.items() if k != "patch_size"},
                **{"num_attention_heads": 2, "num_mel_bins": 5, "max_source_positions": 4},
            },
            "audio_token_id": IMAGE,
        },
        {"text_config": {**ROTARY, **BIASES, "model_type": "llama"}},
    ),
    "vit": (
        "ViTForImageClassification",
        {**PATCHES, "intermediate_size": 20},
        {"qkv_bias": False, "image_size": [8, 16]},
    ),
    "xlm-roberta": ("XLMRobertaForMaskedLM", ENCODER, {}),
    "falcon": (
        "FalconForCausalLM",
        {
            **{k: v for k, v in BERT.items() if k != "intermediate_size"},
            **{"ffn_hidden_size": 20, "layer_norm_epsilon": 1e-2, "pad_token_id": 0},
        },
        {"bias": True, "parallel_attn": False},
    ),
    # heads fill the stream
    "helium": (
        "HeliumForCausalLM",
        {**ROTARY, "num_attention_heads": 3, "num_key_value_heads": 1},
        BIASES,
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {
            **{k: v for k, v in ROTARY.items() if k != "head_dim"},
            **{**GROUPS, **LATENT, "n_shared_experts": 1},
            # its keys are read as complex numbers, which float32 allows at an even stride alone
            "kv_lora_rank": 14,
            "topk_method": "group_limited_greedy",
        },
        {
            **{**BIASES, "q_lora_rank": None, "topk_method": "greedy"},
            **dict.fromkeys(("n_group", "topk_group")),
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        {
            **{**ROTARY, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 7},
            **{"moe_num_shared_experts": 1},
        },
        {"use_bias": True, "moe_num_shared_experts": 0},
    ),
    # wider norms without weights cannot serve a tied head
    "nanochat": (
        "NanoChatForCausalLM",
        {**ROTARY, "tie_word_embeddings": False},
        {"attention_bias": True, "final_logit_softcapping": None},
    ),
    "mistral4": (
        "Mistral4ForCausalLM",
        {
            **{k: v for k, v in ROTARY.items() if k != "head_dim"},
            **{**GROUPS, **LATENT, "rope_parameters": YARN},
        },
        {**ONE_GROUP, "q_lora_rank": None, "attention_bias": True},
    ),
    "marian": ("MarianMTModel", {**BART, "pad_token_id": 0}, {"scale_embedding": True}),
    "pegasus": ("PegasusForConditionalGeneration", BART, {"scale_embedding": True}),
    "biogpt": ("BioGptForCausalLM", ENCODER, {}),
    "cohere": ("CohereForCausalLM", {**ROTARY, "layer_norm_eps": 1e-2}, {"attention_bias": True}),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        {
            **{k: v for k, v in ROTARY.items() if k != "head_dim"},
            **GROUPS,
            **LATENT,
            "n_shared_experts": 1,
        },
        {"q_lora_rank": None, "attention_bias": True},
    ),
    "granitemoeshared": (
        "GraniteMoeSharedForCausalLM",
        {**LOCAL, **FACTORS, "shared_intermediate_size": 11},
        {"attention_bias": True},
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", ROTARY, {"attention_bias": True}),
    "hy_v3": (
        "HYV3ForCausalLM",
        {
            **EXPERTS,
            "num_shared_experts": 1,
            "moe_intermediate_size": 7,
            "mlp_layer_types": ["dense", "sparse"],
        },
        {"attention_bias": True},
    ),
    "llama4_text": ("Llama4ForCausalLM", LLAMA4, {"attention_bias": True}),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {"text_config": LLAMA4, "vision_config": LLAMA4_TOWER, "image_token_index": IMAGE},
        {},
    ),
    # sliding layers have twice as many key heads
    "mimo_v2_flash": (
        "MiMoV2FlashForCausalLM",
        {
            **{**ROTARY, **KINDS, "head_dim": 8, "v_head_dim": 5, "num_attention_heads": 12},
            **{k: v for k, v in GROUPS.items() if k != "first_k_dense_replace"},
            **{"num_key_value_heads": 3, "rope_parameters": PARTIAL_BY_KIND},
            "mlp_layer_types": ["dense", "sparse"],
        },
        {"attention_bias": True, "norm_topk_prob": False},
    ),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {**LOCAL, **HALF}, {}),
    "solar_open": (
        "SolarOpenForCausalLM",
        {
            **{k: v for k, v in ROTARY.items() if k != "intermediate_size"},
            **GROUPS,
            "n_shared_experts": 1,
        },
        {"attention_bias": True},
    ),
    "exaone_moe": (
        "ExaoneMoeForCausalLM",
        {
            **{**EXPERTS, **KINDS, "num_experts": 8, "n_group": 4, "topk_group": 2},
            **{"num_shared_experts": 1, "moe_intermediate_size": 7, "num_experts_per_tok": 3},
            "mlp_layer_types": ["dense", "sparse"],
        },
        {},
    ),
    "gpt_bigcode": (
        "GPTBigCodeForCausalLM",
        GPT_J,
        {"n_inner": 13},
    ),
    "deit": (
        "DeiTForImageClassification",
        {**PATCHES, "intermediate_size": 20},
        {"qkv_bias": False, "image_size": [8, 16]},
    ),
    "audio-spectrogram-transformer": (
        "ASTForAudioClassification",
        {
            **{**PATCHES, "intermediate_size": 20, "max_length": 11},
            **{"num_mel_bins": 9, "time_stride": 3, "frequency_stride": 2},
        },
        {"qkv_bias": False},
    ),
    "vit_mae": (
        "ViTMAEForPreTraining",
        {
            **{**PATCHES, "intermediate_size": 20, "mask_ratio": 0.5},
            **{"decoder_hidden_size": 8, "decoder_num_attention_heads": 2},
            **{"decoder_num_hidden_layers": 1, "decoder_intermediate_size": 14},
        },
        {"qkv_bias": False},
    ),
    "clip": ("CLIPModel", CLIP, {}),
    # its two groups run five times
    "albert": (
        "AlbertForMaskedLM",
        {**ENCODER, "embedding_size": 8, "num_hidden_layers": 5, "num_hidden_groups": 2},
        {},
    ),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        {
            **{**ENCODER, "relative_attention": True, "pos_att_type": "p2c|c2p"},
            **{"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 4},
            **{"position_biased_input": False, "type_vocab_size": 0},
        },
        {"share_att_key": False, "position_biased_input": True, "type_vocab_size": 2},
    ),
    "beit": (
        "BeitForMaskedImageModeling",
        {
            **{**PATCHES, "intermediate_size": 20, "vocab_size": 9},
            **{"use_mask_token": True, "use_shared_relative_position_bias": True},
        },
        {
            **{"use_absolute_position_embeddings": True, "use_relative_position_bias": True},
            **{"use_shared_relative_position_bias": False, "use_mask_token": False},
        },
    ),
    "dinov3_vit": (
        "DINOv3ViTModel",
        {**PATCHES, "intermediate_size": 20, "num_register_tokens": 2},
        {"use_gated_mlp": True, "key_bias": True, "mlp_bias": False, "image_size": [8, 16]},
    ),
    "longformer": (
        "LongformerForMaskedLM",
        {**ENCODER, "attention_window": [4, 4], "sep_token_id": 2},
        {},
    ),
    # three rows of blocks, so that attention is sparse
    "big_bird": (
        "BigBirdForMaskedLM",
        {**ENCODER, "block_size": 1, "num_random_blocks": 1, "pad_token_id": 0},
        {"use_bias": False, "attention_type": "original_full"},
    ),
    "siglip": ("SiglipModel", SIGLIP, {}),
    "siglip_text_model": ("SiglipTextModel", {**CLIP_TEXT, "projection_size": 7}, {}),
    "siglip_vision_model": ("SiglipVisionModel", CLIP_IMAGES, {"vision_use_head": False}),
    "clip_text_model": ("CLIPTextModelWithProjection", CLIP_TEXT, {}),
    "clip_vision_model": ("CLIPVisionModelWithProjection", CLIP_IMAGES, {}),
    "megatron-bert": ("MegatronBertForMaskedLM", ENCODER, {}),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            **QWEN3_VL,
            "text_config": {
                **{**QWEN3_VL["text_config"], "num_local_experts": 4, "num_experts_per_tok": 2},
                # no expert is square, in any growth
                **{**WIDTHS, "moe_intermediate_size": 9},
            },
        },
        {},
    ),
    "afmoe": (
        "AfmoeForCausalLM",
        {
            **{**EXPERTS, **KINDS, "num_dense_layers": 1, "num_shared_experts": 1},
            **{"moe_intermediate_size": 7, "mup_enabled": True},
        },
        {"attention_bias": True, "mup_enabled": False, "num_dense_layers": 0},
    ),
    "gemma4_text": (
        "Gemma4ForCausalLM",
        GEMMA4,
        {
            **{**dict.fromkeys(GEMMA4_EXPERTS), "enable_moe_block": False, "attention_bias": True},
            "hidden_size_per_layer_input": 0,
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {**NEMOTRON_H, "moe_latent_size": 5},
        {"moe_latent_size": None, "norm_topk_prob": False, "mlp_bias": True, "use_bias": True},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **{**LOCAL, **FACTORS, **BAMBA, "shared_intermediate_size": 11},
            "layer_types": ["full_attention", "linear_attention"],
        },
        {
            **{"num_local_experts": 0, "num_experts_per_tok": 0, "attention_bias": True},
            **{"position_embedding_type": "rope", "mamba_proj_bias": True},
        },
    ),
    "bamba": (
        "BambaForCausalLM",
        {**ROTARY, **BAMBA, "attn_layer_indices": [0]},
        {**BIASES, "mamba_proj_bias": True},
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        {
            **{**ROTARY, **BAMBA, "mamba_rms_norm": True},
            "mamba_d_ssm": None,
            "ssm_multipliers": [0.5, 2.0, 4.0, 0.25, 8.0],
        },
        {**BIASES, "mamba_rms_norm": False, "mamba_proj_bias": True, "mamba_d_ssm": 24},
    ),
    "deepseek_v32": ("DeepseekV32ForCausalLM", INDEXED, {"attention_bias": True}),
    "kimi_k25": (
        "Kimi_K25ForConditionalGeneration",
        {
            "text_config": {
                **{k: v for k, v in INDEXED.items() if not k.startswith(("index_", "layer_"))},
                "model_type": "deepseek_v3",
            },
            "vision_config": {
                **{"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2},
                **{"num_attention_heads": 2, "patch_size": 2},
                **{"pos_emb_height": 4, "pos_emb_width": 4},
            },
            **{"projection_hidden_size": 8, "image_token_id": IMAGE, "video_token_id": 48},
            "tie_word_embeddings": False,
        },
        {},
    ),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", INDEXED, {"attention_bias": True}),
    "cohere2_moe": (
        "Cohere2MoeForCausalLM",
        {
            **{**EXPERTS, **KINDS, "layer_norm_eps": 1e-2, "num_shared_experts": 1},
            **{
                "rms_norm_eps": None,
                "mlp_layer_types": ["dense", "sparse"],
                "prefix_dense_intermediate_size": 9,
            },
        },
        {"attention_bias": True, "expert_selection_fn": "sigmoid"},
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {"text_config": GEMMA4_SMALL, "vision_config": GEMMA4_TOWER, "image_token_id": IMAGE},
        {"audio_config": GEMMA4_SOUND},
    ),
    "gpt_neo": ("GPTNeoForCausalLM", NEO, {"intermediate_size": None}),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1ForCausalLM",
        {**ROTARY, "num_experts": 4, "moe_topk": 2},
        {"attention_bias": True, "moe_topk": [2, 2]},
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {
            **{**ROTARY, "layer_types": ["full_attention", "conv", "conv"], "conv_L_cache": 3},
            **{"num_hidden_layers": 3, "block_multiple_of": 5, "norm_eps": 1e-2},
        },
        {"conv_bias": True, "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_vl": (
        "Lfm2VlForConditionalGeneration",
        {
            "text_config": {
                **{**ROTARY, "layer_types": ["full_attention", "conv", "conv"], "norm_eps": 1e-2},
                **{"num_hidden_layers": 3, "block_multiple_of": 5, "model_type": "lfm2"},
            },
            "vision_config": {**TOWER, "num_attention_heads": 2, "num_patches": 16},
            **{"projector_hidden_size": 7, "image_token_id": IMAGE},
        },
        {"projector_bias": False, "projector_use_layernorm": False},
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        {
            **{**EXPERTS, "layer_types": ["full_attention", "conv", "conv"], "norm_eps": 1e-2},
            **{"num_hidden_layers": 3, "num_dense_layers": 1, "moe_intermediate_size": 7},
        },
        {"conv_bias": True, "use_expert_bias": False, "norm_topk_prob": False},
    ),
    "mellum": (
        "MellumForCausalLM",
        {
            **{**EXPERTS, **KINDS, "moe_intermediate_size": 7, "rope_parameters": BY_KIND},
            **{"mlp_layer_types": ["dense", "sparse"]},
        },
        {"attention_bias": True, "norm_topk_prob": False},
    ),
    "modernbert-decoder": (
        "ModernBertDecoderForCausalLM",
        MODERN,
        {"attention_bias": True, "norm_bias": True, "mlp_bias": True, "classifier_bias": True},
    ),
    "xlm-roberta-xl": ("XLMRobertaXLForMaskedLM", ENCODER, {}),
    "bert-generation": ("BertGenerationDecoder", {**ENCODER, "is_decoder": True}, {}),
    "bloom": ("BloomForCausalLM", BLOOM, {}),
    "mamba2": ("Mamba2ForCausalLM", MAMBA2, {"use_bias": True, "use_conv_bias": False}),
    "mpt": ("MptForCausalLM", MPT, {}),
    "esm": ("EsmForMaskedLM", ESM, {"token_dropout": False}),
    "roformer": ("RoFormerForMaskedLM", {**ENCODER, "embedding_size": 8}, {}),
    "nomic_bert": ("NomicBertForMaskedLM", TURNED, {}),
    "gte": ("GteForMaskedLM", TURNED, {"type_vocab_size": 0}),
    "t5gemma": (
        "T5GemmaForConditionalGeneration",
        {"encoder": T5GEMMA, "decoder": T5GEMMA, "vocab_size": 50},
        {key: {**T5GEMMA, "attention_bias": True} for key in ("encoder", "decoder")},
    ),
    "whisper": ("WhisperForConditionalGeneration", WHISPER, {}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3ForMaskedLM", TURNED, {}),
}

# those that read text and have an output projection
OTHERS = ("Image", "Audio", "MAE", "Whisper")
TEXT = [
    name
    for name, (kind, *_) in RELATIVES.items()
    if "For" in kind and not any(word in kind for word in OTHERS)
]


def with_sizes(family: Family, config: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """The options of a config with other sizes, where the family has them."""
    result = copy.deepcopy(config)
    for name, size in sizes.items():
        above, _, field = name.rpartition(".")
        part = above or family.under
        (result if part is None else result[part])[field] = size
    repeats = [
        pair for c in family.classes.values() for pair in c.repeats.items() if "." in pair[0]
    ]
    for name, key in repeats:
        above, _, field = name.rpartition(".")
        own = family.config[key].field if key in family.config else key
        if above in result and own in result[family.under]:
            result[above][field] = result[family.under][own]
    return result
