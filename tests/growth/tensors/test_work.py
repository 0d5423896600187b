"""Whole models in few launches: the bits of one tensor after another, in bounded memory."""

import pytest
import torch
import transformers

import growkern
from growkern.errors import GrowthError
from growkern.growth import sharded
from growkern.growth.plan.tensors.tensor import build_tensor
from growkern.ops import expand
from growkern.ops.backend.launch import HAS_TRITON
from growkern.ops.expand import many
from growkern.ops.expand.many import Work, work_on
from testbed.models import BERT, GPT2, LLAMA, random_model

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

# kinds of launches: with and without noise, on rows or columns, with `upper`, wide or not
MOST_LAUNCHES = 8
# Every kind of launch is in one of them, and so is every way to make a tensor: copies of layers,
# the mean in uneven widths, two sources, shares, zeros of identity blocks.
CASES = [
    ("BertForMaskedLM", BERT, {"hidden_size": 20, "num_attention_heads": 5, "symmetry": "noise"}),
    ("BertForMaskedLM", BERT, {"hidden_size": 24, "num_hidden_layers": 3, "method": "aki"}),
    ("GPT2LMHeadModel", GPT2, {"n_embd": 24, "symmetry": "split"}),
    ("LlamaForCausalLM", LLAMA, {"hidden_size": 36, "symmetry": "routing", "routing": 1.5}),
    (
        "LlamaForCausalLM",
        LLAMA,
        {"hidden_size": 24, "intermediate_size": 33, "depth": "identity", "num_hidden_layers": 3},
    ),
]


@pytest.fixture
def lists(monkeypatch):
    """The work lists that are made, with as many bytes at once as the last entry of `limit`."""
    made, limit = [], [1 << 30]

    def recorded(device, backend):
        work = work_on(device, backend)
        if work.bytes_at_once:
            work.bytes_at_once = limit[-1]
            made.append(work)
        return work

    for module in (expand, many, sharded):
        monkeypatch.setattr(module, "work_on", recorded)
    return made, limit


@pytest.mark.parametrize("class_name, sizes, how", CASES)
def test_grown_at_once_is_grown_one_by_one(class_name, sizes, how, lists):
    source = random_model(class_name, sizes, dtype=torch.bfloat16)
    plan = growkern.plan(source, **how)
    expected = {task.name: build_tensor(plan, task, backend="triton") for task in plan.tasks}
    made, limit = lists
    # lists that are cut do not look at what they hold: one growth with every kind of launch tells
    for bytes_at_once in (1 << 30, *([4000] if how.get("method") == "aki" else [])):
        limit.append(bytes_at_once)
        grown = growkern.grow(source, backend="triton", **how)
        for name, tensor in expected.items():
            assert torch.equal(tensor, grown.get_parameter(name)), name
        weights = [t for t in grown.growth_plan.tasks if not t.tensor.norm]
        assert len(weights) > 2 * MOST_LAUNCHES
        few = made[-1].launches <= MOST_LAUNCHES
        assert few if bytes_at_once > 4000 else made[-1].launches > MOST_LAUNCHES


def test_built_models_are_filled_at_once(lists):
    source = random_model("LlamaForCausalLM", LLAMA)
    expected = growkern.grow(source, backend="cpu", hidden_size=24).state_dict()
    assert not lists[0]
    config = growkern.plan(source, hidden_size=24).target_config
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).double()
    growkern.grow_into(model, source, backend="triton")
    assert lists[0][-1].launches <= MOST_LAUNCHES
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    with torch.no_grad():
        source.model.layers[0].mlp.up_proj.weight[3, 4] = float("inf")
    with pytest.raises(GrowthError, match=r"layers.0.mlp.up_proj.weight, .* NaN or Inf"):
        growkern.grow_into(model, source, backend="triton")


def test_no_more_waits_than_is_allowed():
    work = Work(bytes_at_once=100)
    sources = [torch.randn(2, 3) for _ in range(5)]
    outs, seen = [torch.zeros(2, 3) for _ in sources], []
    for source, out in zip(sources, outs, strict=True):
        work.expand(source, out=out)
        # 48 bytes each: two wait at most
        work.then(lambda out=out: seen.append(out.clone()))
        assert len(work._calls) <= 2
    work.run()
    assert work.launches == 3
    for source, found in zip(sources, seen, strict=True):
        assert torch.equal(found, source)
