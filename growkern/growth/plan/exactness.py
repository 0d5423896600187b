"""Predicts which parts of the source's function a growth keeps exactly, and says why.

It looks at sizes, options and maps. It runs the source only where a dense model becomes a mixture
that computes something else, to measure how far outputs move. Statements on rounding follow the
factors of every tensor, and read no weights but norms. `growth.record.verify` measures the same
afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from growkern.families import SpaceSpec
from growkern.growth.outputs import (
    LARGEST,
    Float64,
    all_outputs,
    as_model,
    fits,
    largest_difference,
    random_inputs,
)
from growkern.growth.plan import bounds
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.tensors.tensor import build_tensor, kind_of
from growkern.growth.space import (
    Upcycling,
    copies_of,
    depth_of_sleep,
    way_of,
    way_of_experts,
)

# measures of `growkern.verify`: the largest difference of an output over the largest output (where
# norms or positions err, at least that on random texts), the rise of the loss by tokens that the
# source does not have, and the largest difference of a weight from the inverse of the grown one
# (Frobenius norm, relative to the weight, in which every copy counts as at least the smallest
# normal number of float16)
OUTPUT_ERROR, NEW_TOKENS = "relative error", "new tokens (nats)"
WEIGHT_ERROR = "weight error"
# 16-bit copies may round in opposite directions, so their sums are off by more than eps / 2
WEIGHT_ROUNDINGS = 2.0
# A norm over n coordinates that centres meets inputs of a variance below the share s of the usual
# one with probability s^((n - 1) / 2). With few coordinates, single texts err far more than others
FEWEST = 8
# parameters of a model that is measured: beyond `LARGEST` in float32
MOST_MEASURED = 400_000_000
# an error that is called exact, for norms whose inputs have the variance 1
LARGEST_ROUNDING = 1e-12


@dataclass(frozen=True)
class Finding:
    """One statement about what a growth keeps.

    Attributes:
        level: "exact", "approximate" (the error is small, see `growkern.verify`) or "changed".
        what: the part of the model, or the dtype, that the statement is about.
        why: the reason.
        bound: the number that limits the growth's error in `measure`, of statements on weights and
            on new tokens. How far outputs may move, `growkern.verify` measures on the source.
        measure: the number of `growkern.verify` that `bound` limits.
        asked: True for a change that the user asked for, such as `method="aki"`.
        change: of a changed statement, the error in `measure` of all changes together, if it was
            measured on random texts.
    """

    level: str
    what: str
    why: str
    bound: float | None = None
    measure: str = OUTPUT_ERROR
    asked: bool = False
    change: float | None = None

    def line(self) -> str:
        """The statement as one line of text."""
        return f"{self.level}: {self.what} ({self.why})"


def rounding_findings(plan: Blueprint) -> list[Finding]:
    layout, dtype = plan.layout, str(plan.dtype).removeprefix("torch.")
    eps = torch.finfo(plan.dtype).eps
    bound = WEIGHT_ROUNDINGS * eps
    each = f"each weight by at most {eps / 2:.1g}; copies add up to it within {bound:.1g}"
    if plan.dtype == torch.float16:
        tiny = torch.finfo(torch.float16).tiny
        each += f"; below {tiny:.2g} the error stays that of {tiny:.2g}"
    if names := plan.narrowed_tensors:
        wide = str(plan.source.dtypes[names[0]]).removeprefix("torch.")
        all_of_it = len(names) == len(plan.source.dtypes)
        what = "the source" if all_of_it else f"{names[0]} (one of {len(names)} such tensors)"
        why = f"{what} is {wide} and is rounded to {dtype}, {each}"
        return [_rounded(plan, dtype, why, bound)]
    if plan.dtype.itemsize > 2:
        return []
    is_widened = any(
        plan.small.size(key) != plan.large.size(key)
        for key in layout.family.config.keys() - set(layout.family.stacks.values())
    )
    # norms of float16 are read
    is_random, is_read = plan.options.scheme == "paper", plan.dtype == torch.float16
    kinds = {}
    for task in plan.tasks:
        layer = task.source_layer if is_random or (is_read and task.tensor.norm) else None
        kinds[task.tensor.template, task.identity, layer, task.upper is None] = task
    rounded = [task.name for task in kinds.values() if kind_of(plan, task).rounds()]
    if rounded:
        why = f"some scaled weights are rounded to this dtype, such as {rounded[0]}, {each}"
        return [_rounded(plan, dtype, why, bound)]
    summed = "copies add up to the source's weights bit for bit"
    return [Finding("exact", dtype, summed if is_widened else "weights are copied")]


def _rounded(plan: Blueprint, dtype: str, why: str, bound: float) -> Finding:
    """The statement on weights that are rounded by at most `bound`."""
    size = plan.small.size("stream")
    if plan.small.family.norm.centres and size < FEWEST:
        why += f"; norms over {size} coordinates can make any change of that"
        return Finding("changed", dtype, why, bound, WEIGHT_ERROR)
    return Finding("approximate", dtype, why, bound, WEIGHT_ERROR)


def findings(plan: Blueprint) -> tuple[Finding, ...]:
    """Findings on width, heads, experts, vocabulary, methods, head, depth, shares and rounding."""
    if plan.options.is_baseline:
        block = "the source's weights lie in a block of random weights"
        why = block if plan.options.method == "direct_copy" else "all weights are random"
        return (_asked("everything", f"{why}, so the source's function is lost"),)
    parts = (
        *(_width, _head_dim, _heads_under_norm, _experts, _vocabulary, _advanced, _fresh, _head),
        *(_depth, _eps, _large_shares, rounding_findings),
    )
    result = tuple(finding for part in parts for finding in part(plan))
    # only sizes that no part judges may have changed, such as the FFN's
    sizes = [f"{field} {a} -> {b}" for field, (a, b) in plan.size_changes().items() if a != b]
    rest = Finding("exact", ", ".join(sizes), "the shares of all copies add up")
    result = _with_change(plan, result or (rest,))
    kept = f", {plan.condition}".rstrip(", ")
    return tuple(f if f.level == "changed" else replace(f, why=f.why + kept) for f in result)


def _asked(what: str, why: str) -> Finding:
    """The statement on a change that the user asked for."""
    return Finding("changed", what, why, asked=True)


def _with_change(plan: Blueprint, result: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Say how far all changes together move the outputs where a choice of experts is new."""
    ways = {way_of_experts(s, plan.small, plan.large.size) for s in plan.small.family.mixtures}
    is_new = not ways.isdisjoint(("ffn", "split"))
    if not (is_new and any(finding.level == "changed" for finding in result)):
        return result
    change = measured_change(plan)
    amount = "the models cannot be run here to measure how far that moves the outputs"
    if change is not None:
        amount = f"on random texts outputs move by {change:.2g} of the largest output"
    return tuple(
        replace(f, why=f"{f.why}; {amount}", change=change) if f.level == "changed" else f
        for f in result
    )


