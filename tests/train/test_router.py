"""The auxiliary loss of routers, as a term of the student.

Truth: `output_router_logits=True` of transformers, in float64.
"""

import copy

import pytest
import torch

import growkern
from growkern import InheritanceSchedule, TwoStageTrainer, count_labels, inherited_loss
from growkern.train.loss.inherited import check_models
from testbed.models import Float64Everywhere, random_model
from testbed.relatives import RELATIVES
from testbed.tiny import arguments
from tests.train.loss.plain import plain_loss
from tests.train.loss.test_inherited import assert_same, padded

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss")


def mixture(family="mixtral", **options):
    class_name, sizes, _ = RELATIVES[family]
    given = {"output_router_logits": True, "router_aux_loss_coef": 0.3, "use_cache": False}
    return random_model(class_name, {**sizes, **given, **options})


@pytest.mark.parametrize("family", MIXTURES)
def test_the_loss_is_that_of_transformers(family):
    student, teacher, inputs = mixture(family), mixture(family, seed=2), padded()
    check_models(student, [teacher])
    with Float64Everywhere():
        theirs = student(**inputs)
        assert_same(student, inherited_loss(student, None, inputs), theirs.loss)
        # a teacher has no such term
        aux = student(**inputs).aux_loss
        expected = plain_loss(student, [teacher], inputs, causal=True, alpha=0.3) + 0.3 * aux
        loss, parts = inherited_loss(student, teacher, inputs, alpha=0.3, return_parts=True)
        torch.testing.assert_close(parts.aux_loss, aux.detach())
        assert_same(student, loss, expected)


def test_micro_batches_count_by_their_labels():
    student, batches = mixture(), [padded(seed) for seed in range(2)]
    items = count_labels(batches, student)
    check_models(student, [])
    with Float64Everywhere():
        losses = [inherited_loss(student, None, one, num_items=items) for one in batches]
        theirs = [
            student(**one).loss * (count_labels([one], student) / items.double()) for one in batches
        ]
        assert_same(student, sum(losses), sum(theirs))


def test_a_step_of_the_trainer(tmp_path):
    """Two micro-batches of unequal numbers of tokens, beside a teacher."""
    student, teacher = mixture(), mixture(seed=2)
    twin, before = copy.deepcopy(student), copy.deepcopy(student.state_dict())
    rows = {name: x[:2] for name, x in padded().items()}
    schedule = InheritanceSchedule(alpha=0.4, decay="constant")
    options = {"max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    args = arguments(tmp_path, optim="sgd", warmup_steps=0, use_cpu=True, **options)
    data = [{name: x[i] for name, x in rows.items()} for i in range(2)]
    trainer = TwoStageTrainer(
        student, args, teacher=teacher, inheritance=schedule, train_dataset=data
    )
    with Float64Everywhere():
        trainer.train()
        expected = plain_loss(twin.train(), [teacher], rows, causal=True, alpha=0.4)
        tokens = [row["attention_mask"].sum().item() for row in data]
        each = [twin(**{name: x[None] for name, x in row.items()}).aux_loss for row in data]
        aux = sum(n * one for n, one in zip(tokens, each, strict=True)) / sum(tokens)
        (expected + 0.3 * aux).backward()
    assert tokens[0] != tokens[1]
    assert trainer.state.log_history[0]["aux_loss"] == pytest.approx(aux.item(), rel=1e-9)
    for name, p in twin.named_parameters():
        step = before[name] - args.learning_rate * p.grad
        torch.testing.assert_close(student.state_dict()[name], step, rtol=1e-9, atol=1e-12)


def test_stage_1_has_no_such_term_where_all_its_layers_are_dense(tmp_path):
    student = mixture("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0])
    data = [{name: x[0] for name, x in padded().items()}]
    args = arguments(tmp_path, max_steps=2, logging_steps=1, warmup_steps=0, use_cpu=True)
    # the depths of this seed are 1 and, in stage 2, 2
    stages = growkern.TwoStageConfig(layers_per_block=1, stage1_steps=1, seed=0)
    trainer = TwoStageTrainer(student, args, train_dataset=data, two_stage=stages)
    rows = {name: x[None] for name, x in data[0].items()}
    with stages.sub_model(student, 0):
        check_models(student, [])
    with Float64Everywhere():
        with stages.sub_model(student, 0):
            expected, parts = inherited_loss(student, None, rows, return_parts=True)
        assert parts.aux_loss is None
        trainer.train()
    first, second = trainer.state.log_history[:2]
    assert (first["depth"], second["depth"]) == (1, 2)
    assert first["loss"] == pytest.approx(expected.item(), abs=1e-4)
    assert "aux_loss" not in first and second["aux_loss"] > 1


def test_a_batch_without_tokens_has_a_loss_of_0(tmp_path):
    student, inputs = mixture().float(), padded()
    full = {name: x[0] for name, x in inputs.items()}
    inputs["attention_mask"] = torch.zeros_like(inputs["labels"])
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    one = {"per_device_train_batch_size": 1, "logging_steps": 1, "use_cpu": True}
    args = arguments(tmp_path, max_steps=2, optim="sgd", **one)
    data = [full, {name: x[0] for name, x in inputs.items()}]
    trainer = TwoStageTrainer(student, args, train_dataset=data)
    loss, parts = inherited_loss(student, None, inputs, return_parts=True)
    loss.backward()
    assert loss == parts.aux_loss == 0
    assert all(p.grad is None or not p.grad.any() for p in student.parameters())
    trainer.train()
    assert sorted(entry["grad_norm"] > 0 for entry in trainer.state.log_history[:2]) == [0, 1]
    assert all(p.isfinite().all() for p in student.parameters())
