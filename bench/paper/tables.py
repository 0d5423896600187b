"""The tables and pictures of the runs: losses, and the FLOPs that are saved at equal loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.paper.maps import maps_text
from bench.paper.plans import TABLES, Line, jobs_of_rates, jobs_of_seed, lines_of
from bench.paper.runs import best_rate
from bench.paper.settings import SIZES
from bench.paper.systems import RATE_SEED, SYSTEMS
from bench.shared.results import read
from growkern.plot.curve import Curve, first_crossing
from growkern.plot.losses import draw
from growkern.train.evaluation.interval import ratio_interval

Row = dict[str, Any]
# seed -> runs of a line and of its baseline
Pairs = dict[int, tuple[list[Row], list[Row]]]
TITLES = (
    *("system", "rate", "start loss", "1/4 of the steps", "1/2", "all", "below it"),
    *("FLOPs saved", "with the source's", "seeds"),
)
# those that pages of the documentation show
IN_DOCS = (
    *("table2", "progressive", "table4", "table5", "inheritance"),
    *("symmetry", "optimizer", "moment", "depth", "directions"),
)
# fewer may all be lines of other tables, which share runs of the baseline, DirectCopy and AKI
LINES_ON_PAGE = 4


def interval(values: Sequence[float], digits: int = 3) -> str:
    """Mean and 95 % interval of numbers that belong to different seeds."""
    mean, (_, high) = ratio_interval(values, [1] * len(values), 0.95)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {high - mean:.{digits}f}"


def saved(runs: Sequence[Row], baseline: Sequence[Row], *, with_source: bool = False) -> float:
    """The share of the baseline's FLOPs that is saved to reach the baseline's final loss.

    What the baseline too began with is counted for neither.

    Args:
        runs: of one seed, the shortest first. Between two of them the loss falls linearly.
        baseline: its runs of the same seed.
        with_source: whether to count the training of the models that were needed.

    Returns:
        The share; NaN if the longest run does not reach the loss. If the shortest one does, at
        least this share is saved.
    """
    _, flops, losses = points_of(runs)
    mark = baseline[-1]
    spent = first_crossing(flops, losses, mark["losses"][-1])
    if spent is None:
        return math.nan
    source = runs[-1]["source flops"] - mark["source flops"] if with_source else 0.0
    return 1 - (spent + source) / mark["flops"][-1]


PAGE = """# Training grown models, and training from scratch

`python -m bench.paper TABLE` trains all runs of a table. Each is a run file of `growkern train`.
Losses are validation losses in nats per token.

- A run that is stopped early ends at a high learning rate, and so at a high loss. So there is a run
  for each length, whose learning rate falls to 0.
- Every method takes the best of three learning rates, in runs of another seed. These are short,
  but not for a BERT or T5 that begins untrained: short runs from scratch end on its plateau. The
  length of stage 1 and the number of kept tokens do not make another method.
- "FPI" and "AKI" copy the hidden state, as the paper does. "padded stream" is growkern's default
  for GPT-2 and T5. For BERT it is copies.
- The first line is the baseline. "below it" is how far the loss after all steps is below the
  baseline's of the same seed.
- "FLOPs saved" are saved to reach the loss of the baseline after all steps. Between runs of two
  lengths the loss is interpolated. A teacher's FLOPs are counted, but not those of predictions that
  are kept once, for any number of runs. The next column counts the training of sources too. "≥":
  some of the shortest runs are below that loss already.
- "accuracy" is that of a classifier, fine-tuned from the longest run. It says from which of five
  libraries a passage of code is.
- An interval (±) is the 95 % interval of the mean over the seeds, by Student's t. A line without
  one has one seed. Lines with fewer seeds than the baseline are in a second table, where all lines
  have the same seeds.
- All lines of a picture have the same seeds. It leaves out lines that have fewer, or shows only the
  seeds that all lines have.

