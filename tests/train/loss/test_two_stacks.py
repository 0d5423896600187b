"""`inherited_loss` of an encoder and a decoder, against the models' own loss and a formula."""

import copy

import pytest
import torch
import transformers

from growkern import GrowthError, count_labels, inherited_loss
from testbed.tiny import VOCAB, batch, build, randomise
from tests.train.loss.plain import plain_loss

START = {"decoder_start_token_id": 2, "pad_token_id": 0}


def t5(tied=True, seed=0, width=16, start=2):
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=width, d_kv=8, d_ff=24, num_heads=2, num_layers=2,
        dropout_rate=0.0, tie_word_embeddings=tied, **START | {"decoder_start_token_id": start},
    )  # fmt: skip
    return randomise(transformers.T5ForConditionalGeneration(config), seed).double()


def bart(seed=0, width=16):
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=width, encoder_layers=2, decoder_layers=2, dropout=0.0,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, max_position_embeddings=32, **START,
    )  # fmt: skip
    model = randomise(transformers.BartForConditionalGeneration(config), seed).double()
    model.final_logits_bias.copy_(torch.randn(1, VOCAB))
    return model


MODELS = {"t5, tied": t5, "t5": lambda **o: t5(tied=False, **o), "bart": bart}


def decoder_inputs(labels, start=2):
    """Labels moved to the right, as the models make them: the loss must not shift them again."""
    ids = torch.cat([torch.full((len(labels), 1), start), labels[:, :-1]], 1)
    return ids.masked_fill(ids == -100, 0)


def data():
    """5 tokens of the decoder for 10 of the encoder."""
    inputs = batch(labelled=0.7)
    return {**inputs, "labels": inputs["labels"][:, :5].contiguous()}


def assert_same(model, ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    parameters = list(model.parameters())
    pairs = [torch.autograd.grad(x, parameters, allow_unused=True) for x in (ours, theirs)]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize("name", MODELS)
def test_without_a_teacher_it_is_the_models_own_loss(name):
    model = MODELS[name]()
    state = copy.deepcopy(model.state_dict())
    assert_same(model, inherited_loss(model, None, data()), model(**data()).loss)
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())


@pytest.mark.parametrize("kl_rows", ["labels", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_with_a_teacher_it_is_the_formula(name, kl_rows):
    student, teacher = MODELS[name](), MODELS[name](seed=4, width=24).eval()
    inputs = data()
    mask = torch.ones_like(inputs["labels"])
    mask[1, 3:] = 0
    inputs["labels"][mask == 0] = -100
    inputs |= {"decoder_attention_mask": mask}
    loss = inherited_loss(student, teacher, inputs, alpha=0.3, kl_rows=kl_rows)
    whole = {**inputs, "decoder_input_ids": decoder_inputs(inputs["labels"])}
    logits = Logits(student, mask), Logits(teacher, mask)
    expected = plain_loss(
        logits[0], [logits[1]], {**whole, "attention_mask": mask},
        causal=False, alpha=0.3, kl_rows=kl_rows,
    )  # fmt: skip
    assert_same(student, loss, expected)
    given = inherited_loss(student, teacher, whole, alpha=0.3, kl_rows=kl_rows)
    torch.testing.assert_close(given, expected)


class Logits:
    """A model for `plain_loss`, whose mask is that of the rows, not of the encoder."""

    def __init__(self, model, mask):
        self.model, self.mask = model, mask

    def __call__(self, attention_mask, **inputs):
        assert attention_mask is self.mask
        return self.model(**inputs)


def test_each_model_begins_with_its_own_start_token():
    student, teacher, inputs = t5(), t5(seed=4, start=3).eval(), data()
    loss = inherited_loss(student, teacher, inputs, alpha=1.0)
    labels = inputs.pop("labels")
    mask = labels != -100
    z, u = (
        model(**inputs, decoder_input_ids=decoder_inputs(labels, start)).logits[mask] / 2
        for model, start in ((student, 2), (teacher, 3))
    )
    kl = (u.softmax(-1) * (u.log_softmax(-1) - z.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(loss, 4 * kl.mean())


def test_labels_of_a_decoder_are_counted_unshifted():
    assert count_labels([data()], t5()) == (data()["labels"] != -100).sum()


def test_what_does_not_fit_is_refused():
    with pytest.raises(GrowthError, match="has an encoder beside its decoder"):
        inherited_loss(t5(), build("gpt2"), data())
    with pytest.raises(GrowthError, match="has an encoder beside its decoder"):
        inherited_loss(build("gpt2"), t5(), batch())
    with pytest.raises(GrowthError, match="no 'decoder_attention_mask'"):
        inherited_loss(t5(), t5(seed=1), data(), kl_rows="all")
