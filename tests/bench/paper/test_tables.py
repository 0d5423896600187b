"""`python -m bench.paper` at a size of seconds: systems train, and a second call repeats none."""

import json
import math
import shutil

import pytest

from bench.paper import __main__ as command, plans, runs
from bench.paper.jobs import RATE_SEED, SOURCE
from bench.paper.plans import TABLES, lines_of
from bench.paper.runs import to_toml
from bench.paper.settings import SIZES
from bench.paper.systems import SYSTEMS, job_of, run_of
from bench.shared.results import write
from growkern.train.topk_teacher.store import read_header

DOMAIN = lines_of("domain", "micro")[0].setting
WORDS = "the model grows and the loss falls while the text goes on"


@pytest.fixture
def text(tmp_path):
    words = WORDS.split()
    for i in range(40):
        line = " ".join(words[(i * j * j + j) % len(words)] for j in range(60))
        (tmp_path / f"{i}.txt").write_text(f"{i} {line}")
    return str(tmp_path / "*.txt")


def test_a_table_is_trained_once_and_printed(text, tmp_path, monkeypatch, capsys):
    systems = ["scratch", "mslt", "fpi"]
    call = ["paper", "table5", "--size", "micro", "--seeds", "1", "--text", text]
    call += ["--dir", str(tmp_path / "runs"), "--workers", "1", "--systems", *systems]
    monkeypatch.setattr("sys.argv", call)
    command.main()
    first = capsys.readouterr().out
    file = tmp_path / "runs" / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    # a rate each and three lengths, and a source for both seeds
    assert len(rows) == 4 * len(systems) + 2
    # of the sources alone, whose moments some systems take over
    kept = {path.parent.name for path in (tmp_path / "runs").rglob("checkpoint-*")}
    assert kept == {f"source-8-0.003-seed{seed}" for seed in (1, RATE_SEED)}
    for row in rows:
        # grown models, and the shortest of a seed, have a start; it comes after no step and no work
        shortest = row["seed"] != RATE_SEED and row["steps"][-1] == 8
        grows = row["system"] != SOURCE and SYSTEMS[row["system"]].grows
        assert (row["steps"][0] == 0) == (shortest or grows)
        assert (row["flops"][0] == 0) == (row["steps"][0] == 0)
        assert row["flops"] == sorted(row["flops"]) and all(map(math.isfinite, row["losses"]))
    lengths = {
        name: {row["steps"][-1] for row in rows if row["system"] == name}
        for name in ("scratch", "fpi")
    }
    # those that choose a rate have 8 steps
    assert lengths == {"scratch": {8, 16, 32}, "fpi": {8, 16, 32}}
    full = [row for row in rows if row["seed"] != RATE_SEED]
    by_system = {row["system"]: row for row in sorted(full, key=lambda row: row["steps"][-1])}
    # exact growth starts where the source ended
    (start,) = {row["losses"][0] for row in full if row["system"] == "fpi"}
    assert start == pytest.approx(by_system[SOURCE]["losses"][-1], rel=1e-5)
    assert by_system["fpi"]["source flops"] == by_system[SOURCE]["flops"][-1]
    # fewer layers for some of the steps
    assert by_system["mslt"]["flops"][-1] < by_system["scratch"]["flops"][-1]
    assert all(SYSTEMS[name].title in first for name in systems)

    torn = file.read_text()
    file.write_text(torn + torn.splitlines()[0][:50])
    command.main()
    assert first.endswith(capsys.readouterr().out)
    assert [json.loads(x) for x in file.read_text().splitlines()[: len(rows)]] == rows

    # on another machine, with all rows but one and no model: the source is trained again, and the
    # run that lacks ends where it ended among others
    *kept, lost = sorted(rows, key=lambda row: row is by_system["fpi"])
    write(tmp_path / "paper.json", {"op": "paper", "status": "ok", "rows": kept})
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    shutil.rmtree(tmp_path / "runs")
    monkeypatch.setattr("sys.argv", [*call, "--known"])
    command.main()
    assert first.endswith(capsys.readouterr().out)
    *same, again = [json.loads(line) for line in file.read_text().splitlines()]
    assert same == kept and again["name"] == lost["name"] and again["flops"] == lost["flops"]
    assert again["losses"] == pytest.approx(lost["losses"], rel=1e-5)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_is_a_run_file(system, tmp_path):
    """At the sizes of the table: the shares of the steps are those of the papers."""
    run = run_of(job_of(DOMAIN, system, 1, 1e-3, 400))
    if system == "stackbert":
        grows = [(x.at_step, x.sizes) for x in run.growth]
        assert grows == [(50, {"n_layer": 2}), (120, {"n_layer": 4})]
    if system == "mslt":
        grows = [(x.at_step, x.sizes["n_layer"]) for x in run.growth]
        assert grows == [(50, 2), (100, 3), (150, 4)]
        assert {x.new_layers_steps for x in run.growth} == {50}
    if "two_stage" in system:
        assert run.two_stage.stage1_steps == 50
    if system.endswith("_ki"):
        assert run.inheritance.end_step == 176 and run.teacher.paths == (run.growth.source,)


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_made_of_runs(name):
    """All run files are valid, no two jobs share a folder, and only the baseline is shared."""
    lines = lines_of(name, "micro")
    jobs = {}
    for line in lines:
        job = job_of(line.setting, line.system, 1, line.rate or 5e-4, 400)
        text = to_toml(run_of(job))
        assert jobs.setdefault(job.name, text) == text
        assert line.system in (TABLES[name].baseline, "scratch") or line.setting.target_sizes()
    assert lines[0].system == TABLES[name].baseline and len(jobs) > 1
    assert all(lines_of(name, size) for size in SIZES)


