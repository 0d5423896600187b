"""T5 v1.1 and Flan-T5: a head of its own, though the config class always says that it is tied."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import growkern
from growkern.growth.optimizer.state import known_names
from growkern.train.loop.growing import plans_of_run
from growkern.train.sections import GrowthStep
from testbed.models import random_model

SIZES = {
    "vocab_size": 60,
    "d_model": 16,
    "d_ff": 24,
    "d_kv": 4,
    "num_heads": 4,
    "num_layers": 2,
    "feed_forward_proj": "gated-gelu",
}
HOW = {
    "wider": {"d_model": 32},
    "uneven": {"d_model": 24, "num_heads": 6},
    "deeper": {"num_layers": 3, "num_decoder_layers": 3},
    "more tokens": {"vocab_size": 64},
    "split": {"d_model": 32, "symmetry": "split"},
}


def stored(directory, tied, dtype=torch.float32):
    """A directory as the Hub has it: the config of version 4 and a head beside the embeddings."""
    config = {**SIZES, "tie_word_embeddings": tied}
    model = random_model("T5ForConditionalGeneration", {}, dtype=dtype, **config)
    model.save_pretrained(directory)
    rng = torch.Generator().manual_seed(7)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(60, 16, generator=rng).to(dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    del config["scale_decoder_outputs"]
    text = json.dumps({**config, "tie_word_embeddings": tied})
    (directory / "config.json").write_text(text)
    return transformers.T5ForConditionalGeneration.from_pretrained(directory).eval()


@torch.no_grad()
def logits(model):
    ids = torch.arange(3, 51).reshape(2, 24)
    return model(input_ids=ids, decoder_input_ids=ids.flip(1)).logits[..., :60]


def assert_same(model, source):
    # float32; a head that was lost would be off by as much as the logits
    expected = logits(source)
    assert (logits(model) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("how, tied", [*((how, False) for how in HOW), ("split", True)])
def test_a_head_of_its_own_grows_exactly(how, tied, tmp_path):
    """`tied=True` is the original T5's scaling: transformers keeps a head whose values differ."""
    source = stored(tmp_path / "small", tied)
    assert source.lm_head.weight is not source.shared.weight
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "disk", progress=False, **HOW[how])
    in_memory = growkern.grow(source, **HOW[how])
    in_memory.save_pretrained(tmp_path / "memory")
    assert_same(in_memory, source)
    for place in ("disk", "memory"):
        found = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / place).eval()
        assert_same(found, source)
        config = json.loads((tmp_path / place / "config.json").read_text())
        assert config["tie_word_embeddings"] is tied
    assert growkern.verify(tmp_path / "small", tmp_path / "disk").ok
    assert growkern.plan(source, **HOW[how]).parameters() == in_memory.num_parameters()


def test_it_has_an_optimizer(tmp_path):
    source = stored(tmp_path / "small", tied=False)
    optimizer = torch.optim.AdamW(source.named_parameters())
    ids = torch.arange(3, 9)[None]
    source(input_ids=ids, decoder_input_ids=ids).logits.square().mean().backward()
    optimizer.step()
    grown = growkern.grow(source, d_model=32)
    assert known_names(grown.growth_plan)["lm_head.weight"] == "lm_head.weight"
    state = growkern.grow_optimizer(optimizer.state_dict(), grown.growth_plan)
    torch.optim.AdamW(grown.named_parameters()).load_state_dict(state)
    assert len(state["state"]) == len(list(grown.parameters()))


def test_a_model_with_one_tensor_for_both_is_refused(tmp_path):
    """It would be filled twice."""
    stored(tmp_path / "small", tied=False)
    config = growkern.plan(tmp_path / "small", d_model=32).target_config
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(growkern.GrowthError, match="two tensors in the source and one in the mod"):
        growkern.grow_into(model, tmp_path / "small")
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    growkern.grow_into(model, tmp_path / "small")
    source = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "small").eval()
    assert_same(model.eval(), source)


def test_other_tensors_that_differ_are_refused(tmp_path):
    stored(tmp_path / "small", tied=False)
    tensors = load_file(tmp_path / "small/model.safetensors")
    tensors["decoder.embed_tokens.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, tmp_path / "small/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(growkern.GrowthError, match=r"decoder\.embed_tokens\.weight and shared"):
        growkern.plan(tmp_path / "small", d_model=32)


def test_growth_inside_a_run_is_refused_before_it_starts(tmp_path):
    """The models of a run are made from configs, which say that the head is tied."""
    model, step = stored(tmp_path / "small", tied=False), GrowthStep(at_step=2, sizes={"d_ff": 48})
    with pytest.raises(growkern.GrowthError, match=r"lm_head\.weight and shared\.weight are two"):
        plans_of_run(model, [step])
    model.lm_head.weight = model.shared.weight
    assert len(plans_of_run(model, [step])) == 1
