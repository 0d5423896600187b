"""The trainer's loss on a batch of each objective against transformers' own, or the paper's."""

import copy

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from examples.objectives import MODELS, make_model
from growkern import (
    GrowthError,
    InheritanceSchedule,
    ReplacedTokenDetection,
    TwoStageConfig,
    grow,
    inherited_loss,
)
from growkern import TwoStageTrainer as Trainer
from growkern.train.model.flops import ModelCost, cost_of
from growkern.train.model.sub_model import find_stacks
from growkern.train.objectives.electra import draw
from growkern.train.objectives.language_modeling import evaluation_collator
from testbed.tiny import arguments
from tests.train.objectives.places import data_of, model_of, tokenizer

ROWS = 6


def pair(**options):
    generator = make_model("ElectraForMaskedLM", tokenizer("bert"), width=16)
    return ReplacedTokenDetection(generator, model_of("rtd"), **options)


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


@pytest.mark.parametrize("objective", [name for name in MODELS if name != "rtd"])
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


def definition(model, batch):
    """Equations of the paper, token by token, in plain words."""
    masked = batch["input_ids"] != batch["original_ids"]
    logits = model.generator(input_ids=batch["input_ids"]).logits
    corrupted, mlm = batch["original_ids"].clone(), []
    for b, s in masked.nonzero().tolist():
        p = logits[b, s].softmax(-1)
        mlm.append(-p[batch["original_ids"][b, s]].log())
        # the token into whose share of [0, 1) the random number falls
        below, u = 0.0, batch["uniforms"][b, s].item()
        for token, share in enumerate(p.tolist()):
            if below <= u < below + share:
                corrupted[b, s] = token
            below += share
    replaced = corrupted != batch["original_ids"]
    score = model.discriminator(input_ids=corrupted).logits.sigmoid()
    detection = -torch.where(replaced, score, 1 - score).log()
    return sum(mlm) / len(mlm) + 50 * detection.mean(), corrupted


@pytest.mark.parametrize("shared", [False, True])
def test_replaced_tokens_as_the_paper_defines_them(shared, tmp_path):
    torch.manual_seed(1)
    model, batch = pair(shared_embeddings=shared).double(), batch_of("rtd")
    trainer = trainer_of(model, tmp_path, "rtd")
    expected, corrupted = definition(model, batch)
    wrong = corrupted != batch["original_ids"]
    assert 10 < wrong.sum() <= (batch["labels"] != -100).sum()
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    assert torch.equal(model(**inputs).corrupted_ids, corrupted)
    _, theirs = loss_and_gradients(model, expected)
    loss, gradients = loss_and_gradients(model, trainer.compute_loss(model, batch))
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, gradient in theirs.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_the_plain_parts_are_those_of_transformers(tmp_path):
    """The discriminator's own loss, with padding too."""
    model = pair()
    rows, collator = data_of("rtd")
    features = [{"input_ids": rows[i]["input_ids"][: 20 + 5 * i]} for i in range(4)]
    batch = collator(features)
    assert not batch["attention_mask"].all()
    trainer = trainer_of(model, tmp_path, "rtd")
    loss = trainer.compute_loss(model, batch)
    found = model(**{key: value for key, value in batch.items() if key != "labels"})
    mask, original = batch["attention_mask"], batch["original_ids"]
    theirs = model.discriminator(
        input_ids=found.corrupted_ids,
        attention_mask=mask,
        labels=(found.corrupted_ids != original).long(),
    ).loss
    mlm = model.generator(
        input_ids=batch["input_ids"], attention_mask=mask, labels=batch["labels"]
    ).loss
    assert loss.item() == pytest.approx((mlm + 50 * theirs).item(), rel=1e-5)


def test_no_gradient_passes_through_the_drawing(tmp_path):
    model, batch = pair(), batch_of("rtd")
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    model(**inputs).detection_logits.sum().backward()
    assert all(p.grad is None for p in model.generator.parameters())
    assert all(p.grad is not None for p in model.discriminator.parameters())


