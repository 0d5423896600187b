"""What a plan keeps exactly, what nearly, what not, and why: said before any weight is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from growkern.growth.plan import Finding

if TYPE_CHECKING:
    from growkern.growth.plan import GrowthPlan


def findings(plan: GrowthPlan) -> tuple[Finding, ...]:
    """Statements on width, head, depth and rounding, in this order."""
    if plan.options.method in ("direct_copy", "random"):
        what = "old block in random weights" if plan.options.method == "direct_copy" else "random"
        return (Finding("changed", "everything", f"{what}: the source's function is not kept"),)
    return (*_width(plan), *_advanced(plan), *_head(plan), *_depth(plan), *_rounding(plan))


def _width(plan: GrowthPlan) -> list[Finding]:
    layout, options = plan.layout, plan.options
    norm, placement = layout.family.norm_kind, layout.family.norm_placement
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
    if placement == "pre":
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


def _advanced(plan: GrowthPlan) -> list[Finding]:
    if plan.options.method != "aki":
        return []
    if not any(task.upper for task in plan.tasks):
        return [Finding("exact", "aki", "nothing above a single layer to take from: as fpi")]
    if plan.options.aki == "eq16":
        return [
            Finding("changed", "aki", "new output rows of every matrix come from the next layer")
        ]
    grown = [name for name in ("attn", "ffn") if plan.layout.fresh(name).any()]
    if not grown:
        return [Finding("exact", "aki", "no new heads or FFN units: as fpi")]
    named = {"attn": "heads", "ffn": "FFN units"}
    what = " and ".join(named[name] for name in grown)
    return [Finding("changed", f"new {what}", "taken from the next layer")]


def _head(plan: GrowthPlan) -> list[Finding]:
    layout = plan.layout
    used = {axis for task in plan.tasks for axis in task.tensor.axes}
    activated = [
        s for s in layout.family.spaces.values() if s.activated and f"write:{s.name}" in used
    ]
    if not activated or layout.is_even or plan.options.scheme == "paper":
        return []
    why = (
        "its activation sits between the dense layer and the norm, so uneven copies shift the "
        "norm's statistics"
    )
    return [Finding("changed", "MLM head", why)]


def _depth(plan: GrowthPlan) -> list[Finding]:
    old = plan.layout.family.size(plan.source.config, "layers")
    new = len(plan.layer_map)
    what = f"{old} -> {new} layers"
    if new == old:
        return []
    if not plan.inserted:
        verb = {"stack": "stacked", "interleave": "repeated"}[plan.options.depth]
        return [Finding("changed", what, f"layers are {verb}; each runs on inputs it never saw")]
    if plan.layout.family.norm_placement == "pre":
        return [Finding("exact", what, "inserted blocks add zero")]
    eps = getattr(plan.source.config, plan.layout.family.norm_eps)
    why = f"inserted blocks repeat their input up to eps={eps:g} of the norms"
    return [Finding("exact" if eps <= 1e-12 else "approximate", what, why)]


def _rounding(plan: GrowthPlan) -> list[Finding]:
    if plan.dtype.itemsize >= plan.source.dtype.itemsize and plan.dtype.itemsize > 2:
        return []
    dtype = str(plan.dtype).removeprefix("torch.")
    if plan.dtype.itemsize < plan.source.dtype.itemsize:
        return [Finding("approximate", dtype, f"the source is {plan.source.dtype}")]
    stream = plan.layout.space("stream")
    share = stream.read[~stream.is_extra]
    powers = bool((torch.frexp(share).mantissa == 0.5).all())
    if powers and plan.options.symmetry == "none":
        return [Finding("exact", dtype, "all shares are powers of two: no rounding")]
    why = "weights are rounded to this dtype after scaling"
    return [Finding("approximate", dtype, why)]
