"""The same training in forty lines without `transformers.Trainer`: the oracle of its tests.

Only the mechanisms are shared (window, head swap, loss); batches, labels, schedules, optimizer and
accumulation are written out here.
"""

import contextlib

import torch

from growkern import linear_kl_mlm_loss
from growkern.train.model.forward import teacher_inputs
from growkern.train.model.head import align_labels, head_swap
from growkern.train.model.sub_model import ModelPart, layer_stacks, sub_model


def train(model, batches, *, causal, learning_rate, warmup, two_stage, schedule, teacher):
    """batches: one list of micro-batches per optimizer step. Returns the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    stacks, steps, losses = layer_stacks(model), len(batches), []
    model.train()
    for step, micro_batches in enumerate(batches):
        depth = two_stage.depth(step, len(stacks[0]))
        alpha = schedule.alpha_at(step)
        items = sum((align_labels(b["labels"], causal=causal) != -100).sum() for b in micro_batches)
        total = 0.0
        for micro_batch in micro_batches:
            labels = align_labels(micro_batch["labels"], causal=causal)
            inputs = {"input_ids": micro_batch["input_ids"]}
            if model.config.is_encoder_decoder:
                # the labels moved to the right, behind the start token
                ids = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], 1)
                inputs["decoder_input_ids"] = ids.clamp(min=0)
            heads = teacher_inputs(teacher, inputs) if alpha > 0 else [None] * 3

            def loss_of(hidden, weight, bias, labels=labels, heads=heads, alpha=alpha, items=items):
                return linear_kl_mlm_loss(
                    hidden, weight, *heads[:2], labels, student_bias=bias, teacher_bias=heads[2],
                    alpha=alpha, temperature=schedule.temperature, num_items=items,
                )  # fmt: skip

            window = contextlib.nullcontext()
            if depth is not None:
                window = sub_model(stacks, ModelPart(depth, two_stage.layers_per_block))
            with window, head_swap(model, loss_of):
                loss = model(**inputs).logits
            loss.backward()
            total += loss.item()
        warm = min(1.0, step / warmup)
        decay = (steps - step) / (steps - warmup) if step >= warmup else 1.0
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * warm * decay
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses
