"""`verify` compares copies bit for bit, also those of numbers that are not finite."""

import math

import pytest
import torch

import growkern
from testbed.families import GROUPED
from testbed.models import BERT, GPT2, random_model

# class, sizes, growth
GROWTHS = {
    "padded": ("LlamaForCausalLM", GROUPED, {"hidden_size": 24}),
    "shares": ("LlamaForCausalLM", GROUPED, {"hidden_size": 32, "symmetry": "noise"}),
    "post-norm": ("BertForMaskedLM", BERT, {"hidden_size": 24}),
    "columns first": ("GPT2LMHeadModel", GPT2, {"n_embd": 32}),
}

FFN = ("up_proj.weight", "intermediate.dense.weight", "mlp.c_fc.weight")


def grown(case, dtype, change=lambda small: None):
    class_name, sizes, how = GROWTHS[case]
    small = random_model(class_name, sizes, dtype=dtype)
    change(small)
    return small, growkern.grow(small, allow_nonfinite=True, **how)


def matrix(model):
    """A weight of the first FFN."""
    return next(p for n, p in model.named_parameters() if n.endswith(FFN))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", GROWTHS)
def test_the_lowest_bit_of_one_copy_is_seen(case, dtype):
    small, large = grown(case, dtype)
    assert not [g for g in growkern.verify(small, large).groups if not g.ok or g.rebuilt_error]
    bits = matrix(large).data.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    bits[1, 2] ^= 1
    report = growkern.verify(small, large)
    assert [g.kind.endswith(FFN) for g in report.groups if not g.ok] == [True]
    assert not report.ok


# with LayerNorm the padding of a hidden state is a sum, which may round
@pytest.mark.parametrize("case", ["shares", "post-norm"])
def test_the_lowest_bit_of_the_last_entry_is_seen(case):
    """Of padding and its readers too."""
    small, large = grown(case, torch.float32)
    for name, p in large.named_parameters():
        if p.ndim < 2:
            continue
        bits = p.data.view(torch.int32)
        bits[-1, -1] ^= 1
        assert not growkern.verify(small, large).ok, name
        bits[-1, -1] ^= 1
    assert growkern.verify(small, large).ok


@pytest.mark.parametrize("value", [-math.inf, math.nan])
@pytest.mark.parametrize("case", ["padded", "columns first"])
def test_what_is_not_finite_is_compared(case, value):
    def put(model):
        matrix(model).data[0, 0] = value

    small, large = grown(case, torch.float32, put)
    report = growkern.verify(small, large)
    assert report.ok and all(g.rebuilt_error == 0.0 for g in report.groups)
    assert any("not finite" in line for line in report.notes)
    weight = matrix(large).data
    before = weight[0, 0].item()
    for other in (0.5, -before):
        weight[0, 0] = other
        assert math.isnan(other) or not growkern.verify(small, large).ok, other
    weight[0, 0] = before
    # and outputs that fail in the grown model alone
    assert not growkern.verify(random_model(*GROWTHS[case][:2], dtype=torch.float32), large).ok
