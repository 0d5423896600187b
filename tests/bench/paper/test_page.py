"""Tables, pages and pictures show what the rows say."""

import math

import pytest

from bench.paper.compare import MARK, NONE, best_rate, compared, interval, saved
from bench.paper.page import report, table
from bench.paper.plans import jobs_of_rates, jobs_of_seed, lines_of


def runs_with(losses, flops, source=0.0):
    """Runs of three lengths; what they lost and spent on the way does not matter."""
    return [
        {"steps": [0, 1], "losses": [9.0, loss], "flops": [0.0, spent], "source flops": source}
        for loss, spent in zip(losses, flops, strict=True)
    ]


def test_savings_are_read_where_the_final_loss_of_scratch_is_reached():
    scratch = runs_with([4.0, 3.0, 2.0], [25.0, 50.0, 100.0])
    fast = runs_with([2.5, 2.2, 1.8], [12.5, 25.0, 50.0], 10.0)
    assert saved(fast, scratch) == pytest.approx(1 - 0.375)
    assert saved(fast, scratch, with_source=True) == pytest.approx(0.525)
    assert saved(runs_with([1.9, 1.8, 1.7], [12.5, 25.0, 50.0]), scratch) == 0.875
    assert math.isnan(saved(runs_with([3.0, 2.5, 2.1], [12.5, 25.0, 50.0]), scratch))
    # both went on with the same model
    begun = runs_with([4.0, 3.0, 2.0], [25.0, 50.0, 100.0], 10.0)
    assert saved(fast, begun, with_source=True) == saved(fast, begun) == 0.625
    # Student's t with 2 degrees of freedom: 4.303 * 1 / sqrt(3)
    assert interval([1.0, 2.0, 3.0], 2) == "2.00 ± 2.48"
    assert report([]) == ""


def rows_for(lines, losses):
    """Rows of finished runs: the middle rate is the best; each seed has losses of three lengths.

    Runs that are shorter than these end at 3.4.
    """
    for line, of_seeds in zip(lines, losses, strict=True):
        for job in jobs_of_rates(line):
            yield row_of(job, abs(job.rate - line.setting.rates[1]) + 3.0)
        for seed, ends in enumerate(of_seeds, start=1):
            jobs = jobs_of_seed(line, seed, line.setting.rates[1])
            for job, end in zip(jobs, [*[3.4] * len(line.parts), *ends], strict=True):
                yield row_of(job, end)


def row_of(job, loss):
    one = {"name": job.name, "system": job.system, "seed": job.seed, "rate": job.rate}
    curve = {"steps": [0, job.steps], "flops": [0.0, float(job.steps)], "losses": [3.5, loss]}
    return one | curve | {"source flops": 400.0 * len(job.needs), "seconds": 60.0}


# three seeds of each line, after 1/4, 1/2 and all of 2,000 steps
MOMENT = [
    [(3.0, 2.5, 2.0), (3.2, 2.7, 2.2), (3.4, 2.9, 2.4)],
    [(2.9, 2.6, 2.2), (2.9, 2.6, 2.1), (2.9, 2.6, 2.3)],
    [(2.2, 2.1, 1.9), (2.4, 2.3, 2.1), (2.6, 2.5, 2.3)],
    [(2.4, 2.1, 1.9), (2.6, 2.3, 2.1), (2.4, 2.3, 2.1)],
    [(3.0, 2.2, 1.8), (3.0, 2.2, 1.8), (3.0, 2.2, 1.8)],
]


def test_a_table_has_a_line_for_each_setting():
    """Every line is compared with the same seeds from scratch, at its own best rate."""
    lines = lines_of("moment", "tiny")[:5]
    text = report(rows_for(lines, MOMENT))
    # other tables share the runs from scratch
    printed = text.split("## When to grow, tiny\n")[1].split("`python")[0].splitlines()[1:]
    head, _, *cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in printed if line
    ]
    assert [number for number, line in enumerate(cells) if line[0] == NONE] == [1]
    del cells[1]
    column = dict(zip(head, zip(*cells, strict=True), strict=True))
    steps = ("200", "600", "2,000", "8,000")
    labels = [f"FPI, padded stream, source of {one} steps" for one in steps]
    assert column["system"] == ("scratch", *labels)
    assert set(column["rate"]) == {f"{lines[0].setting.rates[1]:g}"}
    assert set(column["seeds"]) == {"3"} and "accuracy" not in column
    quarter = ("3.200 ± 0.497", "2.900 ± 0.000", "2.400 ± 0.497", "2.467 ± 0.287", "3.000 ± 0.000")
    assert column["1/4 of the steps"] == quarter and column["all"][0] == "2.200 ± 0.497"
    below = ("0.000 ± 0.000", "0.000 ± 0.430", "0.100 ± 0.000", "0.167 ± 0.287", "0.400 ± 0.497")
    assert column["below baseline"] == below
    # the first seed of the second line does not reach 2.0; the third is below 2.4 from the start
    shares = column["the small one exists"]
    assert shares[:2] == (MARK, "not reached by 1 of 3")
    assert shares[2].startswith("25.0 ±") and shares[3].startswith("≥ ")
    assert column["a given size"][2].startswith("5.0 ±")
    assert set(column["any size will do"][2:]) == {"not known"}


def test_shorter_runs_are_in_no_column_but_in_the_savings():
    """They end at 3.4, below the loss from scratch. Others begin with a quarter of the steps."""
    lines = lines_of("depth", "tiny")
    losses = [[(4.0, 3.8, 3.5)], *[[(3.3, 3.2, 3.1)]] * 6]
    rows = {row["name"]: row for row in rows_for(lines, losses)}
    text = table("depth", "tiny", compared(lines, "depth", rows), rows)
    cells = [line.split(" | ") for line in text.splitlines()[2:10] if NONE not in line]
    assert [line[3:6] for line in cells[1:]] == [["3.300", "3.200", "3.100"]] * 6
    assert [line[9] for line in cells] == [MARK, *["≥ 75.0%"] * 3, *["≥ 96.9%"] * 3]


def test_a_rate_whose_loss_is_no_number_is_not_the_best():
    rows = [{"rate": rate, "losses": [loss]} for rate, loss in ((1.0, math.nan), (2.0, 3.0))]
    assert best_rate(rows) == best_rate(rows[::-1]) == 2.0
