"""`python -m bench.paper` at a size of seconds: systems train, and a second call repeats none."""

import json
import math

import pytest

from bench.paper import __main__ as command
from bench.paper.settings import MICRO_GPT
from bench.paper.systems import RATE_SEED, SOURCE, SYSTEMS, job_of, run_of
from bench.paper.tables import interval, report, saved

WORDS = [
    "the",
    "model",
    "grows",
    "and",
    "the",
    "loss",
    "falls",
    "while",
    "the",
    "text",
    "goes",
    "on",
]


@pytest.fixture
def text(tmp_path):
    for i in range(40):
        line = " ".join(WORDS[(i * j * j + j) % len(WORDS)] for j in range(60))
        (tmp_path / f"{i}.txt").write_text(f"{i} {line}")
    return str(tmp_path / "*.txt")


def test_a_table_is_trained_once_and_printed(text, tmp_path, monkeypatch, capsys):
    systems = ["scratch", "stackbert", "mslt", "fpi", "aki_two_stage_ki"]
    call = ["paper", "table5", "--size", "micro", "--seeds", "1", "--text", text]
    call += ["--dir", str(tmp_path / "runs"), "--systems", *systems]
    monkeypatch.setattr("sys.argv", call)
    command.main()
    first = capsys.readouterr().out
    file = tmp_path / "runs" / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    # two rates each and one run, and a source for both seeds
    assert len(rows) == 3 * len(systems) + 2
    assert not list((tmp_path / "runs").rglob("checkpoint-*"))
    for row in rows:
        assert row["steps"][0] == 0 and row["flops"][0] == 0
        assert row["flops"] == sorted(row["flops"]) and all(map(math.isfinite, row["losses"]))
    by_system = {row["system"]: row for row in rows if row["seed"] != RATE_SEED}
    # exact growth starts where the source ended
    assert by_system["fpi"]["losses"][0] == pytest.approx(by_system[SOURCE]["losses"][-1], rel=1e-5)
    assert by_system["fpi"]["source flops"] == by_system[SOURCE]["flops"][-1]
    # fewer layers for some of the steps
    assert by_system["mslt"]["flops"][-1] < by_system["stackbert"]["flops"][-1]
    assert by_system["stackbert"]["flops"][-1] < by_system["scratch"]["flops"][-1]
    assert all(SYSTEMS[name].title in first for name in systems)

    torn = file.read_text()
    file.write_text(torn + torn.splitlines()[0][:50])
    command.main()
    assert first.endswith(capsys.readouterr().out)
    assert [json.loads(x) for x in file.read_text().splitlines()[: len(rows)]] == rows


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_is_a_run_file(system, tmp_path):
    """At the sizes of the table: the shares of the steps are those of the papers."""
    run = run_of(job_of(MICRO_GPT, system, 1, 1e-3, 400))
    if system == "stackbert":
        assert [(x.at_step, x.sizes) for x in run.growth] == [
            *((50, {"n_layer": 2}), (120, {"n_layer": 4})),
        ]
    if system == "mslt":
        assert [(x.at_step, x.sizes["n_layer"]) for x in run.growth] == [
            *((50, 2), (100, 3), (150, 4)),
        ]
        assert {x.new_layers_steps for x in run.growth} == {50}
    if "two_stage" in system:
        assert run.two_stage.stage1_steps == 50
    if system.endswith("_ki"):
        assert run.inheritance.end_step == 176 and run.teacher.paths == (run.growth.source,)


def test_savings_are_read_at_the_final_loss_of_scratch():
    scratch = {"losses": [4.0, 3.0, 2.0], "flops": [0.0, 50.0, 100.0], "source flops": 0.0}
    fast = {"losses": [3.0, 2.5, 1.5], "flops": [0.0, 50.0, 100.0], "source flops": 10.0}
    assert saved(fast, scratch) == pytest.approx(0.25)
    assert saved(fast, scratch, with_source=True) == pytest.approx(0.15)
    assert math.isnan(saved({**fast, "losses": [3.0, 2.5, 2.1]}, scratch))
    # Student's t with 2 degrees of freedom: 4.303 * 1 / sqrt(3)
    assert interval([1.0, 2.0, 3.0], 2) == "2.00 ± 2.48"
    assert report([]) == ""