"""


def report(rows: Iterable[Row], *, page: bool = False) -> str:
    """All tables in markdown, at every size of which there are rows.

    Args:
        rows: of all runs.
        page: whether this is for the page. There each table has a link to its picture, and a table
            that has only lines of other tables so far is left out.
    """
    by_name = {row["name"]: row for row in rows}
    parts = []
    for name, size, lines in _tables(by_name, LINES_ON_PAGE if page else 2):
        title = f"{TABLES[name].title}, {size}"
        parts += [f"## {title}", "", _markdown(_compared(lines, name, by_name)), ""]
        parts += [_command(name, size), ""]
        if page:
            parts += [f"![{title}]({_picture(name, size)})", ""]
    return "\n".join(parts)


def page_text(results: Path) -> str:
    """The page of all tables in a folder of results; empty if it has none."""
    rows = _rows_in(results)
    if not rows:
        return ""
    parts = [PAGE + report(rows.values(), page=True), maps_text(results)]
    return "\n".join(parts).rstrip() + "\n"


def table_text(results: Path, name: str, size: str = "tiny") -> str:
    """One table of the runs in a folder of results, in markdown, or that there is none yet."""
    found = _compared(lines_of(name, size) or [], name, _rows_in(results))
    return f"{_markdown(found)}\n\n{_command(name, size)}" if found else "not measured yet"


def write_page(results: Path) -> list[Path]:
    """Write the page and the pictures of the rows in paper.json beside it. Returns the files."""
    rows = _rows_in(results)
    if not rows:
        return []
    made = [results / "paper.md"]
    made[0].write_text(page_text(results))
    for name, size, lines in _tables(rows, LINES_ON_PAGE):
        curves = [
            Curve(_title(line), *points_of(one))
            for line, seeds in _drawn(lines, rows).items()
            for one in seeds.values()
        ]
        made.append(results / _picture(name, size))
        draw(curves, made[-1], title=f"{TABLES[name].title}, {size}")
    return made


def _drawn(lines: Sequence[Line], rows: Mapping[str, Row]) -> dict[Line, dict[int, list[Row]]]:
    """The runs of a picture, by line and seed.

    All lines have the same seeds, because a picture has one mark: the mean of the baseline's final
    losses.
    """
    runs = {line: found for line in lines if (found := runs_of(line, rows))}
    seeds = set(next(iter(runs.values())))
    whole = {line: found for line, found in runs.items() if seeds <= found.keys()}
    if len(whole) < LINES_ON_PAGE:
        whole, seeds = runs, set.intersection(*map(set, runs.values()))
    return {line: {seed: found[seed] for seed in sorted(seeds)} for line, found in whole.items()}


def _rows_in(results: Path) -> dict[str, Row]:
    return {row["name"]: row for row in read(results / "paper.json").get("rows", [])}


def _tables(rows: Mapping[str, Row], least: int) -> Iterator[tuple[str, str, list[Line]]]:
    """The name, the size and the lines of every table of which so many lines are done, or all."""
    for name in TABLES:
        for size in SIZES:
            lines = lines_of(name, size) or []
            done = len(_compared(lines, name, rows))
            if done and done >= min(least, len(lines)):
                yield name, size, lines


def _command(name: str, size: str) -> str:
    return f"`python -m bench.paper {name} --size {size} --known`"


def _picture(name: str, size: str) -> str:
    return f"paper-{name}-{size}.png"


def _title(line: Line) -> str:
    return SYSTEMS[line.system].title + (f", {line.label}" if line.label else "")


def _compared(lines: Sequence[Line], name: str, rows: Mapping[str, Row]) -> dict[Line, Pairs]:
    """The runs of a table's lines. Each is beside the last line of the baseline before it."""
    found, baseline = {}, dict[int, list[Row]]()
    for line in lines:
        runs = runs_of(line, rows)
        if line.system == TABLES[name].baseline:
            baseline = runs
        if seeds := sorted(runs.keys() & baseline.keys()):
            found[line] = {seed: (runs[seed], baseline[seed]) for seed in seeds}
    return found


