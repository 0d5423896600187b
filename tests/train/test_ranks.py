"""Training on two processes is training on one."""

import json
import shutil
from itertools import chain

import numpy as np
import pytest
import torch
import transformers

from growkern import GrowthError, run as train
from testbed import warm
from testbed.forked_ranks import on_ranks
from testbed.tiny import MEASURED, Batches
from tests.train import ranks
from tests.train.distributed import rows
from tests.train.run.test_run import RUN, workplace  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(2, ranks.__name__, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return [torch.load(folder / f"{i}.pt", weights_only=True) for i in range(len(ranks.CASES))]


def timeless(line):
    return {name: value for name, value in line.items() if name not in MEASURED}


@pytest.mark.parametrize("i", range(len(ranks.CASES)))
def test_two_processes_are_one_with_batches_twice_as_large(found, i, tmp_path, monkeypatch):
    """Losses, parts, FLOPs, weights and the evaluation's mean, over unequal numbers of labels."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    trainer = ranks.trainer_for(tmp_path, ranks.CASES[i], 4)
    trainer.train()
    alone = ranks.found_by(trainer)
    assert len(alone["log"]) == ranks.STEPS
    for ours, theirs in zip(found[i]["log"], alone["log"], strict=True):
        assert timeless(ours) == pytest.approx(timeless(theirs), rel=1e-6)
        assert ours["tokens_per_second"] > 0
        # of the second process, which has more
        assert ours["maxrss"] == 2e9
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(found[i]["weights"][name], weight, rtol=1e-7, atol=1e-9)
    assert found[i]["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-9)
    assert found[i]["flops"] == pytest.approx(alone["flops"])


def test_every_process_drops_other_values(folder):
    one, other = (torch.load(folder / f"dropped{i}.pt", weights_only=True) for i in range(2))
    assert len(one) == 3
    for mask, another in zip(one, other, strict=True):
        assert 0.2 < (mask != another).double().mean() < 0.8
    assert not torch.equal(one[0], one[1])


def test_one_process_drops_what_plain_trainer_drops(tmp_path):
    alone = ranks.dropped_in(tmp_path / "alone")
    plain = ranks.dropped_in(tmp_path / "plain", transformers.Trainer)
    assert len(alone) == 3 and all(map(torch.equal, alone, plain))


@pytest.mark.parametrize("i", range(len(ranks.CASES)))
def test_resumed_in_the_sub_model_stage_it_ends_the_same(found, i):
    for name, weight in found[i]["weights"].items():
        assert torch.equal(found[i]["resumed"][name], weight), name


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_every_process_reads_the_rows_that_plain_trainer_gives_it(workplace):  # noqa: F811
    for name, sharding in zip(rows.RUNS, ("ddp", "fsdp"), strict=True):
        text = RUN.replace('directory = "out"', f'directory = "{name}"')
        text += f'[distributed]\nsharding = "{sharding}"\n'
        (workplace / f"{name}.toml").write_text(text)
    on_ranks(2, rows.__name__, workplace)
    found = json.loads((workplace / "rows.json").read_text())
    every = [tuple(row["input_ids"][0].tolist()) for row in Batches(rows.ROWS).rows]
    assert len(set(every)) == rows.ROWS
    for name in rows.CASES:
        plain = found[name].pop("plain")
        for how, ranks_rows in found[name].items():
            case, skipped = f"{name}, {how}", 2 * rows.RESUMED_AT if "resumed" in how else 0
            whole = found[name][how.removesuffix(", resumed")]
            assert ranks_rows == [mine[skipped:] for mine in whole], case
            passes = [[mine[i : i + rows.ROWS // 2] for mine in whole] for i in (0, rows.ROWS // 2)]
            for one in passes:
                assert sorted(map(tuple, chain(*one))) == sorted(every), case
            if name in rows.KEEPING:
                assert whole == plain, case
            else:
                # dropout of plain Trainer draws from the same generator
                assert passes[0] == [mine[: rows.ROWS // 2] for mine in plain], case
        assert plain[0] != plain[1]
    assert found["random"]["ddp"] != found["data_seed"]["ddp"]
    for name in rows.RUNS:
        assert found[name]["ours"] == found[name]["plain"], name


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_run_file_on_two_processes(workplace):  # noqa: F811
    """The same batches and masks, shared out; one of the processes writes."""
    command = ("growkern", "train", workplace / "run.toml")
    done = warm.run("testbed.torchrun", 2, *command)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert said.count("finished  6 steps, label loss ") == said.count("to resume  ") == 1
    two = json.loads((workplace / "out" / "trainer_state.json").read_text())["log_history"]
    shutil.rmtree(workplace / "out")
    train(workplace / "run.toml", progress=False)
    one = json.loads((workplace / "out" / "trainer_state.json").read_text())["log_history"]
    for name in ("loss", "eval_loss", "kl"):
        values = [[line[name] for line in log if name in line] for log in (two, one)]
        np.testing.assert_allclose(*values, rtol=1e-4)


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_batches_that_cannot_be_shared_are_refused(workplace, monkeypatch):  # noqa: F811
    assert "batch_size = 4" in RUN
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(GrowthError, match=r"batch_size is 4: .* multiple of the 3 processes"):
        train(workplace / "run.toml", progress=False)
    assert not (workplace / "out").exists()
