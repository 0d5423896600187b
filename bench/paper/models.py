"""The classes of the models, and their configs at a size.

The papers initialise weights with a standard deviation of 0.02 at width 768. At small widths 0.02
is nearly zero, so that random rows disturb nothing. GPT-2, BERT and Qwen3 begin here with
0.02 sqrt(768 / w). T5 keeps the initialization of its own class, which knows the width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers

# ids of `examples.demo.corpus.train_tokenizer`
PADDING, SEPARATOR = 0, 3
# factor of a mixture's auxiliary loss
BALANCE = 0.01


@dataclass(frozen=True)
class Size:
    """A model: its layers, the width of its stream, and its attention heads.

    A mixture has experts, each as wide as the FFN of a dense model or a part of it.
    """

    layers: int
    width: int
    heads: int
    experts: int = 0
    parts: int = 1

    @property
    def name(self) -> str:
        """In folders and labels."""
        return f"{self.layers}x{self.width}"


def _gpt2(size: Size, vocab: int, length: int, dropout: float) -> Any:
    return transformers.GPT2Config(
        vocab_size=vocab,
        n_positions=length,
        n_layer=size.layers,
        n_embd=size.width,
        n_head=size.heads,
        # the function of GPT-2's own "gelu_new", in one kernel: a step takes 0.85 of the time
        activation_function="gelu_pytorch_tanh",
        initializer_range=spread(size.width),
        bos_token_id=SEPARATOR,
        eos_token_id=SEPARATOR,
        pad_token_id=PADDING,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
    )


def _bert(size: Size, vocab: int, length: int, dropout: float) -> Any:
    return transformers.BertConfig(
        vocab_size=vocab,
        max_position_embeddings=length,
        num_hidden_layers=size.layers,
        hidden_size=size.width,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        initializer_range=spread(size.width),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=PADDING,
        eos_token_id=SEPARATOR,
    )


def _t5(size: Size, vocab: int, length: int, dropout: float) -> Any:
    return transformers.T5Config(
        vocab_size=vocab,
        num_layers=size.layers,
        num_decoder_layers=size.layers,
        d_model=size.width,
        num_heads=size.heads,
        d_kv=size.width // size.heads,
        d_ff=4 * size.width,
        dropout_rate=dropout,
        pad_token_id=PADDING,
        eos_token_id=SEPARATOR,
        decoder_start_token_id=PADDING,
    )


def _qwen3(size: Size, vocab: int, length: int, dropout: float) -> Any:
    common = {
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "num_hidden_layers": size.layers,
        "hidden_size": size.width,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "head_dim": size.width // size.heads,
        "intermediate_size": 3 * size.width,
        "initializer_range": spread(size.width),
        "tie_word_embeddings": True,
        "pad_token_id": PADDING,
        "eos_token_id": SEPARATOR,
    }
    if not size.experts:
        return transformers.Qwen3Config(**common)
    return transformers.Qwen3MoeConfig(
        **common,
        num_experts=size.experts,
        num_experts_per_tok=2,
        moe_intermediate_size=3 * size.width // size.parts,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=BALANCE,
    )


def spread(width: int) -> float:
    """The standard deviation of untrained weights."""
    return 0.02 * math.sqrt(768 / width)


@dataclass(frozen=True)
class Family:
    """What a setting must know of a model's class.

    Attributes:
        config: (size, vocabulary, tokens in a row, dropout) -> its config.
        sizes: the names of the config for layers, width and heads, and for what follows from them.
        sentinels: tokens that stand for the spans that T5 takes out.
        mixture: the class of its mixtures of experts.
    """

    model: str
    config: Callable[[Size, int, int, float], Any]
    sizes: tuple[str, ...]
    sentinels: int = 0
    mixture: str = ""


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", _gpt2, ("n_layer", "n_embd", "n_head")),
    "bert": Family(
        "BertForMaskedLM",
        _bert,
        ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        _t5,
        ("num_layers", "num_decoder_layers", "d_model", "num_heads", "d_kv", "d_ff"),
        sentinels=32,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _qwen3,
        (
            *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
            *("intermediate_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        ),
        mixture="Qwen3MoeForCausalLM",
    ),
}