def _markdown(found: Mapping[Line, Pairs]) -> str:
    """A table of the lines that have all seeds, and if there are others, one with equal seeds.

    Lines of different seeds cannot be compared: losses and savings of seeds differ by more than
    those of most methods.
    """
    all_seeds = next(iter(found.values())).keys()
    whole = {line: pairs for line, pairs in found.items() if pairs.keys() >= all_seeds}
    same = sorted(set.intersection(*(set(pairs) for pairs in found.values())))
    if len(whole) == len(found) or not same:
        return _table(whole)
    some = {line: {seed: pairs[seed] for seed in same} for line, pairs in found.items()}
    named = f"seed{'s' * (len(same) > 1)} {' and '.join(map(str, same))}"
    parts = [_table(whole), ""] if len(whole) > 1 else []
    return "\n".join([*parts, f"All lines, with {named} alone:", "", _table(some)])


def _table(found: Mapping[Line, Pairs]) -> str:
    """Lines in markdown, with the accuracies of classifiers if there are any."""
    accuracies = [
        [own[-1].get("accuracy") for own, _ in pairs.values()] for pairs in found.values()
    ]
    lines = [list(TITLES), *(_cells(line, list(found[line].values())) for line in found)]
    if any(one is not None for accuracy in accuracies for one in accuracy):
        for cells, text in zip(lines, ["accuracy", *map(_accuracy, accuracies)], strict=True):
            cells.insert(-1, text)
    head, *rest = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, f"|{'---|' * len(lines[0])}", *rest])


def _cells(line: Line, pairs: Sequence[tuple[list[Row], list[Row]]]) -> list[str]:
    """The columns of `TITLES` of one line."""
    ends = [points_of(own)[2] for own, _ in pairs]
    of_baseline = [points_of(base)[2][-1] for _, base in pairs]
    return [
        _title(line),
        f"{pairs[0][0][0]['rate']:g}",
        interval([own[0]["losses"][0] for own, _ in pairs]),
        *(interval(losses) for losses in zip(*ends, strict=True)),
        interval([base - own[-1] for own, base in zip(ends, of_baseline, strict=True)]),
        _savings(pairs, with_source=False),
        _savings(pairs, with_source=True),
        str(len(pairs)),
    ]


def runs_of(line: Line, rows: Mapping[str, Row]) -> dict[int, list[Row]]:
    """The runs of a line at the rate that its short runs chose.

    Returns:
        Seed -> its runs, the shortest first; only seeds of which all lengths are done.
    """
    tried = [rows.get(job.name) for job in jobs_of_rates(line)]
    done = [row for row in tried if row is not None]
    if len(done) < len(tried):
        return {}
    rate, found = best_rate(done), {}
    for seed in range(1, RATE_SEED):
        names = [job.name for job in jobs_of_seed(line, seed, rate)]
        if all(name in rows for name in names):
            found[seed] = [rows[name] for name in names]
    return found


def points_of(runs: Sequence[Row]) -> tuple[tuple[Any, ...], ...]:
    """The steps, FLOPs and losses at the ends of runs of several lengths."""
    return tuple(tuple(row[key][-1] for row in runs) for key in ("steps", "flops", "losses"))


def _accuracy(found: Sequence[float | None]) -> str:
    known = [100 * one for one in found if one is not None]
    if not known:
        return "-"
    some = "" if len(known) == len(found) else f" ({len(known)} of {len(found)} seeds)"
    return f"{interval(known, 1)} %{some}"


def _savings(pairs: Sequence[tuple[list[Row], list[Row]]], *, with_source: bool) -> str:
    shares = [saved(*pair, with_source=with_source) for pair in pairs]
    if any(math.isnan(share) for share in shares):
        missed = sum(math.isnan(share) for share in shares)
        return f"not reached by {missed} of {len(shares)}"
    # the baseline's own longest run is the mark
    early = [own[0]["losses"][-1] <= base[-1]["losses"][-1] for own, base in pairs]
    return ("≥ " if any(early) else "") + interval([100 * share for share in shares], 1) + " %"
