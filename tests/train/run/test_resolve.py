"""A run is resolved once: each config is read a few times only, and each rule has a message."""

import os
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from growkern import GrowthError
from growkern import run as train
from growkern.train import rules
from growkern.train.run.file import load_run
from growkern.train.run.resolve import resolve
from tests.train.model.test_load import edit
from tests.train.run.test_run import RUN, workplace  # noqa: F401

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
@pytest.mark.parametrize(("start", "most"), [("model", 3), ("growth", 6)])
def test_a_config_is_opened_a_few_times(workplace, opened, start, most):  # noqa: F811
    """Of the model, of a teacher and of the source of a growth."""
    if start == "growth":
        head, tail = RUN.index("[two_stage]"), RUN.index("[output]")
        grown = '[growth]\nsource = "teacher"\nnum_hidden_layers = 3\n'
        text = RUN[:head].replace('[model]\npath = "model"\n', grown) + RUN[tail:]
        (workplace / "run.toml").write_text(text)
    opened.clear()
    train(workplace / "run.toml", progress=False)
    times = Counter(map(os.fspath, (x for x in opened if isinstance(x, str | os.PathLike))))
    places = ("model", "teacher") if start == "model" else ("teacher",)
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
    assert not run.output.exists()
    edit(workplace / "teacher/config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(GrowthError, match=r"teacher is quantised \(gptq\): use the full-precision"):
        resolve(load_run(workplace / "run.toml"), workplace)


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
