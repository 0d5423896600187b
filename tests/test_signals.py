"""SIGINT and SIGTERM in every command: one line, the exit code, and a repeat to the same bytes.

A command runs in a fork of this process, which has imported everything. It gets the signal when it
is about to open its N-th file below the directory of the test. A run gets it at events of its loop
and around its growth too, and also where Python or other code swallows what the handler raises.
"""

import contextlib
import itertools
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import growkern.growth.grow
import growkern.growth.record.verify
import growkern.plot.curves
import growkern.train.loop.growing
import growkern.train.run.start
import growkern.train.topk_teacher.write
from growkern.cli.main import main
from tests.cli.test_commands import RUN, checkpoint  # noqa: F401
from tests.faults.walk import tree
from tests.shared import walks
from tests.train.safety.runs import SENDERS, Everywhere

SIZES = ("--hidden-size=24", "--max-shard-size=4KB")
COMMANDS = {
    "plan": ("plan", "small", "--hidden-size=24"),
    "grow": ("grow", "small", "new", *SIZES),
    "grow over": ("grow", "small", "old", *SIZES, "--seed=3", "--overwrite"),
    "verify": ("verify", "small", "grown"),
    "cache": (
        *("cache-teacher", "small", "text", "--out=new", "--k=2", "--temperature=1"),
        *("--sequence-length=8", "--batch-size=2"),
    ),
    "train": ("train", "run.toml"),
    "export": ("export", "out", "new"),
}
# at the first file and at later ones; not all commands reach the last
MOMENTS = ((1, signal.SIGINT), (6, signal.SIGTERM), (25, signal.SIGINT), (45, signal.SIGTERM))


def signal_at(number, moment, directory, how="plain"):
    """Send a signal at a moment. Returns the function that counts moments, in a file too."""
    seen, file = itertools.count(1), os.open(directory / "moments", os.O_CREAT | os.O_WRONLY)

    def pass_by():
        os.write(file, b".")
        if next(seen) == moment:
            SENDERS[how](number)

    def watch(event, arguments):
        if event == "open" and str(arguments[0]).startswith(str(directory)):
            pass_by()

    sys.addaudithook(watch)
    return pass_by


def everywhere(number, moment, directory, how):
    """As `signal_at`; moments are the events of a training loop and the ends of a growth too."""
    pass_by = signal_at(number, moment, directory, how)
    build, grow = growkern.train.run.start.build_trainer, growkern.train.loop.growing.grown_model

    def built(*args, **options):
        trainer = build(*args, **options)
        trainer.add_callback(Everywhere(pass_by))
        return trainer

    def grown(*args):
        pass_by()
        model = grow(*args)
        pass_by()
        return model

    growkern.train.run.start.build_trainer, growkern.train.loop.growing.grown_model = built, grown


def command(directory, arguments, number=0, moment=0, send=signal_at, **options):
    """Exit code and stderr of a command in a child process."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.dup2(writer, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            # the paths that the child opens then start with it
            os.chdir(directory)
            sys.argv = ["growkern", *arguments]
            for one in (signal.SIGINT, signal.SIGTERM):
                signal.signal(one, signal.default_int_handler)
            if number:
                send(number, moment, directory, **options)
            main()
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            with contextlib.suppress(BaseException):
                sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def absolute(directory, arguments):
    names = ("small", "new", "old", "grown", "text", "run.toml", "out")
    made = [str(directory / a) if a in names else a for a in arguments]
    return [a.replace("--out=new", f"--out={directory / 'new'}") for a in made]


@pytest.fixture(scope="module")
def imported():
    """What a command imports when it reads its arguments is imported before the forks."""
    arguments, sys.argv = sys.argv, ["growkern", "export", "not there", "new"]
    try:
        with pytest.raises(SystemExit):
            main()
    finally:
        sys.argv = arguments


@pytest.fixture
def place(tmp_path, checkpoint, imported):  # noqa: F811
    torch.set_num_threads(1)
    (tmp_path / "small").symlink_to(checkpoint)
    (tmp_path / "text").write_text("a small model grows\n" * 30)
    (tmp_path / "run.toml").write_text(RUN)
    for name in ("grown", "old"):
        growkern.grow_checkpoint(tmp_path / "small", tmp_path / name, hidden_size=24)
    return tmp_path


def results(directory):
    """All files but the logs of times."""
    logs = {"trainer_state", "log.jsonl", "events.", "training_args", "manifest"}
    logs |= {".lock", "scheduler", "moments"}
    found = {n: v for n, v in tree(directory).items() if not any(x in n for x in logs)}
    return {name: value for name, value in found.items() if "checkpoint-" not in name}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_stopped_command_goes_on_to_the_same_bytes(place, name, tmp_path_factory):
    arguments = COMMANDS[name]
    saved = tmp_path_factory.mktemp("saved")
    if name == "export":
        assert not command(place, absolute(place, COMMANDS["train"]))[0]
    subprocess.run(["cp", "-a", f"{place}/.", saved], check=True)

    def again():
        subprocess.run(["rm", "-rf", place], check=True)
        subprocess.run(["cp", "-a", saved, place], check=True)

    done, said = command(place, absolute(place, arguments))
    assert done == 0, said
    wanted = results(place)
    struck = 0
    for moment, number in MOMENTS:
        again()
        code, said = command(place, absolute(place, arguments), number, moment)
        if not code:
            break
        struck += 1
        assert code == 128 + number, said
        # a bar that is drawn anew begins with \r
        written = (line.rpartition("\r")[2] for line in said.split("\n"))
        bars_left_out = [line for line in written if line.strip() and "%|" not in line]
        lines = [line for line in bars_left_out if not line.startswith(("{", " "))]
        assert len(lines) == 1, said
        line = lines[0]
        assert signal.Signals(number).name in line or "stopped" in line
        shown = shlex.split(line.partition(": growkern ")[2])
        assert shown == absolute(place, [a for a in arguments if a != "--no-resume"])
        # whatever is half done lies in a hidden workplace, for the repeat
        code, said = command(place, shown)
        exists = code == 2 and "exists" in said
        assert code == 0 or exists, said
        assert results(place) == wanted, moment
    # plan reads few files
    assert struck >= 2 - (name == "plan")


SIGNALS = 5
GROWING = """
[[growth]]
at_step = 2
hidden_size = 24
"""


def test_no_signal_of_a_run_that_grows_is_lost(place):
    text = RUN.replace("steps = 2", "steps = 4") + GROWING
    (place / "run.toml").write_text(text.replace('"small"', f'"{place}/small"'))
    arguments = absolute(place, COMMANDS["train"])
    done, said = command(place, arguments, signal.SIGTERM, -1, everywhere, how="plain")
    assert done == 0, said
    wanted, moments = results(place / "out"), (place / "moments").stat().st_size
    draw = random.Random(walks.start or 0)
    for _ in range(SIGNALS * walks.times):
        number = draw.choice([signal.SIGINT, signal.SIGTERM])
        case = draw.randint(1, moments), draw.choice([*SENDERS])
        shutil.rmtree(place / "out", ignore_errors=True)
        code, said = command(place, arguments, number, case[0], everywhere, how=case[1])
        assert code == 128 + number, (case, said)
        assert said.count("to resume: growkern train") == 1, (case, said)
        assert not any(word in said for word in ("Traceback", "ignored", "Error")), (case, said)
        code, said = command(place, arguments)
        assert code == 0, (case, said)
        assert results(place / "out") == wanted, case
