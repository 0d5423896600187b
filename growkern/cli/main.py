"""The `growkern` command: reads options, calls the library and prints the result.

Exit codes: 0 for success, 1 for a failed check, 2 for wrong usage or wrong input. With code 2 the
reason is one line on stderr. 130 and 143: ended by SIGINT (Ctrl-C) or SIGTERM; one line says how to
resume.
"""

import codecs
import contextlib
import io
import json
import os
import shlex
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from growkern.errors import (
    FunctionChangedWarning,
    GrowthError,
    GrowthWarning,
    TableError,
    clean,
    is_out_of_memory,
    reason,
    say,
)
from growkern.train.safety import SignalWatch

# of a table
MOST_FAULTS = 20
# in which the first process finds what another one has found
FIRST_SECONDS = 30
python_format = warnings.formatwarning
# commands that a repeat resumes; any other starts again
RESUMING = ("grow", "cache-teacher", "train")
# what a size may be called, beside parts of its option's name -> the size
CALLED = {"width": "stream", "mlp": "ffn", "kv-head": "kv_heads"}


def one_line(error: BaseException) -> str:
    """The message of an error as one line."""
    # errors of the command-line parser; its class moves between versions of typer
    text = error.format_message() if hasattr(error, "format_message") else reason(error)
    usage = getattr(error, "ctx", None)
    if usage is not None:
        see = "" if text.endswith("?") else f"; see {usage.command_path} --help"
        text = _unknown_option(error) or text.rstrip(".") + see
    if is_out_of_memory(error):
        text = f"out of memory. {text}"
    return clean(f"growkern: {' '.join(text.split())}")


def _unknown_option(error: Any) -> str | None:
    """The message of an unknown option: the parser knows of spelling only, as of --hiden-size."""
    name = getattr(error, "option_name", None)
    if name is None:
        return None
    # --layers: --num-hidden-layers
    word = name.strip("-").removesuffix("s")
    fields, is_known = _sizes_of_source()
    sizes = {f"--{field.replace('_', '-')}": size for field, size in fields.items()}
    names = [option.opts[0] for option in error.ctx.command.get_params(error.ctx)]
    near = [x for x in names if sizes.get(x) == CALLED.get(word, "")]
    if len(word) > 2 and not near:
        near = [x for x in names if word in x and x.startswith("-")]
        near = [x for x in near if x in sizes] or near
    # the nearest name alone
    meant = ", ".join(near or (error.possibilities or [])[:1])
    advice = f"did you mean {meant}?" if meant else f"see {error.ctx.command_path} --help"
    if not is_known and any(x in sizes for x in near):
        advice += " Some models call it otherwise: see docs/families.md"
    return f"No such option: {name}; {advice}"


def _sizes_of_source() -> tuple[dict[str, str], bool]:
    """Field -> size, of the model in the first directory that the command names, and True.

    Where there is none, those of Llama, which most models share, and False.
    """
    from growkern.families import growable_fields, load_family
    from growkern.growth.source import config_of

    config = next(filter(None, (config_of(Path(word)) for word in sys.argv[1:])), {})
    kind = config.get("model_type")
    # an unknown option is named before a model that cannot be read
    with contextlib.suppress(GrowthError):
        if isinstance(kind, str):
            return growable_fields(load_family(kind)), True
    return growable_fields(load_family("llama")), False


def _format_warning(message: Any, category: Any, *place: Any, **options: Any) -> str:
    """A warning of ours as one line; others as Python prints them."""
    message = clean(str(message))
    if issubclass(category, GrowthWarning):
        import typer

        line = f"growkern: warning: {message}"
        if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
            color = typer.colors.RED if category is FunctionChangedWarning else typer.colors.YELLOW
            line = typer.style(line, fg=color)
        return f"{line}\n"
    return python_format(message, category, *place, **options)


def _run(arguments: list[str]) -> Any:
    if "" in arguments:
        place = arguments.index("") + 1
        raise GrowthError(f"argument {place} is empty: a variable of the shell may not be set")
    # here, so that a signal during the imports is caught too
    from growkern.cli.commands import app

    return app(arguments, prog_name="growkern", standalone_mode=False)


def _stopped(number: int, arguments: list[str]) -> str:
    """The line that a command ends with after a signal."""
    again = shlex.join(["growkern", *(a for a in arguments if a != "--no-resume")])
    name = signal.Signals(number).name
    if arguments and arguments[0] in RESUMING:
        return f"growkern: {name}: finished work is kept; to resume: {again}"
    return f"growkern: {name}: stopped; to start again: {again}"


def main() -> None:
    """Run the command. Errors that the user can correct become one line and exit code 2."""
    warnings.formatwarning = _format_warning
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # names of files that are no UTF-8 are printed as they are. Other encodings lack letters:
        # an error would end a command that has done its work with code 2
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    if not debug:
        # its warnings about a config would hide the one line that names the error
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    code: Any = 1
    try:
        with SignalWatch() as watch:
            code = _run(arguments)
    except BaseException as error:
        # typer turns some exceptions into others
        if watch.raised:
            code = 128 + watch.raised
        elif isinstance(error, KeyboardInterrupt):
            code = 130
        elif debug or not _is_expected(error):
            raise
        else:
            # without arguments typer prints the help, and its error says no more
            if type(error).__name__ != "NoArgsIsHelpError":
                _let_the_first_say_it(error)
                # of a table with several faults, one line each
                faults = error.faults[:MOST_FAULTS] if isinstance(error, TableError) else ()
                lines = [f"growkern: {fault}" for fault in faults] or [one_line(error)]
                for line in lines:
                    say(line, sys.stderr)
                _tell_torchrun(lines)
            code = 2
    if watch.raised and code:
        line = _stopped(watch.raised, arguments)
        say(line, sys.stderr)
        _tell_torchrun([line])
        code = 128 + watch.raised
    sys.exit(code)


def _let_the_first_say_it(error: BaseException) -> None:
    """Of the processes of a machine, let the first tell of an error in files, which all find.

    torchrun then ends the others. What only this process has found, it tells after the wait.
    """
    # with a group, the processes have begun to work on different things
    distributed = sys.modules.get("torch.distributed")
    is_grouped = distributed is not None and distributed.is_initialized()
    if is_grouped and os.environ.get("WORLD_SIZE", "1") != "1":
        # a launcher ends all processes at the first that fails, which may be another one
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ.get("LOCAL_RANK", "0") == "0" or is_grouped or not isinstance(error, GrowthError):
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(2))
    time.sleep(FIRST_SECONDS)


def _tell_torchrun(lines: list[str]) -> None:
    """Let torchrun end with our lines: below its own traceback nobody sees what we print."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        known = {"py_callstack": "\n".join(lines), "timestamp": str(int(time.time()))}
        message = {"message": {"message": lines[0], "extraInfo": known}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps(message))


def _is_expected(error: BaseException) -> bool:
    is_ours = isinstance(error, ValueError | OSError) or hasattr(error, "format_message")
    return is_ours or is_out_of_memory(error)
