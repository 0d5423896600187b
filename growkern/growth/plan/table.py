"""Renders a plan as rich tables, for `growkern plan` and `print(plan)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from growkern import printing
from growkern.growth.plan.advice.evidence import OURS
from growkern.growth.plan.advice.forecast import Forecast, span
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
    advice: Sequence[str],
    ranks: int,
    recommended: str,
    forecast: Forecast | None = None,
) -> Group:
    """Sizes, cost, findings and advice of a plan.

    Args:
        findings: of `growkern.growth.plan.exactness.findings`.
        numbers: of `growkern.growth.plan.advice.cost.estimate`, for `ranks` processes.
        advice: sentences of `growkern.growth.plan.advice.notes.advice`.
        ranks: number of processes that the target is sharded over.
        recommended: of `growkern.growth.plan.advice.recommend.recommendation`.
        forecast: of `growkern.growth.plan.advice.forecast.forecast`.
    """
    sizes = Table(title=f"{plan.small.class_name}: {plan.options.method}", title_justify="left")
    for column in ("", "source", "target"):
        sizes.add_column(column, justify="left" if not column else "right")
    for name, (old, new) in plan.size_changes().items():
        sizes.add_row(name, str(old), str(new) if old != new else "=")
    for name, count in (("parameters", plan.parameters), ("FLOPs/token", plan.flops_per_token)):
        sizes.add_row(name, human(count("source")), human(count("target")))
    old_bytes = plan.parameters("source") * plan.source.dtype.itemsize
    new_bytes = plan.parameters("target") * plan.dtype.itemsize
    sizes.add_row("weights", f"{human(old_bytes)}B", f"{human(new_bytes)}B")
    roles = Table(title="maps", title_justify="left")
    for column in ("space", "source", "target", "copies", "extra"):
        roles.add_column(column, justify="left" if column == "space" else "right")
    for name, row in plan.maps().items():
        few, most = row["fewest"], row["most"]
        repeats = str(few) if few == most else f"{few}-{most}"
        sizes_and_copies = (str(row["source"]), str(row["target"]), repeats)
        roles.add_row(name, *sizes_and_copies, str(row["extra"] or ""))
    kept = Table(title="what is kept", title_justify="left")
    for column in ("part", "", "why"):
        kept.add_column(column)
    for finding in findings:
        level = Text(finding.level, style=LEVEL_STYLE[finding.level])
        kept.add_row(finding.what, level, finding.why)
    layers = [Text(line) for line in _layer_lines(plan)]
    cost = Table(title="what it costs", title_justify="left", show_header=False)
    cost.add_column()
    cost.add_column(justify="right")
    each = "" if ranks == 1 else f" on each of {ranks} ranks"
    cost.add_row(f"weights{each}", f"{human(numbers['rank_bytes'])}B")
    cost.add_row(
        f"weights, gradients and AdamW in float32{each}",
        f"{human(numbers['training_bytes_per_rank'])}B",
    )
    streamed, filled = (f"{human(numbers[f'{x}_peak_bytes'])}B" for x in ("stream", "rank"))
    cost.add_row("growing onto disk: memory, over PyTorch's own", streamed)
    moved = [f"{human(numbers[f'{x}_bytes'])}B" for x in ("read", "disk")]
    cost.add_row("growing onto disk: to read and to write", " + ".join(moved))
    cost.add_row(
        "growing onto disk: expanding alone, on this CPU", f"{numbers['expand_seconds']:.2g} s"
    )
    cost.add_row(f"growing into a model: memory{each}", filled)
    warnings = [Text(f"note: {line}", "yellow") for line in advice]
    advised = Text(f"recommended: {recommended}")
    saving = [] if forecast is None else _forecast_parts(forecast)
    return Group(sizes, roles, *layers, kept, cost, *saving, advised, *warnings)


def _forecast_parts(forecast: Forecast) -> list[Any]:
    table = Table(title="what growth may save", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("training the target from scratch, FLOPs", human(forecast.flops))
    if forecast.source_flops is not None:
        table.add_row("training the source, FLOPs", human(forecast.source_flops))
    table.add_row("saved at equal loss", forecast.range)
    if forecast.with_source is not None:
        table.add_row("saved, the source's training counted", span(*forecast.with_source))
    for one in forecast.papers:
        origin = "measured by us" if one.paper == OURS else f"published: {one.paper}"
        table.add_row(f"{origin}, {one.models}", one.text)
    style = "green" if forecast.saves else "red"
    return [
        table,
        Text(f"forecast: {forecast.verdict}", style),
        *(Text(f"because: {reason}") for reason in forecast.reasons),
    ]


def _layer_lines(plan: Blueprint) -> list[str]:
    lines = []
    for stack, layers in plan.layer_maps.items():
        labels = (
            f"{source}*" if (stack, layer) in plan.inserted else str(source)
            for layer, source in enumerate(layers)
        )
        lines.append(f"{stack} layers from: {' '.join(labels)}".lstrip())
    return lines
