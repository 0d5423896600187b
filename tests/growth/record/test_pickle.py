"""Grown models that are pickled or saved whole, as any model of transformers can be."""

import copy
import io
import json
import pickle

import pytest
import torch
from torch.distributed import checkpoint as distributed

import growkern
from testbed.models import BERT, LLAMA, random_model

SIZES = {"hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 4}


def opened(kind, directory):
    """A source in memory, or one of its directories."""
    model = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    if kind == "memory":
        return model
    model.save_pretrained(directory, max_shard_size="8KB" if kind == "sharded" else "5GB")
    if kind == "distributed":
        (directory / "model.safetensors").unlink()
        distributed.save(model.state_dict(), checkpoint_id=directory, no_dist=True)
    return directory


@pytest.mark.parametrize(
    "kind, allow_nonfinite",
    [("memory", False), ("file", True), ("sharded", False), ("distributed", True)],
)
def test_a_grown_model_is_saved_whole_and_loaded(kind, allow_nonfinite, tmp_path):
    source = opened(kind, tmp_path / "small")
    large = growkern.grow(source, allow_nonfinite=allow_nonfinite, **SIZES)
    tokens = torch.arange(6)[None]
    file, logits = io.BytesIO(), large(tokens).logits
    torch.save(large, file)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(large))):
        assert torch.equal(loaded(tokens).logits, logits)
        assert loaded.growth_plan.to_dict() == large.growth_plan.to_dict()
        # its plan still says which parameters are copies
        for model in (loaded, copy.deepcopy(large)):
            optimizer = growkern.GrowthAdamW(model.named_parameters(), model.growth_plan, lr=0.1)
            model(tokens).logits.square().sum().backward()
            optimizer.step()
        stepped, other = loaded.state_dict(), model.state_dict()
        assert all(torch.equal(stepped[name], other[name]) for name in other)
        # as any other model
        loaded.save_pretrained(tmp_path / "large")
        assert type(loaded).from_pretrained(tmp_path / "large").config.hidden_size == 24


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_saved_with_its_record(copied, tmp_path):
    source = opened("file", tmp_path / "small")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "rope_theta": 10000.0}))
    large = growkern.grow(source, **SIZES)
    other = copied(copied(large))
    with torch.no_grad():
        other.lm_head.weight += 1
    other.save_pretrained(tmp_path / "other")
    large.save_pretrained(tmp_path / "large")
    expected = {**json.loads((tmp_path / "large/lineage.json").read_text()), "trained_since": True}
    assert json.loads((tmp_path / "other/lineage.json").read_text()) == expected
    files = [tmp_path / name / "config.json" for name in ("large", "other")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "rope_theta" in json.loads(files[1].read_text())
    stored = type(other).from_pretrained(tmp_path / "other").lm_head.weight
    assert torch.equal(stored, other.lm_head.weight) and not torch.equal(
        stored, large.lm_head.weight
    )


def test_a_pickle_holds_no_weights_of_the_source():
    small = random_model("BertForMaskedLM", {**BERT, "vocab_size": 5000})
    plan = growkern.plan(small, hidden_size=24)
    data = pickle.dumps(plan)
    assert len(data) < 5000 * 12 * 8 / 4
    name = "bert.embeddings.word_embeddings.weight"
    with pytest.raises(growkern.GrowthError, match=f"{name} of the source cannot be read: a saved"):
        pickle.loads(data).source.read(name)
    assert plan.source.read(name).data_ptr() == small.get_input_embeddings().weight.data_ptr()
    # nor does a copy take memory for them
    copied = copy.deepcopy(plan)
    assert copied.source.read(name).data_ptr() == small.get_input_embeddings().weight.data_ptr()
