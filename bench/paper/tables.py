"""The tables of the runs in markdown: losses, and the FLOPs that are saved at equal loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from bench.paper.compare import (
    Pairs,
    Row,
    compared,
    interval,
    points_of,
    savings_text,
    title_of,
    whole,
)
from bench.paper.plans import PARTS, TABLES, Line, lines_of
from bench.paper.settings import SIZES

TITLES = (
    *("system", "rate", "start loss", "1/4 of the steps", "1/2", "all", "below baseline"),
    *("FLOPs saved", "source counted", "seeds"),
)


def report(rows: Iterable[Row]) -> str:
    """All tables in markdown, at every size of which there are rows of two lines."""
    by_name = {row["name"]: row for row in rows}
    return "\n".join(section(*one) for one in tables_in(by_name, least=2))


def tables_in(
    rows: Mapping[str, Row], *, least: int
) -> Iterator[tuple[str, str, dict[Line, Pairs]]]:
    """The name, the size and the lines of every table of which so many lines are done, or all."""
    for name in TABLES:
        for size in SIZES:
            lines = lines_of(name, size) or []
            found = compared(lines, name, rows)
            if found and len(found) >= min(least, len(lines)):
                yield name, size, found


def section(name: str, size: str, found: Mapping[Line, Pairs]) -> str:
    """A table in markdown, below its title and above its command."""
    return f"## {heading(name, size)}\n\n{table(name, size, found)}\n"


def heading(name: str, size: str) -> str:
    """The title of a table."""
    return f"{TABLES[name].title}, {size}"


def table(name: str, size: str, found: Mapping[Line, Pairs]) -> str:
    """A table in markdown, above its command. Lines that lack seeds are named below it."""
    shown = whole(found)
    parts = [_table(shown, TABLES[name].classifies)]
    if missing := [title_of(line) for line in found if line not in shown]:
        parts.append(f"Seeds are missing of: {'; '.join(missing)}.")
    parts.append(f"`python -m bench.paper {name} --size {size} --known`")
    return "\n\n".join(parts)


def _table(found: Mapping[Line, Pairs], classifies: bool) -> str:
    """Lines in markdown, with the accuracies of classifiers if the table has them."""
    accuracies = [
        [own[-1].get("accuracy") for own, _ in pairs.values()] for pairs in found.values()
    ]
    lines = [list(TITLES), *(_cells(line, list(found[line].values())) for line in found)]
    if classifies and any(one is not None for accuracy in accuracies for one in accuracy):
        for cells, text in zip(lines, ["accuracy", *map(_accuracy, accuracies)], strict=True):
            cells.insert(-1, text)
    head, *rest = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, f"|{'---|' * len(lines[0])}", *rest])


def _cells(line: Line, pairs: Sequence[tuple[list[Row], list[Row]]]) -> list[str]:
    """The columns of `TITLES` of one line."""
    # some lines have shorter runs too
    ends = [points_of(own)[2][-len(PARTS) :] for own, _ in pairs]
    of_baseline = [points_of(base)[2][-1] for _, base in pairs]
    return [
        title_of(line),
        f"{pairs[0][0][0]['rate']:g}",
        interval([own[0]["losses"][0] for own, _ in pairs]),
        *(interval(losses) for losses in zip(*ends, strict=True)),
        interval([base - own[-1] for own, base in zip(ends, of_baseline, strict=True)]),
        savings_text(pairs),
        savings_text(pairs, with_source=True),
        str(len(pairs)),
    ]


def _accuracy(found: Sequence[float | None]) -> str:
    known = [100 * one for one in found if one is not None]
    if not known:
        return "-"
    some = "" if len(known) == len(found) else f" ({len(known)} of {len(found)} seeds)"
    return f"{interval(known, 1)} %{some}"
