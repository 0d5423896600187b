"""Savings by what is wanted, beside models that are never grown."""

import math

import pytest

from bench.paper import briefs
from bench.paper.briefs import BRIEFS, brief_text
from bench.paper.compare import Share, alone, committed, share, text_of
from bench.paper.models import Size
from bench.paper.settings import SETTINGS
from bench.shared.results import RESULTS
from growkern.errors import GrowthError
from tests.bench.paper.test_page import runs_with

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
    assert text_of([Share(math.nan), Share(0.1)], 2) == "not reached by 1 of 2"


def test_a_small_model_is_read_where_it_reaches_the_loss_from_scratch():
    """Truth: the rows themselves, the loss falling linearly between two lengths."""
    rows = committed(RESULTS)
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
        found = alone(SETTING, Size(4, 64, 4), seed, base, rows)
        assert found == (pytest.approx(1 - spent / whole), "")
        assert round(100 * found.value) == expected
    # of another family, and of another vocabulary, there is none
    assert alone(SETTING, Size(4, 32, 2), 1, base, rows) is None


@pytest.mark.parametrize(
    "change, said",
    [
        ({"groups": {"": ()}}, "questions are"),
        ({"groups": {"": ("size", "sise")}}, "'sise'"),
        ({"alone": {}}, "never grown"),
        ({"alone": {"4 x 64, never grown": (None,)}}, "never grown"),
    ],
)
def test_a_table_without_question_or_never_grown_line_is_refused(change, said, monkeypatch):
    monkeypatch.setitem(briefs.BRIEFS, "sources", BRIEFS["sources"]._replace(**change))
    with pytest.raises(GrowthError, match=said):
        brief_text(RESULTS, "sources")
