"""`symmetry="split"`: unequal shares of a weight that sum back to it bit for bit."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from growkern.growth.plan.axes import axis_map
from growkern.growth.plan.growth_plan import plan
from growkern.growth.plan.tensors.tensor import build_tensor
from growkern.growth.space.spaces import counts, partial_sums, signed_split, take_shares
from growkern.ops.backend.launch import HAS_TRITON
from testbed.models import BERT, GPT2, LLAMA, random_model
from tests.shared.walks import walk

NARROW = [torch.bfloat16, torch.float16]
DTYPES = [*NARROW, torch.float32, torch.float64]


def every_number(dtype):
    """All 16-bit numbers whose shares cannot overflow: zeros and subnormals too."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return every[every.abs().double() <= torch.finfo(dtype).max / 1.5]


def shares_of(index, seed):
    """Shares of a map as a growth draws them, and how they are taken."""
    rng = torch.Generator().manual_seed(seed)
    share = (1 + signed_split(index, rng)) / counts(index, int(index.max()) + 1)
    return share, partial_sums(index, share, torch.ones(len(index), dtype=torch.bool))


def folded(weights, index, size, dtype):
    """The shares of every source column, summed in `dtype` in the order of the copies."""
    zeros = torch.zeros(weights.shape[0], size, dtype=dtype)
    return zeros.index_add(1, index, weights.to(dtype))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_number_is_the_sum_of_its_shares(dtype, count):
    numbers = every_number(dtype)
    index = torch.zeros(count, dtype=torch.long)
    for seed in range(3):
        share, sums = shares_of(index, seed)
        grown = numbers[:, None].repeat(1, count)
        take_shares(grown, 1, *sums)
        for wide in (torch.float32, torch.float64):
            assert torch.equal(folded(grown, index, 1, wide)[:, 0], numbers.to(wide))
        # and they are the shares that were asked for, to two roundings of what is split
        ulp = torch.finfo(dtype).eps * numbers.double().abs() + torch.finfo(dtype).smallest_normal
        asked = numbers.double()[:, None] * share
        assert ((grown.double() - asked).abs() <= 2 * ulp[:, None]).all()
        assert share.unique().numel() == count


@walk(100)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31))
def test_any_map_folds_back(data, dtype, seed):
    index = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=40))
    index = torch.tensor(index).unique(return_inverse=True)[1]
    size = int(index.max()) + 1
    rng = torch.Generator().manual_seed(seed)
    source = torch.randn(data.draw(st.integers(1, 9)), size, generator=rng, dtype=torch.float64)
    source = (source * 2.0 ** data.draw(st.integers(-20, 8))).to(dtype)
    _, sums = shares_of(index, seed)
    for dim in (1, 0):
        grown = source[:, index] if dim else source[:, index].T.contiguous()
        take_shares(grown, dim, *sums)
        grown = grown if dim else grown.T
        for c in range(size):
            # fsum rounds once: the sum of float64 numbers in any order may round on the way
            sums_R = [math.fsum(row) for row in grown[:, index == c].tolist()]
            assert sums_R == source[:, c].tolist()
        if dtype in NARROW:
            assert torch.equal(folded(grown, index, size, torch.float32), source.float())


EVEN = [
    ("BertForMaskedLM", BERT, {"hidden_size": 36, "intermediate_size": 33}),
    ("GPT2LMHeadModel", GPT2, {"n_embd": 24}),
    ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, {"hidden_size": 36}),
]
EVEN_IDS = ["bert", "gpt2", "llama"]


def fold(grown, task, value):
    """A grown tensor read back: read axes summed over the copies, of written ones each copy."""
    value = value.float()
    for dim, (axis, size) in enumerate(zip(task.tensor.axes, task.shape, strict=True)):
        m = axis_map(grown, task, axis, size)
        if axis.startswith("read"):
            shape = list(value.shape)
            shape[dim] = m.source
            value = value.new_zeros(shape).index_add(dim, m.index, value)
        elif axis.startswith("write"):
            first = [m.index.tolist().index(i) for i in range(m.source)]
            copies = value.index_select(dim, torch.tensor(first))
            assert torch.equal(value, copies.index_select(dim, m.index)), task.name
            value = copies
    return value


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("class_name, sizes, growth", EVEN, ids=EVEN_IDS)
def test_a_grown_model_folds_back_bit_for_bit(class_name, sizes, growth, dtype):
    source = random_model(class_name, sizes, dtype=dtype)
    grown = plan(source, symmetry="split", stream="copies", seed=5, **growth)
    split, heads = 0, 0
    for task in grown.tasks:
        value, truth = build_tensor(grown, task), source.get_parameter(task.source).float()
        if not task.tensor.norm:
            assert torch.equal(fold(grown, task, value), truth), task.name
            split += any(axis.startswith("read") for axis in task.tensor.axes)
        elif grown.layout.is_dual(task.tensor.norm[1]):
            index = grown.layout.space(task.tensor.norm[1]).read_index
            assert torch.equal(folded(value[None], index, len(truth), torch.float32)[0], truth)
            assert not torch.equal(value[: len(truth)].float(), truth)
            heads += 1
    assert split > 6 and heads


@pytest.mark.parametrize("class_name, sizes, growth", EVEN, ids=EVEN_IDS)
def test_backends_and_parts_agree_to_the_bit(class_name, sizes, growth):
    source = random_model(class_name, sizes, dtype=torch.bfloat16)
    grown = plan(source, symmetry="split", **growth)
    backends = ["cpu"] + ["triton"] * HAS_TRITON
    for task in grown.tasks:
        whole = build_tensor(grown, task, backend="reference")
        for backend in backends:
            assert torch.equal(build_tensor(grown, task, backend=backend), whole), task.name
        if len(task.shape) == 2:
            part = tuple(slice(n // 3, n - 1) for n in task.shape)
            assert torch.equal(build_tensor(grown, task, part=part), whole[part]), task.name


def test_coordinates_that_are_no_copies_take_no_part():
    """A pre-norm's extra coordinates are zeros: what reads them is beside the shares."""
    source = random_model("GPT2LMHeadModel", GPT2, dtype=torch.bfloat16)
    grown = plan(source, symmetry="split", stream="copies", n_embd=28)
    name = "transformer.h.0.mlp.c_fc.weight"
    (task,) = [task for task in grown.tasks if task.name == name]
    copies = build_tensor(grown, task)[:24, :48].float()
    assert torch.equal(copies[:12] + copies[12:], source.get_parameter(name).float())
