"""Copies the declared options of the losses, `growkern/ops/loss/rows/options.py`.

`python -m docs.options` writes their meanings, types and defaults into
`growkern/train/sections.py`, where a new one is put by hand first, and the numbers of formulas
into `csrc/maths.h`.
"""

import re
from pathlib import Path

from growkern.ops.loss import KL_OPTIONS, LABEL_OPTIONS
from growkern.ops.loss.rows.options import Maths

ROOT = Path(__file__).parents[1]
DECLARED = ROOT / "growkern/ops/loss/rows/options.py"
OPTIONS, HEADER = ROOT / "growkern/train/sections.py", ROOT / "csrc/maths.h"
# the options that a section of a run file gets
SECTIONS = {"LossOptions": LABEL_OPTIONS, "InheritanceSchedule": KL_OPTIONS}


def _parts(text: str, name: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """The text of a class, the entries of its docstring, and its fields, by their names."""
    whole = re.search(rf"class {name}\(?.*?(?=\n\n\n|\Z)", text, re.DOTALL)[0]
    words = whole.partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.split(r"\n(?= {8}\S)", words.rstrip().removesuffix('\n    """'))
    fields = re.findall(r"^ {4}(\w+): .* = .*$", whole, re.MULTILINE)
    lines = {x: re.search(rf"^ {{4}}{x}: .*$", whole, re.MULTILINE)[0] for x in fields}
    return whole, {x.strip().partition(":")[0]: x for x in entries}, lines


def sections(text: str) -> str:
    """The file of the sections, from its present text."""
    _, meanings, declared = _parts(DECLARED.read_text(), "LossCall")
    for name, options in SECTIONS.items():
        old, entries, fields = _parts(text, name)
        # `row_weights` is the name of a column there
        new = old
        for option in [x for x in entries if x in meanings and x != "row_weights"]:
            new = new.replace(entries[option], meanings[option])
        for option in options:
            new = new.replace(fields[option], declared[option])
        text = text.replace(old, new)
    return text


def header(text: str) -> str:
    """The header of the kernels, from its present text."""
    return re.sub("Real .*;", f"Real {', '.join(('inv_t', *Maths._fields[1:]))};", text)


def main() -> None:
    OPTIONS.write_text(sections(OPTIONS.read_text()))
    HEADER.write_text(header(HEADER.read_text()))


if __name__ == "__main__":
    main()
