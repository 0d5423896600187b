"""Counted FLOPs against `torch.utils.flop_counter`, on real steps."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from growkern import InheritanceSchedule, TwoStageConfig, TwoStageTrainer
from growkern.train.flops import ModelCost
from growkern.train.sub_model import layer_stacks, sub_model
from tests.train.test_trainer import Batches, arguments
from tests.train.tiny import FAMILIES, batch, build, stack_of

ROWS, LENGTH = 3, 10


class MatrixProducts(FlopCounterMode):
    """Without the outer product by which older transformers make rotary angles: (D, 1) (1, S)."""

    def _count_flops(self, func_packet, out, args, kwargs):
        if func_packet is torch.ops.aten.bmm and args[0].shape[-1] == 1:
            return out
        return super()._count_flops(func_packet, out, args, kwargs)


def counted(work) -> int:
    counter = MatrixProducts(display=False)
    with counter:
        work()
    return counter.get_total_flops()


def eager(family, **options):
    # the counter sees eager attention as two matrix products; CPU kernels it does not know
    return build(family, attn_implementation="eager", **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_is_exact(family):
    model, inputs = eager(family), {"input_ids": batch(ROWS, LENGTH)["input_ids"]}
    cost = ModelCost(model, layer_stacks(model))
    with torch.no_grad():
        expected = counted(lambda: model(**inputs))
    assert cost.forward(ROWS, LENGTH) + ROWS * LENGTH * cost.head_row(train=False) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_full_training_step_is_exact(family):
    model, inputs = eager(family), batch(ROWS, LENGTH)
    cost = ModelCost(model, layer_stacks(model))
    expected = counted(lambda: model(**inputs).loss.backward())
    actual = cost.train(ROWS, LENGTH) + ROWS * LENGTH * cost.head_row(train=True)
    assert actual == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("depth", [2, 4, 5])
def test_sub_model_step(family, depth):
    model, inputs = eager(family), batch(ROWS, LENGTH)
    stacks = layer_stacks(model)
    cost = ModelCost(model, stacks)

    def step():
        with sub_model(stacks, depth, 2):
            loss = model(**inputs).loss
        loss.backward()

    actual = cost.train(ROWS, LENGTH, depth, 2) + ROWS * LENGTH * cost.head_row(train=True)
    # the lowest trained layer of BERT needs no gradient of its input: its query, key and value
    # save one product each; the others have a trained norm below theirs
    saved = 0
    if family == "bert":
        attention = stack_of(model)[0].attention.self
        saved = 3 * 2 * ROWS * LENGTH * attention.query.weight.numel()
    assert actual - saved == counted(step)


def test_shared_layers_count_every_time_they_run():
    import transformers

    config = transformers.AlbertConfig(
        vocab_size=48,
        embedding_size=8,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=24,
        num_hidden_layers=3,
        attn_implementation="eager",
    )
    model = transformers.AlbertForMaskedLM(config)
    inputs = {"input_ids": batch(ROWS, LENGTH)["input_ids"]}
    cost = ModelCost(model, [])
    with torch.no_grad():
        expected = counted(lambda: model(**inputs))
    assert cost.forward(ROWS, LENGTH) + ROWS * LENGTH * cost.head_row(train=False) == expected


def test_log_lines_carry_the_sum_of_all_that_ran(tmp_path):
    """Student, frozen prefix, teacher while it runs, labelled head rows; evaluation not."""
    model, teacher, data = build("bert"), build("bert", layers=2, width=8, seed=9), Batches(8)
    stages = TwoStageConfig(layers_per_block=2, stage1_steps=2)
    trainer = TwoStageTrainer(
        model,
        arguments(
            tmp_path, max_steps=4, eval_strategy="steps", eval_steps=1, save_strategy="steps"
        ),
        two_stage=stages,
        inheritance=InheritanceSchedule(end_step=3),
        teacher=teacher,
        train_dataset=data,
        eval_dataset=data,
    )
    trainer.train()
    student, old = (ModelCost(m, layer_stacks(m)) for m in (model, teacher))
    expected, lines = 0.0, [line for line in trainer.state.log_history if "loss" in line]
    for step in range(4):
        rows = sum(int((row["labels"] != -100).sum()) for row in data.rows[2 * step : 2 * step + 2])
        expected += student.train(2, 8, stages.depth(step, 5), 2)
        expected += rows * student.head_row(train=True)
        if step < 3:
            expected += old.forward(2, 8) + rows * old.head_row(train=False)
        assert lines[step]["flops"] == expected
    evaluations = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert [line["flops"] for line in evaluations] == [line["flops"] for line in lines]
    assert trainer.state.total_flos == expected
