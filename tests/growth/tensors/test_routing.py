"""`symmetry="routing"`: every weight goes to one copy, or to two, and the copies add up to it."""

import re

import pytest
import torch

import growkern
from growkern.errors import GrowthError
from growkern.growth.plan.axes import axis_map
from growkern.growth.plan.growth_plan import plan
from growkern.growth.plan.tensors.tensor import build_tensor
from growkern.ops.backend.launch import HAS_TRITON
from testbed.families import FAMILIES
from testbed.models import BERT, GPT2, GROUPED, LLAMA, random_model
from tests.growth.plan.test_matrix import ANY_WIDTH, EXACT, error_of_bfloat16

# two, three and five copies, and units copied one to three times; heads that grow themselves
GROWTHS = [
    ("BertForMaskedLM", BERT, {"hidden_size": 36, "intermediate_size": 33}),
    ("GPT2LMHeadModel", GPT2, {"n_embd": 24, "n_inner": 130}),
    ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, {"hidden_size": 60}),
    ("LlamaForCausalLM", LLAMA, {"hidden_size": 24, "head_dim": 8}),
]
IDS = ["bert", "gpt2", "llama", "larger heads"]
DEEP_LLAMA = {**GROUPED, "intermediate_size": 32, "num_hidden_layers": 10}


def maps_of(grown, task):
    return [axis_map(grown, task, *x) for x in zip(task.tensor.axes, task.shape, strict=True)]


def summed(value, dim, index, size):
    """The sums over all entries that have the same index, in float64."""
    shape = list(value.shape)
    shape[dim] = size
    return torch.zeros(shape, dtype=torch.float64).index_add(dim, index, value.double())


