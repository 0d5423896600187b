"""Which config field moves which axis of which tensor: a class on the meta device, field by field.

Nothing has memory here. The config is that of the user with few units, so the facts are those of
the values in use.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from growkern.errors import GrowthError, reason
from growkern.growth.own_table import NO_FIELDS, plain_rotary

LAYERS, HEADS, STREAM = 4, 4, 64
# the value that growth must not meet twice: name of a field -> its value in the small model
SMALL = (
    (r"(num_)?(hidden_)?(n_)?layers?", LAYERS),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim", STREAM),
    (r"(num_|n_)?(attention_)?heads?", HEADS),
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
    (r"query_pre_attn_scalar", 10),
    (r"sliding_window|attention_window|window_size", 32),
)
KEY_HEADS, HEAD_DIM = r"num_key_value_heads|num_kv_heads|n_head_kv", r".*head_dim|kv_channels"
# key heads and head_dim: the first that the class accepts
FITTING = ((2, 24), (2, 16), (4, 16), (4, 24), (2, None), (4, None))
# how far the class's fields go that change no tensor
NO_SIZE = ("use_cache", "return_dict", "output_hidden_states", "output_attentions")
# parameters of the small model
MOST = 2e7


class NoRule(GrowthError):
    """The class has something that a draft has no rule for."""


def small_config(config: Any) -> Any:
    """The config with few units, in which sizes differ from each other as far as they may."""
    fields = {k: v for k, v in config.to_dict().items() if k not in NO_FIELDS}
    layers = next((v for k, v in fields.items() if re.fullmatch(SMALL[0][0], k)), 0)
    error: Exception | None = None
    for key_heads, head_dim in FITTING:
        given = {k: _small(k, v, layers, key_heads, head_dim) for k, v in fields.items()}
        try:
            small = type(config)(**{k: v for k, v in given.items() if v is not None})
            if hasattr(small, "use_cache"):
                small.use_cache = False
            small._attn_implementation = small._experts_implementation = "eager"
            small.architectures = config.architectures
            return small
        except Exception as refused:
            # classes raise errors of any type where sizes do not fit
            error = refused
    raise NoRule(f"no small config of this class: {reason(error or ValueError())[:150]}")


def _small(name: str, old: Any, layers: Any, key_heads: int, head_dim: int | None) -> Any:
    rule = next((value for pattern, value in SMALL if re.fullmatch(pattern, name)), None)
    if name == "rope_parameters" and old:
        return plain_rotary(old)
    if isinstance(old, list):
        return _cut(old, layers)
    if name.endswith("_token_id"):
        return 1 if type(old) is int and old >= 100 else old
    if rule is None or not (type(old) is int or (old is None and rule != 1)):
        return old
    if re.fullmatch(KEY_HEADS, name):
        return key_heads
    # as many heads as the user's model has keys for
    return head_dim if re.fullmatch(HEAD_DIM, name) else rule


def _cut(values: list[Any], layers: Any) -> list[Any]:
    """A list for few layers: of one entry per layer, all values, or the numbers of layers."""
    if len(values) != layers:
        is_numbers = all(type(value) is int for value in values)
        return [v for v in values if v < LAYERS] if is_numbers else values
    kept = values[:LAYERS]
    missing = [v for v in dict.fromkeys(values) if v not in kept]
    return [*kept[: LAYERS - len(missing)], *missing]


def shapes(cls: Any, config: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Name -> shape of every tensor of a model, and its ties."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls._from_config(copy.deepcopy(config))
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, ties


def with_field(config: Any, name: str, value: Any) -> Any:
    """The config with one field changed, by its class, so that what follows from it follows."""
    fields = {k: v for k, v in config.to_dict().items() if k not in NO_FIELDS}
    try:
        new = type(config)(**{**fields, name: value})
    except Exception:
        new = copy.deepcopy(config)
        setattr(new, name, value)
    new._attn_implementation = new._experts_implementation = "eager"
    new.architectures = config.architectures
    return new


@dataclass
class Probe:
    """What a class's tensors do as fields of its config change.

    Attributes:
        base, ties: the tensors of the small model, and the names that share storage.
        moves: tensor -> axis -> field -> how far the field and the axis moved.
        flags: flag -> its value, and the tensors that come and go with the other value.
        counts: fields that count layers.
    """

    base: Mapping[str, tuple[int, ...]]
    ties: dict[str, str]
    moves: dict[str, dict[int, dict[str, tuple[int, int]]]] = field(default_factory=dict)
    flags: dict[str, tuple[bool, set[str], set[str]]] = field(default_factory=dict)
    counts: list[str] = field(default_factory=list)

    def fields(self, name: str, axis: int) -> dict[str, tuple[int, int]]:
        """The fields that move an axis of a tensor."""
        return self.moves.get(name, {}).get(axis, {})


def probe(cls: Any, config: Any) -> Probe:
    """Change one field after another."""
    found = Probe(*shapes(cls, config))
    for name, value in {"head_dim": None, **config.to_dict()}.items():
        if name.endswith("_token_id") or name in NO_SIZE:
            continue
        if type(value) is bool:
            _probe_flag(found, cls, config, name, value)
        elif (type(value) is int and value > 0) or re.search("head_dim|n_inner", name):
            _probe_size(found, cls, config, name, value)
    return found


def _probe_flag(found: Probe, cls: Any, config: Any, name: str, value: bool) -> None:
    try:
        new, ties = shapes(cls, with_field(config, name, not value))
    except Exception:
        return
    if name == "tie_word_embeddings":
        found.ties = {**ties, **found.ties}
    elif new.keys() != found.base.keys():
        found.flags[name] = value, new.keys() - found.base.keys(), found.base.keys() - new.keys()


def _tried(value: Any) -> Iterator[int]:
    yield from (2 * value, value + 1, value // 2) if value else (24,)


def _probe_size(found: Probe, cls: Any, config: Any, name: str, value: Any) -> None:
    for change in _tried(value):
        try:
            new = shapes(cls, with_field(config, name, change))[0]
            break
        except Exception:
            continue
    else:
        return
    other = new.keys() ^ found.base.keys()
    if "layer" in name and any(re.search(r"\.\d+\.", tensor) for tensor in other):
        found.counts.append(name)
    for tensor in new.keys() & found.base.keys():
        for axis, (old, now) in enumerate(zip(found.base[tensor], new[tensor], strict=False)):
            if old != now:
                moved = change - (value or 0) if value else 0, now - old
                found.moves.setdefault(tensor, {}).setdefault(axis, {})[name] = moved


def template(name: str) -> str:
    """The name of a tensor with `{l}` for the number of its layer."""
    return re.sub(r"\.(\d+)\.", ".{l}.", name, count=1)
