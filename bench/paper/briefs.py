"""The short tables of the documentation: what some lines of the tables of all runs save."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bench.paper.compare import Row, committed, compared, savings_text
from bench.paper.plans import lines_of
from bench.shared.results import table

# a line of a table at size "tiny": the table, and the line's system and label
Where = tuple[str, str, str]
FAMILIES = {"BERT": "table2", "GPT-2": "table5", "T5": "table6"}


class Brief(NamedTuple):
    """A short table.

    Attributes:
        groups: names of the groups of columns, each a saving without and with the source.
        lines: the first cell of each -> its line in each group; None: there is none.
        has_sources: whether its lines begin with small models that were trained before.
    """

    head: str
    groups: tuple[str, ...]
    lines: Mapping[str, tuple[Where | None, ...]]
    has_sources: bool = True


def _of_families(system: str, families: str = "BERT GPT-2 T5") -> tuple[Where | None, ...]:
    return tuple((name, system, "") if f in families else None for f, name in FAMILIES.items())


def _one(name: str, system: str, label: str = "") -> tuple[Where]:
    return ((name, system, label),)


BRIEFS = {
    "methods": Brief(
        "method",
        tuple(FAMILIES),
        {
            '`fpi`, `stream="padded"`': _of_families("fpi_padded"),
            '`fpi`, `stream="copies"`': _of_families("fpi"),
            '`aki`, `stream="padded"`': (None, ("symmetry", "aki_padded", ""), None),
            '`aki`, `stream="copies"`': _of_families("aki"),
            "the same, and two stages": _of_families("aki_two_stage", "BERT GPT-2"),
            "the same, and the small model as a teacher": _of_families(
                "aki_two_stage_ki", "BERT GPT-2"
            ),
            "`direct_copy`": _of_families("direct_copy"),
            "layers doubled in the run (StackBERT)": _of_families("stackbert", "BERT GPT-2"),
            "layers added on top in the run (MSLT)": _of_families("mslt", "BERT GPT-2"),
            "no growth, the small model as a teacher": (
                None,
                ("inheritance", "taught", ""),
                None,
            ),
        },
    ),
    "sources": Brief(
        "small model, its steps",
        ("grown", "`direct_copy`"),
        {
            **{
                f"GPT-2 of half the width, {steps}": tuple(
                    ("moment", system, f"source of {steps} steps")
                    for system in ("fpi_padded", "direct_copy")
                )
                for steps in ("200", "600", "2,000", "8,000")
            },
            **{
                f"BERT of {size}": (place, None)
                for size, place in {
                    "half the width, 2,000": ("table3", "aki", "source 4x64"),
                    "half the width and half the layers, 2,000": ("table3", "aki", "source 2x64"),
                    "a quarter of the width, 2,000": ("ages", "aki", "source 4x32"),
                    "a quarter of the width, 6,000": ("ages", "aki", "source 4x32 of 6,000 steps"),
                    "a quarter of the width, 8,000": ("ages", "aki", "source 4x32 of 8,000 steps"),
                    "an eighth of the width, 2,000": ("table3", "aki", "source 4x16"),
                }.items()
            },
        },
    ),
    "one-run": Brief(
        "8 layers, of which the run begins with",
        ("AdamW, width 64", "AdamW, width 32", "Muon, width 64", "Muon, width 32"),
        {
            f"{layers} layers, `{depth}` at 70 % of the steps": tuple(
                ("one_run", f"{depth}_at_70", f"from {layers}x{width}, 8x{width}, {optimizer}")
                for optimizer in ("adamw", "muon")
                for width in (64, 32)
            )
            for layers, depth in ((2, "random"), (4, "stack"))
        },
        has_sources=False,
    ),
    "upcycling": Brief(
        "in place of training the dense model on",
        ("",),
        {
            "whole copies": _one("upcycling", "upcycled", "at 0.009"),
            "whole copies, `drop=0.5`": _one("upcycling", "upcycled_drop", "at 0.009"),
            "twice as many experts, half as wide": _one("upcycling", "upcycled_halves", "at 0.009"),
            "whole copies at a lower rate": _one("upcycling", "upcycled", "at 0.003"),
            "the same, and the dense model as a teacher": _one(
                "upcycling", "upcycled_taught", "at 0.003"
            ),
            **{
                f"{kind} from scratch": _one("upcycling", "scratch", f"{kind}, twice the FLOPs")
                for kind in ("mixture", "dense")
            },
        },
    ),
}


def brief_text(results: Path, name: str) -> str:
    """A short table of the runs in a folder of results, in markdown."""
    brief, rows = BRIEFS[name], committed(results)
    heads = [
        f"{group}: {words}" if group else words
        for group in brief.groups
        for words in ("FLOPs saved", "source counted")[: 1 + brief.has_sources]
    ]
    lines = [
        [words, *(x for where in places for x in savings(rows, where)[: 1 + brief.has_sources])]
        for words, places in brief.lines.items()
    ]
    return table([brief.head, *heads], lines)


def savings(rows: Mapping[str, Row], where: Where | None) -> tuple[str, str]:
    """What a line saves, without and with the training of its source; "-" if it has no runs."""
    if where is None:
        return "-", "-"
    name, system, label = where
    lines = compared(lines_of(name, "tiny") or [], name, rows)
    for line, pairs in lines.items():
        if (line.system, line.label) == (system, label):
            runs = list(pairs.values())
            return savings_text(runs), savings_text(runs, with_source=True)
    return "-", "-"
