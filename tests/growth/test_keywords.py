"""The keyword arguments that type checkers see are those that growth takes."""

from dataclasses import fields
from typing import get_type_hints

from growkern.families.load import load_family, supported_families
from growkern.growth.keywords import GrowthKeywords
from growkern.growth.options import GrowthOptions
from growkern.growth.plan.target import PAD_VOCAB, growable_fields


def test_the_keywords_are_the_options_and_all_sizes():
    seen = get_type_hints(GrowthKeywords)
    options = {
        field.name: get_type_hints(GrowthOptions)[field.name] for field in fields(GrowthOptions)
    }
    sizes = {name for kind in supported_families() for name in growable_fields(load_family(kind))}
    assert seen == {**options, **dict.fromkeys({*sizes, PAD_VOCAB}, int)}
