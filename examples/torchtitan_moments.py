"""Writes a grown model and its grown AdamW state as a checkpoint that torchtitan begins with.

torchtitan keeps the state of an optimizer by the names of its own parameters, as
`state.layers.0.attention.wo.weight.exp_avg`. Its adapters map weights, fuse those of queries, keys
and values, and permute rows of Llama's. So each moment is loaded into a copy of the model as if it
were the weights.

Then give torchtitan `checkpoint.initial_load_path`, `checkpoint.initial_load_model_only = False`
and `checkpoint.exclude_from_loading = ["dataloader", "lr_scheduler", "train_state"]`.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def load(model: torch.nn.Module, adapter: Any, large: PreTrainedModel, numbers: dict) -> None:
    """Load numbers, by the names of `large`'s parameters, into torchtitan's model."""
    # files hold the weights of experts one by one
    state = adapter.from_hf(revert_weight_conversion(large, numbers))
    lost = model.load_state_dict(state, strict=False).missing_keys
    if lost := {*lost} & {name for name, _ in model.named_parameters()}:
        raise ValueError(f"no numbers for {sorted(lost)}")


def write_checkpoint(
    place: Path, optimizers: Any, adapter: Any, large: PreTrainedModel, grown: dict[str, Any]
) -> None:
    """Write the checkpoint, in one process.

    Args:
        optimizers: torchtitan's `OptimizersContainer` of its whole model. Settings such as the
            learning rate are taken from it.
        adapter: the `StateDictAdapter` of that model.
        large: the grown Hugging Face model.
        grown: `grow_optimizer(get_optimizer_state_dict(small, optimizer), plan)`.
    """
    (model,) = optimizers.model_parts
    state, moments = optimizers.state_dict(), copy.deepcopy(model)
    for key in ("exp_avg", "exp_avg_sq", "step"):
        # the number of steps is one for a whole parameter
        every = {
            name: torch.zeros_like(own["exp_avg"]) + own[key]
            for name, own in grown["state"].items()
        }
        load(moments, adapter, large, every)
        for name, moment in moments.named_parameters():
            value = moment.flatten()[0] if key == "step" else moment
            state[f"state.{name}.{key}"] = value.detach().clone()
    load(model, adapter, large, {name: p.detach() for name, p in large.named_parameters()})
    dcp.save({**model.state_dict(), "optimizer": state}, checkpoint_id=place, no_dist=True)
