"""`growkern train RUN.toml` from the file to the trained checkpoint, and resumed."""

import json
import os
import shutil
from pathlib import Path
from typing import get_args

import pytest
import transformers
from safetensors.torch import load_file

from growkern import GrowthError, run as train
from growkern.errors import GrowthWarning
from growkern.plot.curves import read_curve, runs_in
from growkern.plot.roles import arrange
from growkern.publish.calls import locked
from growkern.train.loop.callbacks import LoopCallback
from growkern.train.loop.display import last_losses
from growkern.train.run import resolve as run_directory
from growkern.train.run.arguments import training_arguments
from growkern.train.run.banner import TASKS
from growkern.train.run.file import load_runs
from growkern.train.run.generations import check_growths
from growkern.train.run.resolve import resolve
from growkern.train.sections import Objective
from testbed.tiny import VOCAB, build

RUN = """
[model]
path = "model"
[data]
train = ["text/*.txt"]
validation = ["text/a.txt"]
sequence_length = 16
[training]
steps = 6
batch_size = 4
warmup_steps = 2
log_every = 1
eval_every = 3
save_every = 2
keep_checkpoints = 9
[two_stage]
layers_per_block = 1
stage1_steps = 3
[inheritance]
end_step = 4
[teacher]
paths = ["teacher"]
[output]
directory = "out"
tensorboard = true
"""


def save_tokenizer(path, tokens=VOCAB, words="w"):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    all_words = [*special, *(f"{words}{i}" for i in range(tokens - len(special)))]
    vocabulary = {word: i for i, word in enumerate(all_words)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(path)


@pytest.fixture(params=["bert", "llama"])
def workplace(request, tmp_path):
    for name, layers, width in (("model", 3, 16), ("teacher", 1, 8)):
        build(request.param, layers=layers, width=width).save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name)
    (tmp_path / "text").mkdir()
    for i, name in enumerate("ab"):
        text = " ".join(f"w{(i + 7 * j * j) % 40}" for j in range(300))
        (tmp_path / "text" / f"{name}.txt").write_text(text)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_people_see_the_label_loss_and_logs_keep_their_names(workplace, capsys):
    train(workplace / "run.toml")
    said = capsys.readouterr().out
    history = json.loads((workplace / "out" / "trainer_state.json").read_text())["log_history"]
    lines = [line for line in history if "loss" in line]
    last = [line for line in history if "eval_loss" in line][-1]
    ends = f"label loss {lines[-1]['label_loss']:.4f}, validation loss {last['eval_loss']:.4f}"
    assert f"finished  6 steps, {ends}\n" in said
    # the first step learns from the teacher too: its loss is no loss of labels
    both = (lines[0]["label_loss"] + lines[0]["kl"]) / 2
    assert lines[0]["alpha"] == 0.5 and lines[0]["loss"] == pytest.approx(both, rel=1e-4)
    for line in lines:
        taught = f", kl {line['kl']:.4f}" if "kl" in line else ""
        objective = f", objective {line['loss']:.4f}" if line["alpha"] else ""
        shown = (
            f"step {line['step']} of 6: label loss {line['label_loss']:.4f}{taught}{objective}, lr "
        )
        assert said.count(shown) == 1
    assert "label_loss " not in said and "flops" not in said
    assert "clm: predicts the next token\n" in said
    assert {*TASKS, "auto"} == {*get_args(Objective)}


def test_a_loss_of_another_step_is_printed_with_its_step():
    log = [{"step": 1, "label_loss": 6.0}, {"step": 3, "eval_loss": 5.0}, {"step": 4, "flops": 1.0}]
    assert last_losses(log, 4) == "label loss 6.0000 at step 1, validation loss 5.0000 at step 3"
    assert last_losses(log, 3) == "label loss 6.0000 at step 1, validation loss 5.0000"
    assert last_losses(log[:1], 1) == "label loss 6.0000"


def files_of(path):
    return {f: f.stat().st_mtime_ns for f in path.rglob("*") if f.is_file()}


