"""The plan's words where they were once wrong: each case is compared with Hugging Face itself."""

import pytest

import growkern
from tests.growth.models import random_model, relative_error
from tests.growth.plan.test_families import T5

EXACT = 1e-12


@pytest.mark.parametrize("heads", [6, 7])
def test_layers_that_share_a_relative_bias_share_the_paper_s_head_map(heads):
    source = random_model("T5ForConditionalGeneration", T5, num_layers=3)
    grown = growkern.grow(source, num_heads=heads, scheme="paper", seed=1)
    assert grown.growth_plan.exact
    assert relative_error(source, grown) <= EXACT
    # units that no tensor shares are still drawn per layer
    wider = growkern.plan(source, d_ff=60, scheme="paper", seed=1)
    first, second = (wider.layout.space("ffn", f"encoder.{layer}").read_index for layer in (0, 1))
    assert not first.equal(second)
