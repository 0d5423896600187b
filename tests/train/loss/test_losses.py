"""The options of the losses are declared once: signatures, docstrings and a run file follow."""

import dataclasses
import inspect
import re
from typing import get_type_hints

import pytest

import growkern
from docs import options as generate
from growkern import LossOptions, inherited_loss
from growkern.ops.loss.rows import options as declared_options
from growkern.ops.loss.rows.options import LossCall, Maths
from growkern.ops.loss.rows.values import LABEL_OPTIONS, LIMITS

KEYWORDS = {
    "kl_mlm_loss": declared_options.LogitKeywords,
    "linear_kl_mlm_loss": declared_options.LinearKeywords,
    "topk_kl_mlm_loss": declared_options.TopKKeywords,
    "inherited_loss": declared_options.InheritedKeywords,
}
FUNCTIONS = {name: getattr(growkern, name) for name in KEYWORDS}
# those of one loss are explained there; the others name it
EXPLAINED_BY = {"linear_kl_mlm_loss": "kl_mlm_loss", "topk_kl_mlm_loss": "linear_kl_mlm_loss"}


def options_of(function):
    parameters = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY}


def test_the_files_are_fresh():
    """`python -m docs.options` writes them."""
    for file, copied in ((generate.OPTIONS, generate.sections), (generate.HEADER, generate.header)):
        text = file.read_text()
        assert copied(text) == text


@pytest.mark.parametrize("name", FUNCTIONS)
def test_editors_see_the_options_that_the_loss_has(name):
    """Editors read the keywords, `help` the signature; types are those of the declaration."""
    kinds = get_type_hints(KEYWORDS[name])
    options = inspect.signature(FUNCTIONS[name]).parameters.values()
    shown = {x.name: x.annotation for x in options if x.kind is x.KEYWORD_ONLY}
    assert kinds.keys() == shown.keys() - {"return_parts"}
    assert not KEYWORDS[name].__required_keys__
    declared = get_type_hints(LossCall)
    if name == "inherited_loss":
        # it takes no mask
        declared["kl_rows"] = declared_options.KLRows
    assert {k: x for k, x in kinds.items() if k in declared} == {
        k: declared[k] for k in kinds.keys() & declared.keys()
    }
    assert inspect.signature(FUNCTIONS[name]).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("name", FUNCTIONS)
def test_defaults_are_the_declared_ones(name):
    declared, options = LossCall._field_defaults, options_of(FUNCTIONS[name])
    assert options.items() >= {k: declared[k] for k in options.keys() & declared.keys()}.items()
    assert options.keys() - declared.keys() <= {"student_bias", "teacher_bias", "causal"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_option_is_explained(name):
    entries = re.findall(r"(?m)^ {4}(\w[\w, ]*):", inspect.getdoc(FUNCTIONS[name]))
    explained = {option for key in entries for option in key.split(", ")}
    assert "**options" not in inspect.getdoc(FUNCTIONS[name])
    assert EXPLAINED_BY.get(name, "") in FUNCTIONS[name].__doc__
    assert name in EXPLAINED_BY or explained >= options_of(FUNCTIONS[name]).keys()


def test_section_loss_of_a_run_file_has_the_declared_options():
    fields = {x.name: x.default for x in dataclasses.fields(LossOptions)}
    assert fields.keys() == {*LABEL_OPTIONS, "row_weights"}
    for name in LABEL_OPTIONS:
        default = LossCall._field_defaults[name]
        assert fields[name] == default == Maths._field_defaults[name]
        assert LIMITS[name].inside(default) and not LIMITS[name].inside(float("nan"))


def test_an_unknown_keyword_is_refused_as_by_python():
    with pytest.raises(TypeError, match=r"inherited_loss\(\) got an unexpected .* 'z_los'"):
        inherited_loss(None, None, {}, z_los=0.1)
    # the loss below would take it
    with pytest.raises(TypeError, match=r"inherited_loss\(\) got an unexpected .* 'chunk_bytes'"):
        inherited_loss(None, None, {}, chunk_bytes=1)
