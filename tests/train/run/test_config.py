"""Run files: typed, round-tripped, and wrong ones named to the key."""

import dataclasses
import os
from typing import get_args, get_type_hints

import pytest

from growkern import GrowthError, OptimizerOptions, TwoStageConfig
from growkern.train.run.file import Run, _with_teacher, check_paths, keys, load_run, load_runs

COMPLETE = """
[model]
path = "grown"

[data]
train = ["text/*.txt", "more.txt"]
validation = ["held-out.txt"]
sequence_length = 64

[training]
steps = 100
learning_rate = 1
precision = "bf16"
optimizer = "growth-adamw"
eval_every = 50

[optimizer]
rewarm_steps = 20
rewarm_peak = 2

[two_stage]
layers_per_block = 3
stage1_steps = 20

[inheritance]
end_step = 44
teacher_weights = [0.25, 0.75]

[teacher]
paths = ["small", "other"]

[output]
directory = "out"
tensorboard = false
"""


def test_keys_read_from_the_source_are_those_of_the_classes():
    kinds = {name: (kind, *get_args(kind)) for name, kind in get_type_hints(Run).items()}
    classes = {
        name: next((x for x in options if dataclasses.is_dataclass(x)), None)
        for name, options in kinds.items()
    }
    assert classes.pop("trainer") is None
    assert keys() == {
        name: {field.name for field in dataclasses.fields(kind)} for name, kind in classes.items()
    }


