"""Tensors of checkpoints that follow from the config, and those with an entry for every layer.

Truth: the source and the tensors of a new model of the target's config, in float64.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import EsmForMaskedLM

import growkern
from testbed.models import Float64Everywhere, random_model, relative_error
from testbed.relatives import RELATIVES

FREQUENCIES = "esm.rotary_embeddings.inv_freq"
POSITIONS = {"esm": FREQUENCIES, "roformer": "roformer.encoder.embed_positions.weight"}


@pytest.mark.parametrize("method", ["fpi", "fresh", "random"])
@pytest.mark.parametrize("model_type", POSITIONS)
def test_they_are_those_of_the_target(model_type, method):
    class_name, sizes, _ = RELATIVES[model_type]
    wider = {"hidden_size": 24, "num_attention_heads": 3}
    grown = growkern.grow(random_model(class_name, sizes), method=method, **wider)
    truth = random_model(class_name, {**sizes, **wider}).state_dict()[POSITIONS[model_type]]
    own = grown.state_dict()[POSITIONS[model_type]]
    assert torch.equal(own, truth) and own.shape[-1] != 2


def with_rounded_frequencies():
    model = random_model(*RELATIVES["esm"][:2])
    model.esm.rotary_embeddings.inv_freq = model.esm.rotary_embeddings.inv_freq.half().double()
    return model


def test_older_files_keep_the_rounding_of_each_layer(tmp_path):
    model = with_rounded_frequencies()
    model.save_pretrained(tmp_path / "small")
    state = load_file(file := tmp_path / "small/model.safetensors")
    value = state.pop(next(name for name in state if name.endswith("inv_freq")))
    for layer in range(2):
        name = f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"
        state[name] = value.clone()
    save_file(state, file, metadata={"format": "pt"})
    how = {"hidden_size": 24, "num_hidden_layers": 3, "progress": False}
    plan = growkern.grow_checkpoint(tmp_path / "small", tmp_path / "large", **how).plan
    grown, info = EsmForMaskedLM.from_pretrained(
        tmp_path / "large", dtype="auto", output_loading_info=True
    )
    grown.growth_plan = plan
    assert not any(info.values())
    assert relative_error(model, grown.eval()) <= 1e-12


def test_values_that_no_larger_head_has_are_refused():
    with pytest.raises(growkern.GrowthError, match=f"{FREQUENCIES} .* keep head_dim"):
        growkern.plan(with_rounded_frequencies(), hidden_size=24, num_attention_heads=3)


@pytest.mark.parametrize("method", ["fpi", "fresh"])
def test_contacts_stay_where_heads_and_layers_are_added(method):
    model = random_model(*RELATIVES["esm"][:2])
    how = {"num_hidden_layers": 4, "depth": "identity", "method": method}
    grown = growkern.grow(model, hidden_size=24, num_attention_heads=6, **how)
    for one in (model, grown):
        one.set_attn_implementation("eager")
    tokens = torch.randint(4, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    with Float64Everywhere():
        old, new = (m.predict_contacts(tokens, torch.ones_like(tokens)) for m in (model, grown))
    assert (old - new).abs().max() <= 1e-12
    assert old.std() > 0.01
