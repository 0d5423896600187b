"""`inherited_loss` against the loss of whole logits, with gradients, in every kind of loop."""

import copy

import pytest
import torch

from growkern import GrowthError, count_labels, inherited_loss
from growkern.train.model.sub_model import layer_stacks, text_model
from testbed.forked_ranks import on_ranks
from testbed.models import random_model
from testbed.relatives import RELATIVES
from testbed.tiny import batch, build, randomise
from tests.examples.test_scripts import MODELS, decoder
from tests.train.loss.plain import plain_loss


def padded(seed=0):
    inputs = batch(seed=seed)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, 7:] = 0
    inputs["labels"][0, 7:] = -100
    return {**inputs, "attention_mask": mask}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model, actual, expected):
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-10, atol=1e-12)
    ours, theirs = gradients(model, actual), gradients(model, expected)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-7, atol=1e-11, msg=name)


HEADS = {**MODELS, "granite, divided": lambda: decoder("Granite", logits_scaling=8.0)}


@pytest.mark.parametrize("name", HEADS)
def test_every_kind_of_head(name):
    student = HEADS[name]().double()
    teacher = randomise(copy.deepcopy(student), 1).eval()
    student.eval()
    causal, inputs = "bert" not in name, padded()
    expected = plain_loss(student, [teacher], inputs, causal=causal, alpha=0.3)
    assert_same(student, inherited_loss(student, teacher, inputs, alpha=0.3), expected)
    expected = plain_loss(student, [], inputs, causal=causal)
    assert_same(student, inherited_loss(student, None, inputs), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"divergence": "reverse"},
        {"divergence": "jsd", "beta": 0.2, "temperature": 1.5},
        {"label_smoothing": 0.1, "z_loss": 1e-2},
        {"kl_rows": "all"},
        {"row_weights": torch.rand(3, 10, dtype=torch.float64)},
        {"num_items": 17},
        {"teacher_weights": (0.25, 0.75)},
    ],
    ids=lambda options: ", ".join(options),
)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_every_option(family, options):
    student = build(family, layers=2).double()
    teachers = [build(family, layers=1, width=8, seed=s).double() for s in (5, 6)]
    inputs = padded()
    expected = plain_loss(student, teachers, inputs, causal=family == "gpt2", **options)
    assert_same(student, inherited_loss(student, teachers, inputs, **options), expected)


def test_a_pair_of_hidden_states_and_head():
    student, teacher = build("gpt2", layers=2).double(), build("gpt2", seed=3).double()
    inputs = padded()
    ids = {name: x for name, x in inputs.items() if name != "labels"}
    expected = plain_loss(student, [teacher], inputs, causal=True)

    def pair(model, head):
        return model.transformer(**ids).last_hidden_state, head

    for head in (student.lm_head, student.lm_head.weight):
        for other in (teacher, pair(teacher, teacher.lm_head)):
            loss = inherited_loss(pair(student, head), other, inputs, causal=True)
            assert_same(student, loss, plain_loss(student, [teacher], inputs, causal=True))
    aligned = {**inputs, "labels": torch.roll(inputs["labels"], -1, 1)}
    aligned["labels"][:, -1] = -100
    loss = inherited_loss(pair(student, student.lm_head), pair(teacher, teacher.lm_head), aligned)
    torch.testing.assert_close(loss, expected)


def test_accumulated_batches_are_one_large_batch():
    student, teacher = build("gpt2", layers=2).double(), build("gpt2", seed=3).double()
    parts = [batch(seed=1), batch(seed=2, labelled=0.1)]
    items = count_labels(parts, student)
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    loss = sum(
        inherited_loss(
            student, teacher, part, num_items=items, max_rows=int(count_labels([part], student))
        )
        for part in parts
    )
    assert_same(student, loss, plain_loss(student, [teacher], whole, causal=True))


def test_parts_and_a_teacher_that_does_not_run():
    student, teacher, calls = build("bert"), build("bert", seed=3), []
    teacher.register_forward_hook(lambda module, *_: calls.append(module.training))
    teacher.train()
    loss, parts = inherited_loss(student, teacher, batch(), alpha=0.25, return_parts=True)
    assert loss.item() == pytest.approx(0.75 * parts.mlm.item() + 0.25 * parts.kl.item())
    assert not calls[-1], "evaluation mode"
    before = len(calls)
    inherited_loss(student, teacher, batch(), alpha=0.0)
    assert len(calls) == before


