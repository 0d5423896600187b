"""Grown moments in torchtitan: a step there is the step here."""

import pytest
import torch
import transformers
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import growkern
from bench.outside.models import FAMILIES, ids
from bench.outside.runtimes import titan_logits, titan_model
from examples.torchtitan_moments import load, write_checkpoint

RATE = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.01}


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_a_step_from_grown_moments_is_that_of_the_hugging_face_model(name, tmp_path):
    titan = pytest.importorskip("torchtitan.components.optimizer")
    class_name, config = FAMILIES[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    small = model_class(model_class.config_class(**config))
    optimizer = torch.optim.AdamW(small.named_parameters(), **RATE)
    for _ in range(3):
        optimizer.zero_grad()
        small(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
    # new layers have made no step
    large = growkern.grow(small, hidden_size=64, num_hidden_layers=6, portable=True)
    large.save_pretrained(tmp_path / "large")
    grown = growkern.grow_optimizer(get_optimizer_state_dict(small, optimizer), large.growth_plan)

    model, adapter = titan_model(tmp_path / "large")
    made = titan.default_adamw(**RATE)
    made.implementation = "for-loop"
    optimizers = titan.OptimizersContainer(made, model_parts=[model])
    write_checkpoint(tmp_path / "begin", optimizers, adapter, large, grown)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    optimizers, weights = titan.OptimizersContainer(made, model_parts=[model]), model.state_dict()
    torch.distributed.checkpoint.load(
        {**weights, "optimizer": optimizers}, checkpoint_id=tmp_path / "begin", no_dist=True
    )
    model.load_state_dict(weights)

    own = torch.optim.AdamW(large.named_parameters(), **RATE)
    own.load_state_dict(growkern.grow_optimizer(optimizer.state_dict(), large.growth_plan))
    large(input_ids=ids(), labels=ids()).loss.backward()
    own.step()
    logits = titan_logits(model)[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, ids()[:, 1:].flatten()).backward()
    optimizers.step()
    there = {name: parameter.clone() for name, parameter in model.named_parameters()}
    load(model, adapter, large, {name: p.detach() for name, p in large.named_parameters()})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(there[name], parameter, rtol=0, atol=1e-5, msg=name)
