"""Where the units of a picture come from."""

import growkern
from bench.shared.pictures import NOTHING, unit_panels
from testbed.models import BERT, LLAMA, random_model
from testbed.relatives import RELATIVES


def panels_of(class_name, sizes, **how):
    plan = growkern.plan(random_model(class_name, sizes), **how)
    return {panel.title: panel for panel in unit_panels(plan)}


def test_equal_layers_are_one_row_and_carry_units_are_new():
    panels = panels_of("BertModel", BERT, hidden_size=16, intermediate_size=30)
    hidden, neurons = panels["hidden_size"], panels["intermediate_size"]
    assert hidden.sources.tolist() == [[*range(12), *[NOTHING] * 4]]
    assert neurons.sources.tolist() == [[*range(20), *range(6), *[NOTHING] * 4]]
    assert hidden.labels == ("grown",)


def test_grouped_keys_have_a_panel_of_their_own():
    panels = panels_of("LlamaModel", LLAMA, num_attention_heads=12, num_key_value_heads=4)
    assert panels["num_attention_heads"].sources.tolist() == [[*range(6), *range(6)]]
    assert panels["num_key_value_heads"].sources.tolist() == [[0, 1, 0, 1]]


def test_aki_units_are_marked_but_in_the_last_layer():
    panels = panels_of("BertModel", BERT, hidden_size=24, intermediate_size=30, method="aki")
    heads = panels["num_attention_heads"]
    assert heads.is_next.tolist() == [[False] * 3 + [True] * 3, [False] * 6]
    assert not panels["hidden_size"].is_next.any()
    assert panels["intermediate_size"].is_next.sum(1).tolist() == [10, 0]


def test_a_direct_copy_has_new_units():
    panels = panels_of("BertModel", BERT, hidden_size=16, method="direct_copy")
    assert panels["hidden_size"].sources.tolist() == [[*range(12), *[NOTHING] * 4]]


def test_experts_and_units_of_several_entries_have_panels():
    panels = panels_of(*RELATIVES["qwen3_next"][:2], hidden_size=24, num_experts=8)
    assert panels["num_experts"].sources.tolist() == [[*range(4), *range(4)]]
    # a key head has entries of keys and of values
    assert panels["linear_num_key_heads"].sources.tolist() == [[0, 1, 0, 1]]
    panels = panels_of(*RELATIVES["deepseek_v3"][:2], hidden_size=24)
    assert "n_shared_experts * moe_intermediate_size" in panels
    # a dense model is a mixture of one expert
    sizes, plain = (
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        dict.fromkeys(("attention_bias", "mlp_bias"), False),
    )
    panels = panels_of("LlamaForCausalLM", {**LLAMA, **plain}, to="mixtral", **sizes)
    assert panels["num_local_experts"].sources.tolist() == [[0] * 4]
