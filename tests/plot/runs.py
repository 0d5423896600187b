"""Training runs whose curves are known, and a way to look at a figure before it is saved."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from growkern.plot.curves import Curve


def drawn(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> Any:
    """The figure that a call saves; it is saved nowhere."""
    figure_module = pytest.importorskip("matplotlib.figure")
    figures = []

    def keep(figure, file, **_):
        figure.canvas.draw()
        figures.append(figure)
        file.write_bytes(b"")

    monkeypatch.setattr(figure_module.Figure, "savefig", keep)
    call()
    assert len(figures) == 1
    return figures[0]


def texts(figure: Any, gid: str | None = None) -> list[str]:
    """All words of the axes of a figure, or those with this id."""
    found = [text for axes in figure.axes for text in axes.texts]
    return [text.get_text() for text in found if gid is None or text.get_gid() == gid]


def curve(name, losses, flops=None):
    steps = tuple(range(len(losses)))
    return Curve(name, steps, tuple(flops or [10.0 * s for s in steps]), tuple(losses))


SCRATCH = curve("scratch", [8.0, 6.0, 5.0, 4.0])  # reaches 4 at 30


HISTORY = [
    {"step": 0, "eval_loss": 8.0, "flops": 0.0},
    {"step": 5, "loss": 7.0, "label_loss": 6.5, "flops": 50.0},
    {"step": 10, "eval_loss": 6.0, "flops": 100.0},
    {"step": 10, "eval_loss": 6.0, "flops": 100.0},
    {"step": 10, "train_runtime": 3.0},
]


def write_run(directory, history):
    directory.mkdir(parents=True)
    (directory / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return directory