def log_in(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_train_resume_and_finish(workplace):
    result = train(workplace / "run.toml", progress=False)
    out = workplace / "out"
    assert result.global_step == 6
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    # at the start too
    assert [x["step"] for x in history if "eval_loss" in x] == [0, 3, 6]
    assert all("flops" in line for line in history)
    assert list(out.glob("runs/*/events*")), "TensorBoard"
    weights = load_file(out / "model.safetensors")
    transformers.AutoTokenizer.from_pretrained(out)

    before = files_of(out)
    assert train(workplace / "run.toml", progress=False) is None
    assert files_of(out) == before

    # killed after the last checkpoint, before the model was saved
    (out / "trainer_state.json").unlink()
    (out / "model.safetensors").unlink()
    assert train(workplace / "run.toml", progress=False) is None
    for name, value in load_file(out / "model.safetensors").items():
        assert value.equal(weights[name]), name

    # killed after step 4, while the checkpoint of step 6 was being written
    (out / "checkpoint-6" / "trainer_state.json").unlink()
    (out / "model.safetensors").unlink()
    (out / "trainer_state.json").unlink()
    assert train(workplace / "run.toml", progress=False).global_step == 6
    for name, value in load_file(out / "model.safetensors").items():
        assert value.equal(weights[name]), name
    # no line twice, though those after the checkpoint were logged before the kill too
    again = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert log_in(out) == again and [x["step"] for x in again] == [x["step"] for x in history]


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_each_line_is_in_the_log_at_once(workplace, monkeypatch):
    """Before the first checkpoint too. A disk that takes no more stops the log alone."""
    out, seen, begin = workplace / "out", [], LoopCallback.on_step_begin

    def look(callback, args, state, control, **options):
        begin(callback, args, state, control, **options)
        if len(seen) < 2:
            seen.append((log_in(out) == state.log_history, any(out.glob("checkpoint-*"))))
        elif (out / "log.jsonl").is_file():
            assert read_curve(out).state == "unfinished: step 2 of 6, last evaluation at step 0"
            (out / "log.jsonl").unlink()
            (out / "log.jsonl").mkdir()

    monkeypatch.setattr(LoopCallback, "on_step_begin", look)
    with pytest.warns(GrowthWarning, match="log.jsonl gets no more lines") as found:
        train(workplace / "run.toml", progress=False)
    assert sum("no more lines" in str(warning.message) for warning in found) == 1
    assert seen == [(True, False)] * 2 and (out / "model.safetensors").is_file()


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_finished_run_goes_on_with_more_steps(workplace):
    file = workplace / "run.toml"
    constant = RUN.replace("steps = 6", 'steps = 6\nschedule = "constant_with_warmup"', 1)
    file.write_text(constant.replace('directory = "out"', 'directory = "straight"'))
    train(file, progress=False)
    file.write_text(constant.replace("steps = 6", "steps = 4", 1))
    assert train(file, progress=False).global_step == 4
    file.write_text(constant)
    assert train(file, progress=False).global_step == 6
    longer = load_file(workplace / "out" / "model.safetensors")
    for name, value in load_file(workplace / "straight" / "model.safetensors").items():
        assert value.equal(longer[name]), name
    before = files_of(workplace / "out")
    assert train(file, progress=False) is None
    file.write_text(constant.replace("steps = 6", "steps = 5", 1))
    with pytest.raises(GrowthError, match=r"training.steps is 5, but .* has 6 already: give 6 or"):
        train(file, progress=False)
    assert files_of(workplace / "out") == before


GROWN = (
    RUN.replace('path = "model"', "")
    + """
[growth]
source = "model"
sizes = { hidden_size = 32 }
moments = "grow"
optimizer = "text/a.txt"
"""
)


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_the_growth_at_a_start_is_told_once(workplace):
    out, text = workplace / "out", GROWN.partition("moments")[0]
    (workplace / "run.toml").write_text(text)
    train(workplace / "run.toml", progress=False)
    (out / "checkpoint-6" / "trainer_state.json").unlink()
    (out / "model.safetensors").unlink()
    (out / "trainer_state.json").unlink()
    train(workplace / "run.toml", progress=False)
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    (event,) = (line for line in history if "growth" in line)
    told = {name: value for name, value in event.items() if name.startswith("growth")}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    expected = {"growth": 0, **{f"growth/{name}": size for name, size in sizes.items()}}
    assert event["step"] == 1
    assert told == {**expected, "growth/eval_loss_after": history[0]["eval_loss"]}
    assert not told.keys() & {"growth/loss_before"} and event["maxrss"] > 1e8
    curve = read_curve(out)
    assert not curve.growths and curve.began.startswith("hidden_size 32")
    # of random weights nothing has grown
    (workplace / "run.toml").write_text(text + '\nmethod = "random"')
    train(workplace / "run.toml", progress=False, overwrite=True)
    assert not read_curve(out).began


SETTINGS = {
    GROWN: "growth.optimizer cannot be used: .*a.txt: not a file of optimizer state",
    GROWN.replace(
        '= "text/a.txt', '= "no.pt'
    ): "growth.optimizer cannot be used: .*no.pt: no such file",
    RUN + "[trainer]\nadam_beta2 = 5.0": "with adam_beta2 = 5.0: Invalid beta",
    RUN + "[trainer]\nadam_epsilon = -1": "with adam_epsilon = -1: Invalid epsilon",
    RUN + "[trainer]\neval_delay = 7": "trainer.eval_delay is 7: it must not be more than the 6",
    RUN + "[trainer]\neval_accumulation_steps = 0": "steps is 0: it must be 1 or more",
    RUN + "[trainer]\nlr_scheduler_kwargs = { foo = 1 }": "{'foo': 1}, which the schedule 'linear'",
    RUN + "[trainer]\nmetric_for_best_model = 'los'": "not give; did you mean 'loss'",
    RUN + "[trainer]\npush_to_hub = true": "push_to_hub: the repository cannot be made: no network",
}


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_settings_that_cannot_be_used_delete_nothing(workplace, monkeypatch):
    def unreachable(*args, **options):
        raise RuntimeError("no network")

    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", unreachable)
    (workplace / "run.toml").write_text(RUN)
    train(workplace / "run.toml", progress=False)
    before = files_of(workplace / "out")
    for text, match in SETTINGS.items():
        (workplace / "run.toml").write_text(text)
        with pytest.raises(GrowthError, match=match):
            train(workplace / "run.toml", overwrite=True, progress=False)
        assert files_of(workplace / "out") == before, match


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_another_runs_directory_is_refused_unless_overwritten(workplace):
    train(workplace / "run.toml", progress=False)
    before = files_of(workplace / "out")
    (workplace / "run.toml").write_text(RUN.replace("steps = 6", "steps = 7"))
    with pytest.raises(GrowthError, match=r'"linear" more steps change .* "constant_with_warmup"'):
        train(workplace / "run.toml", progress=False)
    (workplace / "run.toml").write_text(RUN.replace("steps = 6", "steps = 5"))
    changed = r"holds another run \(training.steps 6 -> 5\): .*overwrite=True .* delete its check"
    with pytest.raises(GrowthError, match=changed):
        train(workplace / "run.toml", progress=False)
    assert files_of(workplace / "out") == before
    (workplace / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(GrowthError, match=r"must not be deleted: thesis\.txt is no file of a run"):
        train(workplace / "run.toml", overwrite=True, progress=False)
    (workplace / "out" / "thesis.txt").unlink()
    assert files_of(workplace / "out") == before
    assert train(workplace / "run.toml", overwrite=True, progress=False).global_step == 5

    (workplace / "text" / "a.txt").write_text("w1 " * 300)
    changed = r"another run \(the files of data.train changed; the files of data.validation changed"
    with pytest.raises(GrowthError, match=changed):
        train(workplace / "run.toml", progress=False)

    shutil.rmtree(workplace / "out")
    (workplace / "out").mkdir()
    (workplace / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(GrowthError, match="not the directory of a run"):
        train(workplace / "run.toml", overwrite=True, progress=False)
    assert (workplace / "out" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_the_output_may_be_a_link(workplace):
    """It stays one, through the end of the run and through --overwrite."""
    (workplace / "link").symlink_to("disk")
    run = RUN.replace('directory = "out"', 'directory = "link"')
    for steps in (6, 5):
        (workplace / "run.toml").write_text(run.replace("steps = 6", f"steps = {steps}"))
        trained = train(workplace / "run.toml", overwrite=True, progress=False)
        assert trained.global_step == steps
        assert train(workplace / "run.toml", progress=False) is None
    assert (workplace / "link").readlink() == Path("disk")
    assert run_directory.is_finished(disk := workplace / "disk") and not [*disk.glob(".*")]


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_directory_has_one_trainer(workplace):
    """The second one is told who is there, before any work."""
    who = rf"out: process {os.getpid()} on \S+ is training in it now"
    with locked(workplace / "out", "training in"), pytest.raises(GrowthError, match=who):
        train(workplace / "run.toml", progress=False)
    assert not (workplace / "out").exists()
    train(workplace / "run.toml", progress=False)
    assert not list((workplace / "out").glob(".*"))


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_killed_at_its_start_a_run_begins_again(workplace, monkeypatch):
    """A marker is whole or not there, and an old one stays until a new one replaces it."""
    out = workplace / "out"
    out.mkdir()
    (workplace / ".out.lock").write_text("1 host training in")
    (out / ".run.json.0a1b2c3d.part").write_text("{")
    with monkeypatch.context() as patched:
        # a folder without a marker would be refused
        patched.setattr(run_directory, "open_staging", lambda *_: killed())
        train(workplace / "run.toml", progress=False)
    assert not list(out.glob(".*"))
    (out / "run.json").write_text('{"format": 1, "growkern": "0.1.0", "run": {}, "inputs": {}}')
    with monkeypatch.context() as patched:
        patched.setattr(run_directory, "write_whole", lambda *_: killed())
        with pytest.raises(KeyboardInterrupt):
            train(workplace / "run.toml", overwrite=True, progress=False)
    assert [path.name for path in out.iterdir()] == ["run.json"]
    with pytest.raises(GrowthError, match="holds another run"):
        train(workplace / "run.toml", progress=False)
    train(workplace / "run.toml", overwrite=True, progress=False)


def killed():
    raise KeyboardInterrupt


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('path = "model"', 'path = "modle"', "modle is not a checkpoint directory"),
        ('paths = ["teacher"]', 'paths = ["none"]', "none is not a checkpoint directory"),
        ("text/*.txt", "txet/*.txt", r"no file matches .*txet"),
        ("sequence_length = 16", "sequence_length = 1600", r"model has \d+ positions"),
        ("warmup_steps = 2", "weight_decay = -1.0", "weight_decay is -1.0: it must be 0 or more"),
        ('directory = "out"', 'directory = "model"', "model, which the run reads"),
        ('directory = "out"', 'directory = "."', "which the run reads"),
        ('directory = "out"', 'directory = "run.toml"', "run.toml is a file: choose another name"),
        ("[data]", "[trainer]\nlabel_smoothing = 0.1\n[data]", "set by loss.label_smoothing"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(workplace, old, new, match):
    (workplace / "run.toml").write_text(RUN.replace(old, new))
    with pytest.raises(GrowthError, match=match):
        train(workplace / "run.toml", progress=False)
    assert not (workplace / "out").exists()


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_batches_that_would_be_divided_twice_are_refused(workplace, monkeypatch):
    (workplace / "run.toml").write_text(RUN + "[trainer.accelerator_config]\nsplit_batches = true")
    run = resolve(load_runs(workplace / "run.toml")[0], workplace)
    training_arguments(run.settings, run.output, progress=False)
    # as a second process makes of it
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    with pytest.raises(GrowthError, match="split_batches=True divides the batch"):
        training_arguments(run.settings, run.output, progress=False)


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_folder_with_brackets_is_no_pattern(workplace):
    folder = workplace / "[ab] *"
    folder.mkdir()
    for name in ("model", "teacher", "text", "run.toml"):
        (workplace / name).rename(folder / name)
    # found, and then refused: records are not read as prose
    (folder / "text" / "c.JSON").write_text("{}")
    (folder / "run.toml").write_text(RUN.replace("text/*.txt", "text/*"))
    with pytest.raises(GrowthError, match=r"mixes files of two kinds, .*c\.JSON"):
        train(folder / "run.toml", progress=False)


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_tokenizer_too_large_for_a_model_is_refused(workplace):
    build("bert", layers=1, width=8, vocab_size=VOCAB - 1).save_pretrained(workplace / "teacher")
    with pytest.raises(GrowthError, match=rf"tokenizer has {VOCAB} ids, .*teacher"):
        train(workplace / "run.toml", progress=False)
    assert not (workplace / "out").exists()


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_broken_weight_file_is_refused(workplace):
    file = workplace / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(GrowthError, match="truncated or corrupt"):
        train(workplace / "run.toml", progress=False)
    assert not (workplace / "out").exists()


GENERATIONS = """
[[generation]]
[generation.model]
path = "teacher"
[[generation]]
[generation.inheritance]
end_step = 3
[[generation]]
[generation.training]
steps = 3
[generation.inheritance]
decay = "switch"
end_step = 2
"""


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_each_generation_learns_from_the_one_before(workplace, capsys):
    sections = RUN.split("[two_stage]")[0] + '[output]\ndirectory = "out"\ntensorboard = false\n'
    (workplace / "run.toml").write_text(sections + GENERATIONS)
    runs = load_runs(workplace / "run.toml")
    assert [run.model.path for run in runs] == ["teacher", "model", "model"]
    assert [run.training.steps for run in runs] == [6, 6, 3]
    assert [run.teacher and run.teacher.paths for run in runs] == [
        *(None, ("out/generation-1",), ("out/generation-2",))
    ]
    assert train(workplace / "run.toml").global_step == 3
    out, said = workplace / "out", capsys.readouterr().out.splitlines()
    after = [line.removeprefix("next").strip() for line in said if line.startswith("next")]
    assert after == ["generation 2 of 3", "generation 3 of 3", f"growkern plot {out}"]
    # each curve begins before the first step. The teacher of the first is smaller
    folders = runs_in(out)
    curves = [read_curve(folder) for folder in folders]
    assert [curve.steps[0] for curve in curves] == [0, 0, 0]
    (third, second), (small,), _ = arrange(curves[::-1], folders[::-1])
    assert (third, second, small) == (curves[2], curves[1], curves[0])
    before = files_of(out)
    assert train(workplace / "run.toml", progress=False) is None
    assert files_of(out) == before

    # the independent way: the second one by itself
    alone = (
        sections.replace('"out"', '"alone"')
        + """
[inheritance]
end_step = 3
[teacher]
paths = ["out/generation-1"]
"""
    )
    (workplace / "alone.toml").write_text(alone)
    train(workplace / "alone.toml", progress=False)
    weights = load_file(out / "generation-2" / "model.safetensors")
    for name, value in load_file(workplace / "alone" / "model.safetensors").items():
        assert value.equal(weights[name]), name
    # a wrong key of the last one is noticed before the first one trains
    wrong = (workplace / "run.toml").read_text().replace('decay = "switch"', "rat = 1")
    (workplace / "run.toml").write_text(wrong.replace('"out"', '"other"'))
    with pytest.raises(GrowthError, match=r"generation 3: .*\[inheritance\] has no key 'rat'"):
        train(workplace / "run.toml", progress=False)
    # and a fault that all of them share is of none
    wrong = wrong.replace("rat = 1", "").replace("sequence_length = ", "sequence_length = -")
    (workplace / "run.toml").write_text(wrong)
    with pytest.raises(GrowthError, match=r"sequence_length is -\d+") as shared:
        train(workplace / "run.toml", progress=False)
    assert "generation 1" not in str(shared.value) and not (workplace / "other").exists()


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_a_generation_that_another_began_from_stays_as_it_is(workplace):
    file, out = workplace / "run.toml", workplace / "out"

    def write(steps, last=None, size=16):
        sections = RUN.split("[two_stage]")[0].replace('[model]\npath = "model"\n', "")
        schedule = f'steps = {steps}\nschedule = "constant_with_warmup"'
        text = sections.replace("steps = 6", schedule, 1) + '[output]\ndirectory = "out"\n'
        text += '[[generation]]\n[generation.model]\npath = "teacher"\n'
        if last:
            text += '[[generation]]\n[generation.growth]\nsource = "out/generation-1"\n'
            text += f"hidden_size = {size}\n[generation.training]\nsteps = {last}\n"
        file.write_text(text)

    def bytes_in_out():
        return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    # as long as the next one has not begun
    for steps, last in ((3, None), (4, None), (4, 4)):
        write(steps, last)
        assert train(file, progress=False).global_step == 4 if last else steps
    before = bytes_in_out()
    assert {path.parent.name for path in before} > {"generation-1", "generation-2"}
    both = r"generation-2 began from the result of .*generation-1, .* to 6 steps"
    for settings, match in (
        ((6, 6), both),
        ((6, 4), both),
        ((4, 3), r"steps is 3, but .*generation-2.* has 4"),
        ((4, 4, 24), r"generation-2 holds another run \(growth.hidden_size"),
    ):
        write(*settings)
        with pytest.raises(GrowthError, match=match):
            train(file, progress=False)
        assert bytes_in_out() == before, match
    # what stands in the way of the later one does so before the first one is trained on
    write(6, 6)
    thesis = out / "generation-2" / "thesis.txt"
    thesis.write_text("mine")
    with pytest.raises(GrowthError, match=r"generation-2 must not be deleted: thesis\.txt"):
        train(file, overwrite=True, progress=False)
    thesis.unlink()
    assert bytes_in_out() == before
    # the last one may be longer, and all of them are made anew on demand
    write(4, 6)
    assert train(file, progress=False).global_step == 6
    write(6, 5)
    assert train(file, overwrite=True, progress=False).global_step == 5
    assert train(file, progress=False) is None


PLANNED = """
[[generation]]
model = { path = "teacher" }
[[generation]]
growth = { source = "./out/generation-1", hidden_size = 24 }
[[generation]]
growth = [
    { source = "out/generation-2", num_hidden_layers = 3 },
    { at_step = 2, hidden_size = 48 },
    { at_step = 3, num_hidden_layers = 5 },
]
[[generation]]
growth = { source = "out/generation-3", hidden_size = 96 }
"""


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_all_generations_are_planned_before_the_first_one_trains(workplace):
    sections = RUN.split("[two_stage]")[0].replace('[model]\npath = "model"\n', "")
    file = workplace / "run.toml"

    def check(old="", new=""):
        text = PLANNED.replace(old, new) if old else PLANNED
        file.write_text(f'{sections}[output]\ndirectory = "out"\n{text}')
        check_growths(file, load_runs(file))

    check()
    # the sizes of a checkpoint within a run are known when it is there
    check("out/generation-2", "out/generation-2/checkpoint-2")
    for old, new, match in (
        ("= 24", "= 23", r"run\.toml: generation 2: .*hidden_size=23\b.*\w\); nearest sizes that "),
        # smaller than after the growth inside the run before
        ("= 96", "= 40", r"run\.toml: generation 4: .*hidden_size=40\b"),
        ("= 5", "= 2", r"run\.toml: generation 3: growth 2 of 2 inside .* step 3: .*=2\b"),
    ):
        with pytest.raises(GrowthError, match=match):
            check(old, new)
        with pytest.raises(GrowthError, match=match):
            train(file, progress=False)
        assert not (workplace / "out").exists()
