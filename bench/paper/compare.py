"""The rows of runs: those of paper.json, and the FLOPs that a table's lines save.

The file is committed with the code. New rows are merged into it by name. None is ever dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from bench.paper.corpus import HASH, TEXTS, Facts, Text
from bench.paper.jobs import RATE_SEED, SOURCE
from bench.paper.models import Size
from bench.paper.plans import TABLES, Line, jobs_of_rates, jobs_of_seed, lines_of
from bench.paper.settings import Setting
from bench.paper.systems import SYSTEMS
from bench.shared.results import read, write
from growkern.errors import GrowthError
from growkern.plot.curves import QUESTIONS, first_crossing
from growkern.train.evaluation.evaluate import ratio_interval

Row = dict[str, Any]
# seed -> runs of a line and of its baseline
Pairs = dict[int, tuple[list[Row], list[Row]]]


def interval(values: Sequence[float], digits: int = 3) -> str:
    """Mean and 95 % interval of numbers that belong to different seeds."""
    mean, half = mean_and_half(values)
    if math.isnan(half):
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval: NaN for a single number."""
    mean, (_, high) = ratio_interval(values, [1] * len(values), 0.95)
    return mean, high - mean


def saved(runs: Sequence[Row], baseline: Sequence[Row], *, with_source: bool = False) -> float:
    """The share of the baseline's FLOPs that is saved to reach the baseline's final loss.

    What both began with is counted for neither. What the baseline alone began with is counted.

    Args:
        runs: of one seed, the shortest first. Between two of them the loss falls linearly.
        with_source: whether to count what was spent before, on the training of the models that
            were needed and on kept predictions.

    Returns:
        The share; NaN if no run reaches the loss. If the shortest one does, at least this share is
        saved.
    """
    _, flops, losses = points_of(runs)
    mark = baseline[-1]
    spent = first_crossing(flops, losses, mark["losses"][-1])
    if spent is None:
        return math.nan
    source = runs[-1]["source flops"] - mark["source flops"] if with_source else 0.0
    return 1 - (spent + max(source, 0.0)) / (mark["flops"][-1] + max(-source, 0.0))


def is_early(runs: Sequence[Row], baseline: Sequence[Row]) -> bool:
    """Whether the shortest run reaches the loss already, so that at least `saved` is saved."""
    return bool(runs[0]["losses"][-1] <= baseline[-1]["losses"][-1])


def best_rate(rows: Iterable[Row]) -> float:
    """The learning rate of the run with the lowest final loss. NaN is no loss."""

    def loss(row: Row) -> float:
        last = float(row["losses"][-1])
        return math.inf if math.isnan(last) else last

    return float(min(rows, key=loss)["rate"])


def runs_of(line: Line, rows: Mapping[str, Row]) -> dict[int, list[Row]]:
    """The runs of a line at the rate that its short runs chose.

    Returns:
        Seed -> its runs, the shortest first; only seeds of which all lengths are done.
    """
    tried = [rows.get(job.name) for job in jobs_of_rates(line)]
    done = [row for row in tried if row is not None]
    if len(done) < len(tried):
        return {}
    rate, by_seed = line.rate or best_rate(done), {}
    for seed in range(1, RATE_SEED):
        names = [job.name for job in jobs_of_seed(line, seed, rate)]
        if all(name in rows for name in names):
            by_seed[seed] = [rows[name] for name in names]
    return by_seed


def points_of(runs: Sequence[Row]) -> tuple[tuple[Any, ...], ...]:
    """The steps, FLOPs and losses at the ends of runs of several lengths."""
    return tuple(tuple(row[key][-1] for row in runs) for key in ("steps", "flops", "losses"))


def compared(lines: Sequence[Line], name: str, rows: Mapping[str, Row]) -> dict[Line, Pairs]:
    """The runs of a table's lines. Each is beside the last line of the baseline before it.

    A line of the baseline's system at a given rate is no baseline.
    """
    by_line, baseline = {}, dict[int, list[Row]]()
    for line in lines:
        runs = runs_of(line, rows)
        if line.system == TABLES[name].baseline and line.rate is None:
            baseline = runs
        if seeds := sorted(runs.keys() & baseline.keys()):
            by_line[line] = {seed: (runs[seed], baseline[seed]) for seed in seeds}
    return by_line


