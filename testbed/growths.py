"""The growths that a family's table offers: each size alone, and all at once."""

from growkern.growth.space import followers
from testbed.models import outputs, relative_error

HEADS = "entries of a head"


def old_sizes(model):
    return {key: model.size(key) for key in model.family.config}


def head_counts(model):
    counts = (*model.family.query_heads, "kv_heads")
    fixed = {*model.family.config} - {*model.family.growable}
    return {k: n for k, n in old_sizes(model).items() if k in counts and k not in fixed}


def heads_grow(family):
    """True if heads may get more entries."""
    forced = family.forces_head_dim and family.query_heads and "stream" in family.growable
    return bool(forced or growable_parts(family))


def growable_parts(family):
    """The sizes of a head that may grow: one, or those of its parts."""
    parts = {space.size for space in family.spaces.values() if space.kind == "head"}
    return {"head_dim", *parts} & {*family.growable}


def is_exact_in_any_width(family):
    """True where no hidden size changes the function, neither in the blocks nor in a head."""
    # behind an activation, uneven copies change the mean that a norm subtracts
    heads = any(space.activated and space.size == "stream" for space in family.spaces.values())
    return family.pads_exactly and not (heads and family.norm.centres)


def more_experts(model, count):
    """`count` copies of all experts."""
    return {
        key: count * model.size(key)
        for space in model.mixtures
        for key in (space.size, *followers(space, model))
        if key in model.family.growable
    }


def parts_of_heads(model):
    """Those of `growable_parts` -> entries."""
    parts = growable_parts(model.family)
    return {key: n for key, n in old_sizes(model).items() if key in parts}


def bound_entries(family):
    """The sizes of units of which the model computes from the stream how many entries they have."""
    if not any(size.follows == "stream" for size in family.config.values()):
        return set()
    return {s.size for s in family.spaces.values() if s.activated} & {*family.unit_sizes}


def more_units(model, together=False):
    """Sizes of units, and those that others are products or quotients of.

    Args:
        together: they grow at once.
    """
    family, old = model.family, old_sizes(model)
    sizes = {key: old[key] + 13 for key in family.unit_sizes if old[key]}
    sizes |= {key: old[key] + 1 for key in family.ratios if key in family.growable and old[key]}
    # together with twice as many heads, and a stream of three times the size
    sizes |= {key: old[key] * (3 if together else 2) // 2 for key in bound_entries(family)}
    keys = {size.field: key for key, size in family.config.items()}
    for size in family.config.values():
        if "/" in size.factors:
            above, below = keys[size.factors[0]], keys[size.factors[2]]
            count = sizes[below] if together else old[below]
            if family.config[above].follows == "stream":
                sizes |= {above: 2 * old[above], below: 2 * old[below]}
                continue
            each = old[above] // old[below]
            sizes[above] = (each + 1) * count
    return sizes


def alone(model):
    """What grows -> the table's sizes that change it, and as little else as fits."""
    family, old, heads = model.family, old_sizes(model), head_counts(model)
    wider, stacks = {"stream": 2 * old["stream"]}, {*family.stacks.values()} & {*family.growable}
    found = {k: {k: size} for k, size in more_units(model).items() if size != old[k]}
    found |= {key: {key: old[key] + 1} for key in stacks}
    found |= {"vocab": {"vocab": 64}} if "vocab" in old else {}
    if "stream" not in family.growable:
        return found
    found["stream"] = wider
    for key, size in family.config.items():
        if size.follows == "stream":
            # in groups, of which others make a quotient
            divided = [s.factors[2] for s in family.config.values() if size.field in s.factors[:1]]
            groups = {k: 2 * old[k] for k, s in family.config.items() if s.field in divided}
            bound = {**wider, key: 2 * old[key]}
            found |= {key: bound} | {k: {**bound, k: n} for k, n in groups.items()}
            entries = {k: 2 * old[k] for k in bound_entries(family)}
            found |= {k: {**wider, key: old[key], k: n} for k, n in entries.items()}
    found |= dict.fromkeys(more_experts(model, 3), more_experts(model, 3))
    if not family.forces_head_dim:
        parts = parts_of_heads(model)
        found |= {key: {key: 2 * n} for key, n in {**heads, **parts}.items()}
        return found | ({HEADS: {key: 2 * n for key, n in parts.items()}} if parts else {})
    if not heads_grow(family):
        return found
    found |= {key: {**wider, **heads, key: 2 * n} for key, n in heads.items()}
    if "kv_heads" in heads:
        found["kv_heads"] = {**wider, **{key: 2 * n for key, n in heads.items()}}
    return found | {HEADS: {**wider, **heads}}


def at_once(model):
    """Every size larger, and none a multiple where the family allows that."""
    family, old, heads = model.family, old_sizes(model), head_counts(model)
    sizes = more_units(model, together=True)
    sizes |= {key: old[key] + 1 for key in {*family.stacks.values()} & {*family.growable}}
    sizes |= {"vocab": 64} if "vocab" in old else {}
    if not family.forces_head_dim:
        sizes |= {key: 3 * n for key, n in parts_of_heads(model).items()}
    sizes |= more_experts(model, 3)
    if "stream" not in family.growable:
        return sizes
    if not is_exact_in_any_width(family):
        return sizes | heads | {"stream": 2 * old["stream"]}
    sizes |= {key: 5 if key == "kv_heads" else 5 * n // 3 for key, n in heads.items()}
    if family.forces_head_dim and family.query_heads:
        count = sizes.get(family.query_heads[0], old[family.query_heads[0]])
        # heads that never grow get wider
        width = 2 * model.head_dim(family.query_heads[0]) + (not heads)
        return sizes | {"stream": width * count}
    is_bound = any(size.follows == "stream" for size in family.config.values())
    return sizes | {"stream": 3 * old["stream"] if is_bound else old["stream"] + 8}


def grown_by(model, sizes):
    """The sizes by the config's names, and how layers are added exactly."""
    how = {model.family.config_field(key): size for key, size in sizes.items()}
    if any(sizes.get(key, 0) > model.size(key) for key in model.family.stacks.values()):
        how["depth"] = "identity"
        if model.family.norm.placement == "post":
            # with the default of 1, inserted blocks are exact up to the norms' eps
            how["identity_gain"] = 1e-8
    return how


def largest_error(source, grown, plan):
    """The largest difference of the outputs, on old tokens, over the largest output."""
    old, new = plan.layout.sizes("vocab")
    if old == new or "logits" not in (z := outputs(source)) or z["logits"].shape[-1] != old:
        return relative_error(source, grown)
    grown_z = {name: x[..., :old] for name, x in outputs(grown).items()}
    return max(((x - z[n]).abs().max() / z[n].abs().max()).item() for n, x in grown_z.items())
