"""The command that loads grown directories in other software, without that software."""

import pytest
import torch

from bench.outside import __main__ as outside
from bench.outside.models import EXPECTED
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


def test_rows_compare_source_and_targets_in_each_runtime(tmp_path, monkeypatch):
    for name in ("source", "even", "depth"):
        (tmp_path / "llama" / name).mkdir(parents=True)
    outputs = {"source": [1.0, 2.0], "even": [1.0, 2.0], "depth": [1.0, 1.0]}
    torch.save(torch.tensor([1.0, 2.0]), tmp_path / "llama" / EXPECTED)

    def known(directory):
        return torch.tensor(outputs[directory.name])

    def unknown(directory):
        raise ValueError("no such family\nmore")

    monkeypatch.setattr(outside, "RUNTIMES", runtimes := {"known": known, "unknown": unknown})
    monkeypatch.setattr(outside, "PACKAGES", dict.fromkeys(runtimes, "torch"))
    found = {
        (r["growth"], r["runtime"]): r.get("off", r.get("why"))
        for r in outside.read(tmp_path, [*runtimes])
    }
    assert found == {
        ("source", "known"): 0.0,
        ("even", "known"): 0.0,
        ("depth", "known"): pytest.approx(0.5),
        ("source", "unknown"): "no such family",
    }
