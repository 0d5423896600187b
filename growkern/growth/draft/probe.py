"""Which config field moves which axis of which tensor: a class on the meta device, field by field.

Nothing has memory here. The config is that of the user with few units, so the facts are those of
the values in use.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from growkern.growth.own_table import NO_FIELDS, plain_rotary

LAYERS = 4
# the value that growth must not meet twice: name of a field -> its value in the small model
SMALL = (
    (r"(num_)?(hidden_)?(n_)?layers?", LAYERS),
    # not a square: whether the model rounds its root shows
    (r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim", 128),
    (r"(num_|n_)?(attention_)?heads?", 4),
    (r"num_key_value_heads|num_kv_heads|n_head_kv", 2),
    (r"head_dim|attention_head_dim|kv_channels", 12),
    (r"ffn_dim|intermediate_size|n_inner|hidden_dim|ffn_hidden_size", 56),
    (r"(moe|shared|expert).*intermediate_size|expert_ffn_hidden_size|moe_.*dim", 20),
    (r"vocab_size", 100),
    (r"max_position_embeddings|n_positions|max_seq_len|n_ctx|max_sequence_length", 64),
    (r"type_vocab_size", 2),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 8),
    (r"n_group|topk_group|n_shared_experts|num_shared_experts|first_k_dense_replace", 1),
    (r"moe_layer_start_index", 1),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts", 2),
    (r"rotary_dim", 8),
    (r"\w*_lora_rank", 40),
    (r"index_n_heads|index_topk", 6),
    (r"query_pre_attn_scalar", 10),
    (r"sliding_window|attention_window|window_size", 32),
)
KEY_HEADS, HEAD_DIM = SMALL[3][0], r".*head_dim|kv_channels"
# key heads and head_dim: the first that the class accepts
FITTING = ((2, 24), (2, 32), (4, 32), (4, 24), (2, None), (4, None))
# fields that change neither a tensor nor a value of an output
GENERAL = "use_cache|return_dict|output_|jitter|chunk|tie_word_emb|summary_|encoder_decoder"


def small_configs(config: Any) -> Iterator[Any]:
    """The config with few units, in which sizes differ from each other as far as they may.

    Several, as a class may run with the last of them alone.
    """
    fields = {k: v for k, v in config.to_dict().items() if k not in NO_FIELDS}
    layers = next((v for k, v in fields.items() if re.fullmatch(SMALL[0][0], k)), 0)
    for key_heads, head_dim in FITTING:
        given = {k: _small(k, v, layers, key_heads, head_dim) for k, v in fields.items()}
        try:
            small = type(config)(**{k: v for k, v in given.items() if v is not None})
        except Exception:
            # classes raise errors of any type where sizes do not fit
            continue
        if hasattr(small, "use_cache"):
            small.use_cache = False
        small._experts_implementation = "eager"
        yield small


def _small(name: str, old: Any, layers: Any, key_heads: int, head_dim: int | None) -> Any:
    if name == "rope_parameters" and old:
        return plain_rotary(old)
    if isinstance(old, list) and len(old) == layers:
        # one entry for each layer, of all kinds
        missing = [v for v in dict.fromkeys(old) if v not in old[:LAYERS]]
        return [*old[: LAYERS - len(missing)], *missing]
    if isinstance(old, list):
        # numbers of layers, or something else
        return [v for v in old if type(v) is not int or v < LAYERS]
    if name.endswith("_token_id"):
        return 1 if type(old) is int and old >= 100 else old
    rule = next((value for pattern, value in SMALL if re.fullmatch(pattern, name)), None)
    if rule is None or not (type(old) is int or (old is None and rule != 1)):
        return old
    if re.fullmatch(KEY_HEADS, name):
        return key_heads
    return head_dim if re.fullmatch(HEAD_DIM, name) else rule


def shapes(cls: Any, config: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Name -> shape of every tensor of a model, and its ties."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls._from_config(copy.deepcopy(config))
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, ties


class Probe:
    """The tensors of a class, with a config and with each field of it changed.

    Attributes:
        base: name -> shape, with the config as it is.
        ties: names that share the storage of another, with the flag that ties them.
        changed: field -> its old and its new value, and name -> shape with the new one.
    """

    def __init__(self, cls: Any, config: Any) -> None:
        self.base, self.ties = shapes(cls, config)
        self.changed: dict[str, tuple[Any, Any, dict[str, tuple[int, ...]]]] = {}
        for name, old in {"head_dim": None, **config.to_dict()}.items():
            for new in _others(name, old):
                try:
                    found, ties = shapes(cls, _with_field(config, name, new))
                except Exception:
                    # classes raise errors of any type where sizes do not fit
                    continue
                self.changed[name] = old, new, found
                self.ties |= ties if name == "tie_word_embeddings" else {}
                break

    def fields(self, name: str, axis: int) -> dict[str, tuple[int, int]]:
        """The fields that move an axis of a tensor -> how far they moved, and the axis with them.

        A field without a value is set, and moves by 0.
        """
        old, moved = self.base[name][axis], {}
        for field, (before, after, found) in self.changed.items():
            new = found.get(name, ())[axis:][:1]
            if type(after) is int and new and new[0] != old:
                moved[field] = after - before if before else 0, new[0] - old
        return moved

    @property
    def flags(self) -> dict[str, tuple[bool, set[str], set[str]]]:
        """Flags -> their value, and the tensors that come, and go, with the other value."""
        base = {*self.base}
        return {
            flag: (old, found.keys() - base, base - found.keys())
            for flag, (old, _, found) in self.changed.items()
            if type(old) is bool and not re.search(GENERAL, flag)
        }


def _with_field(config: Any, name: str, value: Any) -> Any:
    """The config with one field changed, by its class, so that what follows from it follows."""
    fields = {k: v for k, v in config.to_dict().items() if k not in NO_FIELDS}
    try:
        return type(config)(**{**fields, name: value})
    except Exception:
        new = copy.deepcopy(config)
        setattr(new, name, value)
        return new


def _others(name: str, value: Any) -> tuple[Any, ...]:
    """Other values of a field, of which the first that the class takes is tried."""
    if type(value) is bool:
        return (not value,)
    if name.endswith("_token_id"):
        return ()
    if type(value) is int and value > 0:
        return 2 * value, value + 1, value // 2
    return (24,) if value in (None, 0) and re.search("head_dim|n_inner", name) else ()


def template(name: str) -> str:
    """The name of a tensor with `{l}` for the number of its layer."""
    return re.sub(r"\.(\d+)\.", ".{l}.", name, count=1)
