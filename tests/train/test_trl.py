"""The examples for TRL train as TRL itself does, and beside a teacher as plain logits do."""

import copy
import sys

import pytest

if sys.version_info < (3, 11):
    pytest.skip("TRL needs Python 3.11", allow_module_level=True)

import torch
from datasets import Dataset
from trl import DistillationTrainer, SFTConfig

from examples import trl_distillation
from examples.trl_distillation import tiny_model, tiny_tokenizer, trainer_of
from growkern import kl_mlm_loss


@pytest.mark.parametrize("beta, temperature", [(0.0, 1.0), (1.0, 1.5), (0.3, 0.7)])
def test_trains_as_trl_does(beta, temperature, tmp_path):
    """Both draw the same completions, as long as the models agree to rounding."""
    student, teacher = tiny_model(48, 0), tiny_model(48, 1)
    how = {"beta": beta, "temperature": temperature, "max_steps": 4, "learning_rate": 1e-3}
    how |= {"gradient_accumulation_steps": 2, "logging_steps": 1}
    lines, models = [], []
    for kind in (DistillationTrainer, trl_distillation.FusedDistillationTrainer):
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

    class Watched(trl_distillation.TaughtTrainer):
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
