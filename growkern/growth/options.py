"""The options of a growth, checked when they are made, and its keyword arguments.

`lineage.json` stores every field, so renaming or adding one changes that file's format.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final, Literal, TypedDict, get_args, get_type_hints

from growkern.arguments import (
    SHARE,
    Limit,
    check_fields,
    check_seed,
    choices,
    real_number,
    whole_number,
)
from growkern.errors import GrowthError, nearest
from growkern.families import (
    Family,
    growable_fields,
    inner,
    load_family,
    read_family,
    refuse_other_mixture,
    supported_families,
)
from growkern.ops.expand import MOST_AMPLITUDE

# the meanings of "auto", except with scheme="paper"
DEFAULT_SYMMETRY: Final = "routing"
DEFAULT_DEPTH: Final = "identity"
Method = Literal["fpi", "fresh", "aki", "direct_copy", "random"]
Depth = Literal["auto", "identity", "stack", "interleave", "random"] | tuple[int, ...]
Scheme = Literal["exact", "paper"]
Symmetry = Literal["auto", "routing", "noise", "split", "none"]
Stream = Literal["auto", "copies", "padded"]
Aki = Literal["unit", "eq16"]
Maps = Literal["cyclic", "balanced"]
SharedExpert = Literal["zero", "dense"]
# of a training, thousands of times more than the largest so far
MOST_TOKENS = 1e18
# not a size: the vocabulary is rounded up to a multiple of it
PAD_VOCAB = "pad_vocab_to_multiple_of"
# a size, for messages
POSITIVE = "a positive whole number"
# what transformers also calls a size that a config has under another name
OTHER_NAMES = {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_experts", "num_local_experts", "num_experts_per_tok"),
}
# of an option that nothing reads
IS_FOR = "in this growth: it is for {}: leave it out"
COPYING = "the methods that copy, fpi and aki"
PADDED = "models with LayerNorm whose stream gets extra coordinates"
# the kinds of a new router. Others are read from a file
ROUTERS = ("random", "zero")


@dataclass(frozen=True)
class GrowthOptions:
    """How to grow.

    Attributes:
        method: how tensors are widened. `fpi` preserves the source's function by copies. `fresh`
            preserves it too, but new heads and FFN units begin untrained, and nothing reads them
            yet (Masked Structural Growth, arXiv 2305.02869). `aki` takes them from the next layer.
            `direct_copy` puts the source into a block of a random matrix. `random` uses nothing of
            the source (bert2BERT, Table 1).
        depth: how layers are added. `identity` inserts blocks that add nothing, which keeps the
            function. `stack` repeats the whole stack (bert2BERT, Algorithm 1). `interleave` puts
            copies next to their layer. `random` inserts untrained layers, as the class initialises
            them, and can start from a model without layers. A list has the source layer of every
            target layer, from 0: (0, 1, 2, 1, 2, 3) repeats the middle of four. `auto` is `stack`
            with scheme="paper" and with the methods `direct_copy` and `random`, else `identity`.
        scheme: `exact` computes the source's function up to rounding wherever possible. `paper` is
            bert2BERT's Eq. 5-13 as printed.
        symmetry: how copies are made different. Equal copies get equal gradients and never part.
            `routing` gives every weight to one copy, chosen by a hash. `noise` adds noise that
            cancels over the copies. `split` gives copies unequal signed shares. `none` leaves them
            equal. `auto` is `none` with `scheme="paper"`, else `routing`. Copies add up exactly to
            the source's weight: with `routing` and `split` always, with `noise` if their number is
            a power of two.
        stream: how the hidden size grows. `copies` repeats the entries of hidden states. `padded`
            keeps each once and adds entries that hold nothing: 0 under RMSNorm, the mean of the
            others under LayerNorm. Weights that read them are copies with random signs. `auto` is
            `padded` where that is exact: with RMSNorm, and with LayerNorm before blocks. Behind
            blocks (BERT), and with scheme="paper", it is `copies`.
        noise: largest size of the noise, relative to each weight. Every copy's share is
            (1 +- noise) times its equal share. A hash draws the sign for every weight. Where a
            dense model becomes a mixture, every two copies of its FFN get such shares.
        routing: amplitude a of the routing, 0 to 3. One copy gets (1 + a)/2 times the weight, and
            another one (1 - a)/2 times. 1: one copy gets all of it. Larger amplitudes make copies
            differ faster, but the loss rises in the first steps. And they enlarge the rounding of
            every layer, so the plan calls the outputs changed.
        aki: `unit` takes whole heads and neurons (Figure 14), `eq16` output rows of every matrix.
        maps: `cyclic` repeats the units in order, `balanced` copies random units equally often.
        carry: amplitude of the extra coordinates that carry the mean through post-norms at uneven
            widths. 0 turns them off. The error is O(carry^2), at most 1e-6 for 0.01. But the
            norm's weight there is 4/carry, and a weight of 400 does not survive a learning rate
            of 1e-3.
        identity_gain: size K of the activations inside inserted post-norm blocks. Each block has a
            relative error of about eps K^2 / (K^2 + eps) / v, where v is the variance of the norms'
            input. At 1e-8 it is rounding in float64, but the weights of those norms hardly learn.
        seed: seed of maps, noise, routing, shares and random weights.
        portable: keep what other software computes instead of reading it. head_dim stays
            hidden_size / num_attention_heads in families that do not declare it. Layers are added
            in whole periods of their kinds, rope_theta stays, and so does the relation of
            query_pre_attn_scalar to head_dim. Sizes that do not allow this are refused.
        dequantize: read a checkpoint in fp8 with block scales or in mxfp4 as the numbers in
            bfloat16 that its weights stand for. The target is not quantised. Without this option
            such a checkpoint is refused.
        to: the family of mixtures that a dense model becomes, such as "qwen3_moe". Its experts are
            copies of the dense FFN, or of equal parts of it if they are smaller.
        router: rows of the new router: `random` as its class draws them, `zero`, or the path of a
            .safetensors file with a matrix for each layer, `layers.0`: a row for each copy of the
            FFN. With centroids as rows, tokens of a kind choose the same expert.
        drop: share of the units of every new expert whose weights are drawn again, with the mean
            and the deviation of their matrix (Drop-Upcycling). Outputs change.
        shared_expert: what an expert that all tokens share starts with. `zero`: it adds nothing,
            and the experts that the router chooses compute the dense FFN. `dense`: the reverse.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {
        **dict.fromkeys(("noise", "carry", "drop"), SHARE),
        "routing": Limit(lambda x: 0 <= x <= MOST_AMPLITUDE, f"lie in [0, {MOST_AMPLITUDE:g}]"),
        "identity_gain": Limit(lambda x: 0 < x <= 1, "lie in (0, 1]"),
    }

    method: Method = "fpi"
    depth: Depth = "auto"
    scheme: Scheme = "exact"
    symmetry: Symmetry = "auto"
    stream: Stream = "auto"
    noise: float = 0.5
    routing: float = 1.0
    aki: Aki = "unit"
    maps: Maps = "cyclic"
    carry: float = 1.0
    identity_gain: float = 1.0
    seed: int = 0
    portable: bool = False
    dequantize: bool = False
    to: str = ""
    router: str = "random"
    drop: float = 0.0
    shared_expert: SharedExpert = "zero"

    def __post_init__(self) -> None:
        # numbers of other libraries become Python's
        if isinstance(self.router, os.PathLike):
            object.__setattr__(self, "router", os.fspath(self.router))
        object.__setattr__(self, "depth", read_depth(self.depth))
        for name, kind in KINDS.items():
            if kind is float:
                object.__setattr__(self, name, real_number(name, getattr(self, name)))
        object.__setattr__(self, "seed", check_seed(self.seed))
        check_fields(self)
        if self.router not in ROUTERS and ".safetensors" not in self.router:
            raise GrowthError(
                f"router={self.router!r}: give {', '.join(ROUTERS)} or a .safetensors file of rows"
            )
        if self.symmetry == "auto":
            default = "none" if self.scheme == "paper" else DEFAULT_SYMMETRY
            object.__setattr__(self, "symmetry", default)
        if self.depth == "auto":
            is_copied = self.scheme == "paper" or self.is_baseline
            object.__setattr__(self, "depth", "stack" if is_copied else DEFAULT_DEPTH)
        if self.to and (self.method != "fpi" or self.scheme != "exact"):
            raise GrowthError(
                f"to={self.to!r} takes method='fpi' and scheme='exact': leave the others out"
            )
        other = f"with symmetry={self.symmetry!r}: give symmetry={{!r}} as well"
        dense = "without a family to become: give to as well"
        rules = [(x, self.symmetry == x, other.format(x)) for x in ("noise", "routing")]
        rules += [(x, bool(self.to), dense) for x in ("router", "drop", "shared_expert")]
        rules += [(x, not self.is_baseline, IS_FOR.format(COPYING)) for x in ("noise", "routing")]
        rules += [("aki", self.method == "aki", IS_FOR.format("method='aki'"))]
        for name, is_read, why in rules:
            if not is_read and getattr(self, name) != getattr(GrowthOptions, name):
                raise GrowthError(no_effect(self, name, why))
        if self.method == "fresh" and self.scheme == "paper":
            raise GrowthError("method='fresh' takes scheme='exact': leave scheme out")
        if self.stream == "padded" and (self.scheme == "paper" or self.is_baseline):
            other = 'scheme="paper"' if self.scheme == "paper" else f"method={self.method!r}"
            raise GrowthError(f"stream='padded' has no effect with {other}: leave it out")

    @property
    def shares_add_up(self) -> bool:
        """True if copies add up exactly to the source's weight for any number of copies."""
        return self.symmetry in ("routing", "split")

    @property
    def is_baseline(self) -> bool:
        """True if the method starts from random weights."""
        return self.method in ("direct_copy", "random")

    @property
    def has_pairs(self) -> bool:
        """True if noise makes the copies of a dense model's FFN differ in pairs."""
        return self.symmetry == "noise" and self.shared_expert == "zero"

    @classmethod
    def split_off(cls, given: dict[str, Any]) -> tuple[GrowthOptions, dict[str, Any]]:
        """Split keyword arguments into options and the rest, which are the target's sizes."""
        names = {f.name for f in fields(cls)}
        options = {k: v for k, v in given.items() if k in names}
        return cls(**options), {k: v for k, v in given.items() if k not in names}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# the type of every option, and the choices of those that are not numbers