@torch.no_grad()
def measured_change(plan: Blueprint) -> float | None:
    """The relative error of outputs on the random texts that `growkern.verify` compares them on.

    The model is grown for it. None: the source or the target cannot be run, as it is too large,
    spread over processes or without weights, or transformers cannot run it on tokens alone.
    """
    if plan.parameters() > MOST_MEASURED or not fits(plan.source, MOST_MEASURED):
        return None
    tasks = {task.name: task for task in plan.tasks}
    grown = replace(
        plan.source,
        spec=plan.large,
        dtypes=plan.dtypes,
        read=lambda name, *_: build_tensor(plan, tasks[name]),
        upcycling=None,
    )
    dtype = torch.float64 if plan.parameters() <= LARGEST else torch.float32
    tokens = random_inputs(plan.source)
    try:
        models = [as_model(model, dtype) for model in (plan.source, grown)]
        with Float64() if dtype == torch.float64 else nullcontext():
            old, new = (next(iter(all_outputs(model, tokens).values())) for model in models)
    except Exception:
        # classes of transformers that need other inputs raise errors of any type
        return None
    return largest_difference(bounds.source_coordinates(plan, new, old.shape[-1]), old)


def _width(plan: Blueprint) -> Iterator[Finding]:
    layout, norm = plan.layout, plan.small.family.norm
    old, new = layout.stream_sizes
    what = f"{layout.family.config_field('stream')} {old} -> {new}"
    if old == new:
        return
    if plan.options.scheme == "paper":
        count = torch.bincount(layout.space("stream").read_index, minlength=old)
        least, most = count.min(), count.max()
        if least == most:
            yield Finding("exact", what, "all coordinates happen to have equally many copies")
            return
        why = f"random maps copy coordinates {least} to {most} times, which changes the statistics"
        yield _asked(what, f"{why} of every {norm.kind}")
    elif layout.is_even and not layout.is_extended:
        yield Finding("exact", what, f"every coordinate has {new // old} copies")
    elif not norm.centres:
        why = "copies are scaled so that the mean square stays the same"
        if layout.is_padded:
            why = "extra coordinates are 0, a scale keeps the mean square"
        yield Finding("exact", what, why)
    elif layout.family.pads_exactly:
        yield Finding("exact", what, "extra coordinates keep the mean, a scale keeps the variance")
    elif not layout.is_carried:
        why = (
            "the extra coordinates do not carry the mean of the norms' outputs, only that of their"
        )
        yield Finding("changed", what, f"{why} biases: {layout.no_carry_reason}")
    elif bounds.carries_exactly(plan):
        why = "extra coordinates carry the mean, exactly as all weights of a norm are equal"
        yield Finding("exact", what, why)
    elif plan.options.carry < 1 and plan.dtype.itemsize < 4:
        yield _asked(what, f"carry={plan.options.carry:g} enlarges rounding of the carried mean")
    else:
        why = "extra coordinates carry the mean, and norms are slightly off, "
        why += f"carry={plan.options.carry:g}"
        if norm.placement == "pre":
            # no later norm acts on the stream itself, so every block can enlarge the error
            yield Finding("changed", what, f"{why}; the layers enlarge this without a limit")
        else:
            yield Finding("approximate", what, why)


