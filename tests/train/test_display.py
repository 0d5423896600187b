"""What people see of a run, beside the same numbers in its log."""

import io
import sys

from growkern.train.loop import display
from tests.train.safety.runs import small_trainer

SHOWN = {"disable_tqdm": False}
# transformers shows a bar for every save
SHORT = SHOWN | {"max_steps": 2, "save_strategy": "no"}


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


def test_the_log_of_another_program_is_moved_aside(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"epoch": 1}\n')
    for _ in range(2):
        small_trainer(tmp_path, args=SHORT).train()
    assert (tmp_path / "log.old.jsonl").read_text() == '{"epoch": 1}\n'
    assert '"step": 2' in (tmp_path / "log.jsonl").read_text()


def test_a_silent_run_says_that_it_is_alive(tmp_path, capsys, monkeypatch):
    """Also during an evaluation. A run that logs often enough says nothing more."""
    args = {"logging_strategy": "no", "max_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    small_trainer(tmp_path / "a", args=SHOWN | args).train()
    assert "step 2" not in capsys.readouterr().out
    monkeypatch.setattr(display, "SILENCE", -1.0)
    small_trainer(tmp_path / "b", args=SHOWN | args).train()
    said = capsys.readouterr().out
    assert "step 2 of 3" in said and "left" in said and "evaluating: 3 batches" in said
