"""A loop of one's own over T5, which the trainer does not take: the mechanisms without Trainer."""

import contextlib

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from growkern.growth.sharded.placement import free_gathered
from growkern.train.distributed.optimizer_state import create_optimizer_state
from growkern.train.distributed.shard import prime
from growkern.train.head import head_swap, teacher_inputs
from growkern.train.inheritance import loss_beside
from growkern.train.sub_model import find_stacks, sub_model
from tests.train.tiny import VOCAB, batch, randomise


def build_t5(layers, width, seed):
    sizes = {"vocab_size": VOCAB, "d_model": width, "d_kv": 8, "d_ff": 24, "num_heads": 2}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.T5Config(**sizes, num_layers=layers, dropout_rate=0.0, **ids)
    model = randomise(transformers.T5ForConditionalGeneration(config), seed)
    model.config.use_cache = model.decoder.config.use_cache = False
    return model


def train_t5(model, teacher, *, accumulation, steps, rows, stages, schedule):
    """Train as the trainer would; the log lines of all steps, and the loss of the first rows."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if ranks > 1 else 0
    is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
    if is_sharded:
        prime(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
    create_optimizer_state(optimizer)
    stacks, log = find_stacks(model), []
    for step in range(steps):
        depth = stages.depth(step, len(stacks[0]))
        alpha = schedule.rate_at(step) if teacher is not None else 0.0
        seeds = [step * accumulation + i for i in range(accumulation)]
        wholes = [batch(rows, 8, seed=seed) for seed in seeds]
        items = sum((one["labels"] != -100).sum() for one in wholes)
        total = torch.zeros((), dtype=torch.float64)
        for i, whole in enumerate(wholes):
            if is_sharded:
                model.set_requires_gradient_sync(i + 1 == accumulation)
            window = contextlib.nullcontext()
            if depth is not None:
                window = sub_model(stacks, depth, stages.layers_per_block)
            inputs = {name: x[rank::ranks] for name, x in whole.items()}
            with window:
                loss = loss_of(model, teacher, inputs, alpha, items)
            (loss * ranks).backward()
            total += loss.detach()
            if teacher is not None:
                free_gathered(teacher)
        if ranks > 1:
            dist.all_reduce(total)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        log.append({"mlm": float(total), "grad_norm": float(norm)})
    free_gathered(model)
    return log


def loss_of(model, teacher, inputs, alpha, items):
    labels = inputs.pop("labels")
    inputs["decoder_input_ids"] = model._shift_right(labels.clamp(min=0))
    fused = loss_beside([teacher_inputs(teacher, inputs)] if alpha > 0 else [])

    def swapped(hidden, weight, bias):
        return fused(hidden, weight, labels=labels, student_bias=bias, alpha=alpha, num_items=items)

    with head_swap(model, swapped):
        return model(**inputs).logits
