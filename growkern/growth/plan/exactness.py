"""What a growth keeps exactly, what nearly, what not, and why: said before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from growkern.growth.plan.axes import axis_map
from growkern.growth.plan.blueprint import Blueprint, Task
from growkern.growth.space.rotary import pair_step


@dataclass(frozen=True)
class Finding:
    """One statement on what the growth keeps.

    Attributes:
        level: "exact", "approximate" (the error is bounded and small) or "changed".
        what: the part of the model it speaks of.
        why: the reason, with the size of the error where it is known.
    """

    level: str
    what: str
    why: str

    def line(self) -> str:
        return f"{self.level}: {self.what} ({self.why})"


def findings(plan: Blueprint) -> tuple[Finding, ...]:
    """Statements on width, heads, vocabulary, head, depth and rounding, in this order."""
    if plan.options.is_baseline:
        what = "old block in random weights" if plan.options.method == "direct_copy" else "random"
        return (Finding("changed", "everything", f"{what}: the source's function is not kept"),)
    parts = (_width, _head_dim, _vocabulary, _advanced, _head, _depth, _rounding)
    return tuple(finding for part in parts for finding in part(plan))


def _width(plan: Blueprint) -> list[Finding]:
    layout, options = plan.layout, plan.options
    norm, placement = layout.family.norm.kind, layout.family.norm.placement
    old, new = layout.stream_sizes
    field = layout.family.config_field("stream")
    what = f"{field} {old} -> {new}"
    if options.scheme == "paper" and old != new:
        count = torch.bincount(layout.space("stream").read_index, minlength=old)
        if count.min() == count.max():
            return [Finding("exact", what, "every coordinate happens to have the same count")]
        return [
            Finding(
                "changed",
                what,
                f"random maps repeat coordinates {count.min()} to {count.max()} times, which "
                f"shifts the statistics of every {norm}",
            )
        ]
    if layout.is_even:
        why = "unchanged" if old == new else f"every coordinate has {new // old} copies"
        return [Finding("exact", what, why)]
    if norm == "rmsnorm":
        return [Finding("exact", what, "copies weighted so that the mean square is kept")]
    if placement == "pre" and not layout.family.carries:
        return [Finding("exact", what, "extra coordinates carry the mean, the scale the variance")]
    if layout.is_carried:
        delta = options.carry
        order = "O(carry^2)" if new % old > 1 else "O(carry), as there is one extra coordinate"
        why = f"extra coordinates carry the mean to {order}, carry={delta:g}"
        return [Finding("approximate", what, why)]
    why = (
        f"extra coordinates get the mean of the norms' biases only ({layout.why_no_carry}); "
        "about 1 % of the hidden state"
    )
    return [Finding("approximate", what, why)]


def _head_dim(plan: Blueprint) -> list[Finding]:
    layout, family = plan.layout, plan.small.family
    found = []
    for heads in family.query_heads:
        old, new = plan.small.head_dim(heads), plan.large.head_dim(heads)
        if old == new:
            continue
        what = f"head_dim {old} -> {new}"
        if family.attention.positions != "rotary":
            found.append(Finding("exact", what, "new query-key products are zero"))
        elif pair_step(*layout.turning) is not None:
            why = "every rotary pair becomes the one that turns as fast"
            found.append(Finding("exact", what, why))
        else:
            why = "rope_theta changes so that every pair turns as fast, to float32 rounding"
            found.append(Finding("approximate", what, why))
    return found


def _vocabulary(plan: Blueprint) -> list[Finding]:
    old, new = plan.layout.sizes("vocab")
    if old == new:
        return []
    what = f"{plan.small.family.config_field('vocab')} {old} -> {new}"
    why = "logits of the old tokens are kept, those of the new ones start at 0"
    return [Finding("approximate", what, why)]


def _advanced(plan: Blueprint) -> list[Finding]:
    if plan.options.method != "aki":
        return []
    if not any(task.upper for task in plan.tasks):
        return [Finding("exact", "aki", "nothing above a single layer to take from: as fpi")]
    if plan.options.aki == "eq16":
        return [
            Finding("changed", "aki", "new output rows of every matrix come from the next layer")
        ]
    moving = [s for s in plan.layout.family.spaces.values() if s.kind in ("heads", "units")]
    kinds = {s.kind for s in moving if s.size != "stream" and plan.layout.fresh(s.name).any()}
    if not kinds:
        return [Finding("exact", "aki", "no new heads or FFN units: as fpi")]
    named = {"heads": "heads", "units": "FFN units"}
    what = " and ".join(text for kind, text in named.items() if kind in kinds)
    return [Finding("changed", f"new {what}", "taken from the next layer")]


def _head(plan: Blueprint) -> list[Finding]:
    layout = plan.layout
    used = {axis for task in plan.tasks for axis in task.tensor.axes}
    activated = [
        s
        for s in layout.family.spaces.values()
        if s.activated and s.kind == "units" and f"write:{s.name}" in used
    ]
    if not activated or layout.is_even or plan.options.scheme == "paper":
        return []
    why = (
        "its activation sits between the dense layer and the norm, so uneven copies shift the "
        "norm's statistics"
    )
    return [Finding("changed", "MLM head", why)]


def _depth(plan: Blueprint) -> list[Finding]:
    family = plan.layout.family
    found = []
    for stack, key in family.stacks.items():
        old, new = plan.small.size(key), len(plan.layer_maps[stack])
        what = f"{old} -> {new} {stack} layers".replace("  ", " ")
        if new == old:
            continue
        if plan.options.depth != "identity":
            verb = {"stack": "stacked", "interleave": "repeated"}[plan.options.depth]
            why = f"layers are {verb}; each runs on inputs it never saw"
            found.append(Finding("changed", what, why))
        elif family.norm.placement != "post":
            found.append(Finding("exact", what, "inserted blocks add zero"))
        else:
            eps, square = plan.small.norm_epsilon, plan.options.identity_gain**2
            error = eps * square / (square + eps)
            why = f"inserted blocks repeat their input up to {error:.2g}, eps={eps:g} of the norms"
            found.append(Finding("exact" if error <= 1e-12 else "approximate", what, why))
    return found


def _rounding(plan: Blueprint) -> list[Finding]:
    layout, dtype = plan.layout, str(plan.dtype).removeprefix("torch.")
    if names := plan.narrowed:
        wide = str(plan.source.dtypes[names[0]]).removeprefix("torch.")
        all_of_it = len(names) == len(plan.source.dtypes)
        what = "the source" if all_of_it else f"{names[0]} ({len(names)} tensors so)"
        return [Finding("approximate", dtype, f"{what} is {wide}")]
    if plan.dtype.itemsize > 2:
        return []
    is_widened = any(
        plan.small.size(key) != plan.large.size(key)
        for key in layout.family.config.keys() - set(layout.family.stacks.values())
    )
    per_layer = plan.options.scheme == "paper"
    kinds = {(t.tensor.template, t.source_layer if per_layer else None): t for t in plan.tasks}
    rounded = [task.name for task in kinds.values() if _is_rounded(plan, task)]
    if rounded:
        why = f"weights are rounded to this dtype after scaling, such as {rounded[0]}"
        return [Finding("approximate", dtype, why)]
    if is_widened and plan.dtype == torch.float16 and plan.options.symmetry != "split":
        tiny = torch.finfo(torch.float16).tiny
        why = f"what falls below {tiny:.2g} when it is divided loses digits; 'split' loses none"
        return [Finding("approximate", dtype, why)]
    why = "copies sum to the source's weights bit for bit" if is_widened else "weights are copied"
    return [Finding("exact", dtype, why)]


def _is_rounded(plan: Blueprint, task: Task) -> bool:
    """True where a tensor's copies do not sum to powers of two of it, or is made of sums."""
    if not task.tensor.norm:
        axes = zip(task.tensor.axes, task.shape, strict=True)
        maps = [axis_map(plan, task, axis, size) for axis, size in axes]
        return any(m.extra or _is_any_rounded(m.index, m.scale, m.sums is not None) for m in maps)
    entering, leaving = (plan.layout.space(name, task.source_layer) for name in task.tensor.norm)
    if bool(entering.is_extra.any()):
        return True
    gain, read = leaving.write, torch.ones_like(leaving.write, dtype=torch.bool)
    if not task.tensor.is_bias:
        read = entering.write != 0
        gain = entering.kappa * leaving.write / entering.write
    if plan.layout.family.norm.plus_one and not task.tensor.is_bias:
        # what is stored is gain (1 + weight) - 1
        return bool((gain[read] != 1).any())
    is_split = plan.options.symmetry == "split" and plan.layout.is_dual(task.tensor.norm[1])
    return _is_any_rounded(entering.read_index[read], gain[read], is_split)


def _is_any_rounded(index: torch.Tensor, scale: torch.Tensor, is_split: bool) -> bool:
    """True where weights are scaled by more than powers of two.

    Args:
        is_split: copies are shares that add up bit for bit (`shares.take_shares`).
    """
    if is_split:
        scale = torch.zeros(int(index.max()) + 1, dtype=scale.dtype).index_add_(0, index, scale)
    powers = torch.log2(scale[scale != 0].abs())
    # sums are 1 up to their own rounding, which is far below that of the weights
    return bool(((powers - powers.round()).abs() > 1e-12).any())
