"""`python -m bench.paper` at a size of seconds: systems train, and a second call repeats none."""

import json
import math
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import BertForMaskedLM

from bench.paper import __main__ as command
from bench.paper import plans, runs
from bench.paper.jobs import RATE_SEED, SOURCE, source_of
from bench.paper.pictures import maps_text
from bench.paper.plans import TABLES, lines_of
from bench.paper.runs import to_toml, write_run_file
from bench.paper.settings import MICRO_GPT, SIZES
from bench.paper.systems import SYSTEMS, job_of, run_of
from bench.shared.results import append_row, write
from growkern.errors import GrowthError
from growkern.train.topk_teacher.store import read_header
from tests.shared import walks

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


def test_final_models_are_classified_once(text, tmp_path, monkeypatch, capsys):
    """One library says "the", the other "loss": any model can tell them apart."""
    for name, word in (("one", "the "), ("other", "loss ")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text(word * 2000)
    monkeypatch.setattr(runs, "CLASSES", (str(tmp_path / "one"), str(tmp_path / "other")))
    call = ["paper", "table2", "--size", "micro", "--seeds", "1", "--text", text]
    call += ["--dir", str(tmp_path / "runs"), "--workers", "1", "--systems", "scratch", "fpi"]
    monkeypatch.setattr("sys.argv", call)
    monkeypatch.setattr(plans, "PARTS", (1.0,))
    command.main()
    out = capsys.readouterr().out
    file = tmp_path / "runs" / runs.ACCURACIES
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["accuracy"] for one in found] == [1.0, 1.0] and out.count("| 100.0 % |") == 2
    # those that chose the rates are not
    assert {one["name"].split("-seed")[1] for one in found} == {"1"}
    command.main()
    assert capsys.readouterr().out == out and len(file.read_text().splitlines()) == 2

    # rows of another machine come without models, and these end elsewhere
    file.unlink()
    for job in found:
        shutil.rmtree(tmp_path / "runs" / job["name"])
    rows = tmp_path / "runs" / runs.ROWS
    known = [json.loads(line) for line in rows.read_text().splitlines()]
    changed = next(row for row in known if row["name"] == found[0]["name"])
    changed["losses"] = [loss + 1 for loss in changed["losses"]]
    append_row(rows, changed)
    command.main()
    shown, said = capsys.readouterr()
    assert shown == out and f"{changed['name']}: another machine ended 1 away" in said

    call = ["paper", "maps", "--size", "micro", "--dir", str(tmp_path / "runs")]
    monkeypatch.setattr("sys.argv", call)
    command.main()
    pictures = [Path(line) for line in capsys.readouterr().out.split()]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    shown = maps_text(tmp_path / "runs")
    assert [f"]({picture.name})" in shown for picture in pictures] == [True, True]
    # the one before training is drawn of the model with which the training began
    (before,) = (tmp_path / "runs").glob("micro-bert/fpi-32-*-before")
    source = tmp_path / "runs" / "micro-bert" / "source-8-0.003-seed1"
    grown, small = (BertForMaskedLM.from_pretrained(one).eval() for one in (before, source))
    ids = torch.arange(12)[None]
    torch.testing.assert_close(grown(ids).logits, small(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_is_a_run_file(system, tmp_path):
    """At the sizes of the table: the shares of the steps are those of the papers."""
    run = run_of(job_of(DOMAIN, system, 1, 1e-3, 400))
    if system == "stackbert":
        assert [(x.at_step, x.sizes) for x in run.growth] == [
            *((50, {"n_layer": 2}), (120, {"n_layer": 4}))
        ]
    if system == "mslt":
        assert [(x.at_step, x.sizes["n_layer"]) for x in run.growth] == [
            *((50, 2), (100, 3), (150, 4))
        ]
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


@pytest.mark.parametrize("name", TABLES)
def test_targets_have_heads_as_wide_as_the_sources(name):
    """Growth copies whole heads. Widths that no head divides would fail after hours of training."""
    for setting in {line.setting for size in SIZES[1:] for line in lines_of(name, size)}:
        small, large = setting.source, setting.target
        assert small.width % small.heads == large.width % large.heads == 0
        assert small.width // small.heads == large.width // large.heads


OTHER_TABLES = [
    ("table6", ["scratch", "fpi"]),
    ("table5", ["scratch", "aki_two_stage_ki"]),
    ("inheritance", ["scratch", "taught_by_two", "taught_by_generations"]),
    ("domain", ["adapted", "adapted_taught"]),
]
if walks.times > 1:
    OTHER_TABLES += [
        (
            "optimizer",
            ["scratch", "padded_adamw", "padded_moments", "padded_rewarmed", "fpi", "fpi_adamw"],
        ),
        ("depth", ["scratch", "fpi_identity", "fpi_interleave"]),
        ("table4", ["scratch", "aki", "aki_adamw", "aki_after_stage1"]),
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


def after(file, wanted, made):
    """Waits for a file, if it wants one, and makes one: whether the wanted one came."""
    until = time.monotonic() + 100
    while wanted and not (file / wanted).exists() and time.monotonic() < until:
        time.sleep(0.01)
    found = not wanted or (file / wanted).exists()
    (file / made).touch()
    return float(found)


def test_a_run_waits_for_what_it_needs_and_for_nothing_else(tmp_path):
    quick, slow = (source_of(MICRO_GPT, seed) for seed in (1, 2))
    grown = job_of(MICRO_GPT, "fpi", 1, 4e-3, 8)
    assert grown.needs == (quick,)
    # the slow source ends after the run that needs the quick one
    waits_for = {slow: "grown", quick: "", grown: "quick"}
    names = {slow: "slow", quick: "quick", grown: "grown"}
    seen = []

    def prepared(job):
        assert job is not grown or quick in seen
        return partial(after, tmp_path, waits_for[job], names[job])

    place = runs.Workplace(tmp_path, {}, lambda line: None, workers=2)
    for job, found in place._called([slow, quick, grown], prepared):
        seen.append(job)
        assert found, names[job]
    # the slow one waits for the file of the other, and may be seen first of the two
    assert seen[0] == quick and {*seen} == {quick, grown, slow}


def test_rows_of_other_settings_are_refused(tmp_path):
    job = job_of(MICRO_GPT, "scratch", 1, 0.003, 8)
    append_row(tmp_path / runs.ROWS, {"name": job.name})
    place = runs.Workplace(tmp_path, {}, lambda line: None)
    write_run_file(job, tmp_path)
    assert place.make([job]) == [{"name": job.name}]
    other = job_of(replace(MICRO_GPT, warmup=1 - MICRO_GPT.warmup), "scratch", 1, 0.003, 8)
    assert other.name == job.name
    with pytest.raises(GrowthError, match=r"settings of this run have changed.*another --dir"):
        place.make([other])
