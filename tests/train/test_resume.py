"""A run that is killed and resumed is the run that was not: weights, state, losses, masks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import trainer as trainer_of_transformers

import growkern
from growkern import InheritanceSchedule, TwoStageConfig, TwoStageTrainer
from growkern.train.dataset.training_data import TokenBlocks
from growkern.train.objectives.language_modeling import MaskedLMCollator
from testbed.models import random_model
from testbed.relatives import RELATIVES
from testbed.tiny import MEASURED, VOCAB, Batches, TinyTokenizer, arguments, build
from tests.train.safety.runs import assert_same, small_trainer, weights_of

STEPS = 10
STAGES = TwoStageConfig(layers_per_block=2, stage1_steps=5)


class Recorder(MaskedLMCollator):
    """Remembers every batch the model was to see."""

    def __call__(self, features):
        batch = super().__call__(features)
        self.__dict__.setdefault("seen", []).append(batch)
        return batch


def trainer_in(path, save_steps):
    """5 batches an epoch, 2 at a time: an epoch is 3 steps, its last one of a single batch."""
    blocks = TokenBlocks(np.random.default_rng(0).integers(5, VOCAB, (18, 12)).astype(np.int32))
    model = build("bert", tied=True)
    # dropout on: the generator's state has to come back too
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    args = arguments(
        path, max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        warmup_steps=3, max_grad_norm=1.0, train_sampling_strategy="random", save_strategy="steps",
        save_steps=save_steps, logging_steps=4,
    )  # fmt: skip
    return TwoStageTrainer(
        model, args, two_stage=STAGES, inheritance=InheritanceSchedule(end_step=8),
        teacher=build("bert", layers=2, width=8, seed=9), train_dataset=blocks,
        data_collator=Recorder(TinyTokenizer(), 0.4),
    )  # fmt: skip


def log_of(trainer):
    """Log lines by step, without what a clock says."""
    return {
        line["step"]: {k: v for k, v in line.items() if k not in MEASURED}
        for line in trainer.state.log_history
        if "loss" in line
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    # set here too: the fixture that makes the tests deterministic lives for one test
    torch.use_deterministic_algorithms(True, warn_only=True)
    trainer = trainer_in(tmp_path_factory.mktemp("straight"), save_steps=1)
    trainer.train()
    return trainer


@pytest.mark.parametrize("stop", [3, 4, 5, 6, 8], ids=lambda step: f"after_{step}")
def test_resumed_equals_straight_bit_for_bit(straight, stop, tmp_path):
    """In stage 1 (3: at the end of an epoch, 4), at the boundary (5) and in stage 2 (6, 8)."""
    resumed = trainer_in(tmp_path, save_steps=100)
    resumed.train(resume_from_checkpoint=f"{straight.args.output_dir}/checkpoint-{stop}")

    for (name, p), q in zip(
        straight.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(p, q[1]), name
    expected = straight.optimizer.state_dict()["state"]
    actual = resumed.optimizer.state_dict()["state"]
    assert expected.keys() == actual.keys()
    for number, state in expected.items():
        for key, value in state.items():
            assert torch.equal(value, actual[number][key]), (number, key)
    assert log_of(resumed) == log_of(straight)

    left = resumed.data_collator.seen[-(len(straight.data_collator.seen) - 2 * stop) :]
    same = straight.data_collator.seen[-len(left) :]
    for batch, other in zip(left, same, strict=True):
        assert torch.equal(batch["input_ids"], other["input_ids"])
        assert torch.equal(batch["labels"], other["labels"])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_evaluation_does_not_change_the_training(tmp_path, workers):
    """The order of a data set that is shuffled, and dropout, come from the same generator."""
    weights = []
    for every in (100, 2):
        args = {"eval_strategy": "steps", "eval_steps": every, "dataloader_num_workers": workers}
        trainer = small_trainer(tmp_path, args={**args, "save_strategy": "no", "max_steps": 5})
        trainer.train()
        weights.append(weights_of(trainer))
    assert_same(*weights)


def test_resuming_a_tied_model_reports_no_missing_weight(tmp_path, monkeypatch):
    """The output matrix of a tied model is not in the file: it is the input matrix."""
    said = []
    monkeypatch.setattr(trainer_of_transformers.logger, "warning", said.append)
    trainer = small_trainer(tmp_path, args={"max_steps": 3, "save_steps": 1})
    trainer.train()
    small_trainer(tmp_path).train(resume_from_checkpoint=True)
    assert not said
    found = SimpleNamespace(
        missing_keys=["cls.predictions.transform.dense.bias"], unexpected_keys=[]
    )
    trainer._issue_warnings_after_load(found)
    assert "transform.dense.bias" in said[0]


@pytest.mark.parametrize("grows", [False, True])
def test_a_mixture_resumes_with_the_experts_of_its_checkpoint(grows, tmp_path):
    """transformers writes each expert under a name that its Trainer does not load."""
    growth = [growkern.GrowthStep(at_step=1, sizes={"num_hidden_layers": 3})] if grows else []

    def trained(checkpoint):
        how = {"dtype": torch.float32, "experts_implementation": "eager"}
        model = random_model(*RELATIVES["qwen3_moe"][:2], **how)
        args = arguments(
            *(tmp_path,), max_steps=4, save_strategy="steps", save_steps=2, save_only_model=False,
            logging_steps=3,
        )  # fmt: skip
        trainer = TwoStageTrainer(model, args, train_dataset=Batches(8), growth=growth)
        trainer.train(checkpoint)
        assert trainer.model.config._experts_implementation == "eager"
        return trainer.model.state_dict(), log_of(trainer)

    (straight, lines), (resumed, found) = trained(None), trained(tmp_path / "checkpoint-2")
    # with the load of the experts
    assert found == lines and "expert_entropy" in found[3]
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
