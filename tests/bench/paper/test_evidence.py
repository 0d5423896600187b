"""What the planner says of our own runs is what is stored of them."""

import math
import re

import pytest

from bench.paper.compare import interval, runs_of, saved
from bench.paper.plans import TABLES, lines_of
from bench.paper.settings import TINY_BERT, Size
from bench.shared.results import RESULTS, read
from growkern.growth.plan.advice.evidence import (
    DIRECT_COPY,
    FAR_FACTOR,
    FARTHEST_FACTOR,
    LONG_SOURCE,
    MOMENTS,
    MOST_FACTOR,
    OURS,
    SAVINGS,
    percent,
)
from tests.bench.pages import says, table_with

# layers and ways of a saving -> table, system and label of its runs, and label of the baseline's
LINES = {
    ("4", "fpi", "padded"): ("table5", "fpi_padded", "", ""),
    ("16", "fpi", "padded"): ("layers", "fpi_padded", "", ""),
    ("4", "aki", "padded"): ("symmetry", "aki_padded", "", ""),
    ("4", "fpi", "copies"): ("table5", "fpi", "", ""),
    ("4", "aki", "copies"): ("table5", "aki", "", ""),
    ("4", "direct_copy"): ("table5", "direct_copy", "", ""),
    ("8", "identity", "young"): ("depth", "fpi_identity", "source of 200 steps", ""),
    ("8", "stack", "young"): ("depth", "fpi", "stack, source of 200 steps", ""),
    ("8", "interleave", "young"): ("depth", "fpi_interleave", "source of 200 steps", ""),
    ("8", "fpi", "padded", "identity", "trained"): (
        *("directions", "padded_identity", "both", "both"),
    ),
}
OWN = [one for one in (*SAVINGS, DIRECT_COPY) if one.paper == OURS]


@pytest.fixture(scope="module")
def rows():
    return {row["name"]: row for row in read(RESULTS / "paper.json")["rows"]}


def runs_named(rows, table, system, label):
    """Seed -> the runs of one line of a table."""
    wanted = (system, label)
    (line,) = [one for one in lines_of(table, "tiny") if (one.system, one.label) == wanted]
    return runs_of(line, rows)


def savings(rows, table, system, label="", of_scratch=""):
    """What each seed of a line saved; NaN where it did not reach the loss from scratch."""
    scratch = runs_named(rows, table, TABLES[table].baseline, of_scratch)
    return [saved(runs, scratch[i]) for i, runs in runs_named(rows, table, system, label).items()]


def key_of(own):
    return re.search(r"to (\d+) x", own.models)[1], *own.ways


@pytest.mark.parametrize("own", OWN, ids=lambda own: "-".join(key_of(own)))
def test_a_saving_of_ours_is_that_of_its_runs(rows, own):
    found = savings(rows, *LINES[key_of(own)])
    seeds = f"{len(found)} seed" + ("s" if len(found) > 1 else "")
    assert own.models.endswith(seeds)
    if own.margin:
        assert interval(found) == f"{own.share:.3f} ± {own.margin:.3f}"
    else:
        assert len(found) == 1 and own.share == pytest.approx(found[0], abs=5e-4)


def test_every_line_is_evidence_once():
    assert sorted(LINES) == sorted(map(key_of, OWN))


def kind_of(text):
    """The axis and the ways to grow that a row of the table of evidence names."""
    axis = "both" if "hidden size and layers" in text else "width"
    words = re.findall("fpi|aki|padded|copies|stack|identity|interleave", text)
    words += ["large decoder"] if "decoder" in text else []
    return "depth" if text.startswith("layers") else axis, frozenset(words)


def test_the_table_of_evidence_has_every_saving_once():
    defaults = ("fpi", "padded", "identity", "trained")
    expected = {}
    for one in SAVINGS:
        ways = () if one.ways == defaults else {*one.ways} - {"young"}
        margin = f" ± {100 * one.margin:.0f}" if one.margin else ""
        figure = f"{percent(one.share).removesuffix('%')}{margin} %"
        expected.setdefault((one.axis, frozenset(ways)), []).append(figure)
    written = {kind_of(kind): cell for kind, cell in table_with("you grow")[1:-1]}
    found = {kind: re.findall(r"-?\d+(?: ± \d+)? %", cell) for kind, cell in written.items()}
    assert {k: sorted(v) for k, v in found.items()} == {k: sorted(v) for k, v in expected.items()}


def test_equal_copies_did_not_reach_the_loss_from_scratch(rows):
    assert all(map(math.isnan, savings(rows, "symmetry", "fpi_none")))


def parameters_of(setting, size):
    return sum(p.numel() for p in setting.untrained(size, 0).parameters())


