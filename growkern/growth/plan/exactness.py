"""Predicts which parts of the source's function a growth keeps exactly, and says why.

It looks at sizes, options and maps. It reads weights only to measure how far outputs move: where
norms will be slightly off, and where a dense model becomes a mixture that computes something else.
`growth.record.verify` measures the same afterwards. A change to how tensors are built must be
reflected here.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from growkern.families.spec import SpaceSpec
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.bounds import (
    angle_error,
    carries_exactly,
    guessing_loss,
    is_capped_too_low,
    largest_capped,
    most_cost,
    output_bound,
    predicts_tokens,
    unrounded_cost,
    values_of,
)
from growkern.growth.plan.finding import (
    LARGEST_ROUNDING,
    NEW_TOKENS,
    Finding,
    rounding_findings,
    says_something,
)
from growkern.growth.space.experts import adds_up, are_asleep, copies_of, depth_of_sleep, has_pairs


def findings(plan: Blueprint) -> tuple[Finding, ...]:
    """Findings on width, heads, experts, vocabulary, AKI, head, depth, shares and rounding."""
    if plan.options.is_baseline:
        block = "the source's weights lie in a block of random weights"
        why = block if plan.options.method == "direct_copy" else "all weights are random"
        why = f"{why}, so the source's function is lost"
        return (Finding("changed", "everything", why, asked=True),)
    parts = (
        *(_width, _head_dim, _heads_under_norm, _experts, _vocabulary, _advanced, _head, _depth),
        *(_large_shares, rounding_findings),
    )
    result = tuple(finding for part in parts for finding in part(plan))
    if result:
        return _with_change(plan, result)
    # only sizes that no part judges have changed, such as the FFN's
    sizes = [f"{field} {a} -> {b}" for field, (a, b) in plan.size_changes().items() if a != b]
    return (Finding("exact", ", ".join(sizes), "the shares of all copies add up"),)


def _with_change(plan: Blueprint, result: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Say how far all changes together move the outputs of a dense model that becomes a mixture."""
    changed = [finding for finding in result if finding.level == "changed"]
    if not (changed and plan.small.dense):
        return result
    # what builds tensors takes a second to import, and most plans build none
    from growkern.growth.plan.tensors.change import measured_change

    change = measured_change(plan)
    amount = "the models cannot be run here to measure how far that moves the outputs"
    if change is not None:
        amount = f"on random texts outputs move by {change:.2g} of the largest output"
    return tuple(
        replace(finding, why=f"{finding.why}; {amount}", change=change)
        if finding in changed
        else finding
        for finding in result
    )


def _width(plan: Blueprint) -> list[Finding]:
    layout, options = plan.layout, plan.options
    norm = layout.family.norm
    old, new = layout.stream_sizes
    field = layout.family.config_field("stream")
    what = f"{field} {old} -> {new}"
    if old == new:
        return []
    if options.scheme == "paper":
        count = torch.bincount(layout.space("stream").read_index, minlength=old)
        if count.min() == count.max():
            return [Finding("exact", what, "all coordinates happen to have equally many copies")]
        return [
            Finding(
                "changed",
                what,
                f"random maps copy coordinates {count.min()} to {count.max()} times, which "
                f"changes the statistics of every {norm.kind}",
                asked=True,
            )
        ]
    if layout.is_even and not layout.is_extended:
        return [Finding("exact", what, f"every coordinate has {new // old} copies")]
    if not norm.centres:
        why = "copies are scaled so that the mean square stays the same"
        if layout.is_padded:
            why = "extra coordinates are 0, a scale keeps the mean square"
        return [Finding("exact", what, why)]
    if layout.family.pads_exactly:
        why = "extra coordinates keep the mean, a scale keeps the variance"
        return [Finding("exact", what, why)]
    if not layout.is_carried:
        why = (
            "the extra coordinates do not carry the mean of the norms' outputs, only that of their "
            "biases: "
            f"{layout.no_carry_reason}"
        )
        return [Finding("changed", what, why)]
    if carries_exactly(plan):
        why = "extra coordinates carry the mean, exactly as all weights of a norm are equal"
        return [Finding("exact", what, why)]
    why = f"extra coordinates carry the mean, and norms are slightly off, carry={options.carry:g}"
    if norm.placement == "pre":
        # no later norm acts on the stream itself, so every block can enlarge the error
        return [Finding("changed", what, f"{why}; the layers enlarge this without a limit")]
    return [_measured(plan, what, why)]