@pytest.mark.parametrize("amplitude", [1.0, 1.5, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("class_name, sizes, growth", GROWTHS, ids=IDS)
def test_a_grown_model_folds_back_bit_for_bit(class_name, sizes, growth, dtype, amplitude):
    source = random_model(class_name, sizes, dtype=dtype)
    grown = plan(source, routing=amplitude, seed=5, stream="copies", **growth)
    read, heads = 0, 0
    for task in grown.tasks:
        value, truth = build_tensor(grown, task), source.get_parameter(task.source).double()
        if task.tensor.norm:
            if grown.layout.is_dual(task.tensor.norm[1]):
                index = grown.layout.space(task.tensor.norm[1]).read_index
                assert torch.equal(summed(value, 0, index, len(truth)), truth)
                heads += 1
            continue
        for dim, m in enumerate(maps_of(grown, task)):
            if task.tensor.axes[dim].startswith("read"):
                value = summed(value, dim, m.index, m.source)
                read += 1
            else:
                # larger heads scale queries, and add entries that are 0
                is_copied = (m.scale == 1).nonzero().flatten()
                truth = truth.index_select(dim, m.index[is_copied])
                value = value.index_select(dim, is_copied)
        assert torch.equal(value.double(), truth), task.name
    assert read > 6 and (heads or not source.config.tie_word_embeddings)


@pytest.mark.parametrize("class_name, sizes, growth", GROWTHS[:3], ids=IDS[:3])
def test_with_amplitude_1_a_copy_has_all_or_nothing(class_name, sizes, growth):
    source = random_model(class_name, sizes, dtype=torch.bfloat16)
    grown = plan(source, stream="copies", **growth)
    shares = 0
    for task in grown.tasks:
        maps = maps_of(grown, task)
        (dim,) = [d for d, m in enumerate(maps) if m.copies is not None] or [None]
        if dim is None:
            continue
        value, truth = build_tensor(grown, task), source.get_parameter(task.source)
        for d, m in enumerate(maps):
            truth = truth.index_select(d, m.index)
        used, copied = value != 0, maps[dim].copies[:, 1] > 1
        assert torch.equal(value[used], truth[used])
        share = used.index_select(dim, copied.nonzero().flatten()).double().mean()
        count = maps[dim].copies[copied, 1].double().reciprocal().mean()
        assert abs(share - count) < 0.1
        shares += 1
    assert shares > 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("class_name, sizes, growth", GROWTHS, ids=IDS)
def test_backends_and_parts_agree_to_the_bit(class_name, sizes, growth, dtype):
    """An interpreted kernel takes a second: it builds the tensors of one layer, of one growth."""
    source = random_model(class_name, sizes, dtype=dtype)
    interpreted = (1.0, "auto") if dtype == torch.float32 else (2.0, "copies")
    for amplitude, stream in ((1.0, "auto"), (1.0, "copies"), (2.0, "copies")):
        grown = plan(source, routing=amplitude, stream=stream, **growth)
        for task in grown.tasks:
            whole = build_tensor(grown, task, backend="reference")
            on_triton = HAS_TRITON and (amplitude, stream) == interpreted
            on_triton &= not re.search(r"\.[1-9]\d*\.", task.name)
            for backend in ["cpu"] + ["triton"] * on_triton:
                assert torch.equal(build_tensor(grown, task, backend=backend), whole), task.name
            if len(task.shape) == 2:
                part = tuple(slice(n // 3, n - 1) for n in task.shape)
                assert torch.equal(build_tensor(grown, task, part=part), whole[part]), task.name


@pytest.mark.parametrize("times", [3, 5])
@pytest.mark.parametrize("model_type", [m for m in ANY_WIDTH if "gemma" not in m and m != "t5"])
def test_any_number_of_copies_rounds_no_bfloat16(model_type, times, tmp_path):
    """Where noise and equal shares round: 1/3 and 1/5 are no bfloat16."""
    how = {"symmetry": "routing", "stream": "copies"}
    family = FAMILIES[model_type][1]
    field = "n_embd" if model_type == "gpt2" else "hidden_size"
    error, exact = error_of_bfloat16(tmp_path, model_type, {**how, field: times * family[field]})
    assert exact and error <= EXACT


@pytest.mark.parametrize("class_name, sizes, growth", GROWTHS[:3], ids=IDS[:3])
def test_copies_get_different_gradients_at_once(class_name, sizes, growth):
    """Also where equal shares would give equal ones: the two copies of a unit of the FFN."""
    source = random_model(class_name, sizes, std=0.1)
    ids = torch.randint(3, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    apart = {}
    for symmetry in ("none", "noise", "routing"):
        model = growkern.grow(source, symmetry=symmetry, **growth).train()
        model(input_ids=ids, labels=ids).loss.backward()
        task = next(
            t for t in model.growth_plan.tasks
            if "write:ffn" in t.tensor.axes and len(t.shape) == 2
        )  # fmt: skip
        dim = task.tensor.axes.index("write:ffn")
        index = axis_map(model.growth_plan, task, "write:ffn", task.shape[dim]).index
        gradient = model.get_parameter(task.name).grad.movedim(dim, 0)
        first, second = (index == 0).nonzero().flatten()[:2]
        rest = gradient[first] - gradient[second]
        apart[symmetry] = (rest.norm() / gradient[first].norm()).item()
    assert apart["none"] < 1e-9 < apart["noise"] < apart["routing"]


def test_units_of_the_next_layer_are_no_copies():
    """AKI: the stream is routed; FFN columns, half of which belong to another layer, are not."""
    source = random_model("BertForMaskedLM", BERT)
    grown = plan(source, symmetry="routing", method="aki", hidden_size=24)
    plain = plan(source, symmetry="none", method="aki", hidden_size=24)
    tasks = {task.name: task for task in grown.tasks}
    name = "bert.encoder.layer.0.output.dense.weight"
    assert tasks[name].upper
    assert torch.equal(build_tensor(grown, tasks[name]), build_tensor(plain, tasks[name]))
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    value, equal = (build_tensor(p, tasks[name]) for p in (grown, plain))
    assert torch.equal(value[:, :12] + value[:, 12:], 2 * equal[:, :12])
    assert not torch.equal(value, equal)


def test_seed_and_tensor_choose_the_copies():
    source = random_model("GPT2LMHeadModel", GPT2)
    a, b, c = (
        growkern.grow(source, n_embd=24, stream="copies", seed=s).state_dict() for s in (0, 0, 1)
    )
    layers = [f"transformer.h.{layer}.mlp.c_fc.weight" for layer in (0, 1)]
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a[layers[0]] == 0, c[layers[0]] == 0)
    assert not torch.equal(a[layers[0]] == 0, a[layers[1]] == 0)


@pytest.mark.parametrize("amplitude", [-0.1, 3.5])
def test_other_amplitudes_are_refused(amplitude):
    with pytest.raises(GrowthError, match="routing"):
        plan(random_model("GPT2LMHeadModel", GPT2), n_embd=24, routing=amplitude)


@pytest.mark.parametrize("routing, is_exact", [(1.0, True), (0.5, True), (3.0, False)])
def test_shares_above_the_weight_enlarge_rounding_and_the_plan_says_so(routing, is_exact):
    """Two copies, 2 and -1 times the weight: their rounding grows from layer to layer."""
    truth, source = (
        random_model("LlamaForCausalLM", DEEP_LLAMA, std=0.1, dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    grown = growkern.grow(source, hidden_size=32, routing=routing, stream="copies")
    assert grown.growth_plan.exact == is_exact
    changed = [f for f in grown.growth_plan.findings if f.level == "changed"]
    assert [f.what for f in changed] == ([] if is_exact else ["routing=3"])
    # the user asked for it, so it is no failure
    assert all(f.asked for f in changed) and growkern.verify(source, grown).ok
    ids = torch.randint(50, (4, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        old, new = (model(input_ids=ids).logits.double() for model in (truth, grown))
    error = ((new - old).abs().max() / old.abs().max()).item()
    assert error < 2e-6 if is_exact else error > 1e-3


@pytest.mark.parametrize("sizes", [{"num_hidden_layers": 12}, {"vocab_size": 60}])
def test_shares_above_the_weight_need_copies(sizes):
    """More layers or tokens alone copy no entry, so no weight has shares."""
    source = random_model("LlamaForCausalLM", DEEP_LLAMA, std=0.1)
    made = plan(source, routing=3.0, depth="identity", **sizes)
    assert not [f.what for f in made.findings if f.level == "changed"]
    assert made.exact == ("vocab_size" not in sizes)
