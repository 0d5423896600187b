"""What the README and the documentation say, and the results behind it."""

import re

from bench.paper.compare import saved
from bench.shared import results

ROOT = results.ROOT
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
LOG = (ROOT / "bench" / "LOG.md").read_text()
CLEAN = re.compile(r"[0-9a-f]{7,40}")
# a family of models -> the rate of its runs from scratch
BASELINES = {"tiny-bert": "0.002", "tiny-gpt": "0.003", "tiny-t5": "0.001"}


def tables(text):
    """The Markdown tables of a text, each as a list of rows of cells. The first row is the head."""
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        lines = [[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()]
        yield [lines[0], *lines[2:]]


def table_with(head):
    (found,) = [table for table in tables(TEXT) if table[0][0].startswith(head)]
    return found


def check_source(name):
    """Check that a quoted result names its machine and a commit without changes: its document."""
    document = results.read(results.RESULTS / f"{name}.json")
    assert document, f"{name}.json is missing or broken, so the README's figures have no source"
    facts = document["machine"]
    assert CLEAN.fullmatch(document.get("commit") or facts.get("commit", "")), f"{name}: no commit"
    assert not facts.get("dirty"), f"{name}: measured from sources that were not committed"
    assert facts.get("cpu") or facts.get("gpu") or facts.get("devices"), f"{name}: no machine"
    return document


def says(sentence):
    """Whether a page has these words, with any line breaks."""
    return " ".join(sentence.split()) in " ".join(TEXT.split())


def logs(sentence):
    """Whether the log has these words, with any line breaks."""
    return " ".join(sentence.split()) in " ".join(LOG.split())


def paper_lines(name, **known):
    """The lines by their systems of the table of training in which `name` stands with `known`."""
    for head, *lines in tables(TEXT):
        found = {line[0]: dict(zip(head, line, strict=True)) for line in lines}
        if head[0] == "system" and name in found and known.items() <= found[name].items():
            return found
    raise AssertionError(name)


def first(cell):
    """The mean in a cell of a table, without its interval."""
    return float(cell.split()[0])


def training_rows():
    return {row["name"]: row for row in results.read(results.RESULTS / "paper.json")["rows"]}


def runs_of(name, rate="0.002", seed=1, rows=None):
    """The runs of a setting and system with a seed, after 500, 1000 and 2000 steps."""
    rows = rows or training_rows()
    return [rows[f"{name}-{steps}-{rate}-seed{seed}"] for steps in (500, 1000, 2000)]


def more_saved(setting, one, other, rate="0.002", rates=None, rows=None):
    """How many points `one` saves more than `other`, for each of three seeds.

    Both are systems of the setting, or of another one if that stands before it: "setting/system".
    """
    differences = []
    for seed in (1, 2, 3):
        scratch = runs_of(f"{setting}/scratch", rate, seed)
        runs = [
            runs_of(
                name if "/" in name else f"{setting}/{name}",
                (rates or {}).get(name, rate),
                seed,
                rows,
            )
            for name in (one, other)
        ]
        first, second = (100 * saved(own, scratch) for own in runs)
        differences.append(first - second)
    return differences


def shares_of(name, rate, **how):
    """The per cent that a line saves for each of three seeds; NaN where it misses the baseline."""
    family = "-".join(name.split("-")[:2]).split("/")[0]
    return [
        100
        * saved(
            runs_of(name, rate, seed), runs_of(f"{family}/scratch", BASELINES[family], seed), **how
        )
        for seed in (1, 2, 3)
    ]