def _eps(plan: Blueprint) -> Iterator[Finding]:
    old, new = plan.small.norm_epsilon, plan.large.norm_epsilon
    if old != new:
        why = "a norm over units divides by less, and all norms that read this eps follow"
        yield Finding("exact", f"{plan.small.family.norm.eps} {old:.3g} -> {new:.3g}", why)


def _head_dim(plan: Blueprint) -> Iterator[Finding]:
    family = plan.small.family
    for heads in family.query_heads:
        old, new = plan.small.head_dim(heads), plan.large.head_dim(heads)
        what = f"head_dim {old} -> {new}"
        if old == new:
            continue
        if family.attention.positions != "rotary":
            yield Finding("exact", what, "the new entries add 0 to every query-key product")
        elif bounds.turns_further(plan):
            why = "rounding: rope_theta changes to keep every pair's frequency, up to float32"
            yield Finding("approximate", what, why)
        else:
            why = "every rotary pair moves to the pair with the same frequency"
            yield Finding("exact", what, why)


def _heads_under_norm(plan: Blueprint) -> Iterator[Finding]:
    """Heads or units that enter one norm, in the paper's scheme: its maps are random."""
    spaces_of = plan.small.family.spaces
    together = [space.name for space in spaces_of.values() if space.weighted]
    written = {
        (part, task.source_layer)
        for task in plan.tasks
        for axis in task.tensor.axes
        if axis.startswith("write:")
        for name in axis.removeprefix("write:").split("|")
        for part in (name, *spaces_of[name].blocks)
    }
    for name in together if plan.options.scheme == "paper" else ():
        spaces = [plan.layout.space(name, layer) for space, layer in written if space == name]
        counts = [space.write_index.bincount(minlength=space.source) for space in spaces]
        if any(count.min() != count.max() for count in counts):
            why = "random maps copy entries unequally often, which changes the norm over them"
            yield _asked(f"entries of {name}", why)


