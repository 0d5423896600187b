"""Random growths of every family: the plan's words hold. The command takes more of them."""

from collections import Counter

import pytest
import torch

from bench.fuzz_exactness import __main__ as command
from bench.fuzz_exactness import check as checks
from bench.fuzz_exactness.cases import Case, draw
from bench.fuzz_exactness.check import check
from growkern.families.model import ModelSpec
from tests import walks
from tests.growth.models import GPT2
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


def test_some_sources_are_float32_and_some_are_deep():
    cases = [draw(0, number) for number in range(PARTS * PART)]
    depths = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers")
    assert max(case.sizes.get(name, 0) for case in cases for name in depths) > 5
    assert 10 < sum(case.dtype == torch.float32 for case in cases) < 60


def test_float32_is_held_against_its_own_rounding(monkeypatch):
    """An error of 1e-5 is below the 1e-4 that `verify` allows, but it is no rounding."""
    case = Case("GPT2LMHeadModel", GPT2, {"n_embd": 24}, on_disk=False, dtype=torch.float32)
    assert check(case) == "exact"
    grow = checks._grown

    def slightly_off(*arguments):
        grown = grow(*arguments)
        grown.transformer.h[0].mlp.c_fc.weight.data *= 1 + 2e-5
        return grown

    monkeypatch.setattr(checks, "_grown", slightly_off)
    with pytest.raises(AssertionError, match="relative error"):
        check(case)
