"""The trainer's loss on a batch of each objective against transformers' own, or the paper's."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from examples.objectives import MODELS, make_model
from growkern import GrowthError, TwoStageTrainer as Trainer, inherited_loss
from growkern.train.model.flops import ModelCost, TokenCounts
from growkern.train.model.sub_model import find_stacks
from testbed.tiny import arguments
from tests.train.objectives.places import data_of, model_of, tokenizer

ROWS = 6


def trainer_of(model, path, objective, **options):
    rows, collator = data_of(objective)
    given = {"per_device_train_batch_size": ROWS, **options.pop("arguments", {})}
    return Trainer(
        model,
        arguments(path, **given),
        train_dataset=rows,
        eval_dataset=torch.utils.data.Subset(rows, range(9)),
        data_collator=collator,
        **options,
    )


def batch_of(objective):
    rows, collator = data_of(objective)
    return collator([rows[i] for i in range(ROWS)])


def loss_and_gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("objective", MODELS)
def test_loss_and_gradients_are_those_of_transformers(objective, tmp_path):
    torch.manual_seed(1)
    model, batch = model_of(objective).double(), batch_of(objective)
    own = copy.deepcopy(model)
    trainer = trainer_of(model, tmp_path, objective)
    assert len({len(x) for x in batch.values()}) == 1
    loss, gradients = loss_and_gradients(model, trainer.compute_loss(model, batch))
    expected, theirs = loss_and_gradients(own, own(**batch).loss)
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, gradient in theirs.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-8, msg=name)


# ---------------------------------------------------------------------- FLOPs


def counted(work):
    counter = FlopCounterMode(display=False)
    with counter:
        work()
    return counter.get_total_flops()


def eager(model):
    # the counter does not know the attention kernels of a CPU
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("objective", ["span_corruption", "denoising"])
def test_flops_of_a_decoder_that_is_shorter_or_longer(objective):
    model, batch = eager(model_of(objective)), batch_of(objective)
    cost = ModelCost(model, find_stacks(model))
    (rows, length), decoder = batch["input_ids"].shape, batch["labels"].shape[1]
    assert length != decoder
    layers = cost.train(TokenCounts.of_rows(rows, length, decoder_length=decoder))
    found = counted(lambda: model(**batch).loss.backward())
    assert layers + rows * decoder * cost.head_row(train=True) == pytest.approx(found, rel=2e-3)


@pytest.mark.parametrize("how", ["trainer", "loop"])
def test_a_second_head_is_not_left_out_unsaid(how, tmp_path):
    model, batch = make_model("BertForPreTraining", tokenizer("bert")), batch_of("mlm")
    with pytest.raises(GrowthError, match=r"BertForPreTraining .*ForMaskedLM"):
        if how == "trainer":
            trainer_of(model, tmp_path, "mlm")
        inherited_loss(model, None, batch)