def test_autocast():
    student, teacher = build("llama", seed=3), build("llama", seed=4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = inherited_loss(student, teacher, batch())
    assert loss.dtype == torch.float32
    ours = gradients(student, loss)
    exact = plain_loss(student, [teacher], batch(), causal=True)
    assert loss.item() == pytest.approx(exact.item(), rel=2e-2)
    for name, theirs in gradients(student, exact).items():
        assert (ours[name] - theirs).norm() <= 5e-2 * theirs.norm(), name


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_compiled_blocks(family):
    # other tests of this process may have compiled the same code as often as PyTorch allows
    torch._dynamo.reset()
    student, teacher = build(family).double(), build(family, seed=3).double()
    causal = family != "bert"
    expected = plain_loss(copy.deepcopy(student), [teacher], batch(), causal=causal)
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    for block in layer_stacks(student)[0]:
        block.compile(backend=backend)
    loss = inherited_loss(student, teacher, batch())
    assert compilations
    torch.testing.assert_close(loss, expected)
    for block in layer_stacks(student)[0]:
        block._compiled_call_impl = None
    plain = plain_loss(student, [teacher], batch(), causal=causal)
    assert_same(student, loss, plain)


def test_two_processes_are_one(tmp_path):
    """With DDP, FSDP2, accelerate and tensor parallelism."""
    on_ranks(2, "tests.train.loss.ranks", tmp_path)


def test_meshes_of_two_axes_are_one_process(tmp_path):
    """FSDP2 beside tensor parallelism, with a whole or a split head, and over a sub-mesh."""
    on_ranks(4, "tests.train.distributed.meshes", tmp_path)


def test_what_cannot_be_trained_is_refused():
    student = build("bert")
    with pytest.raises(GrowthError, match="compile its blocks"):
        inherited_loss(torch.compile(student), None, batch())
    with pytest.raises(GrowthError, match="student's objective"):
        inherited_loss(student, build("gpt2"), batch())
    with pytest.raises(GrowthError, match="no 'labels'"):
        inherited_loss(student, None, {"input_ids": batch()["input_ids"]})
    with pytest.raises(GrowthError, match="neither a masked nor a causal"):
        inherited_loss(student.bert, None, batch())


# ------------------------------------------------------------------ refused


def test_a_student_that_the_trainer_refuses_is_refused():
    model = build("bert")
    model.is_quantized = True
    with pytest.raises(GrowthError, match="quantised"):
        inherited_loss(model, None, batch())
    inherited_loss(build("bert", seed=1), model, batch())
    with pytest.raises(GrowthError, match="meta device"):
        inherited_loss(build("bert").to("meta"), None, batch())


class Wrapper(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


def test_what_is_no_model_is_refused():
    model, hidden = build("gpt2"), torch.zeros(3, 10, 16)
    for wrong, found in (
        ([hidden, model.lm_head], "a list"),
        (Wrapper(model), "a Wrapper"),
        ((hidden, "head"), "a pair with a str"),
        (None, "a NoneType"),
    ):
        with pytest.raises(GrowthError, match=f"model is {found}: give .* or a tuple"):
            inherited_loss(wrong, None, batch())
    with pytest.raises(GrowthError, match="teacher is a Wrapper: give"):
        inherited_loss(model, Wrapper(model), batch())


def test_a_model_that_is_its_own_teacher_stays_in_training():
    model = build("gpt2")
    model.train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    assert inherited_loss(model, model, batch(), alpha=1.0).item() == pytest.approx(0, abs=1e-6)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_texts_train_a_model_that_reads_images(name):
    student = random_model(*RELATIVES[name][:2])
    (stack,) = layer_stacks(student)
    assert stack is text_model(student).layers
    inputs = padded()
    expected = plain_loss(student, [], inputs, causal=True)
    assert_same(student, inherited_loss(student, None, inputs), expected)
