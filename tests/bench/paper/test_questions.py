"""Savings by what is wanted, beside models that are never grown."""

import math
import re

import pytest

from bench import report
from bench.paper import compare
from bench.paper.briefs import BRIEFS, family_text, frontier_text
from bench.paper.compare import Share, best_of, check_savings, saved, share, smaller_alone, text_of
from bench.paper.models import Size
from bench.paper.plans import jobs_of_rates, jobs_of_seed, lines_of
from bench.paper.settings import SETTINGS
from bench.shared.results import RESULTS, write
from growkern.errors import GrowthError
from tests.bench.paper.test_page import row_of, runs_with

SETTING = SETTINGS["tiny", "gpt2"]


def test_the_three_questions_by_hand():
    """The small model costs 30, the grown one 40, scratch 100, the best fixed size 80."""
    scratch = runs_with([4.0, 3.0, 2.0], [25.0, 50.0, 100.0])
    grown = runs_with([2.5, 2.0, 1.8], [20.0, 40.0, 80.0], 30.0)
    found = [share(q, grown, Share(0.2), scratch) for q in ("family", "size", "loss")]
    assert [x.value for x in found] == pytest.approx([1 - 70 / 130, 1 - 70 / 100, 1 - 70 / 80])
    assert {x.bound for x in found} == {""}
    # the shortest run is there already, and so may the best fixed size have been
    early = runs_with([1.9, 1.8, 1.7], [20.0, 40.0, 80.0], 30.0)
    assert share("size", early, Share(0.2), scratch) == (pytest.approx(0.5), "≥")
    assert share("loss", grown, Share(0.2, "≥"), scratch).bound == "≤"
    assert text_of([share("loss", grown, Share(0.2, "≥"), scratch)], 1).startswith("≤")
    assert text_of([Share(0.1, "≥"), Share(0.1, "≤")], 2) == "not known"
    assert text_of([share("loss", early, Share(0.2, "≥"), scratch)], 1) == "not known"
    # a size of which only a bound is known may be the best
    assert best_of([Share(0.3), Share(0.2, "≥"), Share(math.nan)]) == (0.3, "≥")
    assert best_of([Share(0.3), Share(-0.2)]) == (0.3, "") and best_of([]) == (0.0, "")
    assert text_of([Share(math.nan), Share(0.1)], 2) == "not reached by 1 of 2"


def test_a_small_model_is_read_where_it_reaches_the_loss_from_scratch():
    """Truth: the rows themselves, the loss falling linearly between two lengths."""
    rows, size = compare.committed(RESULTS), Size(4, 64, 4)
    pairs = {n: ([], [rows[f"tiny-gpt/scratch-2000-0.003-seed{n}"]]) for n in (1, 2, 3)}
    told = smaller_alone(SETTING, pairs, rows)
    for seed, expected in ((1, 17), (2, 12), (3, 11)):
        base = [rows[f"tiny-gpt/scratch-2000-0.003-seed{seed}"]]
        mark, whole = base[0]["losses"][-1], base[0]["flops"][-1]
        short, long = (
            rows[name]
            for name in (
                f"tiny-gpt/source-2000-0.003-seed{seed}",
                f"tiny-gpt-at400/source-8000-0.003-seed{seed}",
            )
        )
        part = (short["losses"][-1] - mark) / (short["losses"][-1] - long["losses"][-1])
        spent = short["flops"][-1] + part * (long["flops"][-1] - short["flops"][-1])
        found = told[seed][size]
        assert found == (pytest.approx(1 - spent / whole), "")
        assert round(100 * found.value) == expected
    # of another family, and of another vocabulary, there is none
    assert Size(4, 32, 2) not in told[1]
    # without the long run of a seed it may still get there: so those that do are no fair sample
    del rows["tiny-gpt-at400/source-8000-0.003-seed2"]
    assert not any(size in of for of in smaller_alone(SETTING, pairs, rows).values())