OTHER_TABLES = [
    ("table6", ["scratch", "fpi"]),
    ("table5", ["scratch", "aki_two_stage_ki"]),
    ("inheritance", ["scratch", "taught_by_two", "taught_by_generations"]),
    ("domain", ["adapted", "adapted_taught"]),
]


@pytest.mark.parametrize("name, systems", OTHER_TABLES)
def test_other_tables_train(name, systems, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plans, "PARTS", (1.0,))
    call = ["paper", name, "--size", "micro", "--seeds", "1", "--text", text, "--domain", text]
    call += ["--dir", str(tmp_path), "--systems", *systems]
    monkeypatch.setattr("sys.argv", call)
    command.main()
    table = capsys.readouterr().out
    assert all(SYSTEMS[system].title in table for system in systems)


def test_a_source_becomes_a_mixture_before_its_run(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plans, "PARTS", (1 / 4,))
    call = ["paper", "upcycling", "--size", "micro", "--seeds", "1", "--text", text]
    call += ["--dir", str(tmp_path), "--systems", "continued", "upcycled_taught"]
    monkeypatch.setattr("sys.argv", call)
    command.main()
    assert "whole copies, taught" in capsys.readouterr().out
    (row,) = (one for one in runs.rows_of(tmp_path).values() if one["system"] == "upcycled_taught")
    (source,) = row["needs"].values()
    assert row["losses"][0] == pytest.approx(source, rel=1e-5) and row["losses"][1] < source
    config = json.loads((tmp_path / row["name"] / "config.json").read_text())
    assert config["num_local_experts"] == 8 and config["output_router_logits"]


def test_kept_predictions_are_counted_before(text, tmp_path, monkeypatch, capsys):
    """Per row of the text they cost what a teacher in training costs per row."""
    monkeypatch.setattr(plans, "PARTS", (1.0,))
    call = ["paper", "inheritance", "--size", "micro", "--seeds", "1", "--text", text]
    call += ["--dir", str(tmp_path), "--systems", "scratch", "taught", "taught_top4"]
    monkeypatch.setattr("sys.argv", call)
    command.main()
    capsys.readouterr()
    rows = {row["system"]: row for row in runs.rows_of(tmp_path).values() if row["seed"] == 1}
    scratch, taught, kept = (rows[name] for name in ("scratch", "taught", "taught_top4"))
    (cache,) = tmp_path.glob("micro-gpt/source-8-*-seed1-top4")
    examples = read_header(cache).examples
    # 14 of 32 steps have the teacher; the last batch of the first epoch is not full
    assert examples < 14 * 16
    per_example = (taught["flops"][-1] - scratch["flops"][-1]) / (13 * 16 + examples % 16)
    assert kept["flops"][-1] == scratch["flops"][-1]
    before = kept["source flops"] - rows[SOURCE]["flops"][-1]
    assert before == pytest.approx(per_example * examples, rel=1e-9)
    assert taught["source flops"] == rows[SOURCE]["flops"][-1]
