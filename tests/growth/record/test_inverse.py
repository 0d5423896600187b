"""The inverse of growth agrees with the record's text, and finds what growth's own code cannot."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import growkern
from growkern.families.table_files import load_family
from growkern.growth.plan.tensors import gather
from growkern.growth.record.lineage import record_of
from testbed.families import FAMILIES
from testbed.models import BERT, LLAMA, fold_back, random_model
from testbed.relatives import RELATIVES


def changed_by_growth(source, how):
    """The weights that do not come back bit for bit, without norms, and the dtype's word."""
    grown = growkern.grow(source, **how)
    plan, state, lost = grown.growth_plan, grown.state_dict(), []
    for task in plan.tasks:
        if task.is_made or task.identity is not None or task.tensor.norm:
            continue
        weight = plan.source.read(task.source)
        back = fold_back(plan, task, state[task.name]).to(weight.dtype)
        lost += [] if back.equal(weight) else [task.name]
    dtype = str(plan.dtype).removeprefix("torch.")
    return lost, {finding.what: finding.level for finding in plan.findings}.get(dtype)


BITS = [(model_type, "24", {}) for model_type in FAMILIES]
BITS += [(m, "48", {}) for m in ("bart", "bert", "gemma2", "gpt2", "llama", "olmo2", "t5")]
BITS += [(m, "36", {"symmetry": "split"}) for m in ("bert", "gemma3_text", "llama")]
BITS += [(m, "36", {"stream": "copies"}) for m in ("gemma2", "gpt2", "olmo2", "t5")]
BITS += [(m, "24", {"scale_embedding": True}) for m in ("bart",)]
BITS += [("bert", "12", {"identity_gain": gain}) for gain in (1.0, 1e-3, 1e-8)]


@pytest.mark.parametrize("model_type, width, how", BITS)
def test_what_growth_does_not_round_comes_back_bit_for_bit(model_type, width, how):
    """The plan of bfloat16 says so, and float32 follows it."""
    class_name, sizes = FAMILIES[model_type]
    family, how = load_family(model_type), dict(how)
    sizes = {**sizes, **({"scale_embedding": True} if how.pop("scale_embedding", None) else {})}
    how[family.config_field("stream")] = int(width)
    if "identity_gain" in how:
        how |= {"num_hidden_layers": 5, "depth": "identity"}
    lost, word = changed_by_growth(random_model(class_name, sizes, dtype=torch.bfloat16), how)
    assert word in ("exact", "approximate") and bool(lost) <= (word == "approximate"), lost
    if word == "exact":
        lost, _ = changed_by_growth(random_model(class_name, sizes, dtype=torch.float32), how)
        assert not lost


# ------------------------------------------------- by hand, from the text alone


def runs(text, value):
    """A map of the lineage, read by nobody's code but this."""
    found = []
    for run in text.split():
        if value:
            number, _, count = run.partition("x")
            found += [float(number)] * int(count or 1)
        else:
            first, _, last = run.partition("-")
            found += range(int(first), int(last or first) + 1)
    return np.array(found)


def as_matrix(space, what):
    """E, (target, source), or P, (source, target)."""
    index, values = runs(space[f"{what}_index"], False), runs(space[what], True)
    matrix = np.zeros((len(index), space["source"]))
    for row, (column, x) in enumerate(zip(index, values, strict=True)):
        if column < space["source"] and runs(space["write_index"], False)[row] < space["source"]:
            matrix[row, column] = x
    return matrix if what == "write" else matrix.T


@pytest.mark.parametrize("how", [{}, {"symmetry": "split"}, {"scheme": "paper", "seed": 3}])
def test_it_is_what_the_text_of_the_record_says(how):
    """W = P_out U E_in with dense matrices in NumPy, of any U, as after training."""
    source = random_model("BertForMaskedLM", BERT)
    plan = growkern.plan(source, hidden_size=32, **how)
    record, rng, checked = record_of(plan), torch.Generator().manual_seed(0), 0
    record = json.loads(json.dumps(record))
    for task in plan.tasks:
        entry = record["tensors"][task.name]
        if "norm" in entry:
            continue
        trained = torch.randn(task.shape, generator=rng, dtype=torch.float64)
        value = trained.numpy()
        for dim, axis in enumerate(entry["axes"]):
            role, _, space = axis.partition(":")
            if not space:
                continue
            layer = f"{space}@{entry.get('layer')}"
            space = record["maps"].get(layer) or record["maps"][space]
            matrix = as_matrix(space, "read") if role == "write" else as_matrix(space, "write").T
            value = np.moveaxis(np.tensordot(matrix, value, axes=(1, dim)), 0, dim)
        back = fold_back(plan, task, trained).numpy()
        assert np.allclose(back, value / entry.get("factor", 1), rtol=1e-12, atol=1e-12), task.name
        checked += 1
    assert checked > 20


# ------------------------------------------------- growth that is wrong on purpose


def scaled(axis):
    return dataclasses.replace(axis, scale=axis.scale * 1.1)


def swapped(axis):
    """Two entries of the source in each other's place."""
    a, b = axis.index[:2].tolist()
    index = torch.where(axis.index == a, b, torch.where(axis.index == b, a, axis.index))
    return dataclasses.replace(axis, index=index)


def lost(axis):
    """One copy is 0, as if its share had been forgotten."""
    return dataclasses.replace(axis, scale=axis.scale.index_fill(0, torch.tensor([1]), 0.0))


@pytest.mark.parametrize("fault", [scaled, swapped, lost])
@pytest.mark.parametrize(
    "model_type, dtype",
    [("llama", torch.float64), ("bert", torch.bfloat16), ("qwen3_moe", torch.bfloat16)],
)
def test_a_growth_made_wrong_on_purpose_is_found(monkeypatch, model_type, fault, dtype):
    """Code that builds tensors and that rebuilds them is wrong alike: the inverse is not."""
    class_name, sizes = {"llama": ("LlamaForCausalLM", LLAMA), "bert": ("BertForMaskedLM", BERT),
                         "qwen3_moe": RELATIVES["qwen3_moe"][:2]}[model_type]  # fmt: skip
    source, how = random_model(class_name, sizes, dtype=dtype), {"hidden_size": 24}
    assert all(group.ok for group in growkern.verify(source, growkern.grow(source, **how)).groups)
    right = gather.axis_maps

    def wrong(plan, task):
        maps = right(plan, task)
        # of one kind of weights alone, of many
        return (
            [*maps[:-1], fault(maps[-1])] if "q_proj" in task.name or "query" in task.name else maps
        )

    monkeypatch.setattr(gather, "axis_maps", wrong)
    report = growkern.verify(source, growkern.grow(source, **how))
    failed = [group for group in report.groups if not group.ok]
    assert failed and not report.ok
    for group in failed:
        assert "q" in group.kind and group.rebuilt_error == 0.0 and group.inverse_error > 1e-3
