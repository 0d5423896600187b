"""The options of the label's term are defined once: every loss and a run file follow."""

import ast
import inspect
from pathlib import Path
from typing import get_type_hints

import pytest

import growkern
from growkern import GrowthError, LossOptions, inherited_loss
from growkern.ops.loss.rows.label_options import RULES, LabelArguments, LabelOptions
from growkern.ops.loss.rows.state import Maths

DEFAULTS = {name: field.default for name, field in LabelOptions.__dataclass_fields__.items()}


@pytest.mark.parametrize("kind", [LabelOptions, LabelArguments], ids=lambda kind: kind.__name__)
def test_every_option_has_a_type_and_a_rule(kind):
    assert list(get_type_hints(kind)) == list(RULES) == list(DEFAULTS)
    assert get_type_hints(kind) == get_type_hints(LabelOptions)
    assert all(rule.inside(DEFAULTS[name]) for name, rule in RULES.items())
    assert not any(rule.inside(float("nan")) for rule in RULES.values())


@pytest.mark.parametrize(
    "function",
    [
        *(growkern.kl_mlm_loss, growkern.linear_kl_mlm_loss, growkern.topk_kl_mlm_loss),
        *(inherited_loss, LossOptions, Maths),
    ],
    ids=lambda function: function.__name__,
)
def test_names_and_defaults_are_the_same_everywhere(function):
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS
    if not isinstance(function, type):
        assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in DEFAULTS)


def test_the_docstring_tells_every_option_with_its_meaning():
    told = inspect.getdoc(inherited_loss).partition("Args:")[2].partition("Returns:")[0]
    meanings = inspect.getdoc(LabelOptions).partition("Args:\n")[2].partition("\n\n")[0]
    assert "label_options" not in told and meanings in told
    assert "label_options" not in str(inspect.signature(inherited_loss))


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


def test_training_does_not_repeat_the_names():
    """So a new option needs no change there."""
    train = Path(growkern.__file__).parent / "train"
    for name in ("loss/inherited.py", "config.py", "inheritance.py", "loss/batches.py"):
        tree = ast.parse((train / name).read_text())
        names = {x.arg for x in ast.walk(tree) if isinstance(x, ast.arg | ast.keyword)}
        names |= {x.value for x in ast.walk(tree) if isinstance(x, ast.Constant)}
        assert not names & DEFAULTS.keys(), name