def test_tokens_are_drawn_as_often_as_they_are_likely():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((1, 8), (6, 8)))
    bias = torch.randn(6, generator=generator)
    uniforms = torch.rand(40_000, generator=generator)
    drawn = draw(hidden.expand(40_000, 8), weight, bias, uniforms)
    expected = (hidden @ weight.T + bias).softmax(-1)[0]
    torch.testing.assert_close(drawn.bincount(minlength=6) / 40_000, expected, atol=0.01, rtol=0)
    edges = draw(hidden.expand(2, 8), weight, bias, torch.tensor([0.0, 1.0]))
    assert edges.tolist() == [0, 5]
    assert draw(hidden[:0], weight, bias, uniforms[:0]).shape == (0,)


@pytest.mark.parametrize("objective", ["mlm+nsp", "rtd"])
def test_accumulated_batches_count_as_one(objective, tmp_path):
    """The means are over the items of the whole batch, not of its parts."""
    model = pair() if objective == "rtd" else model_of(objective)
    weights, logs = [], []
    for accumulation in (1, 3):
        trainer = trainer_of(
            copy.deepcopy(model),
            tmp_path / str(accumulation),
            objective,
            arguments={
                "per_device_train_batch_size": ROWS // accumulation,
                "gradient_accumulation_steps": accumulation,
                "max_steps": 3,
                "adam_epsilon": 1e-4,
                "learning_rate": 1e-3,
            },
        )
        trainer.train()
        weights.append([p.detach() for p in trainer.model.parameters()])
        logs.append([line for line in trainer.state.log_history if "loss" in line])
    name = trainer.side.name
    for one, other in zip(*logs, strict=True):
        for key in ("loss", "mlm", name, f"{name}_accuracy"):
            assert one[key] == pytest.approx(other[key], rel=1e-4), key
        assert one["loss"] == pytest.approx(one["mlm"] + trainer.side.weight * one[name], rel=1e-5)
    for p, q in zip(*weights, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("objective", ["mlm+nsp", "rtd"])
def test_an_evaluation_has_both_parts(objective, tmp_path):
    model = pair() if objective == "rtd" else model_of(objective)
    trainer = trainer_of(model, tmp_path, objective)
    rows, collator = data_of(objective)
    metrics = trainer.evaluate()
    batch = evaluation_collator(collator, trainer.eval_dataset)([rows[i] for i in range(9)])
    expected = trainer.compute_loss(model.eval(), batch).item()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
    name = trainer.side.name
    assert 0 <= metrics[f"eval_{name}_accuracy"] <= 1
    assert metrics[f"eval_{name}"] > 0


def test_a_teacher_of_pairs_is_followed_on_the_masked_tokens_alone(tmp_path):
    """(1 - a) MLM + a T^2 KL on the rows with a label, and the plain loss of the pairs."""
    model, batch = model_of("mlm+nsp"), batch_of("mlm+nsp")
    torch.manual_seed(5)
    teacher = make_model("BertForMaskedLM", tokenizer("bert"), width=16)
    trainer = trainer_of(
        model,
        tmp_path,
        "mlm+nsp",
        teacher=teacher,
        inheritance=InheritanceSchedule(rate=0.4, end_step=8, temperature=2.0),
    )
    found = model(**batch)
    z, u = (
        found.prediction_logits,
        teacher(input_ids=batch["input_ids"], token_type_ids=batch["token_type_ids"]).logits,
    )
    rows = batch["labels"] != -100
    kl = torch.nn.functional.kl_div(
        (z[rows] / 2).log_softmax(-1), (u[rows] / 2).softmax(-1), reduction="batchmean"
    )
    mlm = torch.nn.functional.cross_entropy(z[rows], batch["labels"][rows])
    expected = 0.6 * mlm + 0.4 * 4 * kl + (found.loss - mlm)
    model.train()
    assert trainer.compute_loss(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)


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


def test_flops_of_pairs_count_the_pooler_once_per_sequence():
    model, batch = eager(model_of("mlm+nsp")), batch_of("mlm+nsp")
    cost = ModelCost(model, find_stacks(model))
    rows, length = batch["input_ids"].shape
    expected = cost.train(rows, length) + rows * length * cost.head_row(train=True)
    found = counted(lambda: model(**batch).loss.backward())
    assert expected == pytest.approx(found, rel=2e-4)


@pytest.mark.parametrize("objective", ["span_corruption", "denoising"])
def test_flops_of_a_decoder_that_is_shorter_or_longer(objective):
    model, batch = eager(model_of(objective)), batch_of(objective)
    cost = ModelCost(model, find_stacks(model))
    (rows, length), decoder = batch["input_ids"].shape, batch["labels"].shape[1]
    assert length != decoder
    layers = cost.train(rows, length, decoder_length=decoder)
    found = counted(lambda: model(**batch).loss.backward())
    assert layers + rows * decoder * cost.head_row(train=True) == pytest.approx(found, rel=2e-3)


def test_flops_of_two_models(tmp_path):
    model, batch = pair(), batch_of("rtd")
    for one in (model.generator, model.discriminator):
        eager(one)
    cost = cost_of(model, find_stacks(model))
    rows, length = batch["input_ids"].shape
    labelled = int((batch["labels"] != -100).sum())
    inputs = {key: value for key, value in batch.items() if key != "labels"}

    def step():
        found = model(**inputs)
        (found.logits.sum() + found.detection_logits.sum()).backward()

    # this step makes all logits of the generator, and those of the masked places once more
    head = model.generator.get_output_embeddings().weight.numel() * 2
    expected = cost.train(rows, length) + 3 * head * rows * length + head * labelled
    assert expected == pytest.approx(counted(step), rel=2e-3)
    assert cost.head_row(train=True) == 4 * head


# ------------------------------------------------------------------- refusals


def test_two_models_have_no_stage_1_and_no_teacher(tmp_path):
    with pytest.raises(GrowthError, match=r"does not fit two stages: leave out \[two_stage\]"):
        trainer_of(pair(), tmp_path, "rtd", two_stage=TwoStageConfig(1, 2))
    schedule = InheritanceSchedule(end_step=4)
    with pytest.raises(GrowthError, match="does not fit a teacher"):
        trainer_of(pair(), tmp_path, "rtd", inheritance=schedule, teacher=model_of("mlm"))


def test_models_that_are_no_pair_are_refused():
    generator, discriminator = pair().generator, model_of("rtd")
    with pytest.raises(
        GrowthError, match=r"the generator of .* is a ElectraForPreTraining: give an"
    ):
        ReplacedTokenDetection(discriminator, discriminator)
    other = transformers.ElectraForMaskedLM(
        transformers.ElectraConfig(
            **{**generator.config.to_dict(), "vocab_size": 300, "embedding_size": 16}
        )
    )
    with pytest.raises(GrowthError, match=r"differ in vocab_size \(300 and 400\)"):
        ReplacedTokenDetection(other, discriminator)
    other = transformers.ElectraForMaskedLM(
        transformers.ElectraConfig(**{**generator.config.to_dict(), "embedding_size": 8})
    )
    ReplacedTokenDetection(other, discriminator)
    with pytest.raises(GrowthError, match=r"embedding_size \(8 and 16\).*shared_embeddings out"):
        ReplacedTokenDetection(other, discriminator, shared_embeddings=True)


def test_a_loop_of_ones_own_is_told_of_the_second_loss():
    with pytest.raises(GrowthError, match="second loss, which inherited_loss would leave out"):
        inherited_loss(model_of("mlm+nsp"), None, batch_of("mlm+nsp"))


def test_batches_without_the_targets_are_refused(tmp_path):
    model, batch = model_of("mlm+nsp"), batch_of("mlm")
    trainer = trainer_of(model, tmp_path, "mlm+nsp")
    with pytest.raises(GrowthError, match="have no 'next_sentence_label'"):
        trainer.compute_loss(model, batch)


def test_the_factors_of_two_growths_are_refused(tmp_path):
    generator = make_model("ElectraForMaskedLM", tokenizer("bert"), width=16)
    model = ReplacedTokenDetection(grow(generator, intermediate_size=80), model_of("rtd"))
    with pytest.raises(GrowthError, match=r"factors belong to one growth, .* grown one by one"):
        trainer_of(model, tmp_path, "rtd", optimizer="growth-adamw")
    with pytest.raises(GrowthError, match="the model was not grown"):
        trainer_of(pair(), tmp_path, "rtd", optimizer="growth-adamw")
