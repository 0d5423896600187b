"""Writes what follows from the declared options of the losses, `growkern/ops/loss/rows/options.py`.

`python -m docs.options` writes

- `growkern/train/sections.py`, the options of losses in the sections of a run file. What is
  written by hand stays there: the other words of docstrings, own options, methods;
- `csrc/maths.h`, the numbers that the compiled kernels get.
"""

import ast
import re
from pathlib import Path

from growkern.ops.loss.rows.options import Maths
from growkern.ops.loss.rows.values import KL_OPTIONS, LABEL_OPTIONS

ROOT = Path(__file__).parents[1]
DECLARED = ROOT / "growkern/ops/loss/rows/options.py"
OPTIONS, HEADER = ROOT / "growkern/train/sections.py", ROOT / "csrc/maths.h"
# the options that a section of a run file gets
SECTIONS = {"LossOptions": LABEL_OPTIONS, "InheritanceSchedule": KL_OPTIONS}
# options that have another type or default in training: as `InheritanceSchedule` declares them
IN_TRAINING = ("temperature", "kl_rows")


def _class(text: str, name: str) -> tuple[ast.ClassDef, dict[str, str], dict[str, str]]:
    """A class, the type and default of each field, and the entries of its docstring."""
    node = next(x for x in ast.parse(text).body if getattr(x, "name", None) == name)
    fields = {
        ast.unparse(x.target): f"{ast.unparse(x.annotation)} = {ast.unparse(x.value)}"
        for x in node.body
        if isinstance(x, ast.AnnAssign) and ast.unparse(x.target) != "LIMITS"
    }
    words = ast.get_docstring(node, clean=False).partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.split(r"\n(?= {8}\S)", words.rstrip())
    plain = {name: x.replace("'", '"') for name, x in fields.items()}
    return node, plain, {x.strip().partition(":")[0]: x for x in entries}


def sections(text: str) -> str:
    """The file of the sections, from its present text."""
    _, declared, meanings = _class(DECLARED.read_text(), "LossCall")
    for name, options in SECTIONS.items():
        node, fields, entries = _class(text, name)
        source = old = ast.get_source_segment(text, node)
        # `row_weights` is the name of a column there
        for option in [x for x in (*fields, *options) if x in meanings and x != "row_weights"]:
            last = [*entries.values()][-1]
            there, new = entries.get(option, last), meanings[option]
            source = source.replace(there, new if option in entries else f"{last}\n{new}")
        for option in [x for x in options if x not in IN_TRAINING]:
            last = option if option in fields else [*fields][-1]
            there, new = f"    {last}: {fields[last]}\n", f"    {option}: {declared[option]}\n"
            source = source.replace(there, new if option in fields else there + new)
        text = text.replace(old, source)
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
    OPTIONS.write_text(sections(OPTIONS.read_text()))
    HEADER.write_text(header())


if __name__ == "__main__":
    main()