_HINTS = get_type_hints(GrowthOptions)
KINDS = {field.name: _HINTS[field.name] for field in fields(GrowthOptions)}
# of a grown optimizer state
Moments = Literal["grow", "old_slices", "reset"]
CHOICES = {name: choices(kind) for name, kind in KINDS.items() if choices(kind)}


def read_depth(value: Any) -> Any:
    """The value of the option `depth` from a user or a record, as `GrowthOptions` keeps it."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", value):
        value = [int(number) for number in value.split(",")]
    if not isinstance(value, list | tuple):
        return value
    return tuple(whole_number("depth", number, "numbers of layers") for number in value)


UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(name: str, value: int | str) -> int:
    """Bytes, from a number or from a text such as "512MB" (10^6) or "1GiB" (2^30)."""
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if isinstance(value, bool) or not parts or parts[2].upper() not in UNITS:
        raise GrowthError(f"{name}={value!r}: give bytes or a text like '512MB' or '1GiB'")
    size = int(float(parts[1]) * UNITS[parts[2].upper()])
    if size < 1:
        raise GrowthError(f"{name}={value!r} must be positive")
    return size


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
    moe_topk: int
    moe_k: int
    moe_num_experts: int
    moe_num_shared_experts: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    shared_intermediate_size: int
    intermediate_size_mlp: int
    num_shared_experts: int
    n_routed_experts: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    top_k_experts: int
    moe_latent_size: int
    moe_shared_expert_intermediate_size: int
    prefix_dense_intermediate_size: int
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
    # Mamba-2
    mamba_n_groups: int
    mamba_n_heads: int
    mamba_num_heads: int
    mamba_d_head: int
    mamba_d_state: int
    mamba_head_dim: int
    n_groups: int
    ssm_state_size: int
    state_size: int
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
    # Falcon
    ffn_hidden_size: int
    # Gemma 4
    hidden_size_per_layer_input: int


def check_moments(moments: str) -> None:
    """Refuse a `moments` that is not one of `Moments`."""
    if moments not in get_args(Moments):
        raise GrowthError(f"moments={moments!r}{nearest(moments, get_args(Moments))}")


def check_tokens(tokens: float | None, source_tokens: float | None) -> None:
    """Refuse numbers of tokens that are none, or of the source's alone."""
    for name, count in (("tokens", tokens), ("source_tokens", source_tokens)):
        if count is not None and not 1 <= count <= MOST_TOKENS:
            raise GrowthError(
                f"{name}={count:g}: give a number of tokens from 1 to {MOST_TOKENS:g}, for "
                "example 1e11 for 100 billion"
            )
    if source_tokens is not None and tokens is None:
        raise GrowthError("source_tokens (--source-tokens) is given without tokens (--tokens)")


def asked_size(family: Family, allowed: Mapping[str, str], name: str, value: Any) -> int:
    """A size that the user gave, checked; `allowed` has field -> size for those that may grow."""
    if name not in allowed and (name != PAD_VOCAB or "vocab" not in family.config):
        raise GrowthError(
            f"this {family.model_type} has no size {name!r} to grow{nearest(name, allowed)}"
        )
    if (size := whole_number(name, value, POSITIVE)) < 1:
        raise GrowthError(f"{name}={value!r}: expected {POSITIVE}")
    return size


def refuse_smaller(field: str, old: int, new: int) -> None:
    """Refuse a size below the source's."""
    if new < old:
        raise GrowthError(f"{field}={new} is smaller than the source's {old}; sizes can only grow")


def no_effect(options: GrowthOptions, name: str, why: str) -> str:
    """The message for an option that nothing in a growth reads."""
    return f"{name}={getattr(options, name)!r} has no effect {why}"


def refuse_heads(family: Family, heads: str, old: Sequence[Any], new: Sequence[Any]) -> None:
    """Refuse given heads that do not divide the stream, or into less than the source's do.

    For models that compute head_dim as stream / heads. `old` and `new` have these two numbers, and
    `new` what else divides the stream: heads that were given of other stacks, or their head_dim.
    """
    least, (stream, count, *others) = old[0] // old[1], new
    if stream % count == 0 and stream // count >= least:
        return
    # whatever the head_dim, its rotary pairs have the source's speeds if it is a multiple
    shared = math.lcm(count, *others)
    step = shared * (least if family.attention.positions == "rotary" else 1)
    below = stream // step * step
    fits = sorted({max(size, shared * least) for size in (below, below + step)})
    field, divisor = map(family.config_field, ("stream", heads))
    raise GrowthError(
        f"{field}={stream} with {divisor}={count}: head_dim of a {family.model_type} is "
        f"{field} / {divisor}, which must be a whole number, and {least} or more as in the source; "
        f"sizes that fit: {field}={' or '.join(map(str, fits))}"
    )


