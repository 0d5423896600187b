"""A class with few units: which config field moves which axis, and what its modules compute."""

from __future__ import annotations

import copy
import math
import re
import traceback
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.initialization import no_init_weights

from growkern.errors import GrowthError, reason
from growkern.growth.models import restore_buffers
from growkern.growth.outputs import Float64
from growkern.growth.own_table import NO_FIELDS, plain_rotary, randomize
from growkern.growth.plan import BY_LAYER

Shapes: TypeAlias = dict[str, tuple[int, ...]]
# layers of the small model, and its most parameters
LAYERS, MOST = 4, 2e7
# experts that a token takes
CHOSEN = "num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts"
FFN = "ffn_dim|intermediate_size|n_inner|hidden_dim|ffn_hidden_size"
# the value that growth must not meet twice: name of a field -> its value in the small model
SMALL = (
    (r"(num_)?(hidden_)?(n_)?layers?", LAYERS),
    # not a square: whether the model rounds its root shows
    (r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim", 128),
    (r"(num_|n_)?(attention_)?heads?", 4),
    (FFN, 56),
    (r"(moe|shared|expert).*intermediate_size|expert_ffn_hidden_size|moe_.*dim", 20),
    (r"vocab_size", 100),
    (r"max_position_embeddings|n_positions|max_seq_len|n_ctx|max_sequence_length", 64),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 8),
    (r"n_group|num_expert_group|topk_group|(n|num)_shared_experts", 1),
    (r"first_k_dense_replace|moe_layer_start_index", 1),
    (r"linear_num_heads|linear_head_dim", 16),
    (f"{CHOSEN}|type_vocab_size", 2),
    (r"rotary_dim", 8),
    (r"\w*_lora_rank", 40),
    (r"index_n_heads|index_topk", 6),
    (r"query_pre_attn_scalar", 10),
    (r"sliding_window|attention_window|window_size", 32),
)
# key heads and head_dim: the first with which the class runs
KEY_HEADS, HEAD_DIM = "num_key_value_heads|num_kv_heads|n_head_kv", "(attention_)?head_dim"
FITTING = ((2, 24), (2, 32), (4, 32), (4, 24), (2, None), (4, None))


def small_fields(config: Any, key_heads: int, head_dim: int | None) -> dict[str, Any]:
    """The config's fields with few units: sizes differ from each other as far as they may."""
    fields = {k: v for k, v in config.to_dict().items() if k not in NO_FIELDS}
    layers = next((v for k, v in fields.items() if re.fullmatch(SMALL[0][0], k)), 0)
    rules = (*SMALL, (KEY_HEADS, key_heads), (HEAD_DIM, head_dim))
    given = {k: _small(k, v, layers, rules) for k, v in fields.items()}
    return {k: v for k, v in given.items() if v is not None}


def _small(name: str, old: Any, layers: Any, rules: Iterable[tuple[str, Any]]) -> Any:
    if name == "rope_parameters" and old:
        return plain_rotary(old)
    if name == BY_LAYER and old:
        return {layer: own for layer, own in old.items() if int(layer) < LAYERS}
    if isinstance(old, list) and len(old) == layers:
        # one entry for each layer, of all kinds
        missing = [v for v in dict.fromkeys(old) if v not in old[:LAYERS]]
        return [*old[: LAYERS - len(missing)], *missing]
    if isinstance(old, list):
        # numbers of layers, or something else
        return [v for v in old if type(v) is not int or v < LAYERS]
    if name.endswith("_token_id"):
        return 1 if type(old) is int and old >= 100 else old
    # a size of 0 is of nothing, and the class computes one without a value
    is_size = (type(old) is int and old > 0) or (old is None and re.fullmatch(HEAD_DIM, name))
    return next((new for pattern, new in rules if is_size and re.fullmatch(pattern, name)), old)


def shapes(cls: Any, config: Any) -> tuple[Shapes, dict[str, str]]:
    """Name -> shape of every tensor of a model, and its ties."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls._from_config(copy.deepcopy(config))
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, ties


def probed(cls: Any, config: Any) -> tuple[Shapes, dict[str, str], dict[str, Shapes]]:
    """The shapes of a class, its ties if it has any, and the shapes with each number changed."""
    # by the config's class, so that what follows from a field follows
    fields, changed = {k: v for k, v in config.to_dict().items() if k not in NO_FIELDS}, {}
    for name, old in {"head_dim": None, **fields}.items():
        is_size = type(old) is int and old > 0 and not name.endswith("_token_id")
        unset = (24,) if old is None and re.fullmatch(f"{HEAD_DIM}|{FFN}", name) else ()
        for new in (2 * old, old + 1, old // 2) if is_size else unset:
            try:
                changed[name], _ = shapes(cls, type(config)(**{**fields, name: new}))
            except Exception:
                # classes raise errors of any type where sizes do not fit
                continue
            break
    return *shapes(cls, type(config)(**{**fields, "tie_word_embeddings": True})), changed


def failure(what: str, error: Exception) -> str:
    """What failed, why, and in which line of a model's code, unless growkern says it."""
    if isinstance(error, GrowthError):
        return str(error)
    frames = reversed(traceback.extract_tb(error.__traceback__))
    lines = (str(frame.line) for frame in frames if "/models/" in frame.filename)
    said = (f", in `{line}`" for line in lines if not line.startswith(("raise", "assert")))
    return f"{what}: {reason(error)}{next(said, '')}"


class Call(NamedTuple):
    """One call of a module: the first tensors that go in and out and are no integers."""

    name: str
    module: nn.Module
    x: Tensor
    y: Tensor


@torch.no_grad()
def watch(cls: Any, config: Any, dtype: Any = torch.float64) -> tuple[Any, Tensor, list[Call]]:
    """A tiny model, the tokens that it read, and the calls of its modules, inner ones first."""
    if sum(map(math.prod, shapes(cls, config)[0].values())) > MOST:
        raise GrowthError("the small config still makes a large model")
    # its parameters are random without the numbers of the process
    with warnings.catch_warnings(), no_init_weights():
        warnings.simplefilter("ignore")
        model = cls._from_config(copy.deepcopy(config), dtype=torch.float64).eval()
    restore_buffers(model)
    randomize(model)
    model.to(dtype)
    calls = list[Call]()

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        ends = [filter(torch.is_tensor, tree_leaves(values)) for values in ((args, kwargs), out)]
        x, y = (next((t for t in end if t.is_floating_point()), None) for end in ends)
        if y is not None:
            # embeddings read integers
            calls.append(Call(name, module, (y if x is None else x).clone(), y.clone()))

    modules = [(name, module) for name, module in model.named_modules() if name]
    hooks = [m.register_forward_hook(partial(note, n), with_kwargs=True) for n, m in modules]
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    with Float64():
        model(input_ids=ids)
    for each in hooks:
        each.remove()
    return model, ids, calls


def same(a: Tensor, b: Tensor) -> bool:
    """True if both hold the same numbers, in any shape and order."""
    return torch.equal(a.flatten().sort().values, b.flatten().sort().values)
