"""A run is resolved once: each config is read a few times only, and each rule has a message."""

import os
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from growkern import (
    GrowthError,
    GrowthStep,
    InheritanceSchedule,
    TwoStageConfig,
    TwoStageTrainer,
)
from growkern import run as train
from growkern.train import rules
from growkern.train.run import resolve as resolving
from growkern.train.run import start
from growkern.train.run.file import load_run
from growkern.train.run.resolve import resolve
from tests.train.model.test_load import edit
from tests.train.run.test_run import RUN, workplace  # noqa: F401
from tests.train.test_trainer import arguments
from tests.train.tiny import build

OPENED = []
# a hook cannot be removed, so there is one for all tests
sys.addaudithook(
    lambda event, args: OPENED.append(args[0]) if event == "open" and RECORDING else None
)
RECORDING = []


@pytest.fixture
def opened():
    """The names of all files that are opened meanwhile, by Python code of any package."""
    OPENED.clear()
    RECORDING.append(True)
    yield OPENED
    RECORDING.clear()


# a source is opened with checksums of its files before and after, which a journal would record
@pytest.mark.parametrize(("begin", "most"), [("model", 3), ("growth", 5)])
def test_a_config_is_opened_a_few_times(workplace, opened, begin, most):  # noqa: F811
    """Of the model, of a teacher and of the source of a growth."""
    if begin == "growth":
        head, tail = RUN.index("[two_stage]"), RUN.index("[output]")
        grown = '[growth]\nsource = "teacher"\nnum_hidden_layers = 3\n'
        text = RUN[:head].replace('[model]\npath = "model"\n', grown) + RUN[tail:]
        (workplace / "run.toml").write_text(text)
    opened.clear()
    train(workplace / "run.toml", progress=False)
    times = Counter(map(os.fspath, (x for x in opened if isinstance(x, str | os.PathLike))))
    places = ("model", "teacher") if begin == "model" else ("teacher",)
    counts = [times[str(workplace / name / "config.json")] for name in places]
    assert all(1 <= count <= most for count in counts), counts


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_resolved_run_has_everything_opened(workplace):  # noqa: F811
    run = resolve(load_run(workplace / "run.toml"), workplace)
    assert run.model.config.num_hidden_layers == 3
    assert [one.directory for one in run.teachers] == [workplace / "teacher"]
    assert run.data.objective == "mlm" and run.output == workplace / "out"
    assert list(run.inputs) == ["model", "teacher"]
    assert len(run.tokenizer) == len(run.teacher_tokenizers[0])
    assert (run.optimizer, run.precision) == ("auto", "fp32")
    assert (run.devices.device.type, run.devices.processes) == ("cpu", 1)
    assert run.arguments.max_steps == 6 and run.arguments.optim == "adamw_torch_fused"
    assert not run.output.exists()
    edit(workplace / "teacher/config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(GrowthError, match=r"teacher is quantised \(gptq\): use the full-precision"):
        resolve(load_run(workplace / "run.toml"), workplace)


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
@pytest.mark.parametrize("name", ["model", "teacher"])
def test_weights_do_not_go_with_a_config_of_before(workplace, name):  # noqa: F811
    """Hours of tokenising may lie between the two."""
    run = resolve(load_run(workplace / "run.toml"), workplace)
    opened = run.model if name == "model" else run.teachers[0]
    file = workplace / name / "config.json"
    # as a backup does it
    os.link(file, workplace / "linked.json")
    opened.load()
    edit(file, hidden_act="relu")
    with pytest.raises(GrowthError, match=f"{name}/config.json was changed while it was read"):
        opened.load()


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda x: f"{x.setting} {x.other}")
def test_a_rule_names_what_to_do(rule):
    """Its two halves are formats of the record's fields, and make one line."""
    assert rule.why and rule.fix and "\n" not in rule.why + rule.fix
    assert not rule.why.endswith((".", ":")) and not rule.fix.endswith(".")
    fields = re.findall(r"\{(\w+)[.}!]", rule.why + rule.fix)
    assert set(fields) <= {"x", "name"}


def test_the_first_broken_rule_is_raised():
    growth = SimpleNamespace(new_layers_steps=2, at_step=1)
    with pytest.raises(GrowthError, match=r"the growth at step 1 lets .*: grow after stage 1"):
        rules.check("growth in stage 1", growth=growth, stage1_steps=3)
    rules.check("growth in stage 1", growth=growth, stage1_steps=1)


