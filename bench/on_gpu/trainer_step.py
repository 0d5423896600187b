"""Measures a step of `TwoStageTrainer` beside a plain Hugging Face Trainer and a bare loop.

The model is a BERT with random weights in bfloat16, on random tokens, with AdamW. "layers alone" is
the limit: a loop of forward, the same fused loss, backward and optimizer, and nothing else. "x
alone" is the time of a step over that of this loop. For steps of stage 1 the table also has their
share of the whole model's FLOPs.
"""

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from bench.on_gpu.recorder import Recorder
from bench.on_gpu.train_step import FULL, TOY, bert, make_batch

Batch = tuple[dict[str, Tensor], Tensor]


class _Rows(torch.utils.data.Dataset):
    def __init__(self, batch: Batch, count: int) -> None:
        self.ids, self.labels = batch[0]["input_ids"].cpu(), batch[1].cpu()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        at = i % len(self.ids)
        return {"input_ids": self.ids[at], "labels": self.labels[at]}


class _Clock(transformers.TrainerCallback):
    """Notes when each step ended, after the device has finished its work."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(_now())

    @property
    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _layers_alone(model: Any, batch: Batch, steps: int) -> tuple[list[float], float]:
    from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss
    from growkern.train.head import head_swap

    inputs, labels = batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=labels.is_cuda)

    def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_kl_mlm_loss(hidden, weight, None, None, labels, student_bias=bias, alpha=0.0)

    clock, losses = _Clock(), []
    for _ in range(steps):
        with head_swap(model, loss_of):
            loss = model(**inputs).logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        clock.on_step_end()
    return clock.seconds, losses[0].item()


def _trained(make: Callable[..., Any], model: Any, batch: Batch, steps: int) -> tuple[Any, _Clock]:
    clock = _Clock()
    with tempfile.TemporaryDirectory() as directory:
        args = transformers.TrainingArguments(
            directory,
            max_steps=steps,
            per_device_train_batch_size=len(batch[1]),
            learning_rate=1e-5,
            max_grad_norm=0.0,
            logging_first_step=True,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
        )
        data = _Rows(batch, steps * len(batch[1]))
        trainer = make(model, args, train_dataset=data, callbacks=[clock])
        trainer.train()
    return trainer, clock


def _first_loss(trainer: Any) -> float:
    return next(line["loss"] for line in trainer.state.log_history if "loss" in line)


def run(recorder: Recorder) -> None:
    from growkern.train.trainer import TwoStageTrainer

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
        trainer, clock = _trained(make, model, batch, steps)
        record(name, clock.seconds, _first_loss(trainer))
    _stage_one(recorder, model, batch, limit)


def _stage_one(recorder: Recorder, model: Any, batch: Batch, whole_s: float) -> None:
    """Record the steps of stage 1 by depth, each with its share of the FLOPs."""
    from growkern import TwoStageConfig, TwoStageTrainer
    from growkern.train.flops import ModelCost
    from growkern.train.sub_model import layer_stacks

    layers = model.config.num_hidden_layers
    steps = recorder.pick(60, 4)
    stages = TwoStageConfig(layers_per_block=max(1, layers // 4), stage1_steps=steps)

    def make(*args: Any, **rest: Any) -> Any:
        return TwoStageTrainer(*args, two_stage=stages, **rest)

    _, clock = _trained(make, model, batch, steps)
    cost = ModelCost(model, layer_stacks(model))
    (B, S), rows = batch[1].shape, int((batch[1] != -100).sum())

    def flops(depth: int | None) -> float:
        trained = stages.layers_per_block if depth else None
        return cost.train(B, S, depth, trained) + rows * cost.head_row(train=True)

    found: dict[int, list[float]] = {}
    # the first interval is that of the second step
    for step, seconds in enumerate(clock.seconds, start=1):
        depth = stages.depth(step, layers)
        assert depth is not None
        found.setdefault(depth, []).append(seconds)
    for depth, seconds in sorted(found.items()):
        step_s, share = statistics.median(seconds), flops(depth) / flops(None)
        facts = {"ms per step": 1e3 * step_s, "x alone": step_s / whole_s, "FLOP share": share}
        recorder.add({"case": f"stage 1, {depth} of {layers} layers", **facts})
