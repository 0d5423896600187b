"""Renders a plan for `growkern plan` and `print(plan)`: the answer first, details on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from growkern.errors import human, print_table
from growkern.growth.plan.advice import DIVISORS, divides
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.exactness import Finding
from growkern.growth.plan.measured import listed, verdict
from growkern.package import DOCS

# columns of a table in a text
COLUMNS = 100
# from the best to the worst, with what each says about the large model
LEVELS = {
    "exact": ("green", " computes the same as the small one, up to rounding"),
    "approximate": ("yellow", "'s outputs stay near the small one's (reasons below)"),
    "changed": ("red", " computes something else than the small one"),
}


def as_text(table: Any) -> str:
    """A rich renderable as plain text, for `str`."""
    console = Console(width=COLUMNS, color_system=None, force_jupyter=False, markup=False)
    with console.capture() as captured:
        print_table(table, console)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def plan_table(
    plan: Blueprint,
    findings: Sequence[Finding],
    numbers: Mapping[str, Any],
    ranks: int,
    tokens: float | None,
    notes: Sequence[str],
    verbose: bool = False,
    way: str = "",
) -> Group:
    """Whether a growth is exact, what it costs (`numbers` of `estimate`), why, and notes.

    `way` says instead of which weights the source can grow from others, if it cannot from its own.
    """
    # the worst one decides the answer
    by_level = sorted(findings, key=lambda part: list(LEVELS).index(part.level), reverse=True)
    level = by_level[0].level if by_level else "exact"
    style, meaning = LEVELS[level]
    level += f" {plan.condition}".rstrip()
    answer = Text.assemble((level, f"bold {style}"), f": the large model{meaning}")
    if way:
        answer = Text.assemble(("cannot grow as it is", "bold red"), f": {way}: {level}")
    parts: list[Any] = [answer, _sizes(plan, numbers)]
    allowed = (f"{DIVISORS[kind][0]} {new}" for kind, (_, new) in divides(plan).items())
    parts += [Text(f"divides by: {'; '.join(allowed)}"), *_growing(numbers, verbose)]
    each = "" if ranks == 1 else f", each of {ranks} processes (FSDP2)"
    parts += [Text(f"training it: memory in float32{each}"), _training(numbers)]
    if by_level:
        parts.append(_why(by_level))
    if verbose:
        parts.append(_maps(plan))
        for stack, layers in plan.layer_maps.items():
            new = ("*" if (stack, i) in plan.inserted else "" for i in range(len(layers)))
            labels = map("{}{}".format, layers, new)
            parts.append(Text(f"{stack} layers from: {' '.join(labels)}".lstrip()))
    if tokens and verbose:
        # one line each, however narrow the terminal
        parts.append(Text("\n".join(listed(plan, tokens)), no_wrap=True, overflow="ignore"))
    parts += (Text(f"note: {line}", "yellow") for line in notes)
    if not verbose:
        parts.append(Text("maps, layers and measurements: --verbose"))
    parts.append(Text(f"words and papers: {DOCS}/commands.md#reading-a-plan"))
    return Group(*parts, *([_verdict(plan, tokens)] if tokens else ()))


def _table(title: str, *columns: str, header: bool = True) -> Table:
    """A table whose first column holds words, and the others numbers."""
    table = Table(title=title, title_justify="left", show_header=header)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _sizes(plan: Blueprint, numbers: Mapping[str, Any]) -> Table:
    table = _table("", plan.small.class_name, "small", "large")
    for name, (old, new) in plan.size_changes().items():
        table.add_row(name, str(old), str(new) if old != new else "=")
    counts = {"parameters": plan.parameters, "FLOPs/token": plan.flops_per_token}
    if plan.small.family.mixtures:
        counts["parameters per token"] = partial(plan.parameters, active=True)
    for name, count in counts.items():
        table.add_row(name, human(count("source")), human(count("target")))
    if numbers["flops"]:
        small = numbers["source_flops"]
        # 6 per token and weight of a matrix. Attention comes on top
        words = "training FLOPs, without attention"
        table.add_row(words, human(small) if small else "", human(numbers["flops"]))
        if small:
            table.add_row("  both together", "", human(small + numbers["flops"]))
    return table


def _growing(numbers: Mapping[str, Any], verbose: bool) -> list[Text]:
    of = {name: f"{human(size)}B" for name, size in numbers.items() if name.endswith("_bytes")}
    lines = [
        f"growing it: reads {of['read_bytes']}, writes {of['disk_bytes']}, needs "
        f"{of['stream_peak_bytes']} of memory besides PyTorch"
    ]
    if verbose:
        lines.append(
            f"  growing into a model, each process: {of['rank_bytes']} of weights, "
            f"{of['rank_peak_bytes']} at the peak"
        )
    return [Text(line) for line in lines]


def _training(numbers: Mapping[str, Any]) -> Table:
    table = _table("", "", "", header=False)
    of = numbers["training_bytes_per_rank"]
    for words, size in (
        ("weights", of["weights"]),
        ("gradients", of["gradients"]),
        ("moments of AdamW", of["optimizer"]),
        ("together", sum(of.values()) - of["teacher"]),
        ("the small model, if it teaches", of["teacher"]),
        ("activations per token of a batch, at least", numbers["activation_bytes_per_token"]),
    ):
        table.add_row(words, f"{human(size)}B", end_section=words.startswith("moments"))
    return table


def _why(findings: Sequence[Finding]) -> Table:
    table = Table("", "part", "why", title="why", title_justify="left", show_header=False)
    for part in findings:
        table.add_row(Text(part.level, style=LEVELS[part.level][0]), part.what, part.why)
    return table


def _verdict(plan: Blueprint, tokens: float) -> Table:
    title = f"in short, at {human(tokens / plan.parameters())} tokens per parameter"
    table = Table("wanted", "do", "measured", title=title, title_justify="left")
    for row in verdict(plan, tokens):
        table.add_row(*row.values(), end_section=True)
    table.caption = "saved: a share of the training FLOPs from scratch to the same loss. Models of "
    table.caption += "growkern's runs have at most 2 million parameters"
    return table


def _maps(plan: Blueprint) -> Table:
    maps = _table("maps", "space", "small", "large", "copies", "extra")
    for name, row in plan.maps().items():
        few, most = row["fewest"], row["most"]
        copies = str(few) if few == most else f"{few}-{most}"
        maps.add_row(name, str(row["source"]), str(row["target"]), copies, str(row["extra"] or ""))
    return maps
