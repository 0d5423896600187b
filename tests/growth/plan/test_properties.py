"""Random shapes of every family, grown in random ways: the target folds back to the source."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, strategies as st

import growkern
from growkern.families.table_files import load_family
from growkern.growth.record.lineage import plan_from_lineage, read_lineage
from growkern.growth.source.source import open_source
from testbed.families import FAMILIES
from testbed.models import fold_back, random_model, relative_error
from tests.growth.plan.test_families import turning
from tests.growth.plan.test_matrix import GROUPED_QUERIES
from tests.shared.walks import walk

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# shares of both signs, of up to 3 / C each, cancel
EXACT = 1e-11


def heads_of(draw, model_type):
    """Query heads and their key heads, per name in the table."""
    family = load_family(model_type)
    if model_type in GROUPED_QUERIES:
        kv_heads = draw(st.integers(1, 3))
        return {"kv_heads": kv_heads, "q_heads": kv_heads * draw(st.integers(1, 3))}
    heads = draw(st.integers(1, 4))
    # one hidden size for all stacks
    return {key: heads * draw(st.integers(1, 2)) for key in family.query_heads}


@st.composite
def sources(draw, model_type):
    """Class, dtype and sizes of a small model of this family."""
    family = load_family(model_type)
    class_name = draw(st.sampled_from(sorted(family.classes)))
    heads = heads_of(draw, model_type)
    count = max(heads.values())
    hidden = count * 2 * draw(st.integers(1, 3))
    sizes = {
        family.config_field("stream"): hidden,
        family.config_field("vocab"): draw(st.integers(50, 60)),
    }
    for key, value in heads.items():
        assume(hidden % (2 * value) == 0)
        sizes[family.config_field(key)] = value
    if not family.forces_head_dim:
        sizes[family.config_field("head_dim")] = hidden // count
    if family.attention.partial:
        sizes |= turning(draw(st.sampled_from([0.25, 0.5, 0.75, 1.0])))
    for key in family.unit_sizes:
        sizes[family.config_field(key)] = draw(st.integers(3, 24))
    for key in family.stacks.values():
        sizes[family.config_field(key)] = draw(st.integers(1, 3))
    for field, key in family.classes[class_name].repeats.items():
        # else transformers cannot run the source either
        sizes[field] = sizes[family.config_field(key)]
    if "emb" in family.config:
        sizes["embedding_size"] = draw(st.sampled_from([hidden, 7]))
    if "layer_types" in family.per_layer:
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        layers = sizes["num_hidden_layers"]
        sizes["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    sizes["tie_word_embeddings"] = draw(st.booleans())
    return class_name, draw(st.sampled_from(DTYPES)), sizes


@st.composite
def growths(draw, model_type, class_name, sizes):
    """Larger sizes for some fields, and a way to grow; not all of them fit together."""
    family = load_family(model_type).of_class(class_name)
    how = {}
    for key in family.growable:
        field = family.config_field(key)
        if not draw(st.booleans()):
            continue
        old = sizes[field]
        if model_type in GROUPED_QUERIES and key in ("q_heads", "kv_heads"):
            group = sizes["num_attention_heads"] // sizes["num_key_value_heads"]
            kv_heads = sizes["num_key_value_heads"] + draw(st.integers(0, 3))
            how["num_key_value_heads"] = kv_heads
            how["num_attention_heads"] = kv_heads * draw(st.integers(group, 2 * group))
        elif key == "stream":
            how[field] = (
                old * draw(st.sampled_from([2, 3]))
                if draw(st.booleans())
                else old + draw(st.integers(1, old))
            )
        elif key in family.stacks.values():
            how[field] = old + draw(st.integers(1, 3))
        else:
            how[field] = old + draw(st.integers(1, 2 * old))
    if family.forces_head_dim and draw(st.booleans()):
        # as many heads, larger ones
        heads = {family.config_field(key) for key in family.query_heads}
        how |= {field: sizes[field] for field in heads}
        stream, most = family.config_field("stream"), max(how[field] for field in heads)
        how[stream] = sizes[stream] + most * draw(st.integers(1, 6))
    how["method"] = draw(st.sampled_from(["fpi", "fpi", "aki"]))
    how["symmetry"] = draw(st.sampled_from(["routing", "noise", "split", "none"]))
    how["maps"] = draw(st.sampled_from(["cyclic", "balanced"]))
    how["depth"] = draw(st.sampled_from(["stack", "interleave", "identity"]))
    how["scheme"] = draw(st.sampled_from(["exact", "exact", "exact", "paper"]))
    if how["scheme"] == "exact" and family.config_field("stream") in how:
        how["stream"] = draw(st.sampled_from(["auto", "copies", "padded"]))
    how["seed"] = draw(st.integers(0, 3))
    return how


def assert_folds_back(plan, grown):
    """P_out U E_in = W for each weight that copies one, and every weight of the source is there."""
    # unequal shares are rounded one by one, up to 3 times as large as what they add up to
    factor = 16 if plan.options.symmetry == "none" else 64
    found, others = set(), set()
    for task in plan.tasks:
        if task.identity or task.upper or task.tensor.norm or task.is_made:
            others |= {task.source, task.upper}
            continue
        truth = plan.source.read(task.source).double()
        back = fold_back(plan, task, grown[task.name])
        # not their ratio: a bias may be 0
        allowed = factor * torch.finfo(plan.dtype).eps * truth.norm()
        assert (back - truth).norm() <= allowed, task.name
        found.add(task.source)
    assert found | others >= plan.source.dtypes.keys()


@pytest.mark.parametrize("model_type", FAMILIES)
@walk(5)
@given(data=st.data())
def test_what_grew_folds_back_to_its_source(model_type, data):
    class_name, dtype, sizes = data.draw(sources(model_type))
    how = data.draw(growths(model_type, class_name, sizes))
    try:
        source = random_model(class_name, {**FAMILIES[model_type][1], **sizes}, dtype=dtype)
    except Exception:
        # sizes that the config class itself refuses
        assume(False)
    try:
        plan = growkern.plan(source, **how)
    except growkern.GrowthError as error:
        assert "\n" not in str(error)
        return
    with tempfile.TemporaryDirectory() as name:
        small, large = Path(name) / "small", Path(name) / "large"
        source.save_pretrained(small)
        growkern.grow_checkpoint(small, large, progress=False, **how)
        grown = growkern.grow(source, **how)
        loaded = type(source).from_pretrained(large, dtype="auto").eval()
        replayed = plan_from_lineage(open_source(small), read_lineage(large))
    state = grown.state_dict()
    assert all(torch.equal(x, state[key]) for key, x in loaded.state_dict().items())
    assert replayed.to_dict() == plan.to_dict()
    if plan.options.method == "fpi" or plan.exact:
        assert_folds_back(plan, state)
    if plan.exact and dtype == torch.float64:
        loaded.growth_plan = plan
        assert relative_error(source, loaded) <= EXACT
