"""The `growkern` command: reads options, calls the library, prints what it returns.

Exit codes: 0 done, 1 the check failed, 2 bad usage or bad input (one line on stderr).
"""

import os
import sys

from growkern.cli import growth, lineage, teacher, tools, train
from growkern.cli.app import app

# importing a module registers its commands
__all__ = ["app", "growth", "lineage", "main", "teacher", "tools", "train"]


def one_line(error: Exception) -> str:
    # the parser's own errors carry their text in format_message, wherever typer keeps its parser
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    return f"growkern: {' '.join(text.split())}"


def main() -> None:
    """Entry point: one line and exit 2 for whatever the user can mend."""
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    if not debug:
        # its warnings on a config would stand before the one line that says what is wrong
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
