"""Tiny sources of many families, and what they are grown into."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# as many as the tests' models, whose last ones stand for images
TOKENS = 50
EXPECTED = "expected.pt"
SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
GPT2 = {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
# published ones say it too
GPT2 |= {"n_ctx": 64}
BOTH = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
SECTIONS = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 2]}
TOWER = {
    **{"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "patch_size": 4},
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "attention_factor": 1.3},
    **{"original_max_position_embeddings": 16},
}
LONG = {
    **{"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 64},
    **{"short_factor": [1.0, 1.2, 1.3, 1.4], "long_factor": [2.0, 3.0, 4.0, 5.0]},
}
DENSE = {**GROUPED, **ROPE, "head_dim": 8}
EXPERTS = {**DENSE, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS = {"layer_types": 2 * ["sliding_attention", "full_attention"], "sliding_window": 4}
WHOLE = {**SIZES, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, **ROPE}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    **{"q_lora_rank": 10, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4},
    **{"v_head_dim": 5, "num_key_value_heads": 4},
}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
MODERN = {**SIZES, "cls_token_id": 1, "sep_token_id": 2, "rope_parameters": BOTH}
SHARED = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
SUMMED = {**EXPERTS, "num_local_experts": 4, "norm_topk_prob": True}
LONGROPE = {**GROUPED, "rope_parameters": LONG, "original_max_position_embeddings": 64}
GLM_YARN = {**EXPERTS, **GROUPS, "rope_parameters": {**YARN, "partial_rotary_factor": 1.0}}
# label -> class, config
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**SIZES, "rope_parameters": PARTIAL}),
    "llama": ("LlamaForCausalLM", {**GROUPED, "rope_parameters": LLAMA3}),
    "mistral": ("MistralForCausalLM", {**GROUPED, **ROPE, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {**GROUPED, **ROPE}),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, **ROPE, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, **ROPE, **GEMMA}),
    "gemma3_text": ("Gemma3ForCausalLM", {**GROUPED, **GEMMA, "rope_parameters": BOTH}),
    "apertus": ("ApertusForCausalLM", {**GROUPED, "rope_parameters": LLAMA3}),
    "vaultgemma": ("VaultGemmaForCausalLM", {**GROUPED, **ROPE, **GEMMA}),
    "olmo2": ("Olmo2ForCausalLM", {**GROUPED, **ROPE}),
    "phi3": ("Phi3ForCausalLM", {**GROUPED, "rope_parameters": PARTIAL}),
    "cohere2": ("Cohere2ForCausalLM", {**GROUPED, **ROPE, "sliding_window": 4}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {**GROUPED, **ROPE, "head_dim": 8}),
    "glm": ("GlmForCausalLM", {**GROUPED, "head_dim": 8, "rope_parameters": PARTIAL}),
    "glm4": ("Glm4ForCausalLM", {**GROUPED, "head_dim": 8, "rope_parameters": PARTIAL}),
    "gptj": ("GPTJForCausalLM", {**GPT2, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2}),
    "olmo": ("OlmoForCausalLM", {**GROUPED, **ROPE}),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**GROUPED, **GEMMA, "rope_parameters": BOTH},
            "vision_config": {**TOWER, "image_size": 8},
            "mm_tokens_per_image": 4,
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**GROUPED, **ROPE, "sliding_window": None, "model_type": "mistral"},
            "vision_config": {**TOWER, "head_dim": 4, "image_size": 16},
            "tie_word_embeddings": False,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**GROUPED, "rope_parameters": SECTIONS},
            "vision_config": {"depth": 1, "hidden_size": 8, "num_heads": 2, "out_hidden_size": 32},
        },
    ),
    "bert": ("BertForMaskedLM", SIZES),
    "modernbert": ("ModernBertForMaskedLM", MODERN),
    "granite": ("GraniteForCausalLM", {**GROUPED, **ROPE}),
    "exaone4": ("Exaone4ForCausalLM", {**DENSE, **KINDS, "rope_parameters": LLAMA3}),
    "mixtral": ("MixtralForCausalLM", {**DENSE, "num_local_experts": 4, "sliding_window": None}),
    "granitemoe": ("GraniteMoeForCausalLM", {**GROUPED, **ROPE, "num_local_experts": 4}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **DENSE,
            **KINDS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN,
        },
    ),
    "qwen2_moe": ("Qwen2MoeForCausalLM", SHARED),
    "qwen3_moe": ("Qwen3MoeForCausalLM", SUMMED),
    "olmoe": ("OlmoeForCausalLM", WHOLE),
    "flex_olmo": ("FlexOlmoForCausalLM", WHOLE),
    "glm4_moe": ("Glm4MoeForCausalLM", {**EXPERTS, **GROUPS, "rope_parameters": PARTIAL}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {**GROUPED, **ROPE, **GROUPS, **LATENT, "num_experts_per_tok": 2},
    ),
    "llama yarn": ("LlamaForCausalLM", {**GROUPED, "rope_parameters": YARN}),
    "olmo2 yarn": ("Olmo2ForCausalLM", {**GROUPED, "rope_parameters": YARN}),
    "phi3 longrope": ("Phi3ForCausalLM", LONGROPE),
    "glm4_moe yarn": ("Glm4MoeForCausalLM", GLM_YARN),
}
# fields of published configs that other software reads, and transformers does not need
SIX = {"hidden_size": 24}
NOT_LAST = ["linear_attention", "full_attention"]
PUBLISHED: dict[str, dict[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "cohere": SIX,
    "deepseek_v2": {"rope_parameters": YARN},
    "exaone_moe": {"is_moe_layer": [False, True]},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "gpt_bigcode": {"n_inner": 48},
    "gpt_neox": {"intermediate_size": 128},
    "lfm2": SIX,
    "lfm2_moe": SIX,
    "mamba2": {"intermediate_size": 24, "ssm_state_size": 5},
    "minimax_m2": {"shared_intermediate_size": 0, "rotary_dim": 2},
    "olmo3": SIX,
    "phi": SIX,
    "qwen3_next": {"layer_types": NOT_LAST, "full_attention_interval": 2, "mlp_only_layers": []},
    "starcoder2": SIX,
}
# further families that some of the other software reads, with the sizes of their tests
FURTHER = (
    *("afmoe", "bamba", "bloom", "cohere", "cohere2_moe", "deepseek_v2", "deepseek_v32"),
    *("ernie4_5_moe", "exaone_moe", "falcon", "falcon_h1", "gemma", "gemma4", "gemma4_text"),
    *("glm4_moe_lite", "glm_moe_dsa", "gpt_bigcode", "granitemoehybrid", "helium"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "jais2", "kimi_k25", "lfm2", "lfm2_moe"),
    *("llama4", "llama4_text", "mamba2", "mbart", "mellum", "mimo_v2_flash", "minimax_m2"),
    *("ministral3", "mistral4", "mpt", "nanochat", "nemotron", "nemotron_h", "olmo3", "phi"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "roberta", "seed_oss"),
    *("smollm3", "solar_open", "stablelm", "starcoder2"),
)
# how many times each size of the source
GROWTHS: dict[str, dict[str, float]] = {
    "even": {"width": 2},
    "uneven": {"width": 1.5},
    "depth": {"layers": 2},
    "experts": {},
}
# of dense models: what their growth by experts makes
MIXTURES = {"mistral": "mixtral", "granite": "granitemoe", "qwen2": "qwen2_moe"}
MIXTURES |= {"qwen3": "qwen3_moe"}


def make(place: Path, families: Sequence[str]) -> None:
    """Write the source and the targets of families into FAMILY/GROWTH.

    The process that loads them has another transformers, which the tests' models do not know.
    """
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    import growkern
    from growkern.families import load_family
    from growkern.growth.disk import complete_config
    from testbed.families import FAMILIES as TABLES
    from testbed.models import eager
    from testbed.relatives import RELATIVES

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TOKENS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    for name in families:
        class_name, config, *_ = {**TABLES, **RELATIVES, **FAMILIES}[name]
        model_class = getattr(transformers, class_name)
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**{**config, **PUBLISHED.get(name, {})}))
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        source = place / name / "source"
        model.save_pretrained(source)
        # older software reads a source that an older version of transformers wrote
        complete_config(source)
        tokenizer.save_pretrained(source)
        file = source / "tokenizer_config.json"
        settings = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        file.write_text(json.dumps(settings))
        with torch.no_grad():
            torch.save(eager(model.eval())(input_ids=ids()).logits, place / name / EXPECTED)
        for growth, times in GROWTHS.items():
            if growth == "experts":
                if name not in MIXTURES:
                    continue
                field = load_family(MIXTURES[name]).config_field("experts")
                how = {"num_experts_per_tok": 2, "to": MIXTURES[name], field: 4}
            else:
                how = {"portable": True, **_sizes(model, times)}
            try:
                is_exact = growkern.plan(source, **how).exact
            except growkern.GrowthError as error:
                print(f"{name} has no growth {growth}: {error}", file=sys.stderr)
                continue
            if is_exact:
                growkern.grow_checkpoint(source, place / name / growth, progress=False, **how)


def _sizes(model: Any, times: dict[str, float]) -> dict[str, int]:
    """The sizes of a growth by the names of the config; `width` and `layers` times the source's."""
    from growkern.families import ModelSpec

    spec = ModelSpec.of(model.config, type(model).__name__)
    keys = {"width": ["stream"], "layers": [*spec.family.stacks.values()]}
    grown = {key: round(n * spec.size(key)) for name, n in times.items() for key in keys[name]}
    return {spec.family.config_field(key): size for key, size in grown.items()}


def ids() -> torch.Tensor:
    """The tokens that every runtime reads."""
    return torch.randint(3, 46, (2, 16), generator=torch.Generator().manual_seed(1))
