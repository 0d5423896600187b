"""Measures a step of `TwoStageTrainer` beside a plain Hugging Face Trainer and a bare loop.

The model is a BERT with random weights in bfloat16, on random tokens, with AdamW. "layers alone" is
the limit: a loop of forward, the same fused loss, backward and optimizer, and nothing else. "x
alone" is the time of a step over that of this loop. For steps of stage 1 the table also has their
share of the whole model's FLOPs.
"""

import copy
import statistics
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from bench.on_gpu.train_step import FULL, TOY, bert, make_batch
from bench.shared.recorder import Recorder
from bench.shared.trainer_runs import Clock, trained

Batch = tuple[dict[str, Tensor], Tensor]


def _layers_alone(model: Any, batch: Batch, steps: int) -> tuple[list[float], float]:
    from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss
    from growkern.train.model.head import head_swap

    inputs, labels = batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=labels.is_cuda)

    def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_kl_mlm_loss(hidden, weight, None, None, labels, student_bias=bias, alpha=0.0)

    clock, losses = Clock(), []
    for _ in range(steps):
        with head_swap(model, loss_of):
            loss = model(**inputs).logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        clock.on_step_end()
    return clock.seconds, losses[0].item()


def _first_loss(trainer: Any) -> float:
    return next(line["loss"] for line in trainer.state.log_history if "loss" in line)


def run(recorder: Recorder) -> None:
    from growkern.train.loop.trainer import TwoStageTrainer

    _, size, _, vocab, _, share = recorder.pick(FULL, TOY)["train_bert"]
    shape = recorder.pick((32, 512), (2, 12))
    torch.manual_seed(0)
    with torch.device(recorder.device):
        model = bert(*size, vocab)
    batch = make_batch(shape, vocab, share, recorder.device, 0)
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(**batch[0]).logits
        truth = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()).item()
    model = model.to(torch.bfloat16)
    start = {name: x.cpu().clone() for name, x in model.state_dict().items()}
    steps = recorder.pick(30, 4)
    alone, loss = _layers_alone(model, batch, steps)
    limit = statistics.median(alone)

    def record(name: str, seconds: list[float], loss: float) -> None:
        step = statistics.median(seconds)
        facts = {"batch": "x".join(map(str, shape)), "ms per step": 1e3 * step}
        facts["x alone"] = step / limit
        # bfloat16 differs from float64 by up to this
        recorder.check(name, abs(loss / truth - 1), 2e-2, **facts)

    record("layers alone", alone, loss)
    for name, make in (
        ("transformers.Trainer", transformers.Trainer),
        ("TwoStageTrainer", TwoStageTrainer),
    ):
        model.load_state_dict(start)
        trainer, clock = trained(make, model, batch[0]["input_ids"], batch[1], steps)
        record(name, clock.seconds, _first_loss(trainer))
    _stage_one(recorder, model, batch, limit)


def _stage_one(recorder: Recorder, model: Any, batch: Batch, whole_s: float) -> None:
    """Record the steps of stage 1 by depth, each with its share of the FLOPs."""
    from growkern import TwoStageConfig, TwoStageTrainer
    from growkern.train.model.flops import ModelCost
    from growkern.train.model.sub_model import layer_stacks

    layers = model.config.num_hidden_layers
    steps = recorder.pick(60, 4)
    stages = TwoStageConfig(layers_per_block=max(1, layers // 4), stage1_steps=steps)

    def make(*args: Any, **rest: Any) -> Any:
        return TwoStageTrainer(*args, two_stage=stages, **rest)

    _, clock = trained(make, model, batch[0]["input_ids"], batch[1], steps)
    cost = ModelCost(model, layer_stacks(model))
    (B, S), rows = batch[1].shape, int((batch[1] != -100).sum())

    def flops(depth: int | None) -> float:
        part = stages.part_of(depth) if depth else None
        return cost.train(B, S, part) + rows * cost.head_row(train=True)

    by_depth: dict[int, list[float]] = {}
    # the first interval is that of the second step
    for step, seconds in enumerate(clock.seconds, start=1):
        depth = stages.depth(step, layers)
        assert depth is not None
        by_depth.setdefault(depth, []).append(seconds)
    for depth, seconds in sorted(by_depth.items()):
        step_s, share = statistics.median(seconds), flops(depth) / flops(None)
        facts = {"ms per step": 1e3 * step_s, "x alone": step_s / whole_s, "FLOP share": share}
        recorder.add({"case": f"stage 1, {depth} of {layers} layers", **facts})
