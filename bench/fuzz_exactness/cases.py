"""Draws random growths of every family."""

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from growkern.families import Family, inner, load_family, supported_families
from testbed.families import FAMILIES
from testbed.growths import bound_entries
from testbed.relatives import RELATIVES, with_sizes
from testbed.second import CASES, sized

# model type -> class, sizes
SOURCES: dict[str, Any] = {**FAMILIES, **RELATIVES}
# of the whole config, also where sizes lie within another
TIED = "tie_word_embeddings"
# config options away from their defaults; a model gets those that its config has
ODD = {
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "norm_bias": (True, False),
    "decoder_bias": (True, False),
    "classifier_bias": (True, False),
    TIED: (True, False),
    "scale_embedding": (True, False),
    "scale_attn_weights": (True, False),
    "scale_decoder_outputs": (True, False),
    "use_parallel_residual": (True, False),
    "feed_forward_proj": ("relu", "gated-gelu"),
    "hidden_act": ("gelu", "relu", "silu"),
    "activation_function": ("gelu_new", "relu"),
    "final_logit_softcapping": (None, 30.0),
    "attn_logit_softcapping": (None, 50.0),
    "rms_norm_eps": (1e-6, 1e-2),
    "layer_norm_epsilon": (1e-6, 1e-2),
    "layer_norm_eps": (1e-12, 1e-2),
    "relative_attention_num_buckets": (4, 32),
    "type_vocab_size": (1, 3),
}
# entries of lists with one for each layer
LISTS: dict[str, list[Any]] = {
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "no_rope_layers": [0, 1],
    "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
    "attention_layers": ["global", "local"],
    "attention_window": [4],
}
# options of every growth. A value that occurs twice is drawn twice as often
OPTIONS = {
    "method": ("fpi", "fpi", "fpi", "fresh", "aki"),
    "depth": ("identity", "identity", "stack", "interleave", "auto"),
    "scheme": ("exact", "exact", "paper"),
    "symmetry": ("routing", "noise", "split", "none"),
    "stream": ("auto", "auto", "copies", "padded"),
    "maps": ("cyclic", "balanced"),
    "carry": (1.0, 0.01, 0.0),
    "identity_gain": (1.0, 1.0, 1e-3, 1e-8),
    "seed": range(10),
}
# options that need another one
DEPENDENT = {
    ("symmetry", "noise"): {"noise": (0.0, 0.5, 1.0)},
    ("symmetry", "routing"): {"routing": (0.0, 0.5, 1.0, 1.0, 2.0, 3.0)},
    ("method", "aki"): {"aki": ("unit", "eq16")},
}
# dtypes of source and target; None: the source's
SOURCE_DTYPES = (*[torch.float64] * 4, torch.bfloat16, torch.float16, torch.float32)
TARGET_DTYPES = (*[None] * 5, torch.float64, torch.float32, torch.bfloat16, torch.float16)
# settings of the source's generation_config
GENERATION = {
    "repetition_penalty": (1.3, 1.9),
    "no_repeat_ngram_size": (2,),
    "suppress_tokens": ([5, 7, 11],),
    "eos_token_id": ([2, 4],),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One random growth.

    Attributes:
        sizes: of the source's config, with its options.
        how: keyword arguments of `growkern.grow`.
        on_disk: True: grown from files to files, and loaded.
        std: standard deviation of the source's weights.
        generation: settings of the source's generation_config.
        by_config: True: the target is given as `target_config` instead of its sizes.
        second: True: its files have layers that predict a second token.
    """

    class_name: str
    sizes: dict[str, Any]
    how: dict[str, Any]
    on_disk: bool
    std: float = 0.3
    dtype: torch.dtype = torch.float64
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)
    by_config: bool = False
    second: bool = False

    @property
    def family(self) -> str:
        """The model type of its class."""
        return str(getattr(transformers, self.class_name).config_class.model_type)


def draw(seed: int, number: int) -> Case:
    """Case `number` of a seed."""
    rng = random.Random(f"{seed} {number}")
    model_type = rng.choice(supported_families())
    family = load_family(model_type)
    own, class_name = _source_sizes(rng, family), rng.choice(sorted(family.classes))
    if second := model_type in CASES and rng.random() < 0.4:
        class_name = SOURCES[model_type][0]
    given = inner(SOURCES[model_type][1], family.under)
    repeats = family.classes[class_name].repeats.items()
    for field, key in (pair for pair in repeats if pair[1] in family.config):
        # the config computes those that have no field, and others keep their values
        if (repeated := family.config[key].field) in own:
            own[field] = own[repeated]
        elif repeated is None and field in given:
            own[field] = family.config[key].of(SimpleNamespace(**{**given, **own}))
    ties = {TIED: own.pop(TIED)} if TIED in own else {}
    sizes = with_sizes(family, SOURCES[model_type][1], own | _layers(rng, family)) | ties
    sizes = sized(model_type, own)[1] if second else sizes
    how = _growth(rng, family.of_class(class_name), inner(sizes, family.under))
    return Case(
        class_name,
        sizes,
        how,
        on_disk=rng.random() < 0.25,
        std=rng.choice([0.02, 0.1, 0.3, 0.3, 1.0]),
        dtype=torch.float64 if second else rng.choice(SOURCE_DTYPES),
        generation=_some(rng, GENERATION, 0.2),
        by_config=rng.random() < 0.2,
        second=second,
    )


def _some(rng: random.Random, values: dict[str, Any], share: float) -> dict[str, Any]:
    """A random value for some of the names."""
    return {name: rng.choice(those) for name, those in values.items() if rng.random() < share}


def _source_sizes(rng: random.Random, family: Family) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    if "kv_heads" in family.growable:
        kv_heads = rng.randint(1, 3)
        heads = {"kv_heads": kv_heads, "q_heads": kv_heads * rng.randint(1, 3)}
    else:
        heads = dict.fromkeys(family.query_heads, rng.randint(1, 4))
    count = max(heads.values(), default=1)
    hidden = count * 2 * rng.randint(1, 4)
    given = inner(SOURCES[family.model_type][1], family.under)
    # sizes that the model computes from the stream
    bound = {str(s.field) for s in family.config.values() if s.follows == "stream"}
    if bound:
        hidden = given[family.config_field("stream")] * rng.randint(1, 3)
    sizes |= {family.config_field(key): value for key, value in heads.items()}
    sizes[family.config_field("stream")] = hidden
    if "head_dim" in family.growable:
        sizes[family.config_field("head_dim")] = rng.choice([2, 4, hidden // count])
    for key in (key for key in family.unit_sizes if key not in bound_entries(family)):
        sizes[family.config_field(key)] = rng.randint(3, 24)
    # those that never grow may bind others
    ratios = [k for k in family.ratios if k in family.growable and k not in family.query_heads]
    sizes |= {family.config_field(key): rng.randint(1, 4) for key in ratios}
    for above, _, below in (s.factors for s in family.config.values() if "/" in s.factors):
        if above == family.config_field("stream"):
            # which is a multiple of its heads
            continue
        # of these, whole numbers
        if above in bound:
            sizes[above] = given[above] * hidden // given[family.config_field("stream")]
            sizes[below] = rng.choice([1, 2, sizes[above]])
        else:
            sizes[above] = sizes[below] * rng.randint(1, 3)
    if "emb" in family.config:
        sizes["embedding_size"] = rng.choice([hidden, 2 * hidden, 7])
    return sizes | _some(rng, ODD, 0.4)


def _layers(rng: random.Random, family: Family) -> dict[str, Any]:
    """Depths, and the kinds of layers."""
    sizes: dict[str, Any] = {}
    for key in family.stacks.values():
        # deep models enlarge rounding; they are few, as they take long
        most = 8 if rng.random() < 0.1 else 3
        sizes[family.config_field(key)] = rng.randint(1, most)
    layers = range(sizes[family.config_field(next(iter(family.stacks.values())))])
    spelled = {key.of: key.field for key in family.older if key.form == "runs"}
    for name in (name for name in family.per_layer if name in LISTS):
        kinds = [rng.choice(_entries(family, name)) for _ in layers]
        sizes |= {spelled[name]: [[kinds, 1]]} if name in spelled else {name: kinds}
    for name in family.conditional("last"):
        # of every kind, a layer stands before them
        kinds = sizes["layer_types"]
        fit = [
            n for n in range(len(kinds)) if {*LISTS["layer_types"]} <= {*kinds[: len(kinds) - n]}
        ]
        sizes[name] = rng.choice(fit or [0])
    return sizes


def _entries(family: Family, name: str) -> list[Any]:
    """What a list of the config may hold; a model with kinds of layers of its own has no others."""
    given = {*inner(SOURCES[family.model_type][1], family.under).get(name, ())}
    return LISTS[name] if given <= {*LISTS[name]} else sorted(given)


def _growth(rng: random.Random, family: Family, sizes: dict[str, Any]) -> dict[str, Any]:
    how: dict[str, Any] = {}
    # how many experts are chosen follows from their number
    chosen = {key for space in family.mixtures for key in (space.chosen, *space.groups)}
    for key in (key for key in family.growable if key not in chosen):
        field = family.config_field(key)
        # heads of their own seldom fit the other sizes
        share = 0.2 if key == "kv_heads" or key in family.query_heads else 0.5
        follows = family.config[key].follows in family.config
        if rng.random() > share or field not in sizes or follows:
            continue
        old = sizes[field]
        if key == "stream":
            how[field] = old * rng.choice([2, 3]) if rng.random() < 0.6 else old + rng.randint(1, 9)
        elif key in (space.size for space in family.mixtures if not space.asleep):
            # others are refused
            how[field] = old * rng.randint(2, 3) + (rng.random() < 0.1)
        elif key == "head_dim":
            how[field] = old + 2 * rng.randint(1, 3)
        elif key in family.stacks.values():
            how[field] = old + rng.randint(1, 2)
        else:
            how[field] = old + rng.randint(1, 2 * old)
    if family.forces_head_dim and rng.random() < 0.3:
        fields = {family.config_field(key) for key in {*family.query_heads} & {*family.growable}}
        how |= {field: sizes[field] for field in fields if field in sizes}
    if "vocab" in family.config and rng.random() < 0.1:
        how.pop(family.config_field("vocab"), None)
        how["pad_vocab_to_multiple_of"] = 16
    how |= _some(rng, OPTIONS, 1.0)
    for (name, value), options in DEPENDENT.items():
        how |= _some(rng, options, 1.0) if how[name] == value else {}
    if dtype := rng.choice(TARGET_DTYPES):
        how["dtype"] = dtype
    return how
