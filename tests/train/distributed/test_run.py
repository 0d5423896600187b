"""Run files with [distributed] and [growth]: from the source to the exported model."""

import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

import growkern
from growkern import GrowthError, run as train
from growkern.cli.commands import app
from growkern.train.run.file import load_run
from growkern.train.safety.export import export
from testbed.forked_ranks import on_ranks
from testbed.tiny import MEASURED
from tests.train.distributed import run_ranks
from tests.train.run.test_run import RUN, workplace  # noqa: F401

SIZES = {"hidden_size": 24, "num_hidden_layers": 4}
GROWTH = """
[growth]
source = "model"
method = "aki"
sizes = { hidden_size = 24, num_hidden_layers = 4 }
"""
SHARDED = """
[distributed]
sharding = "fsdp"
activation_checkpointing = true
"""
# three sizes; the second growth changes the width too
SCHEDULE = """
[[growth]]
source = "model"
hidden_size = 24
[[growth]]
at_step = 3
num_hidden_layers = 4
moments = "grow"
rewarm_steps = 2
[[growth]]
at_step = 5
hidden_size = 32
symmetry = "noise"
moments = "old_slices"
"""
GROWN = RUN.replace('[model]\npath = "model"\n', "").replace("= true", "= false")


def write(folder, name, text):
    (folder / f"{name}.toml").write_text(text.replace('"out"', f'"{name}"'))
    return folder / f"{name}.toml"


def grown_run(*sections):
    return GROWN.replace("log_every = 1", "log_every = 2") + "".join(sections)


