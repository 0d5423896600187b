"""The options of the losses are declared once: signatures, docstrings and a run file follow."""

import ast
import dataclasses
import functools
import inspect
import re
from typing import get_type_hints

import pytest

import growkern
from growkern import GrowthError, LossOptions, inherited_loss
from growkern.ops.loss.rows.options import LABEL_OPTIONS, LIMITS, LossCall, Maths
from growkern.train.loss import losses
from tests.train.loss import generate

FUNCTIONS = {name: getattr(growkern, name) for name in generate.FUNCTIONS}
# those of one loss are explained there; the others name it
EXPLAINED_BY = {"linear_kl_mlm_loss": "kl_mlm_loss", "topk_kl_mlm_loss": "linear_kl_mlm_loss"}


def options_of(function):
    parameters = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY}


def test_the_files_are_fresh():
    """`python -m tests.train.loss.generate` writes them."""
    text = generate.LOSSES.read_text()
    assert generate.losses(text) == text
    text = generate.OPTIONS.read_text()
    assert generate.sections(text) == text
    assert generate.header() == generate.HEADER.read_text()


def test_a_declared_word_reaches_the_file():
    text = generate.LOSSES.read_text()
    older = text.replace("share of the label that is", "part of it").replace("z_loss=z_loss, ", "")
    assert older != text
    assert generate.losses(older) == text


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_keywords_are_the_options(name):
    keywords = getattr(losses, generate.FUNCTIONS[name].keywords)
    assert get_type_hints(keywords).keys() == options_of(FUNCTIONS[name]).keys() - {"return_parts"}
    assert not keywords.__required_keys__


@pytest.mark.parametrize("name", FUNCTIONS)
def test_defaults_are_the_declared_ones(name):
    declared = LossCall._field_defaults | {"temperature": 2.0 if name == "inherited_loss" else 1.0}
    options = options_of(FUNCTIONS[name])
    assert options.items() >= {k: declared[k] for k in options.keys() & declared.keys()}.items()
    assert options.keys() - declared.keys() <= {"student_bias", "teacher_bias", "causal"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_option_is_explained(name):
    entries = generate._entries("\n" + FUNCTIONS[name].__doc__)
    explained = {option for key in entries for option in key.split(", ")}
    if name in EXPLAINED_BY:
        assert EXPLAINED_BY[name] in FUNCTIONS[name].__doc__
    else:
        assert explained >= options_of(FUNCTIONS[name]).keys()


def test_section_loss_of_a_run_file_has_the_declared_options():
    fields = {x.name: x.default for x in dataclasses.fields(LossOptions)}
    assert list(fields) == [*LABEL_OPTIONS, "row_weights"]
    for name in LABEL_OPTIONS:
        default = LossCall._field_defaults[name]
        assert fields[name] == default == Maths._field_defaults[name]
        assert LIMITS[name].inside(default) and not LIMITS[name].inside(float("nan"))


GENERATED = (generate.LOSSES, generate.OPTIONS, generate.HEADER)
# files where an option's name means something else: a function of PyTorch, the rows of a stored
# teacher, columns of data, a count, the tokens that a teacher did not keep
PACKAGE, KERNELS = generate.ROOT / "growkern", generate.HEADER.parent
STORED = [f"train/topk_teacher/{name}.py" for name in ("distillkit", "rows", "served", "store")]
STORED += ["train/topk_teacher/write.py", "cli/training.py"]
OTHERWISE = {
    "alpha": ["train/loop/callbacks.py"],
    "beta": ["ops/loss/linear/gemm.py"],
    "kl_rows": ["train/loop/meter.py"],
    "reduction": ["train/loss/side.py", "train/evaluation/evaluate.py"],
    "row_weights": ["train/dataset/load.py", "train/dataset/records.py", "train/run/start.py"],
    "softcap": ["train/topk_teacher/rows.py"],
    "temperature": STORED,
    "tail": [
        *("ops/loss/rows/on_cpu.py", "ops/loss/rows/triton_blocks.py"),
        *("ops/loss/topk/buckets.py", "ops/loss/topk/tail_on_triton.py"),
        *("cpu/gemm_unpacked.h", "cpu/kl_mlm.h", "cpu/kl_mlm_body.cpp", "cpu/kl_mlm_row.h"),
    ],
}


def names_in(path):
    """The names in a file's code; strings that are one name count, comments do not."""
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"\w+", re.sub(r"//.*|#pragma.*", "", text)))
    attributes = ("id", "attr", "arg", "name", "value")
    return {
        x
        for node in ast.walk(ast.parse(text))
        for x in (getattr(node, attribute, None) for attribute in attributes)
        if isinstance(x, str)
    }


@functools.cache
def named():
    """The names in each file about the losses that is written by hand."""
    paths = [*(PACKAGE / "ops/loss").rglob("*.py"), *(PACKAGE / "train").rglob("*.py")]
    paths += [*(PACKAGE / "cli").rglob("*.py"), *KERNELS.rglob("*.*")]
    files = {p: names_in(p) for p in paths if p not in GENERATED}
    return {
        str(path.relative_to(PACKAGE if PACKAGE in path.parents else KERNELS)): names
        for path, names in files.items()
    }


# models and records have fields of the names that are left out
@pytest.mark.parametrize(
    "name", [name for name in LossCall._fields if name not in ("group", "backend", "vocab_size")]
)
def test_few_files_name_an_option(name):
    """The declaration, its mathematics, and who sets it."""
    naming = [path for path, names in named().items() if name in names]
    others = OTHERWISE.get(name, [])
    assert set(others) <= set(naming), "an entry of OTHERWISE is no longer needed"
    assert len(set(naming) - set(others)) <= 5, naming


def test_an_unknown_keyword_is_refused_as_by_python():
    with pytest.raises(TypeError, match=r"inherited_loss\(\) got an unexpected .* 'z_los'"):
        inherited_loss(None, None, {}, z_los=0.1)
    # the loss below would take it
    with pytest.raises(TypeError, match=r"inherited_loss\(\) got an unexpected .* 'chunk_bytes'"):
        inherited_loss(None, None, {}, chunk_bytes=1)


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_a_value_out_of_range(value):
    with pytest.raises(GrowthError, match=r"label_smoothing is .*: it must lie in \[0, 1\)"):
        LossOptions(label_smoothing=value)
