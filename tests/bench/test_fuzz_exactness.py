"""Random growths of every family: the plan's words hold. The command takes more of them."""

from collections import Counter

import pytest

from bench.fuzz_exactness import __main__ as command
from bench.fuzz_exactness.cases import Case
from bench.fuzz_exactness.check import check
from growkern.families.model import ModelSpec
from tests import walks
from tests.growth.plan.test_matrix import FAMILIES

# parts can run side by side, and one failure names its part
PARTS, PART = 8, 25


@pytest.mark.parametrize("first", range(0, PARTS * walks.times * PART, PART))
def test_the_words_of_plans_hold(first):
    counts = Counter()
    failed = list(command.failures(walks.start or 0, range(first, first + PART), counts))
    assert not failed, failed[0]
    # the others ask for sizes that do not fit together
    assert counts["exact"] + counts["approximate"] + counts["changed"] >= PART // 5


def test_a_wrong_word_is_found(monkeypatch):
    how = {"num_heads": 7, "scheme": "paper", "seed": 1}
    case = Case("T5ForConditionalGeneration", FAMILIES["t5"][1], how, on_disk=True)
    assert check(case) == "exact"
    # one relative bias then meets another order of heads in every layer
    monkeypatch.setattr(ModelSpec, "arranged_once", frozenset())
    with pytest.raises(AssertionError, match="planned exact, but outputs differ"):
        check(case)