def _experts(plan: Blueprint) -> Iterator[Finding]:
    for space in plan.small.mixtures:
        way = way_of_experts(space, plan.small, plan.large.size)
        if plan.upcycling:
            yield from _upcycled(plan, plan.upcycling, space)
        elif way == "asleep":
            yield _asleep(plan, space)
        elif way == "split":
            old, new = plan.layout.sizes(str(space.size))
            what = f"{plan.small.family.config_field(str(space.size))} {old} -> {new}"
            why = (
                f"as many are chosen as before, and {new // old} copies of an expert share its "
                "tokens by a random direction; some tokens reach other experts"
            )
            yield _asked(what, why)
        elif (copies := copies_of(space, plan.small, plan.large)) > 1:
            what = f"{plan.small.family.config_field(str(space.size))} times {copies}"
            why = "the router chooses every copy of an expert or none, and their weights add up"
            yield Finding("exact", what, why)


def _upcycled(plan: Blueprint, upcycling: Upcycling, space: SpaceSpec) -> Iterator[Finding]:
    """A dense model that becomes a mixture."""
    options, (parts, count) = plan.options, plan.layout.sizes(str(space.size))
    each = "a copy" if parts == 1 else f"one of {parts} parts"
    what = f"{count} experts, each {each} of the dense FFN"
    why = "the weights of those that the router chooses add up to 1"
    if options.shared_expert == "dense":
        what = f"{count} experts with outputs of zero"
        why = "the expert that all tokens share computes the dense FFN"
    elif parts > 1:
        why = f"the router chooses whole copies, and outputs count {parts} times"
    if options.shared_expert == "zero" and upcycling.free_weights:
        chosen = plan.large.size(str(space.chosen))
        loses = f"{chosen} of {count} experts have that share of the weight, so outputs count more"
        field = f"{upcycling.free_weights}=False"
        is_equal = options.router == "zero"
        yield Finding("exact", field, loses) if is_equal else _asked(field, f"on average {loses}")
        why = "the weights of all experts add up to 1"
    if options.has_pairs:
        why += "; noise cancels in pairs of copies, which are chosen together"
    yield Finding("exact", what, why)
    if options.drop and options.shared_expert == "zero":
        why = "that share of the units of every expert is drawn again"
        yield _asked(f"drop={options.drop:g}", why)


