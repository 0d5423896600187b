"""The options of the losses are declared once: signatures, docstrings and a run file follow."""

import ast
import dataclasses
import functools
import inspect
import re
from typing import get_type_hints

import pytest

import growkern
from docs import options as generate
from growkern import GrowthError, LossOptions, inherited_loss
from growkern.ops.loss.rows import options as declared_options
from growkern.ops.loss.rows.options import LABEL_OPTIONS, LIMITS, LossCall, Maths

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
    text = generate.OPTIONS.read_text()
    assert generate.sections(text) == text
    assert generate.header() == generate.HEADER.read_text()


def test_a_declared_word_reaches_the_file():
    text = generate.OPTIONS.read_text()
    older = text.replace("share of the label that is", "part of it").replace(
        "    z_loss: float = 0.0\n", "    z_loss: int = 1\n"
    )
    assert older != text
    assert generate.sections(older) == text


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
    declared = LossCall._field_defaults | {"temperature": 2.0 if name == "inherited_loss" else 1.0}
    options = options_of(FUNCTIONS[name])
    assert options.items() >= {k: declared[k] for k in options.keys() & declared.keys()}.items()
    assert options.keys() - declared.keys() <= {"student_bias", "teacher_bias", "causal"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_option_is_explained(name):
    entries = re.findall(r"(?m)^ {4}(\w[\w, ]*):", inspect.getdoc(FUNCTIONS[name]))
    explained = {option for key in entries for option in key.split(", ")}
    assert "**options" not in inspect.getdoc(FUNCTIONS[name])
    if name in EXPLAINED_BY:
        assert EXPLAINED_BY[name] in FUNCTIONS[name].__doc__
    else:
        assert explained >= options_of(FUNCTIONS[name]).keys()


def test_section_loss_of_a_run_file_has_the_declared_options():
    fields = {x.name: x.default for x in dataclasses.fields(LossOptions)}
    assert fields.keys() == {*LABEL_OPTIONS, "row_weights"}
    for name in LABEL_OPTIONS:
        default = LossCall._field_defaults[name]
        assert fields[name] == default == Maths._field_defaults[name]
        assert LIMITS[name].inside(default) and not LIMITS[name].inside(float("nan"))


PACKAGE, KERNELS = generate.ROOT / "growkern", generate.HEADER.parent
# Words that often mean other things: a process group, the backend of any op, the size of a
# tokenizer, the filler of labels, the temperature of a stored teacher, the end of a loop, a keyword
# of PyTorch. They count where they are read from the options of a loss (one of OWNERS), or given to
# a loss by name, alone or in a dict of several options.
AMBIGUOUS = ("group", "backend", "vocab_size", "ignore_index", "temperature", "tail", "reduction")
OWNERS = ("call", "maths", "options", "loss", "inheritance", "schedule", "x")
# files where a word means another thing: keywords of PyTorch, a count, the argument of transformers
# that is translated, the columns of a served teacher, a column of the data
OTHERWISE = {
    "label_smoothing": ["train/loss/options.py"],
    "alpha": ["train/loop/callbacks.py"],
    "beta": ["ops/loss/linear/gemm.py"],
    "kl_rows": ["train/loop/meter.py"],
    "vocab_size": ["train/file_rules.py"],
    "row_weights": ["train/dataset/load.py", "train/dataset/records.py", "train/run/resolve.py"],
}
# growth and model families have no loss; the compiled kernels of growth neither
FOLDERS = ("growkern/ops/loss", "growkern/train", "growkern/cli", "csrc")


def decorators(node):
    return getattr(node, "decorator_list", ())


def _nodes(path):
    """The syntax of a file; of one that is written in part, what is written by hand."""
    tree = ast.parse(path.read_text())
    if path == generate.OPTIONS:
        classes = [x for x in tree.body if isinstance(x, ast.ClassDef)]
        tree = ast.Module([f for x in classes for f in x.body if isinstance(f, ast.FunctionDef)])
    # the types of results, for type checkers alone
    tree.body = [x for x in tree.body if "overload" not in map(ast.unparse, decorators(x))]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(x.body[0].value)
        for x in ast.walk(tree)
        if isinstance(x, documented) and x.body and isinstance(x.body[0], ast.Expr)
    }
    return [x for x in ast.walk(tree) if id(x) not in docstrings]


def _words(node):
    """The names that a node has. A text may be one, or a message with {name}."""
    for attribute in ("id", "attr", "arg", "name", "value"):
        word = getattr(node, attribute, None)
        if isinstance(word, str):
            yield from re.findall(r"^\w+$|(?<=[.{])\w+(?=[!:}])", word)


def _owned(node):
    """The names that a node reads from options of a loss, or gives to a loss."""
    if isinstance(node, ast.Attribute):
        owner = getattr(node.value, "attr", getattr(node.value, "id", None))
        yield from [node.attr] if owner in OWNERS else []
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from re.findall(r"(?<={x\.)\w+", node.value)
    if isinstance(node, ast.Dict):
        keys = {x.value for x in node.keys if isinstance(x, ast.Constant)} & {*LossCall._fields}
        yield from keys if len(keys) > 1 else ()
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func).rpartition(".")[2]
        if called in FUNCTIONS or called in ("LossCall", "Maths"):
            yield from [x.arg for x in node.keywords]


@functools.cache
def named():
    """The names in each hand-written file about the losses: all, and those that are options."""
    paths = [p for folder in FOLDERS for p in (generate.ROOT / folder).rglob("*.*")]
    files = {}
    for path in paths:
        if path in (generate.HEADER,) or path.suffix == ".pyc":
            continue
        if path.suffix == ".py":
            nodes = _nodes(path)
            names = {word.lower() for x in nodes for word in _words(x)}
            owned = {word.lower() for x in nodes for word in _owned(x) if word}
        else:
            code = re.sub(r"//.*|#pragma.*", "", path.read_text()).lower()
            names, owned = set(re.findall(r"\w+", code)), set(re.findall(r"\ba\.(\w+)", code))
        files[str(path.relative_to(generate.ROOT))] = names, owned
    return files


@pytest.mark.parametrize("name", LossCall._fields)
def test_few_files_name_an_option(name):
    """The declaration, its mathematics, and who sets it; upper and lower case alike."""
    declared = str(generate.DECLARED.relative_to(generate.ROOT))
    which = int(name in AMBIGUOUS)
    naming = {path for path, names in named().items() if name in names[which]} | {declared}
    others = {f"growkern/{path}" for path in OTHERWISE.get(name, [])}
    assert others <= naming, "an entry of OTHERWISE is no longer needed"
    assert len(naming - others) <= 5, sorted(naming - others)


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
