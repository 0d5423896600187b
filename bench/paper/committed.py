"""The rows of paper.json, the file of results that is committed with the code.

New rows are merged into them by name. None is ever dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.paper.corpus import HASH, TEXTS, Facts, Text
from bench.shared.results import read, write
from growkern.errors import GrowthError

FILE = "paper.json"
# its rows are for tests and say nothing about the systems
UNSAVED = "micro"
Row = dict[str, Any]


def committed(results: Path) -> dict[str, Row]:
    """The rows of paper.json by the names of their jobs."""
    document = read(results / FILE)
    if not document and (results / FILE).is_file():
        raise GrowthError(f"{results / FILE} is not JSON: restore it with git")
    return {row["name"]: row for row in document.get("rows", [])}


def merged(results: Path, rows: Iterable[Row]) -> dict[str, Row]:
    """The rows of paper.json and new ones, by name. Of two with one name the new one is taken."""
    there = committed(results)
    known = {_place(name): row["text"] for name, row in there.items() if "text" in row}
    new = {row["name"]: row for row in rows}
    _check(new.values(), known, f"the rows in {FILE}", "Print and save them apart")
    for name, row in new.items():
        old = there.get(name, {})
        # the same model, which has not been classified again
        is_same = "accuracy" in old and old["losses"] == row["losses"]
        there[name] = {**({"accuracy": old["accuracy"]} if is_same else {}), **row}
    return there


def save(results: Path, rows: Iterable[Row]) -> None:
    """Merge rows into paper.json, but not those of the size for tests."""
    told = [row for row in rows if size_of(row["name"]) != UNSAVED]
    if told:
        kept = list(merged(results, told).values())
        write(results / FILE, {"op": "paper", "status": "ok", "rows": kept})


def of_text(results: Path, facts: Facts, size: str) -> list[Row]:
    """The rows of paper.json of a size whose texts are known here."""
    rows = [row for row in committed(results).values() if size_of(row["name"]) == size]
    here = {(size, text): facts[text] for text in facts}
    advice = "Give the same text, or leave out --known and --save"
    _check(rows, here, "the text of this call", advice)
    return [row for row in rows if _place(row["name"]) in here]


def size_of(name: str) -> str:
    """The size of a job, by its name."""
    return name.split("-")[0]


def _place(name: str) -> tuple[str, str]:
    """The size of a job and its text."""
    # a setting with another text is named after it
    labels = name.split("/")[0].split("-")
    return labels[0], next((text for text in TEXTS if text in labels), "corpus")


def _check(
    rows: Iterable[Row], known: Mapping[tuple[str, str], Text], other: str, advice: str
) -> None:
    for row in rows:
        text = known.get(_place(row["name"]))
        if text is not None and "text" in row and not _same(row["text"], text):
            raise GrowthError(
                f"{row['name']} was trained on {_said(row['text'])}, and {other} on {_said(text)}. "
                f"Losses on different texts cannot be compared. {advice}"
            )


def _same(text: Text, other: Text) -> bool:
    """Whether two texts are the same: by their hashes, or by their bytes in old rows."""
    # settings use more or less of the validation text, so that its bytes say nothing
    key = HASH if HASH in text and HASH in other else "train_bytes"
    return text[key] == other[key]


def _said(text: Text) -> str:
    hashed = f" (hash {text[HASH]})" if HASH in text else ""
    return f"{text['train_bytes']:,} bytes of text{hashed}"
