"""What layers of torch.nn do with the entries of an axis that grows.

A layer may copy an entry, read all entries and add them up, or treat each by itself. All that stays
exact. A layer that mixes entries in another way, such as a softmax, does not.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd

from growkern.growth.models import FUNCTIONS, class_of

# layers that do nothing in evaluation mode
IN_TRAINING = (nn.Identity, nn.Dropout, _DropoutNd)
# attributes of a layer that say how it computes, and not what, or that are checked elsewhere
NO_SETTING = (
    *("training", "inplace", "sparse", "normalized_shape"),
    *("enable_nested_tensor", "use_nested_tensor", "mask_check"),
)
# files of torch.nn.modules whose layers copy entries, add them up, or treat each by itself ...
ENTRY_BY_ENTRY = (
    *("activation", "batchnorm", "container", "conv", "dropout", "instancenorm", "linear"),
    *("normalization", "sparse", "transformer"),
)
# ... but for these
MIXING = (
    *(nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.GLU),
    *(nn.LocalResponseNorm, nn.CrossMapLRN2d),
)
TABLES = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
# batch norms and PReLU have a number for each entry of an axis
KNOWN = (nn.Linear, nn.MultiheadAttention, _ConvNd, *TABLES, *NORMS, _NormBase, nn.PReLU)
# and their parameters and buffers
KEYS = (
    *("weight", "bias", "running_mean", "running_var", "in_proj_weight", "in_proj_bias"),
    *("q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v"),
)


def may_mix(layer: nn.Module) -> bool:
    """Whether a layer of torch.nn may mix the entries of an axis; False for other classes."""
    kind = class_of(layer)
    if not kind.__module__.startswith("torch.nn."):
        return False
    is_known = kind.__module__.startswith("torch.nn.modules.")
    is_known &= kind.__module__.rpartition(".")[2] in ENTRY_BY_ENTRY
    return not is_known or isinstance(layer, MIXING)


def is_whole(layer: nn.Module) -> bool:
    """Whether a module is one layer of torch.nn, with no code between layers or around it."""
    is_torch = class_of(layer).__module__.startswith("torch.nn.") and "forward" not in vars(layer)
    hooks = (layer._forward_hooks, layer._forward_pre_hooks)
    return is_torch and not (may_mix(layer) or layer._modules or any(hooks))


def reading_axis(layer: nn.Module, key: str) -> int | None:
    """The axis of a known layer's tensor that reads copies; None if all axes are copies."""
    if isinstance(layer, _ConvNd):
        # with groups, `other_function` has compared the channels that a group reads
        reads = key == "weight" and layer.groups == 1
        return int(not isinstance(layer, _ConvTransposeNd)) if reads else None
    if isinstance(layer, nn.MultiheadAttention):
        return 1 if key.endswith("proj_weight") else None
    return 1 if isinstance(layer, nn.Linear) and key == "weight" else None


def other_function(layer: nn.Module, wide: Any) -> str:
    """Why a layer and a wider one compute different things; empty if nothing shows that."""
    kind, other_kind = class_of(layer), class_of(wide)
    if isinstance(layer, IN_TRAINING) and isinstance(wide, IN_TRAINING):
        return ""
    # by name: a notebook may have made the class twice
    if (kind.__module__, kind.__qualname__) != (other_kind.__module__, other_kind.__qualname__):
        return f"`large` has a {other_kind.__name__} here: build both with the same class"
    if kind.__module__.startswith("torch.nn.") and (why := _other_setting(layer, wide)):
        return why
    if isinstance(layer, nn.MultiheadAttention) and layer.head_dim != wide.head_dim:
        return (
            f"heads of {layer.head_dim} entries cannot become heads of {wide.head_dim}: give "
            f"`large` num_heads=embed_dim / {layer.head_dim}"
        )
    if isinstance(layer, _ConvNd):
        return _other_groups(layer, wide)
    if isinstance(layer, NORMS):
        return _other_mean(layer, wide)
    if isinstance(layer, TABLES):
        if layer.num_embeddings != wide.num_embeddings:
            return (
                f"{layer.num_embeddings} rows cannot become {wide.num_embeddings}, as `widen` adds "
                "no tokens: give `large` the same number"
            )
        if layer.embedding_dim != wide.embedding_dim and layer.max_norm is not None:
            return "max_norm also counts the copies: cut the rows once, and build both without it"
    return ""


def _other_setting(layer: nn.Module, wide: nn.Module) -> str:
    """The first setting of a layer of torch.nn that differs in a wider one."""
    kinds: tuple[type, ...] = (float, str, bool, type(None), *FUNCTIONS)
    if isinstance(layer, KNOWN):
        # strides and paddings; whole numbers are sizes
        kinds += (tuple,)
    elif not (layer._modules or layer._parameters or may_mix(layer)):
        kinds += (int,)
    for key, value in vars(layer).items():
        other = getattr(wide, key, value)
        is_setting = isinstance(value, kinds) and key not in NO_SETTING and "drop" not in key
        if is_setting and not key.startswith("_") and other != value:
            ours, theirs = (getattr(x, "__name__", x) for x in (value, other))
            return f"{key} is {ours}, but {theirs} in `large`: give both the same"
    return ""


def _other_groups(layer: _ConvNd, wide: _ConvNd) -> str:
    """Why the groups of a wider convolution read other channels."""
    each = layer.in_channels // layer.groups
    same = each == wide.in_channels // wide.groups
    same &= layer.out_channels // layer.groups == wide.out_channels // wide.groups
    if same or (layer.groups == 1 and wide.groups == 1):
        return ""
    return (
        f"{layer.groups} groups of {each} channels cannot become {wide.groups} of "
        f"{wide.in_channels // wide.groups}: give `large` groups=in_channels / {each}"
    )


def _other_mean(layer: Any, wide: Any) -> str:
    """Why a wider norm takes the mean of other numbers: each entry needs equally many copies."""
    if isinstance(layer, nn.GroupNorm):
        each = layer.num_channels // layer.num_groups
        new = wide.num_channels // wide.num_groups
        if layer.num_groups > 1 and new != each:
            return (
                f"groups of {each} entries cannot become groups of {new}: give `large` "
                f"num_groups=num_channels / {each}"
            )
        # with more groups, each is a copy of a whole group
        sizes = [(each, new)] if layer.num_groups == 1 else []
    else:
        sizes = list(zip(layer.normalized_shape, wide.normalized_shape, strict=True))
    for a, b in sizes:
        if b % a:
            return no_multiple(a, b)
    return ""


def no_multiple(source: int, target: int) -> str:
    """Says that the entries of a norm have unequal numbers of copies."""
    return (
        f"{target} entries are no multiple of {source}. A norm needs equally many copies of each "
        f"entry, as with {source * max(2, round(target / source))}"
    )
