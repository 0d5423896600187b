"""The tables of the runs in markdown, and the page of all of them in bench/results."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from bench.paper.briefs import brief_text, diagnosis_text, ends_of, family_text, frontier_text
from bench.paper.compare import (
    MARK,
    NONE,
    QUESTIONS,
    Pairs,
    Row,
    Share,
    best_of,
    check_savings,
    committed,
    compared,
    interval,
    is_base,
    points_of,
    runs_of,
    share,
    smaller_alone,
    text_of,
    title_of,
    whole,
)
from bench.paper.jobs import Job, all_needs
from bench.paper.lines import Line
from bench.paper.models import FAMILIES, Size
from bench.paper.pictures import draw, maps_text
from bench.paper.plans import PARTS, TABLES, jobs_of_rates, jobs_of_seed, lines_of
from bench.paper.settings import SETTINGS, SIZES, Setting
from bench.paper.systems import SYSTEMS
from bench.shared.results import table as markdown

# a source may be anything that was paid before, so nothing is said of a family
ASKED = ("size", "loss", "existing")
TITLES = (
    *("system", "rate", "start loss", "1/4 of the steps", "1/2", "all", "below baseline"),
    *(QUESTIONS[question] for question in ASKED),
    "seeds",
)
# fewer may all be lines of other tables, which share runs of the baseline, DirectCopy and AKI
LEAST_LINES = 4
PAGE = """# Training grown models, and training from scratch

`python -m bench.paper TABLE` trains all runs of a table. Each is a run file of `growkern train`.
Losses are validation losses in nats per token, over at least 100,000 labels at size `tiny`.

- A run that is stopped early ends at a high learning rate, and so at a high loss. So there is a run
  for each length, whose learning rate falls to 0.
- Every method takes the best of three learning rates, of four for T5, in runs of another seed.
  These are short, but not for a BERT or T5 that begins untrained: short runs from scratch end on
  its plateau. Some lines take the rate of another one: those that differ in the length of stage 1
  or in the number of kept tokens, and FPI and AKI with AdamW, with copies, those of FPI and AKI.
  Where the best rate is the lowest or the highest, a better one may lie beyond it. All sources are
  trained at one rate. "From dense to experts" shows two rates, each with a baseline of its own.
- A step of a mixture costs more FLOPs, so it has fewer steps: as many FLOPs as its baseline.
- "FPI" and "AKI" copy the hidden state, as the paper does. "padded stream" is growkern's default
  for GPT-2 and T5. For BERT it is copies.
- The first line is the baseline. "below baseline" is how far the loss after all steps is below
  that of the baseline with the same seed.
- The last columns are shares of FLOPs that are saved to the loss of the baseline after all steps,
  by what is wanted, as in docs/savings.md. For a size or a loss the FLOPs before
  count too: of sources, and of predictions that are kept once for any number of runs. A given loss
  is compared with the best smaller size that was trained alone, with AdamW or Muon. These sizes
  stand below their baseline as "never grown".
- The optimizer's FLOPs count too. Those of AdamW are no products, and next to none. Muon's own
  products add 39 % to a step of GPT-2 4 x 128, 20 % to Qwen3 8 x 64 and 8 % to 8 x 32.
- Between runs of two
  lengths the loss is taken to fall linearly. In truth it falls faster at first, so that the savings
  are a little too low. Some lines have shorter runs for it, which no column shows. The
  FLOPs of a teacher in training are counted. "≥": some of the shortest runs are below that loss
  already.
- "accuracy" is that of a classifier, fine-tuned from the longest run. It says from which of five
  libraries a passage of code is.
- An interval (±) is the 95 % interval of the mean over the seeds, by Student's t. A line without
  one has one seed. All lines of a table and its picture have the same seeds.
- Times are of machines with 2 cores that trained two runs at a time. Some did other work beside it.

