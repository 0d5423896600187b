"""The picture of where units come from: its data is the growth record's."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch

import growkern
from growkern.errors import GrowthError
from growkern.growth.record.lineage import read_index
from growkern.plot.weights import NOTHING, layer_panels, plot_weights, unit_panels
from testbed.models import BERT, LLAMA, random_model
from testbed.relatives import RELATIVES
from tests.plot.runs import drawn


def grown_pair(folder, method="fpi", **how):
    source = random_model("BertModel", BERT, dtype=torch.float32)
    grown = growkern.grow(source, method=method, **how)
    for name, model in (("small", source), ("large", grown)):
        model.save_pretrained(folder / name)
    return folder / "small", folder / "large"


def panels_of(class_name, sizes, **how):
    plan = growkern.plan(random_model(class_name, sizes), **how)
    return {panel.title: panel for panel in unit_panels(plan)}


def test_units_are_those_of_the_record(tmp_path):
    """Against the text of lineage.json, of which one map per layer is drawn at random."""
    _, large = grown_pair(tmp_path, hidden_size=24, scheme="paper", intermediate_size=33)
    data = json.loads((large / "lineage.json").read_text())
    plan = growkern.plan(
        random_model("BertModel", BERT, dtype=torch.float32),
        hidden_size=24,
        scheme="paper",
        intermediate_size=33,
    )
    panels = {panel.title: panel for panel in unit_panels(plan)}
    assert list(panels) == ["hidden_size", "num_attention_heads", "intermediate_size"]

    def recorded(key):
        return read_index(data["maps"][key]["read_index"]).numpy()

    assert (panels["hidden_size"].sources == [recorded("stream")]).all()
    neurons = panels["intermediate_size"]
    assert (neurons.sources == [recorded("ffn@0"), recorded("ffn@1")]).all()
    assert neurons.labels == ("layer 0", "layer 1") and neurons.count == 20
    # a head has 4 entries
    heads = [recorded(f"v@{layer}")[::4] // 4 for layer in (0, 1)]
    assert (panels["num_attention_heads"].sources == heads).all()


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


def test_layers_are_those_of_the_plan():
    plan = growkern.plan(random_model("BertModel", BERT), num_hidden_layers=4)
    (panel,) = layer_panels(plan)
    assert panel.sources.tolist() == [[0, 0, 1, 1]]
    assert panel.inserted.tolist() == [[False, True, False, True]]


def test_weights_are_drawn(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    pair = grown_pair(tmp_path, hidden_size=24, num_hidden_layers=3)
    plot_weights(*pair, tmp_path / "w.png")
    with image.open(tmp_path / "w.png") as picture:
        assert picture.width <= 1600
    figure = drawn(monkeypatch, lambda: plot_weights(*pair, tmp_path / "w.png"))
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == [
        "layers: 2 to 3; hatched: inserted, computes nothing yet",
        "hidden_size: 12 to 24",
        "num_attention_heads: 3 to 6",
        "intermediate_size: 20 to 40",
    ]
    (title,) = (text.get_text() for text in figure.texts)
    names = [path.name for path in pair]
    assert f"grown ({names[1]})" in title and f"small ({names[0]})" in title
    # a copy has the colour and the number of its unit in the strip of the source
    small, large = (one.get_array()[0] for one in figure.axes[2].images)
    assert np.array_equal(large, np.concatenate([small, small]))
    assert [t.get_text() for t in figure.axes[2].texts] == list("012" * 3)
    hatched = [patch for patch in figure.axes[0].patches if patch.get_hatch()]
    assert [patch.get_x() for patch in hatched] == [1]
    renderer = figure.canvas.get_renderer()
    boxes = [axes.get_tightbbox(renderer) for axes in figure.axes]
    for above, below in itertools.pairwise(boxes):
        assert above.y0 > below.y1 and figure.bbox.x0 < above.x0 and above.x1 < figure.bbox.x1


def test_without_a_record_the_fix_is_named(tmp_path):
    small, large = grown_pair(tmp_path, hidden_size=24)
    shutil.copytree(large, tmp_path / "trained")
    record = (tmp_path / "trained" / "lineage.json").rename(tmp_path / "record.json")
    for pair, lineage, words in (
        ((small, tmp_path / "trained"), None, "no lineage.json.*--lineage"),
        ((large, small), record, "hidden_size=24, the growth record says 12: give the small"),
        ((small, tmp_path / "nothing"), None, "no such directory"),
    ):
        with pytest.raises(GrowthError, match=words) as error:
            plot_weights(*pair, tmp_path / "w.png", lineage=lineage)
        assert "\n" not in str(error.value) and not (tmp_path / "w.png").exists()
    plot_weights(small, tmp_path / "trained", tmp_path / "w.png", lineage=record)
    assert (tmp_path / "w.png").exists()


def test_random_weights_come_from_no_unit(tmp_path):
    pair = grown_pair(tmp_path, hidden_size=24, method="random")
    with pytest.raises(GrowthError, match="takes no unit from the source"):
        plot_weights(*pair, tmp_path / "w.png")


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
