"""The server whose forks run modules of the tests."""

import os
import signal
import sys

import pytest

from testbed import warm


def test_a_module_runs_as_the_main_one():
    done = warm.run(__name__, "say", "two words")
    assert (done.returncode, done.stdout, done.stderr) == (3, "two words\n", "beside\n")
    assert warm.run(__name__, "fail").returncode == 1
    assert warm.run(__name__, "die").returncode == -signal.SIGKILL


def test_forks_share_imports_and_nothing_else(monkeypatch):
    monkeypatch.setenv("GROWKERN_TEST_WARM", "yes")
    first, second = warm.run(__name__, "look"), warm.run(__name__, "look")
    assert first.stdout.split()[1:] == second.stdout.split()[1:] == ["yes", "False"]
    # the server imports what the first fork had to
    assert second.stdout.split()[0] == "True"


def test_a_module_that_does_not_end_is_killed():
    with pytest.raises(AssertionError, match="did not end in 2 s"):
        warm.run(__name__, "wait", limit_s=2)
    assert warm.run(__name__, "say", "again").stdout == "again\n"


def main(what, *rest):
    if what == "say":
        print(*rest)
        sys.stderr.write("beside\n")
        sys.exit(3)
    if what == "fail":
        raise RuntimeError
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "wait":
        signal.pause()
    print("this" in sys.modules, os.environ["GROWKERN_TEST_WARM"], hasattr(sys, "was_here"))
    sys.was_here = True
    sys.stdout.flush()
    out, sys.stdout = sys.stdout, sys.stderr
    import this  # noqa: F401

    sys.stdout = out


if __name__ == "__main__":
    main(*sys.argv[1:])
