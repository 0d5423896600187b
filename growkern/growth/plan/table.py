"""Renders a plan as rich tables, for `growkern plan` and `print(plan)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from growkern import printing
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.finding import Finding
from growkern.units import human

# columns of a table in a text
COLUMNS = 100
LEVEL_STYLE = {"exact": "green", "approximate": "yellow", "changed": "red"}


def as_text(table: Any) -> str:
    """A rich renderable as plain text, for `str`."""
    console = Console(width=COLUMNS, color_system=None, force_jupyter=False, markup=False)
    with console.capture() as captured:
        printing.show(table, console)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def plan_table(
    plan: Blueprint,
    findings: Sequence[Finding],
    numbers: Mapping[str, Any],
    ranks: int,
    measured: Sequence[Mapping[str, str]],
    notes: Sequence[str],
) -> Group:
    """Sizes, findings, cost, measurements and notes of a plan.

    Args:
        numbers: of `growkern.growth.plan.pieces.estimate`, for `ranks` processes.
        measured: of `growkern.growth.plan.advice.measured.measurements`, if they are asked for.
    """
    maps = _table("maps", "space", "source", "target", "copies", "extra")
    for name, row in plan.maps().items():
        few, most = row["fewest"], row["most"]
        copies = str(few) if few == most else f"{few}-{most}"
        maps.add_row(name, str(row["source"]), str(row["target"]), copies, str(row["extra"] or ""))
    kept = Table("part", "", "why", title="what is kept", title_justify="left")
    for finding in findings:
        level = Text(finding.level, style=LEVEL_STYLE[finding.level])
        kept.add_row(finding.what, level, finding.why)
    layers = [Text(line) for line in _layer_lines(plan)]
    parts: list[Any] = [_sizes(plan), maps, *layers, kept, _cost(numbers, ranks)]
    if numbers["flops"]:
        parts.append(_training(numbers))
        parts.append(_measured(measured))
    return Group(*parts, *(Text(f"note: {line}", "yellow") for line in notes))


def _table(title: str, *columns: str, header: bool = True) -> Table:
    """A table whose first column holds words, and the others numbers."""
    table = Table(title=title, title_justify="left", show_header=header)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _sizes(plan: Blueprint) -> Table:
    title = f"{plan.small.class_name}: {plan.options.method}"
    table = _table(title, "", "source", "target")
    for name, (old, new) in plan.size_changes().items():
        table.add_row(name, str(old), str(new) if old != new else "=")
    for name, count in (("parameters", plan.parameters), ("FLOPs/token", plan.flops_per_token)):
        table.add_row(name, human(count("source")), human(count("target")))
    old_bytes = plan.parameters("source") * plan.source.dtype.itemsize
    new_bytes = plan.parameters("target") * plan.dtype.itemsize
    table.add_row("weights", f"{human(old_bytes)}B", f"{human(new_bytes)}B")
    return table


def _cost(numbers: Mapping[str, Any], ranks: int) -> Table:
    table = _table("what it costs", "", "", header=False)
    each = "" if ranks == 1 else f" on each of {ranks} ranks"
    of = {name: f"{human(size)}B" for name, size in numbers["training_bytes_per_rank"].items()}
    table.add_row(f"weights{each}", f"{human(numbers['rank_bytes'])}B")
    table.add_row(
        f"training{each}, float32: weights + gradients", f"{of['weights']} + {of['gradients']}"
    )
    table.add_row(f"training{each}, float32: moments of AdamW", of["optimizer"])
    table.add_row(f"training{each}, float32: the source as a teacher", of["teacher"])
    streamed, filled = (f"{human(numbers[f'{x}_peak_bytes'])}B" for x in ("stream", "rank"))
    table.add_row("growing onto disk: memory, over PyTorch's own", streamed)
    moved = [f"{human(numbers[f'{x}_bytes'])}B" for x in ("read", "disk")]
    table.add_row("growing onto disk: to read and to write", " + ".join(moved))
    seconds = f"{numbers['expand_seconds']:.2g} s"
    table.add_row("growing onto disk: expanding alone, on this CPU", seconds)
    table.add_row(f"growing into a model: memory{each}", filled)
    return table


def _training(numbers: Mapping[str, Any]) -> Table:
    """6 FLOPs per token and weight of a matrix. Attention comes on top."""
    table = _table("what training costs, without attention", "", "", header=False)
    table.add_row("the target, from scratch or grown", f"{human(numbers['flops'])}FLOPs")
    if numbers["source_flops"]:
        share = numbers["source_flops"] / numbers["flops"]
        table.add_row("the source", f"{human(numbers['source_flops'])}FLOPs")
        table.add_row("the source, as a share of the target", f"{share:.2g}")
    return table


def _measured(measured: Sequence[Mapping[str, str]]) -> Any:
    if not measured:
        return Text("measured savings: none, neither in a paper nor by us, along these axes")
    table = Table("growth", "saved", "model", "source", "date", title_justify="left")
    table.title = "training FLOPs that growth saved at equal loss, the source not counted"
    for row in measured:
        table.add_row(*row.values())
    return table


def _layer_lines(plan: Blueprint) -> list[str]:
    lines = []
    for stack, layers in plan.layer_maps.items():
        labels = (
            f"{source}*" if (stack, layer) in plan.inserted else str(source)
            for layer, source in enumerate(layers)
        )
        lines.append(f"{stack} layers from: {' '.join(labels)}".lstrip())
    return lines