"""


def page_text(results: Path) -> str:
    """The page of all tables in a folder of results; empty if it has none.

    Each table has a link to its picture. A table that has only lines of other tables so far is left
    out.
    """
    rows = committed(results)
    if not rows:
        return ""
    tables = list(tables_in(rows, least=LEAST_LINES))
    parts = [PAGE, _settings([SETTINGS[size, TABLES[name].family] for name, size, _ in tables])]
    parts.append(_systems({line.system for _, _, by_line in tables for line in by_line}))
    for name, size, by_line in tables:
        parts.append(section(name, size, by_line, rows))
        minutes = minutes_of(lines_of(name, size), rows)
        if minutes is not None:
            parts.append(f"One seed took {minutes:.0f} minutes, its rates and sources included.\n")
        if _has_picture(by_line):
            parts.append(f"![{heading(name, size)}]({_picture(name, size)})\n")
    text = "\n".join([*parts, *_studies(results, rows), maps_text(results)]).rstrip() + "\n"
    return check_savings("paper.md", text)


def _studies(results: Path, rows: Mapping[str, Row]) -> Iterator[str]:
    """The tables of studies whose lines have no lengths in common, once there is enough to tell."""
    yield f"## Which small model, in short\n\n{brief_text(results, 'sources')}\n"
    for name, texts in {
        "diagnosis": [diagnosis_text],
        "family": [partial(brief_text, name="family"), family_text],
        "frontier": [frontier_text],
    }.items():
        if 2 * len(ends_of(rows, name)) >= len(lines_of(name, "tiny")):
            told = "\n\n".join(text(results) for text in texts)
            yield f"## {heading(name, 'tiny')}\n\n{told}\n"


def write_page(results: Path) -> list[Path]:
    """Write the page and the pictures of the rows in paper.json beside it. Returns the files."""
    rows = committed(results)
    if not rows:
        return []
    made = [results / "paper.md"]
    made[0].write_text(page_text(results))
    for name, size, by_line in tables_in(rows, least=LEAST_LINES):
        if _has_picture(by_line):
            made.append(results / _picture(name, size))
            draw(by_line, made[-1], title=heading(name, size))
    return made


def _settings(settings: Iterable[Setting]) -> str:
    """What the tables of each family have in common."""
    lines = ["| setting | class | source | target | steps of each | tokens in a step |"]
    lines.append(f"|{'---|' * 6}")
    for setting in dict.fromkeys(settings):
        sizes = " | ".join(
            f"{size.layers} layers, width {size.width}" for size in (setting.source, setting.target)
        )
        tokens = setting.batch * setting.length
        kind = FAMILIES[setting.family].model
        lines.append(f"| {setting.name} | {kind} | {sizes} | {setting.steps:,} | {tokens:,} |")
    return "\n".join(["## Settings", "", *lines, ""])


def _systems(names: Container[str]) -> str:
    """What each system does."""
    lines = ["| system | what it is |", "|---|---|"]
    lines += [
        f"| {system.title} | {system.about} |" for key, system in SYSTEMS.items() if key in names
    ]
    return "\n".join(["## Systems", "", *lines, ""])


def minutes_of(lines: Sequence[Line], rows: Mapping[str, Row]) -> float | None:
    """The time of a table with seed 1 where nothing has been trained before, two runs at a time.

    Returns:
        None if some of its runs are not there, or were interrupted.
    """
    needed = set[Job]()
    for line in lines:
        if 1 not in (runs := runs_of(line, rows)):
            return None
        rate = float(runs[1][0]["rate"])
        jobs = {*jobs_of_rates(line), *jobs_of_seed(line, 1, rate)}
        needed |= jobs.union(*map(all_needs, jobs))
    times = [rows.get(job.name, {}).get("seconds") for job in needed]
    return None if None in times else sum(times) / 2 / 60


def _has_picture(by_line: Mapping[Line, Pairs]) -> bool:
    return not all(map(is_base, whole(by_line).values()))


def _picture(name: str, size: str) -> str:
    return f"paper-{name}-{size}.png"


def report(rows: Iterable[Row]) -> str:
    """All tables in markdown, at every size of which there are rows of two lines."""
    by_name = {row["name"]: row for row in rows}
    found = tables_in(by_name, least=2)
    return check_savings("report", "\n".join(section(*lines, by_name) for lines in found))


def tables_in(
    rows: Mapping[str, Row], *, least: int
) -> Iterator[tuple[str, str, dict[Line, Pairs]]]:
    """The name, the size and the lines of every table of which so many lines are done, or all."""
    for name in TABLES:
        for size in SIZES:
            lines = lines_of(name, size)
            if any(line.lengths for line in lines):
                # it has a table of its own
                continue
            by_line = compared(lines, name, rows)
            if by_line and len(by_line) >= min(least, len(lines)):
                yield name, size, by_line


def section(name: str, size: str, by_line: Mapping[Line, Pairs], rows: Mapping[str, Row]) -> str:
    """A table in markdown, below its title and above its command."""
    return f"## {heading(name, size)}\n\n{table(name, size, by_line, rows)}\n"


def heading(name: str, size: str) -> str:
    """The title of a table."""
    return f"{TABLES[name].title}, {size}"


def table(name: str, size: str, by_line: Mapping[Line, Pairs], rows: Mapping[str, Row]) -> str:
    """A table in markdown, above its command. Lines that lack seeds are named below it."""
    shown = whole(by_line)
    parts = [_table(name, shown, rows)]
    if missing := [title_of(line) for line in by_line if line not in shown]:
        parts.append(f"Seeds are missing of: {'; '.join(missing)}.")
    parts.append(f"`python -m bench.paper {name} --size {size} --known`")
    return "\n\n".join(parts)


def _table(name: str, by_line: Mapping[Line, Pairs], rows: Mapping[str, Row]) -> str:
    """Lines in markdown, each baseline's above those of models that are never grown.

    Classifiers have a column if the table has any.
    """
    accuracies = {
        line: _accuracy([own[-1].get("accuracy") for own, _ in pairs.values()])
        for line, pairs in by_line.items()
    }
    classifies = TABLES[name].classifies and set(accuracies.values()) != {"-"}
    heads = [*TITLES[:-1], *(["accuracy"] if classifies else []), TITLES[-1]]
    goes_on = TABLES[name].baseline not in ("scratch", "scratch_muon")
    lines, best = [], dict[int, Share]()
    for line, pairs in by_line.items():
        alone: dict[int, dict[Size, Share]] = {}
        if is_base(pairs) and not goes_on:
            alone = smaller_alone(line.setting, pairs, rows)
        if is_base(pairs):
            # seeds that lack a size say nothing of the best one
            sizes = {size for of in alone.values() for size in of}
            best = {
                n: best_of(of.values()) for n, of in alone.items() if of.keys() == sizes != set()
            }
            best = dict.fromkeys(pairs, Share(0.0)) if goes_on else best
        cells = _cells(line, pairs, best, goes_on=goes_on)
        cells[-1:-1] = [accuracies[line]] if classifies else []
        lines.append(cells)
        if is_base(pairs) and not goes_on:
            lines += _never_grown(alone, heads)
    return markdown(heads, lines)


def _never_grown(alone: Mapping[int, Mapping[Size, Share]], heads: list[str]) -> list[list[str]]:
    """The lines of the sizes that were trained alone, or the one that says that there is none.

    Args:
        alone: seed -> size -> what it saves.
    """
    lines = []
    for size in sorted({x for of in alone.values() for x in of}, key=lambda x: (x.layers, x.width)):
        shares = [of[size] for of in alone.values() if size in of]
        said = {"any size will do": text_of(shares, len(alone)), "seeds": str(len(shares))}
        lines.append([f"{size.name}, never grown", *(said.get(head, "-") for head in heads[1:])])
    return lines or [[NONE, *["-"] * (len(heads) - 1)]]


def _cells(line: Line, of_seeds: Pairs, best: Mapping[int, Share], *, goes_on: bool) -> list[str]:
    """The columns of `TITLES` of one line.

    Args:
        best: seed -> what the best smaller size saves; empty if none was trained alone.
        goes_on: whether the baseline is the small model itself, which answers one question.
    """
    pairs = list(of_seeds.values())
    # some lines have runs of other lengths too
    lengths = sorted((*line.parts, *PARTS))
    losses_of = [points_of(own)[2] for own, _ in pairs]
    ends = [
        [loss for part, loss in zip(lengths[-len(losses) :], losses, strict=True) if part in PARTS]
        for losses in losses_of
    ]
    of_baseline = [points_of(base)[2][-1] for _, base in pairs]
    told = {
        question: text_of(
            [
                share(question, own, best.get(n, Share(0.0)), base)
                for n, (own, base) in of_seeds.items()
                if n in best or question != "loss"
            ],
            len(pairs),
        )
        for question in ASKED
    }
    if is_base(of_seeds):
        told = dict.fromkeys(ASKED, MARK)
    elif not any(own[-1]["source flops"] for own, _ in pairs):
        told["existing"] = "-"
    told |= {"size": "-"} if goes_on else {}
    return [
        title_of(line) + (", never grown" if goes_on and is_base(of_seeds) else ""),
        f"{pairs[0][0][0]['rate']:g}",
        interval([own[0]["losses"][0] for own, _ in pairs]),
        *["-"] * (len(PARTS) - len(ends[0])),
        *(interval(losses) for losses in zip(*ends, strict=True)),
        interval([base - own[-1] for own, base in zip(ends, of_baseline, strict=True)]),
        *told.values(),
        str(len(pairs)),
    ]


def _accuracy(accuracies: Sequence[float | None]) -> str:
    known = [100 * accuracy for accuracy in accuracies if accuracy is not None]
    if not known:
        return "-"
    some = "" if len(known) == len(accuracies) else f" ({len(known)} of {len(accuracies)} seeds)"
    return f"{interval(known, 1)} %{some}"