def whole(by_line: Mapping[Line, Pairs]) -> dict[Line, Pairs]:
    """The lines that have all seeds of the first one, with these seeds.

    Others cannot be compared: losses and savings of seeds differ by more than those of most
    methods.
    """
    seeds = next(iter(by_line.values())).keys()
    return {
        line: {seed: pairs[seed] for seed in seeds}
        for line, pairs in by_line.items()
        if pairs.keys() >= seeds
    }


def is_base(pairs: Pairs) -> bool:
    """Whether a line is a baseline, and so compared with itself."""
    return all(own is base for own, base in pairs.values())


def title_of(line: Line) -> str:
    """The name of a line in tables and pictures."""
    return SYSTEMS[line.system].title + (f", {line.label}" if line.label else "")


FILE = "paper.json"
# its rows are for tests and say nothing about the systems
UNSAVED = "micro"


def committed(results: Path) -> dict[str, Row]:
    """The rows of paper.json by the names of their jobs."""
    document = read(results / FILE)
    if not document and (results / FILE).is_file():
        raise GrowthError(f"{results / FILE} is not JSON: restore it with git")
    return {row["name"]: row for row in document.get("rows", [])}


def merged(results: Path, rows: Iterable[Row]) -> dict[str, Row]:
    """The rows of paper.json and new ones, by name. Of two with one name the new one is taken."""
    there = committed(results)
    known = {_place(name): row["text"] for name, row in there.items() if "text" in row}
    new = {row["name"]: row for row in rows}
    _check(new.values(), known, f"the rows in {FILE}", "Print and save them apart")
    for name, row in new.items():
        old = there.get(name, {})
        # the same model, which has not been classified again
        is_same = "accuracy" in old and old["losses"] == row["losses"]
        there[name] = {**({"accuracy": old["accuracy"]} if is_same else {}), **row}
    return there


def save(results: Path, rows: Iterable[Row]) -> None:
    """Merge rows into paper.json, but not those of the size for tests."""
    told = [row for row in rows if size_of(row["name"]) != UNSAVED]
    if told:
        kept = list(merged(results, told).values())
        write(results / FILE, {"op": "paper", "status": "ok", "rows": kept})


def of_text(results: Path, facts: Facts, size: str) -> list[Row]:
    """The rows of paper.json of a size whose texts are known here."""
    rows = [row for row in committed(results).values() if size_of(row["name"]) == size]
    here = {(size, text): facts[text] for text in facts}
    advice = "Give the same text, or leave out --known and --save"
    _check(rows, here, "the text of this call", advice)
    return [row for row in rows if _place(row["name"]) in here]


def size_of(name: str) -> str:
    """The size of a job, by its name."""
    return name.split("-")[0]


def _place(name: str) -> tuple[str, str]:
    """The size of a job and its text."""
    # a setting with another text is named after it
    labels = name.split("/")[0].split("-")
    return labels[0], next((text for text in TEXTS if text in labels), "corpus")


def _check(
    rows: Iterable[Row], known: Mapping[tuple[str, str], Text], other: str, advice: str
) -> None:
    for row in rows:
        text = known.get(_place(row["name"]))
        if text is not None and "text" in row and not _same(row["text"], text):
            raise GrowthError(
                f"{row['name']} was trained on {_said(row['text'])}, and {other} on {_said(text)}. "
                f"Losses on different texts cannot be compared. {advice}"
            )


def _same(text: Text, other: Text) -> bool:
    """Whether two texts are the same: by their hashes, or by their bytes in old rows."""
    # settings use more or less of the validation text, so that its bytes say nothing
    key = HASH if HASH in text and HASH in other else "train_bytes"
    return text[key] == other[key]


def _said(text: Text) -> str:
    hashed = f" (hash {text[HASH]})" if HASH in text else ""
    return f"{text['train_bytes']:,} bytes of text{hashed}"


# With s the FLOPs of the small model, g those that the grown one then needs to the loss where
# training from scratch ends, w those of training from scratch, and b those that the best fixed size
# needs to that loss:
#
#     family   (s + w - s - g) / (s + w)    small and large are both wanted
#     size     (w - s - g) / w              only the large one is wanted, and nothing is there
#     loss     (b - s - g) / b              any size will do
#     existing (w - g) / w                  the small one is there, and its training is not counted
# cells and lines of tables of savings
MARK = "0%, the mark"
NONE = "no smaller model was trained alone for about as many FLOPs"
# what says that a line tells of a saving
FIGURE = re.compile(r"\d ?%|\d per ?cent|\d(x| times)\b|not reach")
TELLS = re.compile(
    r"\bsav(ed|es|ings?)\b|not reached by \d|did not reach|[≥≤] -?\d|± [\d.]+ ?%"
    r"|(%|per ?cent) (less|fewer|reduction)|cheaper|^[^|]*FLOPs?\b.*(reduction|speed-?up|%)"
    r"|(reduction|speed-?up)\b.*FLOP|(a family|a given (size|loss)|exists)\b.*\d ?%",
    re.I,
)