def test_paths_that_an_earlier_run_makes_need_not_be_there_yet(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")
    (tmp_path / "text.txt").touch()
    file = tmp_path / "run.toml"
    rest = """
data = { train = ["text.txt"] }
training = { steps = 1 }
output = { directory = "run" }
"""
    runs = """
[[generation]]
model = { path = "small" }
[[generation]]
growth = { source = "run/generation-1", hidden_size = 8 }
inheritance = { end_step = 1 }
"""
    file.write_text(rest + runs)
    check_paths(load_runs(file), tmp_path)
    # a name of a model on the Hub may be one, but not where there is a folder of its first part
    for name in ("owner/name", "./run/generation-1", "small/name"):
        file.write_text(
            f'{rest.replace("run", "out")}growth = [{{ source = "{name}", hidden_size = 8 }}]'
        )
        tables = load_runs(file)
        if name == "owner/name":
            check_paths(tables, tmp_path)
            continue
        with pytest.raises(GrowthError, match=f"{name.removeprefix('./')}: no such directory"):
            check_paths(tables, tmp_path)


SOURCE = {"source": "small", "hidden_size": 8}


@pytest.mark.parametrize(
    "growth, paths",
    [
        (SOURCE, ["small"]),
        ([SOURCE, {"at_step": 1, "hidden_size": 16}], ["small"]),
        ({**SOURCE, "revision": "main"}, None),
        ({"at_step": 1, "hidden_size": 16}, None),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_a_run_without_a_teacher_learns_from_the_model_that_it_grows(growth, paths, given):
    own = {"teacher": {"paths": ["other"]}} if given else {}
    tables = {"growth": growth, "inheritance": {"end_step": 1}, **own}
    taught = _with_teacher(tables).get("teacher")
    assert taught == (own.get("teacher") or (paths and {"paths": paths}))
    assert "teacher" not in _with_teacher({"growth": growth})


@pytest.fixture
def load(tmp_path):
    def from_text(text):
        file = tmp_path / "RUN.toml"
        file.write_text(text)
        return load_run(file)

    return from_text


def test_every_section_arrives_typed(load):
    run = load(COMPLETE)
    assert run.two_stage == TwoStageConfig(3, 20)
    assert run.optimizer == OptimizerOptions(rewarm_steps=20, rewarm_peak=2.0)
    assert run.data.train == ("text/*.txt", "more.txt")
    assert run.training.learning_rate == 1.0 and type(run.training.learning_rate) is float
    assert run.inheritance.teacher_weights == (0.25, 0.75)
    assert run.teacher.paths == ("small", "other")
    assert run.output.tensorboard is False
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.training.steps = 1


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("steps = 100", "step = 100", r"\[training\] has no key 'step'; did you mean 'steps'"),
        ("rewarm_peak", "rewarm_peek", r"\[optimizer\] has no key .*; did you mean 'rewarm_peak'"),
        ("rewarm_steps = 20\n", "", "rewarm_peak has no effect without optimizer.rewarm_steps"),
        ('validation = ["held-out.txt"]\n', "", "training.eval_every needs data to evaluate: give"),
        ("rewarm_steps = 20", "ns_steps = 3", "ns_steps is an option of Muon, but"),
        ("end_step = 44", 'path = "small"', r"no key 'path': .* \[teacher\] as 'paths'"),
        ("end_step = 44", 'teachers = ["small"]', r"no key 'teachers': .* own, \[teacher\]"),
        ("end_step = 44", "learning_rate = 1.0", r"no key 'learning_rate': .* \[training\]$"),
        ("[two_stage]", "[two_stages]", r"no key 'two_stages'; did you mean 'two_stage'"),
        ("stage1_steps", "stage_1_steps", "did you mean 'stage1_steps'"),
        ("steps = 100", 'steps = "100"', r"training.steps is '100' \(str\): it must be a whole"),
        ("[output]", "[output]\nreport_to = 1", r"must be a text or a list, each a text$"),
        ("steps = 100", "steps = true", r"training.steps is True \(bool\): it must be a whole"),
        ("steps = 100", "steps = 1.5", r"training.steps is 1.5 \(float\)"),
        ('["small", "other"]', '["small", 3]', r"teacher.paths\[1\] is 3 \(int\): it must be a t"),
        ('["small", "other"]', '"small"', r"teacher.paths is 'small' \(str\): it must be a list"),
        ('"bf16"', '"fp8"', "training.precision is 'fp8'"),
        ('directory = "out"', "", r"\[output\] lacks 'directory'"),
        ("end_step = 44", "end_step = 0", "end_step is 0"),
        ("layers_per_block = 3", "layers_per_block = 0", "layers_per_block is 0"),
        ("stage1_steps = 20", "stage1_steps = 200", "more than the 100 training.steps"),
        ("end_step = 44", "end_step = 101", "inheritance.end_step is 101: .*the 100 training.ste"),
        ("rewarm_steps = 20", "rewarm_steps = 101", "optimizer.rewarm_steps is 101: .*the 100 t"),
        ("eval_every = 50", "warmup_steps = 101", "training.warmup_steps is 101: .*the 100 train"),
        ("steps = 100", "steps = 0", "training.steps is 0: it must lie in 1 .. "),
        ("learning_rate = 1", "learning_rate = -1", "learning_rate is -1.0: it must be 0 or more"),
        ("learning_rate = 1", "learning_rate = nan", "learning_rate is nan: it must be 0 or more"),
        ('[teacher]\npaths = ["small", "other"]', "", "belong together"),
        ('[model]\npath = "grown"', "model = 3", r"model is 3 \(int\): it must be a table"),
        ("[data]", "[data", "cannot read"),
    ],
)
def test_a_wrong_file_is_refused_by_file_and_key(load, old, new, match):
    assert old in COMPLETE
    with pytest.raises(GrowthError, match=match) as refusal:
        load(COMPLETE.replace(old, new, 1))
    assert "RUN.toml" in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "match"),
    [
        (
            'num_hidden_layers = "3"',
            r"h(\[0\])?\.num_hidden_layers is '3' \(str\): it must be a",
        ),
        ("n_layer = true", r"growth(\[0\])?\.n_layer is True \(bool\): it must be a whole"),
        ('methd = "aki"', "has no key 'methd'; did you mean 'method'"),
        ("", "a growth needs sizes, such as num_hidden_layers = 12"),
        ("sizes = 3", r"sizes is 3 \(int\): it must be a table"),
    ],
)
@pytest.mark.parametrize("is_list", [True, False])
def test_sizes_that_are_wrong_are_named(load, key, match, is_list):
    head, where = ("[[growth]]", "at_step = 5") if is_list else ("[growth]", 'source = "grown"')
    with pytest.raises(GrowthError, match=match):
        load(f"{COMPLETE}\n{head}\n{where}\n{key}\n")


