"""Trains one model of the demo. An interrupted run resumes; a run stops at its target loss."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from growkern.demo.config import DemoConfig
from growkern.plot.curve import Curve, curve_of
from growkern.publish.calls import move
from growkern.train.dataset.text import TokenBlocks
from growkern.train.loop.trainer import TwoStageTrainer
from growkern.train.objectives.language_modeling import CausalLMCollator
from growkern.train.run.start import train_or_resume
from growkern.train.safety.checkpoints import (
    checkpoints_in,
    close_staging,
    last_checkpoint,
    open_staging,
)

# called with the step, the number of steps, and the last validation loss or None
Report = Callable[[int, int, float | None], None]


@dataclass(frozen=True)
class Data:
    """The tokenizer and the blocks of all runs of a demo."""

    tokenizer: Any
    train: TokenBlocks
    validation: TokenBlocks


def train_model(
    model: Any,
    directory: Path,
    data: Data,
    config: DemoConfig,
    *,
    title: str,
    seed: int,
    report: Report,
    target_loss: float | None = None,
    **trainer_options: Any,
) -> Curve:
    """Train a model, or resume its training, and save it with its log.

    Args:
        model: to be trained.
        directory: of the run.
        data: to train and validate on.
        config: settings of the demo.
        title: of the curve.
        seed: of the data order.
        report: called after each step and each evaluation.
        target_loss: training stops at the first validation loss that is not above it.
        trainer_options: of `TwoStageTrainer`.

    Returns:
        The curve of the run.
    """
    watch = _Watch(target_loss, report)
    trainer = TwoStageTrainer(
        model,
        _arguments(directory, config, seed),
        processing_class=data.tokenizer,
        train_dataset=data.train,
        eval_dataset=data.validation,
        data_collator=CausalLMCollator(data.tokenizer),
        callbacks=[watch],
        **trainer_options,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.resume_hint = "the same command again"
    checkpoint = trainer.newest_whole_checkpoint()
    if checkpoint is not None and watch.reached(_history(checkpoint)):
        # it was interrupted after its last step, but before its result was stored
        trainer.state.log_history = _history(checkpoint)
        trainer._load_from_checkpoint(str(checkpoint))
    else:
        train_or_resume(trainer)
    trainer.save_model()
    trainer.save_state()
    # renamed first: half a checkpoint would be reported as damaged
    trash = open_staging(directory)
    for left in checkpoints_in(directory):
        move(left, trash / left.name)
    close_staging(directory)
    return curve_of(trainer.state.log_history, title)


def curve_from(record: dict[str, Any]) -> Curve:
    """Make a curve from the JSON record of `curve_record`."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
    return Curve(**values)


def curve_record(curve: Curve) -> dict[str, Any]:
    """A curve as a JSON record."""
    return asdict(curve)


class _Watch(TrainerCallback):
    """Reports progress, stops a run at its target, and logs the seconds of training.

    Only the time from the start to the end of each step counts, not evaluation or saving. A resumed
    run continues the count.
    """

    def __init__(self, target_loss: float | None, report: Report) -> None:
        self.target_loss, self.report = target_loss, report
        self._seconds, self._since = 0.0, 0.0
        self._loss: float | None = None

    def reached(self, history: list[dict[str, Any]]) -> bool:
        """Whether a log history holds a validation loss at the target."""
        losses = [line["eval_loss"] for line in history if "eval_loss" in line]
        return self.target_loss is not None and any(one <= self.target_loss for one in losses)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._seconds = max((line.get("seconds", 0.0) for line in state.log_history), default=0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._seconds += time.perf_counter() - self._since
        self.report(state.global_step, state.max_steps, self._loss)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.log_history[-1]["seconds"] = self._seconds

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any
    ) -> None:
        self._loss = metrics["eval_loss"]
        self.report(state.global_step, state.max_steps, self._loss)
        if self.target_loss is not None and self._loss <= self.target_loss:
            control.should_training_stop = True
            control.should_save = True


def _history(checkpoint: Path) -> list[dict[str, Any]]:
    return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).log_history


def _arguments(directory: Path, config: DemoConfig, seed: int) -> TrainingArguments:
    training = config.training
    return TrainingArguments(
        output_dir=str(directory),
        max_steps=training.steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        lr_scheduler_type="constant_with_warmup",
        weight_decay=0.01,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        seed=seed,
        data_seed=seed,
        logging_steps=training.eval_every,
        eval_strategy="steps",
        eval_steps=training.eval_every,
        # a resumed run already has the loss of its start in its log
        eval_on_start=last_checkpoint(directory) is None,
        save_strategy="steps",
        save_steps=training.save_every,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        # pinning memory gives a warning without an accelerator
        dataloader_pin_memory=torch.cuda.is_available(),
    )
