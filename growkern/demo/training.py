"""One training run of the demo: resumed if it was cut off, stopped at the loss it has to reach."""

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from growkern.demo.config import DemoConfig, Training
from growkern.plot import Curve, curve_of
from growkern.train.data import MaskedLMCollator, TokenBlocks
from growkern.train.run import last_checkpoint, train_or_resume
from growkern.train.trainer import TwoStageTrainer

# step, steps in all, validation loss if there is one yet
Report = Callable[[int, int, float | None], None]


@dataclass(frozen=True)
class Data:
    """What all runs of a demo train and validate on."""

    tokenizer: Any
    train: TokenBlocks
    validation: TokenBlocks


def train_model(
    model: Any,
    directory: Path,
    data: Data,
    config: DemoConfig,
    training: Training,
    *,
    title: str,
    seed: int,
    report: Report,
    target_loss: float | None = None,
    **trainer_options: Any,
) -> Curve:
    """Train a model in `directory`, or go on with it; leave the model and its log there.

    target_loss: stop at the first evaluation that is not above it.
    """
    watch = _Watch(target_loss, report)
    trainer = TwoStageTrainer(
        model,
        _arguments(directory, config, training, seed),
        processing_class=data.tokenizer,
        train_dataset=data.train,
        eval_dataset=data.validation,
        data_collator=MaskedLMCollator(data.tokenizer, config.masking_probability, seed),
        callbacks=[watch],
        **trainer_options,
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = last_checkpoint(directory)
    if checkpoint is not None and watch.reached(_history(checkpoint)):
        # it was cut off between its last step and its mark
        trainer.state.log_history = _history(checkpoint)
        trainer._load_from_checkpoint(str(checkpoint))
    else:
        train_or_resume(trainer)
    trainer.save_model()
    trainer.save_state()
    for left in directory.glob("checkpoint-*"):
        # renamed first: a checkpoint that is half deleted must not be taken for one to go on from
        shutil.rmtree(left.rename(left.with_name(f".{left.name}")))
    return curve_of(trainer.state.log_history, title)


def curve_from(record: dict[str, Any]) -> Curve:
    """A curve read back from JSON."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
    return Curve(**values)


def curve_record(curve: Curve) -> dict[str, Any]:
    return asdict(curve)


class _Watch(TrainerCallback):
    """Reports, stops the run at its target, and notes the seconds of training in the log.

    Seconds are counted from the start of a step to its end: evaluating, saving and being killed
    cost none, and a run that goes on goes on counting.
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


def _arguments(
    directory: Path, config: DemoConfig, training: Training, seed: int
) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(directory),
        max_steps=training.steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        lr_scheduler_type="linear",
        weight_decay=0.01,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        seed=seed,
        data_seed=seed,
        logging_steps=training.eval_every,
        eval_strategy="steps",
        eval_steps=training.eval_every,
        # a run that goes on has the loss of its start in its log already
        eval_on_start=last_checkpoint(directory) is None,
        save_strategy="steps",
        save_steps=training.save_every,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        # pinning warns where there is no accelerator
        dataloader_pin_memory=torch.cuda.is_available(),
    )
