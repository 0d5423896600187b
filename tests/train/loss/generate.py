"""Writes what follows from the declared options of the losses, `growkern/ops/loss/rows/options.py`.

`python -m tests.train.loss.generate` writes

- `growkern/train/loss/losses.py`, the losses as users call them: signatures, keywords for type
  checkers, calls, and the entries of options in docstrings;
- `growkern/train/loss/options.py`, the fields of the sections of a run file with options. All other
  words of the docstrings, and the methods, are written by hand in both files, and stay;
- `csrc/maths.h`, the numbers that the compiled kernels get.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

from growkern.ops.loss.rows.options import LABEL_OPTIONS, LIMITS, LossCall, Maths

ROOT = Path(__file__).parents[3]
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
# options of the loss of a batch, in their order there, with what differs
OF_BATCH = {
    **dict.fromkeys(("alpha", "temperature", "num_items", "divergence", "beta", "kl_rows")),
    **dict.fromkeys(
        ("teacher_weights", "row_weights", "vocab_size", "teacher_vocab_size", "max_rows")
    ),
    "causal": "bool | None = None",
    **{"return_parts": None, "temperature": "float = 2.0", "kl_rows": 'KLRows = "labels"'},
    **dict.fromkeys(LABEL_OPTIONS),
}
# sections of a run file: their options, in their order there, with what differs
SECTIONS = {
    "LossOptions": {**dict.fromkeys(LABEL_OPTIONS), "row_weights": "str | None = None"},
    "InheritanceSchedule": {
        **{"rate": "float = 0.5", "end_step": "int | None = None", "temperature": "float = 2.0"},
        "kl_rows": 'KLRows = "labels"',
        "teacher_weights": "tuple[float, ...] | None = None",
        **dict.fromkeys(("divergence", "beta")),
        **{"decay": 'Decay = "linear"', "tail": "Tail | None = None"},
    },
}


class Loss(NamedTuple):
    """A function of the file.

    Attributes:
        keywords: name of its `TypedDict`.
        options: name -> type and default, where these are not the declared ones.
        explained: options whose entries are written here.
        module: of the function behind it.
        called: the name of that function in the file.
    """

    keywords: str
    options: dict[str, str | None]
    explained: tuple[str, ...]
    module: Path
    called: str


def _options(*without: str) -> dict[str, str | None]:
    return {name: None for name in LossCall._fields if name not in without}


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
    fields = {
        ast.unparse(x.target): f"{ast.unparse(x.annotation)} = {_plain(x.value)}"
        for x in node.body
        if isinstance(x, ast.AnnAssign)
    }
    return fields, _entries(ast.get_docstring(node, clean=False))


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
        if x.arg not in loss.options
    }
    options = own | {k: given or declared[k] for k, given in loss.options.items()}
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


def _section(name: str, tree: ast.Module, text: str, declared: dict[str, str]) -> str:
    """A section of a run file; its methods are written by hand."""
    node = _node(tree, name)
    docstring = _explained(
        ast.get_docstring(node, clean=False), LABEL_OPTIONS if name == "LossOptions" else ()
    )
    fields = "".join(f"    {k}: {x or declared[k]}\n" for k, x in SECTIONS[name].items())
    lines = text.splitlines()
    methods = [
        "\n".join(lines[min([x.lineno, *(d.lineno for d in x.decorator_list)]) - 1 : x.end_lineno])
        for x in node.body
        if isinstance(x, ast.FunctionDef)
    ]
    limits = {k: f'LIMITS["{k}"]' for k in SECTIONS[name] if k in LIMITS}
    if "rate" in SECTIONS[name]:
        limits = {"rate": "SHARE"} | limits
    entries = "".join(f'        "{k}": {x},\n' for k, x in limits.items())
    return "\n\n".join(
        [
            f'@dataclass(frozen=True)\nclass {name}:\n    """{docstring}"""',
            f"    LIMITS: ClassVar[dict[str, Limit]] = {{\n{entries}    }}",
            fields.rstrip(),
            *methods,
        ]
    )


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
    tree, (declared, _) = ast.parse(text), _declared()
    parts = [text[: text.index("\n\n@dataclass")].rstrip()]
    parts += [_section(name, tree, text, declared) for name in SECTIONS]
    return "\n\n\n".join(parts) + "\n"


def header() -> str:
    """The header of the kernels."""
    fields = ", ".join(("inv_t", *Maths._fields[1:]))
    return f"""// The numbers in the formulas of a loss: 1 / temperature, then as in class Maths of
// growkern/ops/loss/rows/options.py. `python -m tests.train.loss.generate` writes this file.
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
