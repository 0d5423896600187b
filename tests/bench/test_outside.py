"""The command that loads grown directories in other software, without that software."""

from bench.outside import __main__ as outside
from bench.outside.runtimes import RUNTIMES


def row(runtime, **more):
    return {"family": "llama", "growth": "even", "runtime": runtime, "version": "1.2", **more}


def test_what_differs_is_refused_or_loads_nothing_fails():
    def failures(rows):
        return outside.failures(rows, [*RUNTIMES])

    fine = [row(name, off=1e-7) for name in RUNTIMES]
    assert failures(fine) == []
    assert failures([*fine, {**row("ctranslate2", why="unknown"), "growth": "source"}]) == []
    assert failures([*fine, {**row("ctranslate2", why="unknown"), "growth": "experts"}]) == []
    for wrong in (row("ctranslate2", off=0.01), row("ctranslate2", off=float("nan"))):
        assert len(failures([*fine, wrong])) == 1
    assert failures([*fine, row("ctranslate2", why="refused")]) == [
        "llama, even, ctranslate2: refused"
    ]
    assert failures(fine[:-1]) == [f"{[*RUNTIMES][-1]} loaded nothing"]
