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
# of a mixture, with the factor of its auxiliary loss
ROUTERS = {"norm_topk_prob": True, "output_router_logits": True, "router_aux_loss_coef": 0.01}


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


def _qwen3(size: Size) -> dict[str, int]:
    sizes = {
        "num_hidden_layers": size.layers,
        "hidden_size": size.width,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "intermediate_size": 3 * size.width,
    }
    if not size.experts:
        return sizes
    of_expert = {"moe_intermediate_size": 3 * size.width // size.parts}
    return sizes | {"num_experts": size.experts, "num_experts_per_tok": 2} | of_expert


def spread(width: int) -> float:
    """The standard deviation of untrained weights."""
    return 0.02 * math.sqrt(768 / width)


@dataclass(frozen=True)
class Family:
    """What a setting must know of a model's class.

    Attributes:
        sizes: layers, width and heads, and what follows from them, by the names of the config.
        length: the name of the tokens in a row, if the config has it.
        dropout: the names of the shares.
        others: all other arguments of the config, in all sizes and in one.
        sentinels: tokens that stand for the spans that T5 takes out.
        mixture: the class of its mixtures of experts.
    """

    model: str
    sizes: Callable[[Size], dict[str, int]]
    length: str
    dropout: tuple[str, ...]
    others: Callable[[Size], dict[str, Any]]
    sentinels: int = 0
    mixture: str = ""

    def model_class(self, size: Size) -> Any:
        """The class of a model of this size in transformers."""
        return getattr(transformers, self.mixture if size.experts else self.model)

    def config(self, size: Size, vocab: int, length: int, dropout: float) -> Any:
        """The config of a model that reads rows of so many tokens."""
        options = {"vocab_size": vocab, "pad_token_id": PADDING, "eos_token_id": SEPARATOR}
        options |= {self.length: length} if self.length else {}
        options |= dict.fromkeys(self.dropout, dropout)
        config_class = self.model_class(size).config_class
        return config_class(**options, **self.sizes(size), **self.others(size))


FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        lambda size: {"n_layer": size.layers, "n_embd": size.width, "n_head": size.heads},
        "n_positions",
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        lambda size: {
            # the function of GPT-2's own "gelu_new", in one kernel: a step takes 0.85 of the time
            "activation_function": "gelu_pytorch_tanh",
            "initializer_range": spread(size.width),
            "bos_token_id": SEPARATOR,
        },
    ),
    "bert": Family(
        "BertForMaskedLM",
        lambda size: {
            "num_hidden_layers": size.layers,
            "hidden_size": size.width,
            "num_attention_heads": size.heads,
            "intermediate_size": 4 * size.width,
        },
        "max_position_embeddings",
        ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        lambda size: {"initializer_range": spread(size.width)},
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        lambda size: {
            **dict.fromkeys(("num_layers", "num_decoder_layers"), size.layers),
            "d_model": size.width,
            "num_heads": size.heads,
            "d_kv": size.width // size.heads,
            "d_ff": 4 * size.width,
        },
        "",
        ("dropout_rate",),
        lambda size: {"decoder_start_token_id": PADDING},
        sentinels=32,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _qwen3,
        "max_position_embeddings",
        (),
        lambda size: {
            "head_dim": size.width // size.heads,
            "initializer_range": spread(size.width),
            "tie_word_embeddings": True,
            **(ROUTERS if size.experts else {}),
        },
        mixture="Qwen3MoeForCausalLM",
    ),
}