def test_no_evidence_is_of_a_larger_factor():
    factors = []
    for table, system, label, _ in LINES.values():
        wanted = (system, label)
        (one,) = [x.setting for x in lines_of(table, "tiny") if (x.system, x.label) == wanted]
        if one.target.width > one.source.width:
            factors.append(parameters_of(one, one.target) / parameters_of(one, one.source))
    assert MOST_FACTOR - 0.5 < max(factors) < MOST_FACTOR
    assert says(f"more width, and more than {MOST_FACTOR:g} times the parameters")


def test_a_far_growth_saved_little(rows):
    most = {}
    for width, factor in ((32, 14), (16, 46)):
        small, large = (
            parameters_of(TINY_BERT, size)
            for size in (Size(4, width, width // 16), TINY_BERT.target)
        )
        assert large / small == pytest.approx(factor, abs=0.5) and large / small > FAR_FACTOR
        found = [
            share
            for table, system in (
                ("table3", "aki"),
                ("table3", "direct_copy"),
                ("narrow", "fpi_padded"),
            )
            for share in savings(rows, table, system, f"source 4x{width}")
        ]
        assert len(found) == 9 and any(map(math.isnan, found))
        most[width] = max((one for one in found if not math.isnan(one)), default=None)
    assert most[16] is None
    assert says(f"that grew to 14 times saved at most {100 * most[32]:.0f} %")


def test_a_far_growth_from_a_long_trained_source_saved_much(rows):
    shares = savings(rows, "ages", "aki", "source 4x32 of 6,000 steps")
    line = next(one for one in lines_of("ages", "tiny") if "6,000" in one.label)
    assert line.setting.source_steps / line.setting.steps == LONG_SOURCE
    assert FAR_FACTOR < 14 < FARTHEST_FACTOR
    # "with AKI in every seed, with direct_copy in most"
    direct = [
        one
        for steps in ("6,000", "8,000")
        for one in savings(rows, "ages", "direct_copy", f"source 4x32 of {steps} steps")
    ]
    assert sum(one > 0.2 for one in direct) == 4 and len(direct) == 6
    assert not [x for x in lines_of("ages", "tiny") if "fpi" in x.system]
    least = f"{math.floor(100 * min(shares))} %"
    assert says(
        f"and AKI at least {least} from a source that had seen {LONG_SOURCE:.0f} times the tok"
    )


def test_fpi_is_ahead_of_aki_in_every_seed_of_a_small_bert(rows):
    fpi, aki = (savings(rows, "table2", system) for system in ("fpi", "aki"))
    assert len(fpi) == len(aki) == 3
    assert all(one > other for one, other in zip(fpi, aki, strict=True))


def test_ways_to_add_layers_save_alike(rows):
    for label in ("source of 200 steps", "source of 2,000 steps"):
        lines = (("fpi_identity", label), ("fpi", f"stack, {label}"), ("fpi_interleave", label))
        shares = [savings(rows, "depth", *one) for one in lines]
        means = [sum(one) / len(one) for one in shares]
        assert max(means) - min(means) < 0.03


def test_the_page_names_what_is_no_evidence(rows):
    left_out = [
        savings(rows, *where)
        for where in (
            ("table2", "fpi"),
            ("table6", "fpi_padded"),
            ("depth", "fpi_identity", "source of 2,000 steps"),
            ("directions", "fpi_identity", "depth", "depth"),
        )
    ]
    bert, t5, twice, more = (interval([100 * one for one in found], 0) for found in left_out)
    assert says(f"({bert} % for FPI in BERT, {t5} % with a padded hidden state in T5)")
    assert says(f"({twice} %, {more} %), and after four times as much training (at least 75 %)")
    assert min(savings(rows, "moment", "fpi_padded", "source of 8,000 steps")) > 0.75 - 1e-6


def test_the_page_names_the_upper_ends_of_young_sources():
    ends = [100 * (gain + half) for gain, half in MOMENTS.values()]
    assert list(MOMENTS) == [0.1, 0.3, 1.0]
    assert says("{:.0f} % for a tenth or less, {:.0f} % for 0.3, {:.0f} % close to".format(*ends))


def test_savings_of_a_source_at_the_mark_are_no_evidence(rows):
    """A source of 4 x 64 hardly has to learn to reach what 8 x 64 reaches from scratch."""
    marks = runs_named(rows, "depth", "scratch", "")
    for seed, runs in runs_named(rows, "depth", "fpi_identity", "source of 2,000 steps").items():
        assert abs(runs[0]["losses"][0] - marks[seed][-1]["losses"][-1]) < 0.05
    assert not [one for one in OWN if one.axis == "depth" and "young" not in one.ways]
