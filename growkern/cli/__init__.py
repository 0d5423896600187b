"""The `growkern` command: reads options, calls the library and prints the result.

Exit codes: 0 for success, 1 for a failed check, 2 for wrong usage or wrong input. With code 2 the
reason is one line on stderr. 130 and 143: ended by SIGINT (Ctrl-C) or SIGTERM.
"""

import os
import sys
import warnings
from typing import Any

from growkern.cli import growth, lineage, teacher, tools, train
from growkern.cli.app import app
from growkern.errors import GrowthWarning

python_format = warnings.formatwarning
# importing a module registers its commands
__all__ = ["app", "growth", "lineage", "main", "teacher", "tools", "train"]


def one_line(error: Exception) -> str:
    """The message of an error as one line."""
    # errors of the command-line parser; its class moves between versions of typer
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    return f"growkern: {' '.join(text.split())}"


def _format_warning(message: Any, category: Any, *place: Any, **options: Any) -> str:
    """A warning of ours as one line; others as Python prints them."""
    if issubclass(category, GrowthWarning):
        return f"growkern: warning: {message}\n"
    return python_format(message, category, *place, **options)


def main() -> None:
    """Run the command. Errors that the user can correct become one line and exit code 2."""
    warnings.formatwarning = _format_warning
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    if not debug:
        # its warnings about a config would hide the one line that names the error
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        sys.exit(app(arguments, prog_name="growkern", standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        expected = isinstance(error, ValueError | OSError) or hasattr(error, "format_message")
        if debug or not expected:
            raise
        print(one_line(error), file=sys.stderr)
        sys.exit(2)
