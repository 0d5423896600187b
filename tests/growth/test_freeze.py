"""Training that leaves the source's layers as they are, as LLaMA-Pro does."""

import pytest
import torch
import transformers

import growkern
from growkern.errors import GrowthError
from testbed.models import BERT, GPT2, LLAMA, random_model


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


@pytest.mark.parametrize(
    "kind, sizes, how, new",
    [
        ("LlamaForCausalLM", LLAMA, {"intermediate_size": 40}, "gate_proj"),
        ("LlamaForCausalLM", LLAMA, {"num_attention_heads": 12}, "q_proj"),
        ("GPT2LMHeadModel", GPT2, {"vocab_size": 60}, "wte"),
        ("BertForMaskedLM", BERT, {"intermediate_size": 30}, "intermediate"),
    ],
)
def test_new_entries_of_old_layers_are_not_frozen_without_a_word(kind, sizes, how, new):
    layers = "n_layer" if kind.startswith("GPT") else "num_hidden_layers"
    source = random_model(kind, sizes, dtype=torch.float32)
    deep, both = (growkern.grow(source, **{layers: 4}, **more) for more in ({}, how))
    names = growkern.freeze_old(deep)
    assert 0 < len(names) < len(list(deep.parameters()))
    # independent of the record: the entries of parameters that the growth of layers alone lacks
    sizes_of = {name: p.numel() for name, p in deep.named_parameters()}
    more = sum(p.numel() - sizes_of[n] for n, p in both.named_parameters() if n not in names)
    with pytest.raises(GrowthError, match=f"{more} new entries.*{new}"):
        growkern.freeze_old(both)
    assert all(p.requires_grad for p in both.parameters())
