"""Prints for the commands. Names that files give cannot control the terminal.

Every command prints through this module. Messages of errors and warnings are cleaned when they are
made, by `growkern.errors.clean`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

from growkern.errors import clean

PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def say(line: object, file: TextIO | None = None) -> None:
    """Print one line.

    Args:
        file: where to; default: standard output.
    """
    print(clean(str(line), kept=""), file=file)


def show(table: Any, console: Any = None, **options: Any) -> None:
    """Print a table or a text of rich.

    Args:
        console: of rich, which reads no markup: names may look like it. Default: a new one.
        options: of its `print`.
    """
    from rich.console import Console

    console = console or Console(markup=False)
    console.print(_Clean(table), **options)


class _Clean:
    """A table of rich whose letters are clean. The colours are rich's own."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        for segment in console.render(self._table, options):
            yield segment if segment.control else segment._replace(text=clean(segment.text))


def human(number: float) -> str:
    """A number with an SI prefix: 1234567 becomes "1.23 M"."""
    for prefix in PREFIXES:
        text = f"{number:.3g}"
        # as it is printed: 999.7 has the next prefix
        if abs(float(text)) < 1000 or prefix == PREFIXES[-1]:
            break
        number /= 1000
    return f"{text} {prefix}".strip()
