"""The keyword arguments that type checkers see are those that the losses take."""

import inspect
from typing import get_type_hints

import pytest

import growkern
from growkern.ops.loss import keywords
from growkern.ops.loss.rows.label_options import LabelArguments

SEEN = {
    "kl_mlm_loss": keywords.LogitKeywords,
    "linear_kl_mlm_loss": keywords.LinearKeywords,
    "topk_kl_mlm_loss": keywords.TopKKeywords,
    "inherited_loss": keywords.InheritedKeywords,
}


@pytest.mark.parametrize("name", SEEN)
def test_the_keywords_are_the_options(name):
    parameters = inspect.signature(getattr(growkern, name)).parameters.values()
    taken = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY} | set(
        get_type_hints(LabelArguments)
    )
    assert set(get_type_hints(SEEN[name])) == taken - {"return_parts"}
