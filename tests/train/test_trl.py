"""The examples for TRL train as TRL itself does, and beside a teacher as plain logits do."""

import copy
import sys

import pytest

if sys.version_info < (3, 11):
    pytest.skip("TRL needs Python 3.11", allow_module_level=True)

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import DistillationTrainer, SFTConfig, SFTTrainer

from examples.trl_distillation import (
    FusedDistillationTrainer,
    TaughtTrainer,
    tiny_model,
    tiny_tokenizer,
    trainer_of,
)
from growkern import InheritanceSchedule, TwoStageTrainer, grow_checkpoint, kl_mlm_loss
from tests.train.test_trainer import arguments, losses_of


@pytest.mark.parametrize("beta, temperature", [(0.0, 1.0), (1.0, 1.5), (0.3, 0.7)])
def test_trains_as_trl_does(beta, temperature, tmp_path):
    """Both draw the same completions, as long as the models agree to rounding."""
    student, teacher = tiny_model(48, 0), tiny_model(48, 1)
    how = {
        "beta": beta,
        "temperature": temperature,
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
    }
    lines, models = [], []
    for kind in (DistillationTrainer, FusedDistillationTrainer):
        model = copy.deepcopy(student)
        trainer = trainer_of(kind, model, copy.deepcopy(teacher), str(tmp_path), **how)
        trainer.train()
        lines.append([x for x in trainer.state.log_history if "loss" in x])
        models.append(model)
    for key, error in (("loss", 1e-5), ("grad_norm", 1e-4)):
        theirs, ours = ([line[key] for line in one] for one in lines)
        assert len(ours) == 4 and ours == pytest.approx(theirs, rel=error)
    moved = (models[0].lm_head.weight - student.lm_head.weight).abs().mean()
    # Adam turns a gradient near 0 into a step of either sign
    apart = (models[1].lm_head.weight - models[0].lm_head.weight).abs().mean()
    assert moved > 1e-3 and apart < 1e-3 * moved


def test_supervised_finetuning_takes_a_teacher(tmp_path):
    """Each step's loss is that of plain logits, over texts that TRL pads and masks."""
    student, teacher = tiny_model(48, 0), tiny_model(48, 1)
    texts = [{"prompt": "w5 w7", "completion": " w9" * (2 + i % 3)} for i in range(16)]
    args = SFTConfig(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        gradient_checkpointing=False,
        **{"bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True},
    )
    expected, rows = [], []

    class Watched(TaughtTrainer):
        def compute_loss(self, model, inputs, *args, **options):
            with torch.no_grad():
                known = {name: inputs[name] for name in ("input_ids", "attention_mask")}
                pair = [one(**known).logits[:, :-1].flatten(0, 1) for one in (model, teacher)]
                labels = inputs["labels"][:, 1:].flatten()
                loss = kl_mlm_loss(*pair, labels, alpha=0.5, temperature=2.0, reduction="sum")
            expected.append(loss.item())
            rows.append(int((labels != -100).sum()))
            return super().compute_loss(model, inputs, *args, **options)

    trainer = Watched(
        student,
        args,
        train_dataset=Dataset.from_list(texts),
        eval_dataset=Dataset.from_list(texts[:4]),
        processing_class=tiny_tokenizer(48),
    )
    trainer.teacher = teacher
    trainer.train()
    found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert 0 < min(rows) < 4 * 5
    steps = [sum(expected[i : i + 2]) / sum(rows[i : i + 2]) for i in (0, 2)]
    assert found == pytest.approx(steps, rel=1e-4) and found[1] < found[0]
    assert trainer.evaluate()["eval_loss"] < found[0]


def test_an_upcycled_directory_is_trained(tmp_path):
    """By TRL, and by growkern's trainer with the dense model as its teacher."""
    dense = tiny_model(48, 0)
    dense.save_pretrained(tmp_path / "dense")
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    made = tmp_path / "dense", tmp_path / "moe"
    grow_checkpoint(*made, to="mixtral", progress=False, **sizes)
    how = {"max_steps": 3, "per_device_train_batch_size": 4, "use_cpu": True}
    texts = [{"prompt": "w5 w7", "completion": " w9 w9"} for _ in range(12)]
    data = [{"input_ids": [5, 7, 9, 9], "labels": [-100, -100, 9, 9]} for _ in range(12)]

    def by_trl(moe):
        args = SFTConfig(
            **{**arguments(tmp_path, **how).to_dict(), "gradient_checkpointing": False}
        )
        own = Dataset.from_list(texts)
        return SFTTrainer(moe, args, train_dataset=own, processing_class=tiny_tokenizer(48))

    def by_growkern(moe):
        schedule, args = InheritanceSchedule(rate=0.5, decay="constant"), arguments(tmp_path, **how)
        return TwoStageTrainer(moe, args, teacher=dense, inheritance=schedule, train_dataset=data)

    for build in (by_trl, by_growkern):
        moe = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
        moe.config.output_router_logits = True
        trainer = build(moe)
        trainer.train()
        losses = losses_of(trainer)
        assert losses[-1] < losses[0]
        # the copies of the FFN see different tokens
        first, second = moe.model.layers[0].mlp.experts.down_proj[::2]
        assert not torch.equal(first, second)