def _asleep(plan: Blueprint, space: SpaceSpec) -> Finding:
    """New experts that sleep behind their bias. The bias rule moves it by `speed` in a step."""
    old, new = plan.layout.sizes(str(space.size))
    biases = [
        bounds.values_of(plan, task.source)
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


def _vocabulary(plan: Blueprint) -> Iterator[Finding]:
    old, new = plan.layout.sizes("vocab")
    if old == new:
        return
    what = f"{plan.small.family.config_field('vocab')} {old} -> {new}"
    limit = bounds.largest_capped(plan.small)
    is_eq16 = plan.options.aki == "eq16" and any(task.upper for task in plan.tasks)
    if not bounds.predicts_tokens(plan.large):
        yield Finding("exact", what, "no head predicts tokens, and old ones keep their rows")
    elif limit < bounds.LARGEST_LOGIT:
        why = "the soft cap bends logits so much that new tokens may take a large share"
        yield Finding("changed", what, why)
    elif limit < math.inf and _is_changed(plan):
        why = "logits change, and the soft cap may then bend them so much that no bound holds"
        yield _asked(what, why)
    elif is_eq16 or any(_large_shares(plan)):
        why = "copies of hidden states differ, and the mean of the old rows then bounds no logit"
        yield _asked(what, why)
    else:
        # a model that knows nothing guesses one of the old tokens
        bound, guess = bounds.most_cost(plan), math.log(old)
        why = f"old tokens keep their logits; the {new - old} new ones raise the loss of any text"
        why += f" by at most {bound:.2g} nats"
        if plan.dtype.itemsize == 2:
            why += " and rounding"
        if bound >= guess:
            why += f", too much beside the {guess:.2g} nats that guessing costs"
            yield Finding("changed", what, why, None, NEW_TOKENS, asked=True)
            return
        if limit < math.inf:
            why += f", while logits stay below {limit:.0f} before the soft cap"
        yield Finding("approximate", what, why, bound, NEW_TOKENS)


def _is_changed(plan: Blueprint) -> bool:
    """True if logits of old tokens change."""
    parts = (_width, _head_dim, _heads_under_norm, _advanced, _depth, _large_shares)
    return any(finding.level == "changed" for part in parts for finding in part(plan))


def advanced_kinds(plan: Blueprint) -> set[str]:
    """Which of "heads" and "units" AKI takes from the next layer."""
    moving = [s for s in plan.layout.family.spaces.values() if s.kind in ("heads", "units")]
    return {
        s.kind for s in moving if s.size != "stream" and plan.layout.next_layer_units(s.name).any()
    }


def _advanced(plan: Blueprint) -> Iterator[Finding]:
    if plan.options.method != "aki":
        return
    if not any(task.upper for task in plan.tasks):
        yield Finding("exact", "aki", "a single layer has no next layer to take from: same as fpi")
    elif plan.options.aki == "eq16":
        yield _asked("aki", "the new output rows of every matrix come from the next layer")
    elif what := _new_parts(advanced_kinds(plan)):
        yield _asked(what, "taken from the next layer")
    else:
        yield Finding("exact", "aki", "no new heads or FFN units: same as fpi")


def _fresh(plan: Blueprint) -> Iterator[Finding]:
    if plan.options.method != "fresh":
        return
    spaces = plan.layout.family.spaces.values()
    if what := _new_parts({s.kind for s in spaces if plan.layout.untrained_units(s.name).any()}):
        yield Finding("exact", what, "they begin untrained, and nothing reads them yet")


def _new_parts(kinds: Set[str]) -> str:
    """The name of new heads and FFN units, if spaces of their kinds have some."""
    named = {"heads": "heads", "units": "FFN units"}
    what = " and ".join(text for kind, text in named.items() if kind in kinds)
    return what and f"new {what}"


def _head(plan: Blueprint) -> Iterator[Finding]:
    layout = plan.layout
    used = {axis for task in plan.tasks for axis in task.tensor.axes}
    activated = [s for s in layout.family.spaces.values() if s.activated and s.size == "stream"]
    is_used = any(f"write:{space.name}" in used for space in activated)
    if is_used and not layout.is_even and plan.options.scheme != "paper":
        why = "an activation sits between its dense layer and its norm, so uneven numbers of copies"
        yield Finding("changed", "MLM head", f"{why} change the norm's statistics")


def _depth(plan: Blueprint) -> Iterator[Finding]:
    family, way = plan.small.family, way_of(plan.options.depth)
    for stack, key in family.stacks.items():
        old, new = plan.small.size(key), len(plan.layer_maps[stack])
        what = f"{old} -> {new} {stack} layers".replace("  ", " ")
        if new == old:
            continue
        if way.is_untrained:
            why = "the new layers begin untrained, so the loss rises until they have learned"
            yield _asked(what, why)
        elif way.verb is not None:
            why = f"layers are {way.verb}, so they get inputs that they were not trained on"
            yield _asked(what, why)
        elif family.norm.placement != "post":
            yield Finding("exact", what, "inserted blocks add 0")
        else:
            # an input of variance 1 is off by the share eps K^2 / (K^2 + eps)
            eps, square = plan.small.norm_epsilon, plan.options.identity_gain**2
            is_exact = eps * square / (square + eps) <= LARGEST_ROUNDING
            why = f"inserted blocks repeat their input, but for the norms' eps={eps:g}"
            yield Finding("exact" if is_exact else "approximate", what, why)


def _large_shares(plan: Blueprint) -> Iterator[Finding]:
    """Routing that gives copies more than the whole weight.

    Copies that differ by their rounding are drawn apart by a factor of up to a in every layer. With
    a = 3 random Llamas of 10 layers differ by 7e-10 in float64, and in float32 by as much as the
    outputs themselves.
    """
    options = plan.options
    copied = any(row["most"] > 1 for row in plan.maps().values())
    if options.symmetry == "routing" and options.routing > 1 and copied:
        why = "shares larger than the weight cancel, which enlarges rounding in every layer"
        yield _asked(f"routing={options.routing:g}", why)
