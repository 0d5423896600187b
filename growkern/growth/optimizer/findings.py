"""`growkern.moment_findings`: where the steps of a grown model are those of its source."""

from __future__ import annotations

from growkern.errors import GrowthError, listed, nearest
from growkern.growth.optimizer.moments import (
    entry_factors,
    has_matrices,
)
from growkern.growth.plan import Finding, GrowthPlan, PlanOfModel, check_plan, kind_of
from growkern.growth.record import unknown_growth


def moment_findings(plan: PlanOfModel, *, optimizer: str = "adamw") -> tuple[Finding, ...]:
    """Which grown moments equal the averages of the target's own gradients, and which do not.

    Args:
        plan: of the growth.
        optimizer: "adamw", or "muon" to hear about its steps, too.

    Returns:
        The first finding is about all moments, further ones about parts of the model. "exact": they
        are equal. "approximate": the moments are start values that fold back to the source's, or a
        growth before this one is not known, and with it the factors of steps.
        "changed": the target computes another function, or the moments start at zero.

    Raises:
        GrowthError: an unknown optimizer, or `plan` is no plan.
    """
    check_plan(plan)
    if optimizer not in ("adamw", "muon"):
        raise GrowthError(f"optimizer={optimizer!r}{nearest(optimizer, ('adamw', 'muon'))}")
    parts = [_overall, _exceptions, *([_steps_of_muon] if optimizer == "muon" else [])]
    return tuple(finding for part in parts for finding in part(plan))


def _overall(plan: GrowthPlan) -> list[Finding]:
    layout, options = plan.layout, plan.options
    if options.is_baseline:
        return [Finding("changed", "moments", "the weights do not come from the source")]
    reasons = []
    if not all(finding.level == "exact" for finding in plan.findings):
        reasons.append("the target does not compute the source's function exactly")
    if options.method == "fresh":
        reasons.append("moments of new heads and FFN units are 0")
    elif options.symmetry in ("noise", "routing"):
        reasons.append(f"symmetry={options.symmetry!r}: copies differ, so their gradients differ")
    if options.symmetry == "split":
        reasons.append("symmetry='split': the readers of a vector take different shares")
    if layout.is_extended:
        reasons.append("gradients pass through the extra coordinates of the stream")
    if reasons:
        reasons.append(
            "growth_clip_norm_ also counts how copies differ, so its norm is larger than the "
            "source's"
        )
    if unknown := unknown_growth(plan):
        reasons.append(unknown)
    if reasons:
        return [Finding("approximate", "moments", "; ".join(reasons))]
    but = ", but for the parts named below" if _exceptions(plan) else ""
    why = (
        f"every copy's gradient is a fixed share of its source's{but}; clip gradients with "
        "growth_clip_norm_, as their plain norm counts every copy"
    )
    return [Finding("exact", "moments", why)]


def _exceptions(plan: GrowthPlan) -> list[Finding]:
    family, models, result = plan.small.family, (plan.small, plan.large), []
    if "kv_heads" in family.config:
        old, new = (m.size("q_heads") // m.size("kv_heads") for m in models)
        if old != new:
            why = (
                f"gradients of {new} query heads add up in a key head, in the source those of "
                f"{old}, so a copy's gradient is no fixed share of its source's"
            )
            result.append(Finding("approximate", "keys and values", why))
    larger = {
        part
        for space in family.spaces.values()
        for part in space.parts
        if space.kind in ("head", "heads") and len({m.width(space) for m in models}) > 1
    }
    if "before_norm" in larger:
        why = "below their norm a copy's gradient is no fixed share of its source's"
        result.append(Finding("approximate", "queries and keys", why))
    elif "key" in larger:
        why = "the new entries of keys are 0 but get gradients from the queries"
        result.append(Finding("approximate", "keys", why))
    units = [s.name for s in family.spaces.values() if s.kind == "units"]
    if any(bool((plan.layout.space(name, 0).write == 0).any()) for name in units):
        why = "they are 0 but get gradients from what they are multiplied with"
        result.append(Finding("approximate", "units beyond whole copies", why))
    kinds = [kind_of(plan, task) for task in plan.tasks]
    if any(kind.idle is not None for kind in kinds):
        why = "they have their source's mean of squares, and a mean of 0"
        result.append(Finding("approximate", "new experts", why))
    if not all(kind.has_known_gradient for kind in kinds):
        why = (
            "symmetry='split': the copies' shares of the gradient are unknown; their moments "
            "and step counts start at 0"
        )
        result.append(Finding("changed", "weights that write the residual stream or heads", why))
    if any(kind.is_new for kind in kinds):
        result.append(Finding("changed", "new blocks", "their moments and step counts start at 0"))
    return result


def _steps_of_muon(plan: GrowthPlan) -> list[Finding]:
    """Exact where the moments are and all entries of each matrix have the same factors."""
    (moments,) = _overall(plan)
    level = moments.level
    reasons = [] if level == "exact" else [f"the momentum is not the target's own: {moments.why}"]
    uneven = [
        task.name
        for task in plan.tasks
        if has_matrices(plan, task)
        and any(
            bool((vector != vector.flatten()[0]).any())
            for factors in [entry_factors(plan, task, {})]
            for vector in (*factors.lr, *factors.eps)
        )
    ]
    if uneven:
        level = level if reasons else "approximate"
        reasons.append(
            f"copies are uneven in {listed(uneven, 1)}: Muon's step there "
            "is not the grown step, and its learning rate fits on average"
        )
    but = ", but for the parts named above" if _exceptions(plan) else ""
    why = f"every matrix takes the grown step, with the factors of growth_lr_multipliers{but}"
    return [Finding(level, "steps of Muon", "; ".join(reasons) or why)]
