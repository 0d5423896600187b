"""Small training runs for the tests of this folder, and ways to send a signal."""

import contextlib
import importlib.util
import os
import tempfile
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import TrainerCallback, TrainingArguments

from growkern import TwoStageConfig, TwoStageTrainer
from growkern.train.dataset.training_data import TokenBlocks
from growkern.train.objectives.language_modeling import MaskedLMCollator
from testbed.tiny import VOCAB, TinyTokenizer, build

STEPS = 8
STAGES = TwoStageConfig(layers_per_block=1, stage1_steps=3)


def small_model(**options):
    """A BERT with dropout, so that a resumed run needs the state of the generator."""
    model = build("bert", layers=2, width=8, tied=True, **options)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return model


def small_trainer(path, model=None, *, callbacks=None, args=None, **options):
    """A trainer that saves and logs every second step unless `args` says otherwise."""
    blocks = TokenBlocks(np.random.default_rng(0).integers(5, VOCAB, (24, 8)).astype(np.int32))
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    settings |= args or {}
    return TwoStageTrainer(
        small_model() if model is None else model,
        TrainingArguments(str(path), **settings),
        two_stage=replace(STAGES, stage1_steps=min(STAGES.stage1_steps, settings["max_steps"])),
        train_dataset=blocks,
        eval_dataset=blocks,
        data_collator=MaskedLMCollator(TinyTokenizer(), 0.4),
        callbacks=callbacks,
        **options,
    )


class At(TrainerCallback):
    """Calls a function at one step: before the forward pass, or after the backward pass."""

    def __init__(self, step, call, event="on_step_begin"):
        self.step, self.call = step, call
        setattr(self, event, self.run)

    def run(self, args, state, control, **objects):
        if state.global_step == self.step:
            self.call(objects["model"])


EVENTS = [n for n in vars(TrainerCallback) if n.startswith("on_") and n != "on_init_end"]


class Everywhere(TrainerCallback):
    """Calls a function with the trainer at every event of its training loop."""

    def __init__(self, call):
        for name in EVENTS:
            setattr(self, name, lambda *_, **__: call())


# ----------------------------------------------------------------------- signals


def send(number):
    """Send a signal to this process. Its handler runs before this returns."""
    os.kill(os.getpid(), number)
    sum(range(1000))


class Finalised:
    """Sends a signal when it is deleted; Python swallows what the handler raises."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        send(self.number)


def send_from_callback(number):
    """Send it in a callback of a weak reference; Python swallows what the handler raises."""
    one = threading.Event()
    reference = weakref.ref(one, lambda _: send(number))
    del one, reference


def send_from_import(number):
    """Send it while a module is imported, which swallows what the handler raises."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "swallowing.py"
        file.write_text(
            "from tests.train.safety.runs import send\n"
            f"try:\n    send({int(number)})\nexcept BaseException:\n    pass\n"
        )
        spec = importlib.util.spec_from_file_location("swallowing", file)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def send_and_swallow(number):
    """Send it where code swallows all exceptions."""
    with contextlib.suppress(BaseException):
        send(number)


SENDERS = {
    "plain": send,
    "__del__": Finalised,
    "weakref": send_from_callback,
    "import": send_from_import,
    "suppress": send_and_swallow,
}


def weights_of(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same(weights, others):
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name