def log_of(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    keys = (*MEASURED, "train_runtime", "eval_runtime")
    return [
        {k: v for k, v in line.items() if k not in keys and "per_second" not in k}
        for line in history
        if "loss" in line or "eval_loss" in line
    ]


def assert_close(run, other):
    expected = load_file(other / "model.safetensors")
    for name, weight in load_file(run / "model.safetensors").items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def assert_same_weights(checkpoint, model):
    """A checkpoint of shards, and a directory with the whole model."""
    whole = load_file(model / "model.safetensors")
    target = {name: torch.empty_like(weight) for name, weight in whole.items()}
    dcp.load(target, checkpoint_id=f"{checkpoint}/weights", no_dist=True)
    assert all(torch.equal(weight, whole[name]) for name, weight in target.items())


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_two_ranks_grow_stop_resume_and_export(workplace):  # noqa: F811
    """Against one process that grows the whole model, and against a run without a stop."""
    for name in ("straight", "stopped", "fewer"):
        write(workplace, name, grown_run(GROWTH, SHARDED))
    best = grown_run(GROWTH, SHARDED, "[trainer]\nload_best_model_at_end = true\n")
    write(workplace, "best", best.replace("eval_every = 3", "eval_every = 2"))
    one = write(workplace, "one", grown_run(GROWTH))
    script = [("straight", None), ("stopped", 3), ("stopped", None), ("fewer", 3), ("best", None)]
    write(workplace, "shards", grown_run(SCHEDULE, SHARDED))
    write(workplace, "copies", grown_run(SCHEDULE))
    sizes = write(workplace, "sizes", grown_run(SCHEDULE))
    script += [("shards", None), ("copies", 4), ("copies", None)]
    script = json.dumps([(f"{name}.toml", step) for name, step in script])
    (workplace / "script.json").write_text(script)
    on_ranks(2, run_ranks.__name__, workplace)
    train(one, progress=False)

    # bit for bit on as many ranks
    straight = load_file(workplace / "straight" / "model.safetensors")
    stopped = load_file(workplace / "stopped" / "model.safetensors")
    assert straight.keys() == stopped.keys()
    assert all(torch.equal(weight, stopped[name]) for name, weight in straight.items())
    assert log_of(workplace / "straight") == log_of(workplace / "stopped")

    # right on another number: here it resumes on one rank
    train(workplace / "fewer.toml", progress=False)
    for name in ("fewer", "straight"):
        for ours, theirs in zip(log_of(workplace / name), log_of(workplace / "one"), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert_close(workplace / name, workplace / "one")

    # growth inside a run, of a model that is sharded and of one that is not
    train(sizes, progress=False)
    for name in ("shards", "copies"):
        expected = log_of(workplace / "sizes")
        if name == "copies":
            # stopped where it grows: a stop has no time for an evaluation
            before = next(x for x in expected if "eval_loss" in x and x["step"] == 5)
            expected = [x for x in expected if x is not before]
            for line in (x for x in expected if x.get("growth") == 2):
                del line["growth/eval_loss_before"], line["growth/eval_loss_after"]
        for ours, theirs in zip(log_of(workplace / name), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert_close(workplace / name, workplace / "sizes")

    # all ranks load the best checkpoint
    state = json.loads((workplace / "best" / "trainer_state.json").read_text())
    assert "checkpoint-" in state["best_model_checkpoint"]
    assert_same_weights(state["best_model_checkpoint"], workplace / "best")

    # an ordinary directory, of the last checkpoint
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        command = ["export", str(workplace / "straight"), str(workplace / "hf")]
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    model = transformers.AutoModelForCausalLM.from_pretrained(workplace / "hf")
    assert model.config.hidden_size == 24 and model.config.architectures == ["LlamaForCausalLM"]
    exported = model.state_dict()
    assert all(torch.equal(weight, exported[name]) for name, weight in straight.items())

    # the checkpoint grows as it is, and its optimizer in memory
    last = workplace / "straight" / "checkpoint-6"
    command = ["grow", str(last), str(workplace / "large"), "--num-hidden-layers", "6"]
    CliRunner().invoke(app, command, catch_exceptions=False)
    large = growkern.grow(workplace / "hf", num_hidden_layers=6)
    grown = load_file(workplace / "large" / "model.safetensors")
    assert all(torch.equal(weight, large.state_dict()[name]) for name, weight in grown.items())
    with pytest.raises(GrowthError, match="parts of processes: grow it in a run"):
        growkern.grow_checkpoint(last, workplace / "l", num_hidden_layers=6, optimizer=last)
    adam = torch.optim.AdamW(large.parameters())
    growkern.grow_optimizer_into(large, adam, last)
    assert adam.state[large.lm_head.weight]["exp_avg"].any()
    transformers.AutoTokenizer.from_pretrained(workplace / "hf")
    assert {p.name for p in (workplace / "hf").iterdir()}.isdisjoint({"weights", "optimizer"})
    with pytest.raises(GrowthError, match="exists"):
        export(workplace / "straight", workplace / "hf")
    export(workplace / "straight", workplace / "hf", dtype="bfloat16", overwrite=True)
    half = load_file(workplace / "hf" / "model.safetensors")
    assert half["lm_head.weight"].dtype == torch.bfloat16
    # a checkpoint with a changed byte is left out
    (weights,) = (last / "weights").glob("__0_*")
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert export(workplace / "straight", workplace / "older").name == "checkpoint-4"


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_growth_in_place_is_growth_through_the_disk(workplace):  # noqa: F811
    """Weights and moments, without sharding and with it."""
    small = write(workplace, "small", RUN)
    train(small, progress=False)
    state = workplace / "small" / "checkpoint-6"
    growkern.grow_checkpoint(workplace / "small", workplace / "large", **SIZES)

    def short(text):
        return text.replace("steps = 6", "steps = 3").replace("end_step = 4", "end_step = 3")

    source = GROWTH.replace('"model"', '"small"').replace('method = "aki"', 'moments = "reset"')
    moments = source.replace("reset", "grow") + f'optimizer = "small/{state.name}"\n'
    disk = RUN.replace('"model"', '"large"')
    train(write(workplace, "disk", short(disk)), progress=False)
    for name, text in {"reset": source, "grow": moments, "sharded": moments + SHARDED}.items():
        train(write(workplace, name, short(grown_run(text))), progress=False)
    assert_close(workplace / "reset", workplace / "disk")
    assert_close(workplace / "sharded", workplace / "grow")
    # 6 steps of the source and 2 more, for what every step trains
    kept = torch.load(workplace / "grow" / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert max(float(entry["step"]) for entry in kept["state"].values()) == 8


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (RUN + GROWTH, "either model.path"),
        (GROWN, "either model.path"),
        (grown_run(GROWTH, 'moments = "grow"\n'), "moments and optimizer belong together"),
        (grown_run(GROWTH, 'methd = "fpi"\n'), "'methd'.*'method'"),
        (grown_run(GROWTH.replace("24", '"24"')), "growth.sizes.hidden_size is '24'"),
        (grown_run(SCHEDULE.replace("at_step = 5", "at_step = 3")), "at step 3 follows one at st"),
        (grown_run(SCHEDULE.replace("at_step = 5", "at_step = 6")), "step 6 would come after the"),
        (
            grown_run(SCHEDULE.replace("rewarm_steps = 2", "rewarm_steps = 4")),
            "at step 3: rewarm_steps is 4: it must not be more than the 3 steps that the run has",
        ),
        (
            grown_run(SCHEDULE.replace("rewarm_steps = 2", "new_layers_steps = 3")),
            "at step 3: new_layers_steps is 3: it must not be more than the 2 steps to the next gr",
        ),
        (grown_run(SCHEDULE.replace("symmetry =", "symetry =")), "'symetry'.*'symmetry'"),
        (grown_run(SCHEDULE.replace('source = "model"\n', "")), "growth.*needs its source"),
        (grown_run(GROWTH, "[distributed]\ntensor_parallel = 2\n"), "tensor parallelism"),
        (grown_run(GROWTH, "[distributed]\ncpu_offload = true\n"), "needs sharding"),
    ],
)
def test_sections_that_are_refused(tmp_path, text, match):
    with pytest.raises(GrowthError, match=match):
        load_run(write(tmp_path, "a", text))