def check_savings(name: str, text: str) -> str:
    """A text as it is, if a reader can tell what each saving in its tables is one of.

    A saving's question stands in the head of its column, in the head of the first column, or in its
    line. Columns whose heads differ in nothing but the question share a mark. Each mark has a line
    of a model that is never grown, or of `NONE`; and has it again after each line of `MARK`, where
    another baseline begins. A line that names its question itself holds that model too.

    Raises:
        GrowthError: a saving has no question, or no model that is never grown.
    """
    if bare := re.search(r"^ *:?-+:? *\|.*$", text, re.M):
        raise GrowthError(f"{name}: {bare[0]!r}: begin the lines of a table with |")
    for part in re.findall(r"(?:^ *\|.*\n?)+", text, re.M):
        rows = (re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in part.splitlines())
        head, _, *lines = ([x.strip() for x in row] for row in rows)
        _check_table(f"table {name!r}, {head[0]!r}", head, lines)
    return text


def _check_table(name: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Check one table, by column and line. (`check_savings`)"""
    questions = f"one of {', '.join(QUESTIONS.values())}"
    marks: dict[str, list[int]] = {}
    for column, words in enumerate(head[1:], 1):
        if _asks(words) or (_asks(head[0]) and not any(map(_asks, head[1:]))):
            mark = re.sub(f":? ?({'|'.join(QUESTIONS.values())})", "", words)
            marks.setdefault(mark if _asks(words) else "", []).append(column)
    asked = [column for columns in marks.values() for column in columns]
    for line in lines:
        cells = [(x, y) for n, (x, y) in enumerate(zip(head, line, strict=True)) if n not in asked]
        # an address says nothing, and nor does the level of an interval
        told = re.sub(r"\]\([^)]*\)|95 % interval", "", " | ".join(y for _, y in cells))
        figures = told.partition(" | ")[2]
        if not FIGURE.search(figures) or not TELLS.search(" | ".join([told, *dict(cells)])):
            continue
        told = "; ".join(f"{x}: {y}" if "never grown" in x else y for x, y in cells if y != "-")
        if not _asks(told):
            raise GrowthError(f"{name}: {told}: name the question of this saving, {questions}")
        if "never grown" not in told and NONE not in told:
            raise GrowthError(f"{name}: {told}: add the model that is never grown")
    if not marks and any("below" in words for words in head):
        raise GrowthError(f"{name}: name the question of these differences, {questions}")
    starts = [0, *[number for number, line in enumerate(lines) if MARK in line][1:]]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        for mark, columns in marks.items():
            titles = [x[0] for x in lines[start:end] if any(x[i] != "-" for i in columns)]
            none = any(NONE in x[0] for x in lines[start:end])
            if titles and not none and not any("never grown" in words for words in titles):
                raise GrowthError(
                    f"{name}, columns {mark!r}, from {titles[0]!r} on: no model that is "
                    "never grown: add its line"
                )


def _asks(words: str) -> bool:
    """Whether words name a question."""
    return any(question in words for question in QUESTIONS.values())


# what runs share whose losses may be compared
SHARED = (
    *("family", "text", "vocab", "batch", "length", "dropout", "precision"),
    *("validation_tokens", "validation_passes", "schedule"),
)
Runs = Sequence[Row]
# the bound of a share of which the runs had too few FLOPs to tell
SHORT = "short"


class Share(NamedTuple):
    """A share of FLOPs that is saved; `bound`: "≥", "≤" or both if runs tell no more."""

    value: float
    bound: str = ""


@cache
def _settings(size: str) -> dict[str, Setting]:
    """Every setting of the tables at a size, by its name."""
    lines = [line for name in TABLES for line in lines_of(name, size)]
    kinds = [(x.setting, x.setting.for_source, x.setting.for_scratch) for x in lines]
    return {setting.name: setting for three in kinds for setting in three}


def fixed_sizes(
    setting: Setting, seed: int, rows: Mapping[str, Row]
) -> dict[Size, list[tuple[float, float]]]:
    """The FLOPs and losses at the ends of all comparable runs of one size, from random weights.

    Returns:
        Size -> its runs by FLOPs; of several with as many FLOPs the best one.
    """
    settings = _settings(setting.name.split("-")[0])
    found: dict[Size, list[tuple[float, float]]] = {}
    for row in rows.values():
        other = settings.get(row.get("setting", ""))
        if other is None or row["seed"] != seed or row["system"] not in (SOURCE, "scratch"):
            continue
        size = other.source if row["system"] == SOURCE else other.target
        if not size.experts and all(getattr(other, x) == getattr(setting, x) for x in SHARED):
            found.setdefault(size, []).append((row["flops"][-1], row["losses"][-1]))
    return {
        size: [min(same) for _, same in groupby(sorted(ends), lambda end: end[0])]
        for size, ends in found.items()
    }


def _alone(ends: Sequence[tuple[float, float]], mark: Row) -> Share | None:
    """What a size that is never grown saves to the loss where a baseline ends, with one seed.

    Args:
        ends: the FLOPs and losses of its runs.

    Returns:
        NaN if it does not get there, with the bound `SHORT` if it had fewer FLOPs. None if it was
        run for longer only.
    """
    spent, most = first_crossing(*zip(*ends, strict=True), mark["losses"][-1]), mark["flops"][-1]
    if spent is None:
        # steps are whole, so equal FLOPs differ a little
        return Share(math.nan, SHORT if ends[-1][0] < 0.99 * most else "")
    share = Share(1 - spent / most, "≥" if spent == ends[0][0] else "")
    return None if share.bound and share.value < 0 else share


def share(question: str, runs: Runs, best: Share, base: Runs) -> Share:
    """What runs save by a question; `best`: what the best fixed size saves. NaN: not reached."""
    bound = "≥" if is_early(runs, base) else ""
    if question == "loss":
        left = 1 - saved(runs, base, with_source=True)
        return Share(1 - left / (1 - best.value), bound + ("≤" if best.bound else ""))
    if question == "size":
        return Share(saved(runs, base, with_source=True), bound)
    if question == "existing":
        return Share(saved(runs, base), bound)
    source = (runs[-1]["source flops"] - base[-1]["source flops"]) / base[-1]["flops"][-1]
    return Share(saved(runs, base) / (1 + source), bound)


def smaller_alone(
    setting: Setting, pairs: Pairs, rows: Mapping[str, Row]
) -> dict[int, dict[Size, Share]]:
    """What each size saves that was run and is smaller than the target.

    Runs with fewer FLOPs tell nothing where they do not get there. Then the seeds that get there
    are no fair sample, so only those remain that do not and had as many FLOPs.

    Returns:
        Seed -> size -> its share; NaN: not reached.
    """
    large, found = setting.target, dict[int, dict[Size, Share]]()
    for seed, (_, base) in pairs.items():
        sizes = fixed_sizes(setting, seed, rows).items()
        shares = {size: _alone(ends, base[-1]) for size, ends in sizes}
        found[seed] = {
            size: share
            for size, share in shares.items()
            if share is not None
            and (size != large and size.layers <= large.layers and size.width <= large.width)
        }
    short = {size for of in found.values() for size, share in of.items() if share.bound == SHORT}
    return {
        seed: {
            n: x
            for n, x in of.items()
            if n not in short or (x.bound != SHORT and math.isnan(x.value))
        }
        for seed, of in found.items()
    }


def best_of(shares: Iterable[Share]) -> Share:
    """What the best of some sizes saves, or 0, if the large one is best.

    A size of which only a bound is known may be the best one.
    """
    found = [x for x in shares if not math.isnan(x.value)]
    return Share(max([0.0, *(x.value for x in found)]), "≥" if any(x.bound for x in found) else "")


def text_of(shares: Sequence[Share], seeds: int) -> str:
    """The mean in per cent over the seeds with its interval or its bound, in words."""
    if not shares:
        return "not known"
    missed = sum(math.isnan(x.value) for x in shares)
    if missed:
        return f"not reached by {missed} of {len(shares)}"
    values, bounds = [100 * x.value for x in shares], {y for x in shares for y in x.bound}
    few = f" ({len(values)} seed)" if len(values) < seeds else ""
    if bounds:
        # of a bound from both sides nothing is known
        mean = sum(values) / len(values)
        return "not known" if len(bounds) > 1 else f"{bounds.pop()} {mean:.1f}%{few}"
    return f"{interval(values, 1)}%{few}"