def _measured(plan: Blueprint, what: str, why: str) -> Finding:
    """The statement on a part whose norms or rotary positions are slightly off."""
    bound: float | None = plan.cache.get("output bound", lambda: output_bound(plan))
    if bound is None:
        why = f"{why}; the source cannot be run here to measure how far that moves the outputs"
        return Finding("changed", what, why)
    if not says_something(bound):
        return Finding(
            "changed", what, f"{why}; that moves the outputs too far or too unevenly for a bound"
        )
    why = f"{why}; outputs by at most {bound:.1e} of the largest output on random texts"
    if bound <= LARGEST_ROUNDING:
        return Finding("exact", what, why)
    return Finding("approximate", what, why, bound)


def _head_dim(plan: Blueprint) -> list[Finding]:
    family, result = plan.small.family, []
    for heads in family.query_heads:
        old, new = plan.small.head_dim(heads), plan.large.head_dim(heads)
        if old == new:
            continue
        what = f"head_dim {old} -> {new}"
        if family.attention.positions != "rotary":
            why = "the new entries add 0 to every query-key product"
            result.append(Finding("exact", what, why))
        elif (error := angle_error(plan)) == 0:
            why = "every rotary pair moves to the pair with the same frequency"
            result.append(Finding("exact", what, why))
        else:
            why = (
                "rope_theta changes to keep every pair's frequency; float32 rounding turns the "
                f"last position too far by up to {error:.1e} radians"
            )
            result.append(_measured(plan, what, why))
    return result


def _heads_under_norm(plan: Blueprint) -> list[Finding]:
    """Heads or units that enter one norm, in the paper's scheme: its maps are random."""
    layout = plan.layout
    together = [space.name for space in layout.family.spaces.values() if space.weighted]
    written = {
        (name, task.source_layer)
        for task in plan.tasks
        for axis in task.tensor.axes
        if axis.startswith("write:")
        for name in axis.removeprefix("write:").split("|")
    }
    result = []
    for name in together if plan.options.scheme == "paper" else ():
        layers = {layer for one, layer in written if one == name}
        spaces = [layout.space(name, layer) for layer in layers]
        counts = [space.write_index.bincount(minlength=space.source) for space in spaces]
        if any(count.min() != count.max() for count in counts):
            why = "random maps copy entries unequally often, which changes the norm over them"
            result.append(Finding("changed", f"entries of {name}", why, asked=True))
    return result


def _experts(plan: Blueprint) -> list[Finding]:
    result = []
    for space in plan.small.family.mixtures:
        if plan.small.dense:
            parts, count = (m.size(str(space.size)) for m in (plan.small, plan.large))
            each = "a copy" if parts == 1 else f"one of {parts} parts"
            what = f"{count} experts, each {each} of the dense FFN"
            why = "the weights of those that the router chooses add up to 1"
            if plan.options.shared_expert == "dense":
                what = f"{count} experts with outputs of zero"
                why = "the expert that all tokens share computes the dense FFN"
            elif parts > 1:
                why = f"the router chooses whole copies, and outputs count {parts} times"
            if plan.options.shared_expert == "zero" and not adds_up(plan.small):
                result.append(_not_renormalised(plan, space))
                why = "the weights of all experts add up to 1"
            if has_pairs(plan.options):
                why += "; noise cancels in pairs of copies, which are chosen together"
            result.append(Finding("exact", what, why))
            if plan.options.drop and plan.options.shared_expert == "zero":
                what = f"drop={plan.options.drop:g}"
                why = "that share of the units of every expert is drawn again"
                result.append(Finding("changed", what, why, asked=True))
        elif are_asleep(space, plan.small, plan.large.size):
            result.append(_asleep(plan, space))
        elif (copies := copies_of(space, plan.small, plan.large)) > 1:
            what = f"{plan.small.family.config_field(str(space.size))} times {copies}"
            why = "the router chooses every copy of an expert or none, and their weights add up"
            result.append(Finding("exact", what, why))
    return result