def test_a_single_growth_inside_a_run_may_be_a_table_or_a_list_of_one(load):
    runs = [
        load(f"{COMPLETE}\n{head}\nat_step = 30\nn = 3\n") for head in ("[growth]", "[[growth]]")
    ]
    assert runs[0].growths == runs[1].growths and runs[0].later_growths[0].sizes == {"n": 3}


ODD_VALUES = {
    "31 digits": ("steps = 100", "steps = 1" + "0" * 30, "training.steps is 1.*64 bits"),
    "a long name": ("steps = 100", '"' + "a" * 200_000 + '" = 1', "has no key 'aaa"),
    "a long value": ('"bf16"', '"' + "a" * 200_000 + '"', "precision is 'aaa"),
    "a large file": ("[model]", "#" * 300_000 + "\n[model]", "more than any run file"),
    "steps without end": ("steps = 100", f"steps = {10**18}", "steps is 1.*lie in 1"),
    "a teacher's weight that is no number": ("[0.25, 0.75]", "[nan, 1.0]", "must sum to 1"),
    "a temperature that is no number": (
        "end_step = 44",
        "end_step = 44\ntemperature = nan",
        "temperature is nan",
    ),
    "a single token": ("sequence_length = 64", "sequence_length = 1", "must lie in 2 .. "),
    "a negative length": ("sequence_length = 64", "sequence_length = -1", "sequence_length is -1"),
}


@pytest.mark.parametrize("name", ODD_VALUES)
def test_odd_values_are_refused_in_one_line(load, name):
    old, new, match = ODD_VALUES[name]
    assert old in COMPLETE
    with pytest.raises(GrowthError, match=match) as refusal:
        load(COMPLETE.replace(old, new, 1))
    said = str(refusal.value)
    assert "RUN.toml" in said and "\n" not in said and len(said) < 500


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "run.toml")
    with pytest.raises(GrowthError, match="not a regular file"):
        load_run(tmp_path / "run.toml")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(GrowthError, match=r"none\.toml: no such file"):
        load_run(tmp_path / "none.toml")


def test_depths_are_multiples_of_a_block_drawn_alike_everywhere():
    stages = TwoStageConfig(layers_per_block=3, stage1_steps=3000, seed=2)
    depths = [stages.depth(step, 10) for step in range(3000)]
    assert set(depths) == {3, 6, 9, 10}
    for depth in set(depths):
        # 3000 draws of 1 in 4: standard deviation 24
        assert abs(depths.count(depth) - 750) < 120
    assert depths == [TwoStageConfig(3, 3000, 2).depth(step, 10) for step in range(3000)]
    assert depths != [TwoStageConfig(3, 3000, 3).depth(step, 10) for step in range(3000)]
    assert stages.depth(3000, 10) is None


@pytest.mark.parametrize(
    "options",
    [
        {"layers_per_block": 0, "stage1_steps": 1},
        {"layers_per_block": 1, "stage1_steps": -1},
        {"layers_per_block": 1, "stage1_epochs": float("nan")},
        {"layers_per_block": 1, "stage1_steps": 1, "stage1_epochs": 1},
        {"layers_per_block": 1},
        {"layers_per_block": 1, "stage1_steps": 1, "embeddings": "top"},
    ],
)
def test_stages_that_make_no_sense_are_refused(options):
    with pytest.raises(GrowthError):
        TwoStageConfig(**options)
