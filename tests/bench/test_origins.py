"""Where the units of a growth come from, as pictures of attention show it."""

import growkern
from bench.shared.pictures import NOTHING, units_of
from testbed.models import BERT, LLAMA, random_model


def units(class_name, sizes, space, layer=0, **how):
    """The source of every unit, and whether it is one of the next layer."""
    plan = growkern.plan(random_model(class_name, sizes), **how)
    found = units_of(plan, space, next(iter(plan.layer_maps)), layer)
    return found.source.tolist(), found.is_next.tolist()


def test_units_are_copies_or_new():
    source, is_next = units("BertModel", BERT, "stream", hidden_size=16, intermediate_size=30)
    assert source == [*range(12), *[NOTHING] * 4] and not any(is_next)
    source, _ = units("BertModel", BERT, "stream", hidden_size=16, method="direct_copy")
    assert source == [*range(12), *[NOTHING] * 4]
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    assert units("LlamaModel", LLAMA, "q", **heads)[0] == [*range(6), *range(6)]
    assert units("LlamaModel", LLAMA, "k", **heads)[0] == [0, 1, 0, 1]


def test_aki_units_are_marked_but_in_the_last_layer():
    how = {"hidden_size": 24, "intermediate_size": 30, "method": "aki"}
    first, last = ([units("BertModel", BERT, x, n, **how) for x in ("q", "ffn")] for n in (0, 1))
    assert first[0][1] == [False] * 3 + [True] * 3 and sum(first[1][1]) == 10
    assert not any(last[0][1]) and not any(last[1][1])
