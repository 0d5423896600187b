"""Small training runs for the tests of this folder."""

import numpy as np
import torch
from transformers import TrainerCallback, TrainingArguments

from growkern import TwoStageConfig, TwoStageTrainer
from growkern.train.data import MaskedLMCollator, TokenBlocks
from tests.train.tiny import VOCAB, TinyTokenizer, build

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
    return TwoStageTrainer(
        small_model() if model is None else model,
        TrainingArguments(str(path), **settings | (args or {})),
        two_stage=STAGES,
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


def weights_of(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same(weights, others):
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name
