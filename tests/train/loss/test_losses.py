"""The options of the losses are declared once: signatures, docstrings and a run file follow."""

import dataclasses
import inspect
import re
from pathlib import Path
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


@pytest.mark.parametrize(
    "name",
    [
        *(*LABEL_OPTIONS, "teacher_softcap", "num_items", "return_parts", "vocab_start"),
        *("chunk_bytes", "max_rows", "vocab_tile", "logits_dtype", "teacher_vocab_size"),
        "ignore_index",
    ],
)
def test_few_files_name_an_option(name):
    """The declaration, its mathematics, and who sets it; for names that mean nothing else."""
    package = Path(growkern.__file__).parent
    paths = {*package.rglob("*.py"), *generate.HEADER.parent.rglob("*.*")}
    written = sorted(paths - {generate.LOSSES, generate.HEADER})
    naming = [str(p) for p in written if name in re.findall(r"\w+", p.read_text())]
    assert len(naming) <= 5, naming


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