def test_what_the_baseline_alone_began_with_counts():
    """The baseline goes on from a model that cost 100, for 100. From scratch 150 are enough."""
    goes_on = runs_with([2.0], [100.0], 100.0)
    assert saved(runs_with([3.0, 2.0], [50.0, 150.0]), goes_on, with_source=True) == 0.25
    assert saved(runs_with([2.0], [50.0], 100.0), goes_on, with_source=True) == 0.5


TABLES = ("saved", "demo", "early", "gpu", *(f"savings-{name}" for name in BRIEFS))


def refused(name, text):
    """That a table is refused without its questions, and without models that are never grown."""
    assert check_savings(name, text) == text
    untold = re.sub(f"{'|'.join(compare.QUESTIONS.values())}", "what", text)
    for changed in (untold, text.replace("never grown", "alone").replace(compare.NONE, "others")):
        with pytest.raises(GrowthError, match=f"{name!r}.*(question|never grown)"):
            check_savings(name, changed)


@pytest.mark.parametrize("name", TABLES)
def test_a_block_is_refused_without_them(name, monkeypatch):
    refused(name, report.BLOCKS[name](RESULTS))
    untold = "| run | FLOPs saved |\n| - | - |\n| A | 3% |"
    monkeypatch.setitem(report.BLOCKS, name, lambda _: untold)
    with pytest.raises(GrowthError, match=f"{name!r}.*question"):
        report.with_blocks(f"<!-- {name} -->\n<!-- /{name} -->", RESULTS)


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_tables_by_hand_name_their_questions_too(page):
    check_savings(page.name, page.read_text())


def test_the_frontier_shows_the_better_rate_beside_the_best_fixed_size(tmp_path):
    """The target ends at 3.0, the best fixed size at 2.9, and each other line at 3.1 or above."""
    rows = []
    for number, line in enumerate(lines_of("frontier", "tiny")):
        (job,) = jobs_of_seed(line, 1, line.rate)
        fixed = {"4x64": 3.0, "2x64, never grown": 2.9}.get(line.label, 3.1)
        rows.append(row_of(job, fixed + (0.05 if number % 2 else 0.0)))
    write(tmp_path / "paper.json", {"rows": rows[::-1]})
    head, _, *cells = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in frontier_text(tmp_path).splitlines()
    )
    assert [x in "".join(head) for x in compare.QUESTIONS.values()] == [False, True, True, False]
    by_name = {name: [*figures] for name, *figures in cells}
    assert len(by_name) == len(rows) / 2
    assert by_name["scratch, 4x64"] == ["0.0052", "3.000", "-", "-0.100"]
    assert by_name["scratch, 2x64, never grown"] == ["0.0052", "2.900", "+0.100", "-"]
    assert by_name["stack at 70 %, moments reset, from 2x64"] == [
        "0.0052",
        "3.100",
        "-0.100",
        "-0.200",
    ]


def test_a_family_is_compared_with_each_size_alone_seed_by_seed(tmp_path):
    """Alone 3.0, 3.1 and 3.2; the chain 0.1 above with two seeds, and 0.4 with the third."""
    lines = {(x.system, x.label): x for x in lines_of("family", "tiny")}
    alone, chain = lines["scratch", "4x64"], lines["chained", "4x64"]
    rows = [row_of(job, 3.0) for line in (alone, chain) for job in jobs_of_rates(line)]
    for seed, behind in ((1, 0.1), (2, 0.1), (3, 0.4)):
        loss = 2.9 + 0.1 * seed
        rows += [row_of(job, loss) for job in jobs_of_seed(alone, seed, 0.0052)]
        *short, whole = jobs_of_seed(chain, seed, chain.setting.rates[0])
        rows += [*(row_of(job, 9.0) for job in short), row_of(whole, loss + behind)]
    write(tmp_path / "paper.json", {"rows": rows})
    text = check_savings("family", family_text(tmp_path))
    _, _, *cells = ([x.strip() for x in line.strip("|").split("|")] for line in text.splitlines())
    assert cells[0] == ["4x64 alone, never grown", "0.0052", "3", "3.100", "-"]
    # 0.2 and 4.303 times the deviation 0.1732 over the root of 3
    assert ["chain, 4x64", "0.003", "3", "3.300", "-0.200 ± 0.430"] in cells