def _asleep(plan: Blueprint, space: SpaceSpec) -> Finding:
    """New experts that sleep behind their bias. The bias rule moves it by `speed` in a step."""
    old, new = (model.size(str(space.size)) for model in (plan.small, plan.large))
    biases = [
        values_of(plan, task.source)
        for task in plan.tasks
        if task.tensor.template == space.asleep and not task.is_made
    ]
    # where all biases are equal, and where they are not known, it is least
    equal = depth_of_sleep(torch.zeros(1))
    depth = min([depth_of_sleep(bias.double()) for bias in biases if bias is not None] or [equal])
    what = f"{plan.small.family.config_field(str(space.size))} {old} -> {new}"
    why = (
        f"exact now, as the {new - old} new experts of each layer sleep: no token reaches them. "
        f"With growkern.ExpertBalancing(speed) the first of them wake before step "
        f"{depth / 2:.2g} / speed, and the outputs change. Without it they never wake"
    )
    return Finding("exact", what, why)


def _not_renormalised(plan: Blueprint, space: SpaceSpec) -> Finding:
    """The statement on chosen experts whose weights do not add up to 1."""
    count, chosen = (plan.large.size(str(key)) for key in (space.size, space.chosen))
    what = f"{plan.small.family.dense and plan.small.family.dense.renormalised}=False"
    why = f"{chosen} of {count} experts have that share of the weight, so outputs count more"
    if plan.options.router == "zero":
        return Finding("exact", what, why)
    return Finding("changed", what, f"on average {why}", asked=True)


def _vocabulary(plan: Blueprint) -> list[Finding]:
    old, new = plan.layout.sizes("vocab")
    if old == new:
        return []
    what = f"{plan.small.family.config_field('vocab')} {old} -> {new}"
    if not predicts_tokens(plan.large):
        return [Finding("exact", what, "no head predicts tokens, and old ones keep their rows")]
    if is_capped_too_low(plan):
        why = "the soft cap bends logits so much that new tokens may take a large share"
        return [Finding("changed", what, why)]
    if largest_capped(plan.small) < math.inf and _is_changed(plan):
        why = "logits change, and the soft cap may then bend them so much that no bound holds"
        return [Finding("changed", what, why, asked=True)]
    if _copies_differ(plan):
        why = "copies of hidden states differ, and the mean of the old rows then bounds no logit"
        return [Finding("changed", what, why, asked=True)]
    bound = most_cost(plan)
    if bound is None:
        why = "new rows are rounded to 16 bits, and the weights are not here to bound their logits"
        return [Finding("changed", what, why)]
    why = (
        f"old tokens keep their logits; the {new - old} new ones raise the loss of any text by at "
        f"most {bound:.2g} nats"
    )
    guess, asked = guessing_loss(plan), unrounded_cost(plan)
    if not says_something(bound, guess, asked):
        # so many tokens cost that in any dtype
        is_asked = not says_something(asked, guess, asked)
        why += f", too much beside the {guess:.2g} nats that guessing costs"
        if not is_asked:
            why += f"; it is {asked:.2g} nats in float32, where new rows are not rounded to 16 bits"
        return [Finding("changed", what, why, None, NEW_TOKENS, is_asked)]
    if (largest := largest_capped(plan.small)) < math.inf:
        why += f", while logits stay below {largest:.0f} before the soft cap"
    return [Finding("approximate", what, why, bound, NEW_TOKENS)]