def refuse_by_config(
    config: Mapping[str, Any], options: GrowthOptions, dims: Mapping[str, Any], table: Any = None
) -> None:
    """Refuse what a config.json and the tables alone show to be wrong.

    A plan refuses this too, and more, but it needs PyTorch, which takes seconds to import.
    `dims` are its sizes, `table` the file of a table of the user's own.
    """
    kind = config.get("model_type")
    if not table and kind not in supported_families():
        return
    family = read_family(table) if table else load_family(str(kind))
    if options.to:
        refuse_other_mixture(family.model_type, options.to)
        family = load_family(options.to)
    if options.carry != GrowthOptions.carry and not family.carries:
        raise GrowthError(no_effect(options, "carry", IS_FOR.format(PADDED)))
    allowed, values = growable_fields(family), {} if options.to else inner(config, family.under)
    free = OTHER_NAMES.union(family.sparse_fields, [family.dense and family.dense.renormalised])
    plain = {size.field for size in family.config.values() if not size.narrowed}
    for name in dims.keys() & allowed.keys() | dims.keys() - free:
        size, old = asked_size(family, allowed, name, dims[name]), values.get(name)
        refuse_smaller(name, old if type(old) is int and name in plain else 0, size)
    for key in family.key_heads:
        heads, keys = (dims.get(family.config_field(x)) for x in ("q_heads", key))
        if heads is not None and keys is not None:
            family.refuse_groups(key, heads, keys)
    # a size by another name may be one of the two
    is_known = family.forces_head_dim and not OTHER_NAMES & dims.keys() - allowed.keys()
    fields = [family.config_field(key) for key in ("stream", *family.query_heads)]
    old = [values.get(field) for field in fields]
    if is_known and all(type(x) is int and x > 0 for x in old):
        stream, *counts = ({**values, **dims}[field] for field in fields)
        # of heads that are not given head_dim stays
        others = [n if x in dims else old[0] // n for x, n in zip(fields[1:], counts, strict=True)]
        for heads, before, count in zip(family.query_heads, old[1:], counts, strict=True):
            if family.config_field(heads) in dims:
                refuse_heads(family, heads, (old[0], before), (stream, count, *others))