LATER = '[growth]\nat_step = 3\nnum_hidden_layers = 4\n[trainer]\noptim = "sgd"'
TWO = 'paths = ["teacher", "model"]'
UNFIT = {
    "a tail of a live teacher": (
        ("end_step = 4", 'end_step = 4\ntail = "bucket"'),
        "tail is 'bucket', but a model gives every token its probability: leave it out",
    ),
    "one weight for two teachers": (
        (
            'end_step = 4\n[teacher]\npaths = ["teacher"]',
            f"end_step = 4\nteacher_weights = [1.0]\n[teacher]\n{TWO}",
        ),
        "1 teacher_weights for 2 teachers: give one weight per teacher",
    ),
    "a metric that no evaluation gives": (
        ("[output]", "[trainer]\nmetric_for_best_model = 'los'\n[output]"),
        "metric_for_best_model is 'los', which an evaluation does not give; did you mean 'loss'",
    ),
    "balanced experts without a router": (
        ("[training]", "[training]\nexpert_balancing = 0.1"),
        "BertForMaskedLM has no router with a bias that only chooses experts",
    ),
    "more layers per block than layers": (
        ("layers_per_block = 1", "layers_per_block = 4"),
        "layers_per_block is 4, but the model has 3 layers: give 3 or less",
    ),
    "moments that cannot grow": (
        ("[output]", f"{LATER}\n[output]"),
        'the state of sgd cannot be grown: set moments to "reset" in all growths',
    ),
    "a precision against the arguments of the launcher": (
        ("", ""),
        "precision is 'fp32', also where a run file says nothing, but the environment variable",
    ),
}


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_refused_before_data_and_weights(workplace, monkeypatch, case):  # noqa: F811
    (old, new), match = UNFIT[case]
    if not old:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    (workplace / "run.toml").write_text(RUN.replace(old, new))
    monkeypatch.setattr(start, "load_data", None)
    monkeypatch.setattr(resolving, "load_model", None)
    with pytest.raises(GrowthError, match=re.escape(match)):
        train(workplace / "run.toml", progress=False)
    assert not (workplace / "out").exists()


# of records that are made again with other values, of each model or module, and by `load_data`
OFTEN = {"data", "distributed", "checkpoint", "checkpointing", "sides", "weights"}
CHECKS = ("check_switches", "check_arguments", "check_optimizer", "check_growths")


@pytest.fixture
def asked(monkeypatch):
    """How often each rule was asked, by its record, and each function that checks, by its name."""
    counts = Counter()

    def counting(name, function):
        def counted(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        return counted

    first = {rule.of: rule for rule in reversed(rules.RULES)}
    monkeypatch.setattr(
        rules,
        "RULES",
        tuple(
            rule._replace(broken=counting(rule.of, rule.broken)) if rule is first[rule.of] else rule
            for rule in rules.RULES
        ),
    )
    for name in CHECKS:
        for module in [m for n, m in sys.modules.items() if n.startswith("growkern.")]:
            if name in vars(module):
                monkeypatch.setattr(module, name, counting(name, vars(module)[name]))
    return counts


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_run_file_is_checked_once(workplace, asked):  # noqa: F811
    train(workplace / "run.toml", progress=False)
    wanted = {"arguments", "training", "block", "teachers", "arguments' optimizer", "precision"}
    assert wanted | set(CHECKS[:3]) <= asked.keys()
    assert {name: n for name, n in asked.items() if n > 1 and name not in OFTEN} == {}


def test_a_trainer_in_python_is_checked_once(tmp_path, asked):
    options = {
        "two_stage": TwoStageConfig(1, stage1_steps=2),
        "teacher": build("bert"),
        "inheritance": InheritanceSchedule(end_step=2),
        "growth": [GrowthStep(at_step=3, sizes={"num_hidden_layers": 6})],
    }
    TwoStageTrainer(
        build("bert"), arguments(tmp_path, max_steps=4, save_strategy="steps"), **options
    )
    wanted = {"arguments", "training", "block", "teachers", "arguments' optimizer", "precision"}
    assert wanted | {"growth in a run", *CHECKS} <= asked.keys()
    assert {name: n for name, n in asked.items() if n > 1 and name not in OFTEN} == {}