def _is_changed(plan: Blueprint) -> bool:
    """True if logits of old tokens change."""
    parts = (_width, _head_dim, _heads_under_norm, _advanced, _depth, _large_shares)
    return any(finding.level == "changed" for part in parts for finding in part(plan))


def _copies_differ(plan: Blueprint) -> bool:
    """True if the copies of a hidden state differ, by rows of other layers or by rounding."""
    is_eq16 = plan.options.aki == "eq16" and any(task.upper for task in plan.tasks)
    return is_eq16 or bool(_large_shares(plan))


def advanced_kinds(plan: Blueprint) -> set[str]:
    """Which of "heads" and "units" AKI takes from the next layer."""
    moving = [s for s in plan.layout.family.spaces.values() if s.kind in ("heads", "units")]
    return {
        s.kind for s in moving if s.size != "stream" and plan.layout.next_layer_units(s.name).any()
    }


def _advanced(plan: Blueprint) -> list[Finding]:
    if plan.options.method != "aki":
        return []
    if not any(task.upper for task in plan.tasks):
        return [
            Finding("exact", "aki", "a single layer has no next layer to take from: same as fpi")
        ]
    if plan.options.aki == "eq16":
        why = "the new output rows of every matrix come from the next layer"
        return [Finding("changed", "aki", why, asked=True)]
    kinds = advanced_kinds(plan)
    if not kinds:
        return [Finding("exact", "aki", "no new heads or FFN units: same as fpi")]
    named = {"heads": "heads", "units": "FFN units"}
    what = " and ".join(text for kind, text in named.items() if kind in kinds)
    return [Finding("changed", f"new {what}", "taken from the next layer", asked=True)]


def _head(plan: Blueprint) -> list[Finding]:
    layout = plan.layout
    used = {axis for task in plan.tasks for axis in task.tensor.axes}
    activated = [
        s
        for s in layout.family.spaces.values()
        if s.activated and s.size == "stream" and f"write:{s.name}" in used
    ]
    if not activated or layout.is_even or plan.options.scheme == "paper":
        return []
    why = (
        "an activation sits between its dense layer and its norm, so uneven numbers of copies "
        "change the norm's statistics"
    )
    return [Finding("changed", "MLM head", why)]


def _depth(plan: Blueprint) -> list[Finding]:
    family = plan.layout.family
    result = []
    for stack, key in family.stacks.items():
        old, new = plan.small.size(key), len(plan.layer_maps[stack])
        what = f"{old} -> {new} {stack} layers".replace("  ", " ")
        if new == old:
            continue
        if plan.options.depth == "random":
            why = f"{new - old} layers begin untrained, so the loss rises until they have learned"
            result.append(Finding("changed", what, why, asked=True))
        elif plan.options.depth != "identity":
            verb = {"stack": "stacked", "interleave": "repeated"}[plan.options.depth]
            why = f"layers are {verb}, so they get inputs that they were not trained on"
            result.append(Finding("changed", what, why, asked=True))
        elif family.norm.placement != "post":
            result.append(Finding("exact", what, "inserted blocks add 0"))
        else:
            eps = plan.small.norm_epsilon
            why = f"inserted blocks repeat their input, but for the norms' eps={eps:g}"
            result.append(_measured(plan, what, why))
    return result


def _large_shares(plan: Blueprint) -> list[Finding]:
    """Routing that gives copies more than the whole weight.

    Copies that differ by their rounding are drawn apart by a factor of up to a in every layer. With
    a = 3 random Llamas of 10 layers differ by 7e-10 in float64, and in float32 by as much as the
    outputs themselves.
    """
    options = plan.options
    copied = any(row["most"] > 1 for row in plan.maps().values())
    if options.symmetry != "routing" or options.routing <= 1 or not copied:
        return []
    why = "shares larger than the weight cancel, which enlarges rounding in every layer"
    return [Finding("changed", f"routing={options.routing:g}", why, asked=True)]
