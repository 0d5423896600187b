"""Which systems in which settings each table compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from bench.paper import lines
from bench.paper.jobs import RATE_SEED, Job
from bench.paper.lines import Line
from bench.paper.models import Size
from bench.paper.settings import SETTINGS, Setting
from bench.paper.systems import SYSTEMS, job_of
from growkern.train.model import ModelCost, TokenCounts, find_stacks

# The lengths of runs, as shares of the setting's steps. A run that is stopped early ends at a high
# learning rate. So each length is a run of its own, whose rate falls to 0.
PARTS = (1 / 4, 1 / 2, 1.0)


def _deep(setting: Setting) -> Setting:
    """Four times the layers of the source, which is untrained here, under warmup-stable-decay.

    The runs that choose a rate are as long as the longest: after 500 of 1,200 steps the highest
    rate was best for lines that end better at a lower one.
    """
    steps = setting.steps * 3 // 4
    low, high = setting.rates[-2:][0], setting.rates[-1]
    return setting.variant(
        "deep",
        target=replace(setting.source, layers=4 * setting.source.layers),
        steps=steps,
        rate_steps=steps,
        rates=(low, round((low * high) ** 0.5, 4), high),
        schedule="warmup_stable_decay",
        optimizer="adamw",
    )


# per parameter, where size pays
TOKENS = 20

# of lines that grow in the run, as shares of the FLOPs from scratch
THREE_QUARTERS = (3 / 4,)


def _start(setting: Setting, start: Size, depth: str, percent: int, label: str = "") -> Line:
    """A run that starts with another model, grows once, and costs as many FLOPs as from scratch."""
    share = percent / 100
    mean = share * _step_flops(setting, start) / _step_flops(setting, setting.target) + 1 - share
    steps = round(setting.steps / mean)
    # the name of the setting tells sources apart, that of the job moments and steps
    name = f"from{start.name}"
    variant = setting.variant(name, source=start, steps=steps, rate_steps=steps)
    label = f"from {start.name}{label}"
    return Line(variant, f"{depth}_at_{percent}", label, parts=THREE_QUARTERS)


def _empty(setting: Setting, size: Size) -> Any:
    """A model without weights."""
    with torch.device("meta"):
        return setting.untrained(size, seed=0)


@cache
def _step_flops(setting: Setting, size: Size) -> float:
    """FLOPs of a step for one row."""
    model = _empty(setting, size)
    # some classes read values to make a mask; those of the weights do not matter
    model.to_empty(device="cpu")
    cost, row = ModelCost(model, find_stacks(model)), TokenCounts.of_rows(1, setting.length)
    return cost.train(row) + row.tokens * cost.head_row(train=True)


def one_run_search(setting: Setting) -> list[Line]:
    """Where to start, when to grow and where new layers come from, each changed alone.

    All at one rate. The last lines start with half of the width.
    """
    setting = replace(_deep(setting), rates=_deep(setting).rates[1:2])
    layers, start = setting.target.layers, setting.source
    eighth, quarter, half = (replace(start, layers=layers // n) for n in (8, 4, 2))
    narrow = replace(setting.target, width=start.width // 2, heads=start.heads // 2)
    narrow_half = replace(narrow, layers=layers // 2)
    line = partial(_start, setting)
    return [
        Line(setting, "scratch"),
        *(line(quarter, "stack", percent) for percent in (30, 50, 70)),
        *(line(quarter, depth, 50) for depth in ("random", "identity")),
        *(line(start, "random", 70) for start in (eighth, quarter, half)),
        line(half, "stack", 50),
        *(line(half, depth, 70) for depth in ("stack", "identity")),
        *(line(narrow, "stack", percent) for percent in (50, 70)),
        line(narrow_half, "stack", 50),
    ]


def _never_grown(setting: Setting, start: Size, rate: float, label: str) -> Line:
    """A smaller model from scratch, with as many FLOPs as the target from scratch."""
    steps = round(
        setting.steps * _step_flops(setting, setting.target) / _step_flops(setting, start)
    )
    variant = setting.variant(f"{start.name}-alone", target=start, steps=steps)
    return Line(variant, "scratch", f"{start.name}, never grown{label}", None, rate, THREE_QUARTERS)


def one_run(setting: Setting) -> list[Line]:
    """The best two of the search, at two sizes, with AdamW and with Muon.

    And the smaller model that never grows.
    """
    deep = _deep(setting)
    target = deep.target
    narrow = replace(target, width=target.width // 2, heads=target.heads // 2)
    lines = []
    for sized in (deep, deep.variant(narrow.name, target=narrow)):
        for optimizer in ("adamw", "muon"):
            variant = sized.variant(optimizer, optimizer=optimizer)
            label = f"{sized.target.name}, {optimizer}"
            lines.append(Line(variant, "scratch", label))
            for parts, depth in ((2, "stack"), (4, "random")):
                start = replace(sized.target, layers=sized.target.layers // parts)
                lines.append(_start(variant, start, depth, 70, f", {label}"))
            half = replace(sized.target, layers=sized.target.layers // 2)
            rate = variant.rates[-1] if optimizer == "muon" else variant.rates[1]
            lines.append(_never_grown(variant, half, rate, f", {label}"))
    return lines


def _paid(setting: Setting, target: Size) -> Setting:
    """A model that gets 20 tokens per parameter, so that its size pays."""
    deep = _deep(setting)
    parameters = _empty(deep, target).num_parameters()
    steps = 10 * round(TOKENS * parameters / deep.tokens / 10)
    return deep.variant(target.name, target=target, steps=steps)


def diagnosis(setting: Setting) -> list[Line]:
    """Why a grown start is worse than a random one at equal steps: one change at a time.

    Growth of half its layers after 30 % of the steps leaves as many steps as the second line from
    scratch has. The last lines grow a source whose rate has fallen to 0.
    """
    start = setting.source
    whole = _paid(setting, replace(start, layers=2 * start.layers))
    low, at_start, high = whole.rates
    grown = _start(whole, start, "stack", 30)
    narrow = replace(whole.target, width=whole.target.width // 2, heads=whole.target.heads // 2)
    wider = replace(_start(whole, narrow, "stack", 30), rate=at_start)
    before = round(0.3 * grown.setting.steps)
    fewer = whole.variant("left", steps=grown.setting.steps - before)
    after = fewer.variant("decayed", source=start, source_steps=before, source_rate=at_start)
    same = [
        *(f"{depth}_at_30" for depth in ("stack", "identity", "random", "interleave")),
        *(f"stack_at_30_{name}" for name in ("reset", "rewarm", "growth_adamw")),
        "identity_at_30_reset",
    ]
    lines = [
        Line(whole, "scratch", "equal FLOPs", rate=at_start),
        Line(whole, "scratch", f"equal FLOPs at {high:g}", rate=high),
        Line(whole, "scratch_restarted", "equal FLOPs", rate=at_start),
        _never_grown(whole, start, at_start, ""),
        *(Line(fewer, "scratch", f"equal steps at {rate:g}", rate=rate) for rate in whole.rates),
        *(replace(grown, system=name, rate=at_start) for name in same),
        replace(grown, label=f"{grown.label}, at {low:g}", rate=low),
        *(
            replace(wider, system=f"stack_at_30_{name}")
            for name in ("growth_adamw", "growth_adamw_reset")
        ),
        *(Line(after, name, "after a decay", rate=at_start) for name in ("fpi", "fpi_identity")),
        Line(after, "fpi", f"after a decay, at {low:g}", rate=low),
    ]
    return [replace(line, parts=(), lengths=(1.0,)) for line in lines]


# of runs of a family that are grown. The last one makes the small model of the next size, so that
# as much is spent before each size as on the smaller ones from scratch
OF_CHAIN = (3 / 4, 1.0)


def family(setting: Setting) -> list[Line]:
    """Half, the same and one and a half times the width, each a product.

    All are trained from scratch, and as a chain: each is grown from the one before, which was
    grown. The largest chooses from two rates at half of its steps. Its chain is by 'fresh', at the
    rate that it chose, as the defaults end behind the middle size alone.
    """
    base = replace(setting.source, layers=2 * setting.source.layers)
    sizes = [
        replace(base, width=parts * base.width // 2, heads=parts * base.heads // 2)
        for parts in (1, 2, 3)
    ]
    small, middle, large = (_paid(setting, size) for size in sizes)
    low, between, high = small.rates
    alone = [
        replace(small, untrained_rate_steps=small.steps),
        # `diagnosis` has excluded the lowest
        replace(middle, rates=(between, high), untrained_rate_steps=middle.steps),
        replace(large, rates=(low, between), untrained_rate_steps=large.steps // 2),
    ]
    first = middle.variant(
        f"after{small.target.name}",
        source=small.target,
        source_steps=small.steps,
        source_rate=between,
        rate_steps=middle.steps // 2,
    )
    second = first.variant(
        large.target.name,
        source=middle.target,
        target=large.target,
        source_steps=middle.steps,
        source_rate=between,
        steps=large.steps,
    )
    scratch = [Line(one, "scratch", one.target.name, lengths=(1.0,)) for one in alone]
    below = [
        Line(first, name, middle.target.name, lengths=OF_CHAIN)
        for name in ("chained", "chained_copy")
    ]
    above = [
        Line(second, name, large.target.name, rate=low, lengths=(1.0,))
        for name in ("chained_fresh", "chained_copy")
    ]
    # what the chain does at its first growth, one change at a time
    changed = [
        Line(first, name, f"{middle.target.name} at {between:g}", rate=between, lengths=(1.0,))
        for name in ("chained", "chained_copy", "chained_fresh", "fpi_padded", "fpi", "aki")
    ]
    # each after the baseline of its size
    lower = Line(
        middle, "scratch", f"{middle.target.name} at {between:g}", rate=between, lengths=(1.0,)
    )
    return [*scratch[:2], lower, *below, *changed, scratch[2], *above]


def frontier(setting: Setting) -> list[Line]:
    """Fixed sizes at the FLOPs of one, which is the target if it is the best of them.

    Then runs that start small and grow to it. Each line has the better of two rates.
    """
    start = setting.source
    base = replace(start, layers=2 * start.layers)
    whole = _paid(setting, base)
    low, between, high = whole.rates
    narrow, wide = (
        replace(base, width=parts * base.width // 2, heads=parts * base.heads // 2)
        for parts in (1, 3)
    )
    one, many = (replace(start, layers=n) for n in (start.layers // 2, 4 * start.layers))
    lines = [Line(whole, "scratch", base.name, rate=rate) for rate in (between, high)]
    for size in (one, start, many, narrow, wide):
        large = size in (many, wide)
        for rate in (low, between) if large else (between, high):
            lines.append(_never_grown(whole, size, rate, ""))
    for size, depth, percent in (
        *((start, depth, percent) for depth in ("stack", "identity") for percent in (30, 50, 70)),
        *((one, "random", percent) for percent in (50, 80)),
        (narrow, "fresh", 50),
    ):
        line = _start(whole, size, depth, percent)
        # as growth inside a run does by default
        line = replace(line, system=f"{line.system}_reset")
        lines += [replace(line, rate=rate) for rate in (between, high)]
    return [replace(line, parts=(), lengths=(1.0,)) for line in lines]


# FLOPs of a step of the dense model at size tiny, as a share of those of its mixture, and of one
# whose experts are half as wide; and of the mixture, where a teacher runs in some of the steps
OF_MIXTURE, OF_HALVES, TAUGHT = 0.715, 0.989, 0.905


def upcycling(setting: Setting) -> list[Line]:
    """A dense model that goes on, and mixtures with as many FLOPs, at the highest rate.

    Short runs chose the middle rate for some, which is behind at the end: they follow at that one.
    Two lines begin untrained and have the FLOPs of the source too, which are as many.
    """

    def mixture(name: str, part: float, experts: int = 8, parts: int = 1) -> Setting:
        target = replace(dense_run.target, experts=experts, parts=parts)
        return dense_run.variant(name, target=target, steps=round(part * dense_run.steps))

    lines = []
    rates = setting.rates[-1], setting.rates[len(setting.rates) // 2]
    for number, rate in enumerate(rates):
        dense_run, label, twice = replace(setting, rates=(rate,)), f"at {rate:g}", "twice the FLOPs"
        copies = Line(mixture("experts", OF_MIXTURE), "upcycled", label)
        halves = Line(mixture("halves", OF_HALVES, 16, parts=2), "upcycled_halves", label)
        mixed = Line(mixture("twice", 2 * OF_MIXTURE), "scratch", f"mixture, {twice}")
        once = dense_run.variant("once", steps=2 * dense_run.steps)
        dense = Line(once, "scratch", f"dense, {twice}", mixed)
        drop = replace(copies, system="upcycled_drop")
        taught = Line(mixture("taught", TAUGHT * OF_MIXTURE), "upcycled_taught", label, copies)
        lines += [Line(dense_run, "continued", label), copies, halves]
        lines += [taught] if number else [drop, mixed, dense]
    return lines


@dataclass(frozen=True)
class Table:
    """A table of a paper, or of ours.

    Attributes:
        lines: (setting) -> its lines.
        baseline: system of the lines that others are compared with. Each is compared with the last
            one before it.
        classifies: whether the final models are fine-tuned and classify text.
    """

    title: str
    family: str
    lines: Callable[[Setting], list[Line]]
    baseline: str = "scratch"
    classifies: bool = False


TABLES = {
    "table2": Table(
        "bert2BERT, Table 2: BERT", "bert", lines.systems(*lines.COMPARED), classifies=True
    ),
    "table3": Table("bert2BERT, Table 3: smaller sources", "bert", lines.smaller_sources),
    "narrow": Table("Why narrow sources save less", "bert", lines.narrow_sources),
    "ages": Table("StackBERT, and sources of three ages", "bert", lines.ages),
    "table4": Table("bert2BERT, Table 4: the length of stage 1", "bert", lines.stages),
    "progressive": Table("Fewer layers first", "bert", lines.progressive),
    "table5": Table("bert2BERT, Table 5: GPT-2", "gpt2", lines.systems(*lines.COMPARED, "fresh")),
    "layers": Table("More and narrower layers", "gpt2", lines.more_layers),
    "stages": Table("Stage 1 as a run before: GPT-2", "gpt2", lines.stage_before),
    "table6": Table(
        "bert2BERT, Table 6: T5",
        "t5",
        lines.systems("scratch", "direct_copy", "fpi", "aki", "fpi_padded"),
    ),
    "inheritance": Table("Knowledge Inheritance: taught, and alone", "gpt2", lines.inheritance),
    "domain": Table(
        "Knowledge Inheritance: from Python to C++", "gpt2", lines.domain, baseline="adapted"
    ),
    "symmetry": Table(
        "How copies are told apart: GPT-2",
        "gpt2",
        lambda setting: [
            *lines.systems("scratch", "fpi_none", "fpi_noise", "fpi_split")(setting),
            Line(setting, "fpi", "routing"),
            # copies against none, and rows of the next layer with both
            *lines.systems("aki", "fpi_padded", "aki_padded")(setting),
        ],
    ),
    "copies": Table(
        "How copies are told apart: BERT",
        "bert",
        lines.systems("scratch", "fpi_none", "fpi", "aki"),
    ),
    "rates": Table("A higher rate than short runs chose: BERT", "bert", lines.rates),
    "rates_gpt": Table("From scratch at other rates: GPT-2", "gpt2", lines.rates_of_scratch),
    "rates_t5": Table("A higher rate than short runs chose: T5", "t5", lines.rates),
    "optimizer": Table("The optimizer of a grown model", "gpt2", lines.optimizers),
    "muon": Table(
        "Muon after growth, beside Muon from scratch",
        "gpt2",
        lines.systems("scratch_muon", "padded_muon", "noise_muon"),
        baseline="scratch_muon",
    ),
    "depth": Table("Where new layers come from", "gpt2", lines.depth),
    "directions": Table("Width, depth or both", "gpt2", lines.directions),
    "moment": Table("When to grow", "gpt2", lines.moment),
    "one_run_search": Table("One run that starts small: a search", "qwen3", one_run_search),
    "one_run": Table("One run that starts small", "qwen3", one_run),
    "diagnosis": Table("Growth inside a run, one change at a time", "qwen3", diagnosis),
    "family": Table("A family of three sizes", "qwen3", family),
    "frontier": Table("Growth inside a run, beside the best fixed size", "qwen3", frontier),
    "upcycling": Table("From dense to experts", "qwen3", upcycling, baseline="continued"),
}


def jobs_of_rates(line: Line) -> list[Job]:
    """The runs that choose the learning rate of a line; none if it is given."""
    if line.rate is not None:
        return []
    line = line.like or line
    setting, steps = line.setting, line.setting.rate_steps
    if not SYSTEMS[line.system].grows:
        steps = setting.untrained_rate_steps or steps
    return [job_of(setting, line.system, RATE_SEED, rate, steps) for rate in setting.rates]


def jobs_of_seed(line: Line, seed: int, rate: float) -> list[Job]:
    """The runs of a line with one seed, the shortest first."""
    setting = line.setting
    parts = line.lengths or (*line.parts, *PARTS)
    steps = sorted(max(1, round(part * setting.steps)) for part in parts)
    return [job_of(setting, line.system, seed, rate, length) for length in steps]


def lines_of(name: str, size: str) -> list[Line]:
    """The lines of a table at a size."""
    return TABLES[name].lines(SETTINGS[size, TABLES[name].family])
