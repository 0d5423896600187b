"""Writes what follows from the declared options of the losses, `growkern/ops/loss/rows/options.py`.

`python -m docs.options` writes

- `growkern/train/loss/losses.py`, the losses as users call them: signatures, keywords for type
  checkers, calls, and the entries of options in docstrings;
- `growkern/train/loss/options.py`, the options of losses in the sections of a run file. What is
  written by hand stays in both files: the other words of docstrings, own options, methods;
- `csrc/maths.h`, the numbers that the compiled kernels get.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

from growkern.ops.loss.rows.options import KL_OPTIONS, LABEL_OPTIONS, LossCall, Maths

ROOT = Path(__file__).parents[1]
OPS, DECLARED = ROOT / "growkern/ops/loss", "rows/options.py"
LOSSES, HEADER = ROOT / "growkern/train/loss/losses.py", ROOT / "csrc/maths.h"
OPTIONS = LOSSES.with_name("options.py")

OF_LOGITS, OF_HEADS = (
    ("teacher_softcap",),
    ("chunk_bytes", "max_rows", "vocab_tile", "logits_dtype"),
)
OF_ALL = tuple(
    name for name in LossCall._fields if name not in (*OF_LOGITS, *OF_HEADS, "tail", "return_parts")
)
# options of the loss of a batch, in their order there
OF_BATCH = (
    *("alpha", "temperature", "num_items", "divergence", "beta", "kl_rows", "teacher_weights"),
    *("row_weights", "vocab_size", "teacher_vocab_size", "max_rows", "causal", "return_parts"),
    *LABEL_OPTIONS,
)
# the options that a section of a run file gets
SECTIONS = {"LossOptions": LABEL_OPTIONS, "InheritanceSchedule": KL_OPTIONS}
# options that have another type or default in training: as `InheritanceSchedule` declares them
IN_TRAINING = ("temperature", "kl_rows")


class Loss(NamedTuple):
    """A function of the file.

    Attributes:
        keywords: name of its `TypedDict`.
        options: in their order.
        explained: options whose entries are written here.
        module: of the function behind it.
        called: the name of that function in the file.
    """

    keywords: str
    options: tuple[str, ...]
    explained: tuple[str, ...]
    module: Path
    called: str


def _options(*without: str) -> tuple[str, ...]:
    return tuple(name for name in LossCall._fields if name not in without)


FUNCTIONS = {
    "kl_mlm_loss": Loss(
        "LogitKeywords", _options(*OF_HEADS, "tail"),
        (*OF_ALL, *OF_LOGITS, "return_parts"), OPS / "kl_mlm_loss.py", "of_logits",
    ),
    "linear_kl_mlm_loss": Loss(
        "LinearKeywords", _options("tail"),
        OF_HEADS, OPS / "linear_kl_mlm_loss.py", "of_heads",
    ),
    "topk_kl_mlm_loss": Loss(
        "TopKKeywords", _options(*OF_LOGITS), ("tail",), OPS / "topk_kl_mlm_loss.py", "of_topk",
    ),
    "inherited_loss": Loss(
        "InheritedKeywords", OF_BATCH, LABEL_OPTIONS,
        ROOT / "growkern/train/loss/inherited.py", "of_models",
    ),
}  # fmt: skip
# keywords that several losses share, and whose classes derive from which
COMMON = tuple(name for name in OF_ALL if name in OF_BATCH and name != "kl_rows")
SHARED = {
    "CommonKeywords": ("TypedDict", COMMON),
    "RowKeywords": ("CommonKeywords", tuple(name for name in OF_ALL if name not in COMMON)),
    "HeadKeywords": ("RowKeywords", OF_HEADS),
}
BASES = {"LogitKeywords": "RowKeywords", "LinearKeywords": "HeadKeywords"}
BASES |= {"TopKKeywords": "HeadKeywords", "InheritedKeywords": "CommonKeywords"}


def _node(tree: ast.Module, name: str) -> ast.ClassDef | ast.FunctionDef:
    """The class or function of that name; of an overloaded function the last one."""
    return [x for x in tree.body if getattr(x, "name", None) == name][-1]


def _entries(docstring: str) -> dict[str, str]:
    """The entries of Args: in a docstring that begins four columns in, by their names."""
    section = docstring.partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.split(r"\n(?= {8}\S)", section.rstrip())
    return {entry.strip().partition(":")[0]: entry for entry in entries}


def _declared() -> tuple[dict[str, str], dict[str, str]]:
    """The type and default of each option, and the entries of the docstring."""
    node = _node(ast.parse((OPS / DECLARED).read_text()), "LossCall")
    return _fields(node), _entries(ast.get_docstring(node, clean=False))


def _fields(node: ast.ClassDef) -> dict[str, str]:
    """The type and default of each field of a class."""
    return {
        ast.unparse(x.target): f"{_plain(x.annotation)} = {_plain(x.value)}"
        for x in node.body
        if isinstance(x, ast.AnnAssign) and x.target.id != "LIMITS"
    }


def _plain(node: ast.expr) -> str:
    return ast.unparse(node).replace("'", '"')


def _explained(docstring: str, names: tuple[str, ...]) -> str:
    """A docstring with the declared entries of some options."""
    _, declared = _declared()
    here = _entries(docstring)
    wanted = {k: x for k, x in declared.items() if set(k.split(", ")) <= set(names)}
    for key in wanted.keys() & here.keys():
        docstring = docstring.replace(here[key], wanted[key])
    missing = [x for key, x in wanted.items() if key not in here]
    if missing:
        last = list(here.values())[-1]
        docstring = docstring.replace(last, "\n".join([last, *missing]))
    return docstring


def _inherited(base: str) -> tuple[str, ...]:
    """The keywords of a class and of those that it derives from."""
    return () if base == "TypedDict" else (*SHARED[base][1], *_inherited(SHARED[base][0]))


def _class(name: str, base: str, fields: dict[str, str]) -> str:
    lines = [f"    {k}: {x.partition(' = ')[0]}" for k, x in fields.items()]
    return f"class {name}({base}, total=False):\n" + "\n".join(lines)


def _wrapped(words: list[str]) -> str:
    """Arguments of a call, as many in a line as fit."""
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > 90:
            lines.append("")
        lines[-1] += f"{word}, "
    return "\n".join(f"        {line.rstrip()}" for line in lines)


def _function(name: str, loss: Loss, docstring: str, declared: dict[str, str]) -> str:
    behind = _node(ast.parse(loss.module.read_text()), name)
    tensors = [f"{x.arg}: {_plain(x.annotation)}" for x in behind.args.args]
    own = {
        x.arg: f"{_plain(x.annotation)} = {_plain(default)}"
        for x, default in zip(behind.args.kwonlyargs, behind.args.kw_defaults, strict=True)
        if default is not None
    }
    if loss.called == "of_models":
        schedule = _fields(_node(ast.parse(OPTIONS.read_text()), "InheritanceSchedule"))
        declared = declared | {k: schedule[k] for k in IN_TRAINING}
    options = {k: x for k, x in own.items() if k not in loss.options}
    options |= {k: own.get(k) or declared[k] for k in loss.options}
    elsewhere = ("return_parts", *_inherited(BASES[loss.keywords]))
    among = {k: x for k, x in options.items() if k not in elsewhere}
    parts = [_class(loss.keywords, BASES[loss.keywords], among)]
    for kind, result in (("False] = False", "Tensor"), ("True]", "tuple[Tensor, LossParts]")):
        lines = [*tensors, "*", f"return_parts: Literal[{kind}"]
        lines += [f'**options: "Unpack[{loss.keywords}]"']
        arguments = "".join(f"    {line},\n" for line in lines)
        parts.append(f"@overload\ndef {name}(\n{arguments}) -> {result}: ...")
    lines = [*tensors, "*", *(f"{k}: {x}" for k, x in options.items())]
    arguments = "".join(f"    {line},\n" for line in lines)
    passed = _wrapped([x.partition(":")[0] for x in tensors] + [f"{k}={k}" for k in options])
    load = ""
    if loss.called == "of_models":
        load = (
            "    # loads transformers, which the other losses do without\n"
            f"    from growkern.train.loss.inherited import {name} as {loss.called}\n\n"
        )
    parts.append(
        f"def {name}(\n{arguments}) -> Tensor | tuple[Tensor, LossParts]:\n"
        f'    """{_explained(docstring, loss.explained)}"""\n'
        f"{load}    return {loss.called}(\n{passed}\n    )  # fmt: skip"
    )
    return "\n\n\n".join(parts)


def _section(node: ast.ClassDef, source: str) -> str:
    """The source of a section of a run file, with the declared options."""
    (declared, _), fields = _declared(), _fields(node)
    copied = {k: declared[k] for k in SECTIONS[node.name] if k not in IN_TRAINING}
    names = {k for k in fields if k in declared} | copied.keys()
    docstring = ast.get_docstring(node, clean=False)
    source = source.replace(docstring, _explained(docstring, tuple(names - {"row_weights"})))
    for k in copied.keys() & fields.keys():
        source = source.replace(f"    {k}: {fields[k]}\n", f"    {k}: {copied[k]}\n")
    *_, last = fields.items()
    line = "    {}: {}\n".format(*last)
    added = "".join(f"    {k}: {copied[k]}\n" for k in copied if k not in fields)
    return source.replace(line, line + added)


def losses(text: str) -> str:
    """The file of the losses, from its present text."""
    tree, (declared, _) = ast.parse(text), _declared()
    parts = [text[: text.index("\n\nclass ")].rstrip()]
    parts += [
        _class(name, base, {k: declared[k] for k in names})
        for name, (base, names) in SHARED.items()
    ]
    for name, loss in FUNCTIONS.items():
        docstring = ast.get_docstring(_node(tree, name), clean=False)
        parts.append(_function(name, loss, docstring, declared))
    return "\n\n\n".join(parts) + "\n"


def sections(text: str) -> str:
    """The file of the sections, from its present text."""
    for name in SECTIONS:
        node = _node(ast.parse(text), name)
        source = ast.get_source_segment(text, node)
        text = text.replace(source, _section(node, source))
    return text


def header() -> str:
    """The header of the kernels."""
    fields = ", ".join(("inv_t", *Maths._fields[1:]))
    return f"""// The numbers in the formulas of a loss: 1 / temperature, then as in class Maths of
// growkern/ops/loss/rows/options.py. `python -m docs.options` writes this file.
#pragma once

namespace growkern {{

template <typename Real>
struct Maths {{
    Real {fields};
}};

}}  // namespace growkern
"""


def main() -> None:
    LOSSES.write_text(losses(LOSSES.read_text()))
    OPTIONS.write_text(sections(OPTIONS.read_text()))
    HEADER.write_text(header())


if __name__ == "__main__":
    main()
