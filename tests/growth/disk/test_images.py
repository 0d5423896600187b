"""Models that read images, in files: their names, their configs, and the moments of their towers.

Truth: what transformers writes and reads. `tests.growth.plan.test_relatives` compares outputs.
"""

import functools
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import growkern
from growkern.growth import sharded
from testbed.models import as_stored, eager, image_inputs, random_model, relative_error
from testbed.relatives import RELATIVES

HOW = {"hidden_size": 24, "num_hidden_layers": 3, "depth": "identity", "progress": False}
GEMMA3 = RELATIVES["gemma3"][:2]


def grown(small, large):
    growkern.grow_checkpoint(small, large, **HOW)
    return load_file(large / "model.safetensors")


def test_names_of_all_layouts_are_read_and_that_of_transformers_is_written(tmp_path):
    model = random_model(*GEMMA3, tie_word_embeddings=False)
    small = tmp_path / "small"
    model.save_pretrained(small)
    expected = grown(small, tmp_path / "large")
    loaded = type(model).from_pretrained(tmp_path / "large", dtype=torch.float64)
    loaded.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again/model.safetensors").keys() == expected.keys()
    # the published files have one more name in front of a tower's
    published = load_file(small / "model.safetensors").items()
    published = {n.replace("vision_tower.", "vision_tower.vision_model."): x for n, x in published}
    own = {
        n: x.clone() for n, x in model.state_dict().items() if n not in model.all_tied_weights_keys
    }
    for layout in (published, own):
        save_file(layout, small / "model.safetensors", metadata={"format": "pt"})
        found = grown(small, tmp_path / f"large{len(layout)}{layout is own}")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_a_flat_config_of_version_4_stays_true(tmp_path):
    """It has the fields of the text beside those of the whole."""
    small, large = tmp_path / "small", tmp_path / "large"
    model = random_model(*RELATIVES["qwen2_5_vl"][:2])
    model.save_pretrained(small)
    config = json.loads((small / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**text, **config, "rope_theta": rope.pop("rope_theta")}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (small / "config.json").write_text(json.dumps(flat))
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    growkern.grow_checkpoint(small, large, progress=False, **sizes)
    found = json.loads((large / "config.json").read_text())
    assert found.items() >= sizes.items()
    assert found["text_config"].items() >= sizes.items()
    assert found["rope_scaling"] == {"rope_type": "default", "mrope_section": [2, 2, 4]}
    assert found["vision_config"]["out_hidden_size"] == 48
    loaded = type(model).from_pretrained(large, dtype=torch.float64).eval()
    assert relative_error(model, loaded) <= 1e-12


def test_the_moments_of_a_tower_are_copied():
    model = random_model(*GEMMA3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = model.float()
    inputs = image_inputs("gemma3", torch.Generator().manual_seed(0))
    model(**{**inputs, "pixel_values": inputs["pixel_values"].float()}).logits.mean().backward()
    optimizer.step()
    large = growkern.grow(model, hidden_size=24)
    state = growkern.grow_optimizer(optimizer.state_dict(), large.growth_plan)["state"]
    names = [name for name, _ in large.named_parameters()]
    moments = {name: optimizer.state[p] for name, p in model.named_parameters()}
    patches = "model.vision_tower.embeddings.patch_embedding.weight"
    assert state[names.index(patches)]["exp_avg"].ndim == 4
    assert torch.equal(state[names.index(patches)]["exp_avg"], moments[patches]["exp_avg"])


def test_a_tower_that_a_target_config_changes_is_refused():
    model = random_model(*RELATIVES["qwen2_5_vl"][:2])
    target = growkern.plan(model, hidden_size=48).target_config
    assert growkern.plan(model, target_config=target).exact
    target.vision_config.num_heads = 4
    with pytest.raises(growkern.GrowthError, match=r"vision_config\.num_heads=4 differs from"):
        growkern.plan(model, target_config=target)


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl"])
def test_a_model_that_was_grown_into_another_dtype_is_verified(model_type, tmp_path):
    """The record has the config of the target, whose tower has the new dtype too."""
    model = random_model(*RELATIVES[model_type][:2], dtype=torch.float32)
    model.save_pretrained(tmp_path / "small")
    how = {"intermediate_size": 64, "dtype": torch.bfloat16, "progress": False}
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "large", **how)
    assert growkern.verify(tmp_path / "small", tmp_path / "large").ok


@pytest.mark.parametrize("model_type", ["vit", "qwen3_vl"])
def test_a_sharded_model_is_filled_from_distributed_files(model_type, tmp_path, monkeypatch):
    """Patch convolutions have four and five axes; they are read and built in pieces."""
    small_pieces = functools.partial(sharded.row_blocks, piece_bytes=1000)
    monkeypatch.setattr(sharded, "row_blocks", small_pieces)
    source = random_model(*RELATIVES[model_type][:2])
    dcp.save(source.state_dict(), checkpoint_id=str(tmp_path), no_dist=True)
    source.config.architectures = [type(source).__name__]
    source.config.save_pretrained(tmp_path)
    grown = growkern.grow(source, hidden_size=24, num_hidden_layers=4)
    with torch.device("meta"):
        model = type(source)._from_config(grown.config, dtype=torch.float64)
    growkern.grow_into(model, tmp_path)
    found = model.state_dict()
    assert all(torch.equal(x, found[name]) for name, x in grown.state_dict().items())


def test_a_tower_that_transformers_makes_others_of_stays_as_its_files_have_it(tmp_path):
    """Published files of Kimi K2.5, with the names of its own code."""
    small, large = tmp_path / "small", tmp_path / "large"
    model = random_model(*RELATIVES["kimi_k25"][:2])
    model.save_pretrained(small)
    # transformers writes the layers of the text as the tower's
    text = ("language_model.model.blocks.", "language_model.model.layers.")
    state = load_file(small / "model.safetensors")
    state = {n.replace(*text).removeprefix("model."): x for n, x in state.items()}
    save_file(state, small / "model.safetensors", metadata={"format": "pt"})
    file = small / "config.json"
    config = json.loads(file.read_text())
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    config["text_config"]["model_type"] = "kimi_k2"
    file.write_text(json.dumps(config))
    tensors = grown(small, large)
    assert growkern.verify(small, large).ok
    tower = [name for name in state if name.startswith("vision_tower.")]
    assert any("wqkv" in name for name in tower)
    assert all(torch.equal(tensors[name], state[name]) for name in tower)
    after = json.loads((large / "config.json").read_text())
    assert after["architectures"] == config["architectures"]
    assert after["text_config"]["model_type"] == "kimi_k2"
    loaded = eager(type(model).from_pretrained(large, dtype=torch.float64)).eval()
    loaded.growth_plan = growkern.plan(small, **{k: v for k, v in HOW.items() if k != "progress"})
    assert relative_error(model, as_stored(loaded, large)) <= 1e-12
    with pytest.raises(growkern.GrowthError, match="grow_checkpoint"):
        growkern.grow(small, hidden_size=24)
    state.pop(tower[0])
    save_file(state, small / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(growkern.GrowthError, match=r"vision_tower.* numbers in the files"):
        growkern.plan(small, hidden_size=24)
