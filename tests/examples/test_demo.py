"""The demo from its text to its picture, with hundredths of the steps."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import growkern
from examples.demo import demo

PRESET = demo.Preset(0.006, 2, 1, 300, 40, 3000)


def test_make_demo_quick_trains_all_models_and_draws_what_they_saved(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    # inside another make, which runs the suite, make also prints the directory
    line = ["make", "-n", "--no-print-directory", "-o", "setup", "demo-quick"]
    line += [f"DEMO_DIR={tmp_path / 'demo'}", "ARGS=--seed 3"]
    root = Path(growkern.__file__).parents[1]
    made = subprocess.run(line, cwd=root, capture_output=True, text=True)
    _, option, *words = shlex.split(made.stdout)
    assert (option, words[0]) == ("-m", demo.__name__)
    monkeypatch.setattr(demo, "QUICK", PRESET)
    monkeypatch.setattr(sys, "argv", words)
    demo.main()
    tmp_path /= "demo-quick"
    said = capsys.readouterr().out
    assert "(11/11) growkern plot" in said and 'to the mark: the final loss of "scratch"' in said
    for name in demo.RUNS:
        assert f"│ {name} " in said
    assert (tmp_path / "loss_vs_flops.png").read_bytes().startswith(b"\x89PNG")
    folder = tmp_path / "seed3"
    assert growkern.verify(folder / "small", folder / "grown").level == "exact"
    result = json.loads((tmp_path / "results.json").read_text())
    small, (scratch, *grown) = result["sources"][0], result["curves"]
    assert [curve["name"] for curve in (scratch, *grown)] == list(demo.RUNS)
    # exact growth begins where the small model ended, and a run from scratch does not
    starts = {curve["name"]: curve["losses"][0] for curve in (scratch, *grown)}
    assert starts["fpi"] == pytest.approx(small["losses"][-1], rel=1e-5) != starts["scratch"]
    # the steps are those of the run files, times the share of the preset
    assert scratch["steps"][-1] == 4 and {curve["steps"][-1] for curve in grown} == {3}


@pytest.mark.parametrize("preset", [demo.FULL, demo.QUICK])
def test_the_presets_train_through_both_stages_and_evaluate_at_the_end(preset, tmp_path):
    tokenizer = demo.make_text(tmp_path / "text", 300, 40, 3000)
    (tmp_path / "seed").mkdir()
    demo.prepare(tmp_path / "seed", preset, 5, tokenizer)
    from growkern.train.run.file import load_run

    for name in demo.RUNS:
        run = load_run(tmp_path / "seed" / f"{name}.toml")
        assert run.training.seed == 5 and run.training.steps % run.training.eval_every == 0
        assert run.training.eval_every == preset.eval_every == run.training.log_every / 4
        if run.two_stage:
            assert 0 < run.two_stage.stage1_steps < run.training.steps / 2
