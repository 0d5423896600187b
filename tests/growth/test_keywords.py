"""The keyword arguments that type checkers see are those that growth takes."""

from dataclasses import fields
from typing import get_type_hints

import transformers

from growkern.families.family import growable_fields
from growkern.families.table_files import load_family, supported_families
from growkern.growth.options import PAD_VOCAB, GrowthKeywords, GrowthOptions, refuse_by_config


def test_the_keywords_are_the_options_and_all_sizes():
    seen = get_type_hints(GrowthKeywords)
    options = {
        field.name: get_type_hints(GrowthOptions)[field.name] for field in fields(GrowthOptions)
    }
    tables = [load_family(kind) for kind in supported_families()]
    sizes = {name for family in tables for name in growable_fields(family)}
    which = {k: w for family in tables if family.dense for k, w in family.sparse_fields.items()}
    lists = {name: list[int] if word == "in" else int for name, word in which.items()}
    switches = {family.dense.renormalised for family in tables if family.dense} - {None}
    lists |= dict.fromkeys(switches, bool)
    assert seen == {**options, **dict.fromkeys({*sizes, PAD_VOCAB}, int), **lists}


def test_other_names_of_sizes_are_left_to_the_config():
    for kind in supported_families():
        family, config = load_family(kind), transformers.CONFIG_MAPPING[kind]
        text = config.sub_configs.get(family.under, config)
        aliases = getattr(text, "attribute_map", {}).items()
        sizes = {name: 8 for name, field in aliases if field in growable_fields(family)}
        refuse_by_config({"model_type": kind}, GrowthOptions(), sizes)
    # of LFM2, a config may say more than there are
    wide = {"model_type": "lfm2", "intermediate_size": 12288}
    refuse_by_config(wide, GrowthOptions(), {"intermediate_size": 9000})
