"""What users read: the error that they can act on, warnings, and what commands print.

Names that files give cannot control the terminal: messages are cleaned when they are made, and
lines and tables when they are printed. Every command prints through this module.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import sys
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import FrameType
from typing import Any, TextIO

# Characters of a message, and of one with a path that is longer than a name: two paths of Linux's
# greatest length fit. A damaged file may hold names and values of any length: of a longer
# message only the two ends are kept.
MOST, MOST_WITH_PATHS, LONGEST_NAME = 1000, 2 * 4096 + 1000, 255
HEAD, TAIL = 600, 300


# controls, marks that turn the direction of writing, and separators of lines: all else is printed
CONTROLS = ("Cc", "Cf", "Zl", "Zp")


def clean(text: str, kept: str = "\n\t") -> str:
    """A text whose control characters are spelt out: those of a name could control a terminal."""
    if text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape").decode()
        if unicodedata.category(letter) in CONTROLS and letter not in kept
        else letter
        for letter in text
    )


class GrowthError(ValueError):
    """Input that cannot be used: names the tensor or field, what was found and how to fix it."""

    def __init__(self, message: object = "") -> None:
        text = clean(str(message))
        words = [word for word in text.split() if len(word) > LONGEST_NAME]
        has_path = any(max(map(len, word.split("/"))) <= LONGEST_NAME for word in words)
        most = MOST_WITH_PATHS if has_path else MOST
        super().__init__(text if len(text) <= most else f"{text[:HEAD]} ... {text[-TAIL:]}")


class UnfitError(GrowthError):
    """Sizes that do not fit together, where near ones may."""


class TableError(GrowthError):
    """A family table that cannot be used.

    Attributes:
        faults: what is wrong, one line each: the key, the value and the fix.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = [clean(fault, "") for fault in faults]


class GrowthWarning(UserWarning):
    """Something that the user should know. The work continues."""

    def __init__(self, message: object = "") -> None:
        super().__init__(clean(str(message)))


class FunctionChangedWarning(GrowthWarning):
    """The grown model will compute another function than its source."""


# the warnings of this process, printed or not, since they were last compared with those of others
FOUND: list[str] = []


def warn(message: str, category: type[GrowthWarning] = GrowthWarning) -> None:
    """Warn at the user's line that called this package, however many calls lie between.

    Of several processes that a launcher started, the first one warns: all of them do the same work.
    `growkern.train.run.start` tells of what others alone have found.
    """
    FOUND.append(message)
    if os.environ.get("RANK", "0") != "0":
        return
    frame: FrameType | None = sys._getframe(1)
    place = frame
    while frame is not None:
        if str(frame.f_globals.get("__name__")).split(".")[0] == __package__:
            place = frame.f_back or frame
        frame = frame.f_back
    assert place is not None
    registry = place.f_globals.setdefault("__warningregistry__", {})
    name, line = place.f_code.co_filename, place.f_lineno
    warnings.warn_explicit(category(message), None, name, line, registry=registry)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out. On a CPU, PyTorch has no class for it."""
    is_known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    is_of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return is_known or is_of_system or "can't allocate memory" in str(error)


def reason(error: BaseException) -> str:
    """Why something failed, in one line, without what only a programmer reads.

    The class stands before the text where the text alone says little, as that of a KeyError.
    """
    if isinstance(error, OSError) and error.strerror:
        of = error.filename
        return f"{of}: {error.strerror}" if isinstance(of, str) else error.strerror
    text, name = " ".join(str(error).split()), type(error).__name__
    says_enough = isinstance(error, (ValueError, TypeError, RuntimeError, OSError))
    return text if text and says_enough else f"{name}: {text}".removesuffix(": ")


def nearest(name: str, allowed: Iterable[str]) -> str:
    """The end of an unknown-name message: the closest allowed name, or all of them."""
    options = sorted(allowed)
    # a longer name is like none of them, and would take minutes to compare
    close = difflib.get_close_matches(name[:100], options, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; allowed: {', '.join(options)}"


# ----------------------------------------------------------------- printing

PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def say(line: object, file: TextIO | None = None) -> None:
    """Print one line at once; default: to standard output."""
    # a file would get it when 8 KiB are full, which takes a run minutes
    print(clean(str(line), kept=""), file=file, flush=True)


def print_table(table: Any, console: Any = None, **options: Any) -> None:
    """Print a table or a text of rich.

    Args:
        console: of rich, which reads no markup: names may look like it. Default: a new one.
    """
    from rich.console import Console

    console = console or Console(markup=False)
    console.print(_Clean(table), crop=False, **options)


class _Clean:
    """A table of rich whose letters are clean. The colours are rich's own."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        for segment in console.render(self._table, options):
            yield segment if segment.control else segment._replace(text=clean(segment.text))


@contextlib.contextmanager
def without_bars(progress: bool = True, others: Sequence[str] = ()) -> Iterator[None]:
    """While active, transformers and modules of other libraries show no progress bars.

    With `progress` they do where stderr is a terminal.
    """
    from transformers.utils import logging

    def hidden(bar: Any, args: Any, options: dict[str, Any]) -> Any:
        return bar(*args, **{**options, "disable": True})

    with contextlib.ExitStack() as stack:
        if not (progress and sys.stderr.isatty()):
            # its switch would turn that of the Hub's client with it, and never back
            stack.callback(logging.set_tqdm_hook, logging.set_tqdm_hook(hidden))
            for library in (import_module(name) for name in others if find_spec(name)):
                if not library.are_progress_bars_disabled():
                    library.disable_progress_bars()
                    stack.callback(library.enable_progress_bars)
        yield


def human(number: float) -> str:
    """A number with an SI prefix: 1234567 becomes "1.23 M"."""
    for prefix in PREFIXES:
        text = f"{number:.3g}"
        # as it is printed: 999.7 has the next prefix
        if abs(float(text)) < 1000 or prefix == PREFIXES[-1]:
            break
        number /= 1000
    return f"{text} {prefix}".strip()


def counted(number: int, noun: str) -> str:
    """A number of things: "1 row", "2 rows", "2 processes"."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def a_kind(value: object) -> str:
    """The class of a value with its article: "a list", "an int"."""
    name = type(value).__name__
    return f"a{'n' if name[0] in 'AEIOaeio' else ''} {name}"


def listed(names: Sequence[str], most: int) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
