"""The trainer on a model of an encoder and a decoder; `test_trainer` compares it with a loop."""

import copy
import re

import pytest
import torch

import growkern
from growkern import GrowthError, InheritanceSchedule, TwoStageTrainer, inherited_loss
from testbed.tiny import Batches, arguments, build

STACKS = ("encoder", "decoder")
STAGES = growkern.TwoStageConfig(layers_per_block=1, stage1_steps=4, seed=1)


class Pairs(Batches):
    """Texts of ten tokens with answers of five, of which the last may be padding."""

    def __init__(self, rows, mask=True):
        super().__init__(rows)
        for i, row in enumerate(self.rows):
            real = torch.ones(1, 5, dtype=torch.int64)
            real[0, 4] = i % 2
            row["labels"] = torch.where(real == 1, 5 + (3 * row["input_ids"][:, :5]) % 40, -100)
            if mask:
                row["decoder_attention_mask"] = real


def trainer_for(path, data, teacher=None, **options):
    model = build("t5", layers=3, tied=True).double()
    if teacher is not None:
        options["inheritance"] = InheritanceSchedule(alpha=0.8, end_step=6, kl_rows="all")
    return TwoStageTrainer(
        model, arguments(path, max_steps=6), teacher=teacher, train_dataset=data, eval_dataset=data,
        **options,
    )  # fmt: skip


def test_both_stacks_run_and_train_in_part(tmp_path):
    trainer = trainer_for(tmp_path, Pairs(12), two_stage=STAGES)
    model, before = trainer.model, copy.deepcopy(trainer.model.state_dict())
    calls = []
    for name, block in model.named_modules():
        if re.fullmatch(r"(en|de)coder\.block\.\d", name):
            block.register_forward_hook(lambda *_, name=name: calls.append(name))

    step = trainer.training_step

    def watched(*args, **options):
        calls.clear()
        loss = step(*args, **options)
        depth = STAGES.depth(trainer.state.global_step, 3) or 3
        assert calls == [
            f"{stack}.block.{i}" for stack in ("encoder", "decoder") for i in range(depth)
        ]
        trained = {".".join(n.split(".")[:3]) for n, p in model.named_parameters()
                   if p.grad is not None and ".block." in n and bool(p.grad.any())}  # fmt: skip
        top = range(depth) if trainer.state.global_step >= 4 else [depth - 1]
        assert trained == {f"{stack}.block.{i}" for stack in STACKS for i in top}
        return loss

    trainer.training_step = watched
    trainer.train()
    depths = {line["depth"] for line in trainer.state.log_history if "depth" in line}
    assert len(depths) > 1
    still = [name for name, x in model.state_dict().items() if torch.equal(x, before[name])]
    assert not still


def test_the_loss_is_that_of_inherited_loss(tmp_path):
    """On every real token of the answers, and evaluated by the model's own loss."""
    teacher = build("t5", layers=1, width=8, seed=9).double().eval()
    data = Pairs(12)
    trainer = trainer_for(tmp_path, data, teacher)
    whole = {key: torch.cat([row[key] for row in data.rows]) for key in data.rows[0]}
    own = trainer.model(**{k: v for k, v in whole.items() if k != "decoder_attention_mask"}).loss
    assert trainer.evaluate()["eval_loss"] == pytest.approx(own.item(), rel=1e-6)
    first = {key: x[:2] for key, x in whole.items()}
    expected = inherited_loss(trainer.model, teacher, first, alpha=0.8, kl_rows="all")
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_what_does_not_fit_is_refused(tmp_path):
    lacks = trainer_for(tmp_path, Pairs(4, mask=False), build("t5", seed=3).double())
    with pytest.raises(GrowthError, match="no 'decoder_attention_mask'"):
        lacks.train()
