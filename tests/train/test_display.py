"""What people see of a run, beside the same numbers in its log."""

import io
import re
import sys

import pytest

from growkern.errors import GrowthWarning, human, warn
from growkern.train.loop import display
from testbed.tiny import build
from tests.train.growth.test_growing import GROWTH, trainer_in
from tests.train.safety.runs import small_trainer

SHOWN = {"disable_tqdm": False}
# transformers shows a bar for every save
SHORT = SHOWN | {"max_steps": 2, "save_strategy": "no"}


def told(capsys):
    """The lines that were printed. In a file each has the time."""
    return re.sub(r"(?m)^[\d-]{10} [\d:]{8} ", "", capsys.readouterr().out).splitlines()


def test_a_growth_is_told_when_it_is_made_and_compared_in_the_next_line(tmp_path, capsys):
    trainer = trainer_in(tmp_path, GROWTH[:1], args=SHOWN | {"max_steps": 5, "warmup_steps": 4})
    trainer.train()
    said = told(capsys)
    counts = [
        sum(p.numel() for p in build("bert", layers=n, tied=True).parameters()) for n in (2, 4)
    ]
    logged = {x["step"]: x["mlm"] for x in trainer.state.log_history if "mlm" in x}
    place = next(i for i, line in enumerate(said) if line.startswith("step 3: "))
    assert "num_hidden_layers 2 -> 4" in said[place]
    assert f"{human(counts[0])} -> {human(counts[1])} parameters" in said[place]
    assert said[place - 1].startswith("step 3 of 5: ")
    both = f"step 4 of 5: label loss {logged[4]:.4f} ({logged[3]:.4f} at step 3, "
    assert said[place + 1].startswith(both)
    assert sum(" at step " in line for line in said) == 1


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_for_a_terminal_alone(tmp_path, capsys, monkeypatch):
    trainer = small_trainer(tmp_path / "file", args=SHORT)
    trainer.train()
    # transformers draws one for the files of a model
    trainer.save_model()
    out, err = capsys.readouterr()
    lines = [line[20:] for line in out.splitlines() if line.startswith("20")]
    assert len(lines) == 2 and "\r" not in out + err and err == ""
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    small_trainer(tmp_path / "screen", args=SHORT).train()
    assert "2/2" in screen.getvalue()
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(", lr")[0] for line in shown] == [x.split(", lr")[0] for x in lines]


def test_a_silent_run_says_that_it_is_alive(tmp_path, capsys, monkeypatch):
    """Also during an evaluation. A run that logs often enough says nothing more."""
    args = {"logging_strategy": "no", "max_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    small_trainer(tmp_path / "a", args=SHOWN | args).train()
    assert "step 2" not in capsys.readouterr().out
    monkeypatch.setattr(display, "SILENCE", -1.0)
    small_trainer(tmp_path / "b", args=SHOWN | args).train()
    said = capsys.readouterr().out
    assert "step 2 of 3" in said and "left" in said and "evaluating: 3 batches" in said


def test_a_line_of_somebody_else_is_shown_whole(tmp_path, capsys):
    trainer = small_trainer(tmp_path)
    trainer.log({"accuracy": 0.5})
    assert "accuracy 0.5" in capsys.readouterr().out


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_several_processes_the_first_warns(rank, monkeypatch, recwarn):
    monkeypatch.setenv("RANK", rank)
    warn("once")
    assert [w.category for w in recwarn] == [GrowthWarning] * (rank == "0")
