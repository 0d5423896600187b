"""Training that leaves the source's layers as they are, as LLaMA-Pro does."""

import pytest
import torch
import transformers

import growkern
from growkern.errors import GrowthError
from testbed.models import LLAMA, random_model


def test_only_inserted_layers_train(tmp_path):
    source = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    growkern.grow(source, num_hidden_layers=4).save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    trained = growkern.freeze_old(model)
    # 0 0* 1 1*
    assert {name.split(".")[2] for name in trained} == {"1", "3"}
    before = {name: x.clone() for name, x in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    tokens = torch.arange(12)[None]
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    moved = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert moved and moved <= set(trained)
    assert {"model.layers.1.mlp.down_proj.weight", "model.layers.3.mlp.down_proj.weight"} <= moved


def test_models_without_inserted_layers_are_refused():
    source = random_model("LlamaForCausalLM", LLAMA)
    with pytest.raises(GrowthError, match="was not grown"):
        growkern.freeze_old(source)
    for how in ({"hidden_size": 24}, {"num_hidden_layers": 4, "depth": "stack"}):
        with pytest.raises(GrowthError, match='depth="identity"'):
            growkern.freeze_old(growkern.grow(source, **how))
