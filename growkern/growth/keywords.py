"""The keyword arguments of every growth, for type checkers and editors."""

from __future__ import annotations

from typing import TypedDict

from growkern.growth.options import (
    Aki,
    Depth,
    Maps,
    Method,
    Scheme,
    SharedExpert,
    Stream,
    Symmetry,
)


class GrowthKeywords(TypedDict, total=False):
    """The fields of `growkern.growth.options.GrowthOptions`, and the target's sizes.

    Sizes go by the names in the model's own config. Each family takes those that its config has.
    """

    method: Method
    depth: Depth
    scheme: Scheme
    symmetry: Symmetry
    stream: Stream
    noise: float
    routing: float
    aki: Aki
    maps: Maps
    carry: float
    identity_gain: float
    seed: int
    portable: bool
    dequantize: bool
    to: str
    router: str
    drop: float
    shared_expert: SharedExpert

    vocab_size: int
    pad_vocab_to_multiple_of: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    # mixtures of experts
    num_experts: int
    num_local_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    # the layers of a mixture that a dense model becomes
    mlp_only_layers: list[int]
    decoder_sparse_step: int
    norm_topk_prob: bool
    first_k_dense_replace: int
    # latent attention
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    # gated delta nets
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_value_head_dim: int
    # GPT-2
    n_embd: int
    n_inner: int
    n_head: int
    n_layer: int
    # BART and T5
    d_model: int
    d_ff: int
    d_kv: int
    num_heads: int
    num_layers: int
    num_decoder_layers: int
    encoder_layers: int
    decoder_layers: int
    encoder_ffn_dim: int
    decoder_ffn_dim: int
    encoder_attention_heads: int
    decoder_attention_heads: int
    # DistilBERT
    dim: int
    hidden_dim: int
    n_heads: int
    n_layers: int
    # OPT
    ffn_dim: int
    # ViT and DINOv2
    pooler_output_size: int
    mlp_ratio: int
