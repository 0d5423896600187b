"""The first things that a newcomer uses: import, public names, versions."""

import ast
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import growkern
from growkern.cli.commands import GROUP_OF
from growkern.files import parse_toml
from testbed.models import BERT, random_model

ROOT = Path(growkern.__file__).parents[1]
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
PROJECT = parse_toml((ROOT / "pyproject.toml").read_text())["project"]


def test_a_message_holds_two_of_the_longest_paths():
    # 4,096 characters, of names as long as a file system takes
    first, second = (f"/{letter * 255}" * 16 for letter in "ab")
    text = f"{first} differs from {second}: grow it again"
    assert str(growkern.GrowthError(text)) == text
    longer = str(growkern.GrowthError(text * 2))
    assert len(longer) < 1000 and longer.endswith("grow it again")
    values = str(growkern.GrowthError(f"hidden_size is {[1] * 1000}: give one number"))
    assert len(values) < 1000 and values.endswith("give one number")


def python(code: str, *options: str, **environment: str) -> str:
    """The output of a fresh interpreter."""
    command, env = [sys.executable, *options, "-c", code], {**os.environ, **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ------------------------------------------------------------------ import


def test_import_is_light():
    heavy = ("torch", "triton", "transformers", "rich", "typer", "numpy")
    loaded = python(f"import growkern, sys; print([m for m in {heavy} if m in sys.modules])")
    assert loaded == "[]"


def imported_by(arguments: list[str], modules: tuple[str, ...]) -> list[str]:
    """Those of the modules that a command of growkern imports."""
    code = f"""
import sys
from contextlib import redirect_stdout
from io import StringIO
from growkern.cli.main import main
sys.argv = ["growkern", *{arguments!r}]
with redirect_stdout(StringIO()) as output:
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
assert output.getvalue()
print([name for name in {modules!r} if name in sys.modules])
"""
    return ast.literal_eval(python(code))


@pytest.mark.parametrize("arguments", ["--version", "--help", "plan --help"])
def test_help_is_light(arguments):
    heavy = ("torch", "transformers", "numpy", "triton", "matplotlib")
    assert imported_by(arguments.split(), heavy) == []


# wrong paths, options, types and values; {bert} is a config without weights
WRONG = """
plan nothere
plan {bert} --method fip
plan {bert} --hidden-size wide
plan {llama} --n-embd 16
plan {llama} --hidden-size 0
plan {llama} --hidden-size 4
plan {llama} --to nofamily
grow {llama} new --to qwen3_moe --hidden-size 16
grow {llama} new --n-embd 16
plan {bert} --wrong
plan {bert} --ranks 0
plan {bert} --tokens nan
plan {bert} --source-tokens 1e9
grow nothere new
grow {bert} new --text nothere
plan {small} --num-attention-heads 7
plan {llama} --num-attention-heads 6 --num-key-value-heads 4
plan {llama} --hidden-size 16 --carry 0.5
grow {llama} new --hidden-size 16 --aki eq16
grow {bert} new --wrong
grow {bert} new --hidden-size 32
grow {bert} new --depth wrong
grow {bert} new --dtype float12
grow {bert} new --memory-limit huge
grow {bert} {full}
grow {bert} {grown}
grow {bert} new --optimizer {bert}/config.json --moments old
verify nothere new
verify {bert} nothere
verify {bert} {llama}
verify {bert} {bert} --wrong
verify nothere --checksums
verify {bert} {bert} --lineage nothere
family draft nothere
family draft {bert} --table nothere
family draft {bert} --table {key} --output new
train nothere
train {bert}
train {key} --wrong
train {key}
train {type}
train {value}
train {choice}
train {lacking}
train {place}
train {growth}
train {heads}
train {idle}
train {keys}
train {model}
train {text}
train {teacher}
export nothere new
export {bert} new
cache-teacher nothere --out new --k 2
cache-teacher {bert} nothere --out new --k 2
cache-teacher {bert} --out new --k 2 --run nothere
eval nothere
eval nothere.toml
eval {bert} nothere.txt
eval {bert} --text {bert}/*.txt
plot nothere
plot {bert}
plot {bert} --wrong
info --wrong
"""


# a run file without a mistake, up to its training, and a mistake in each part
RUN = {
    "model": {"path": "."},
    "data": {"train": ["config.json"]},
    "training": {"steps": 1},
    "output": {"directory": "out"},
}
MISTAKES = {
    "type": {"data": {"train": "config.json"}},
    "value": {"training": {"steps": 1, "learning_rate": -1}},
    "choice": {"inheritance": {"end_step": 1, "decay": "lineal"}},
    "lacking": {"two_stage": {"stage1_steps": 1}},
    "key": {"training": {"step": 1}},
    "place": {"data": {"train": ["config.json"], "steps": 1}},
    "growth": {"growth": {"source": ".", "hidden_size": 8, "methd": "fpi"}},
    "model": {"model": {"path": "nothere"}},
    "text": {"data": {"train": ["nothere/*.txt"]}},
    "heads": {"growth": {"source": "small", "num_attention_heads": 7}},
    "idle": {"growth": {"source": "llama", "hidden_size": 16, "carry": 0.5}},
    "keys": {
        "growth": {"source": "llama", "num_attention_heads": 6, "num_key_value_heads": 4},
    },
    "teacher": {"teacher": {"paths": [".", "nothere"]}, "inheritance": {}},
}


def test_wrong_paths_and_options_are_told_before_torch_is_imported(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name, sections in MISTAKES.items():
        lines = [
            f"{section} = {{ {', '.join(f'{k} = {json.dumps(v)}' for k, v in table.items())} }}"
            for section, table in {**RUN, **sections}.items()
        ]
        (tmp_path / f"{name}.toml").write_text("\n".join(lines))
    for name in ("full", "grown", "llama", "small"):
        (tmp_path / name).mkdir()
    llama, small = ({"model_type": kind, "hidden_size": 8} for kind in ("llama", "bert"))
    (tmp_path / "llama" / "config.json").write_text(json.dumps(llama))
    small |= {"num_attention_heads": 4}
    (tmp_path / "small" / "config.json").write_text(json.dumps(small))
    (tmp_path / "full" / "notes").touch()
    record = {"format": 1, "piece_bytes": 1, "files": {}, "source": {}, "target": {}}
    (tmp_path / "grown" / "checksums.json").write_text(json.dumps(record))
    places = {name: tmp_path / name for name in ("full", "grown", "llama", "small")} | {
        "bert": tmp_path
    }
    places |= {name: tmp_path / f"{name}.toml" for name in MISTAKES}
    lines = WRONG.format(**places).strip().splitlines()
    code = f"""
import sys
from growkern.cli.main import main
from growkern.families import load_family
for line in {lines!r}:
    sys.argv = ["growkern", *line.split()]
    try:
        main()
    except SystemExit as stop:
        heavy = [name for name in ("torch", "transformers", "datasets") if name in sys.modules]
        assert stop.code == 2 and not heavy, (line, stop.code, heavy)
        # reading the tables of all families takes longer than the rest
        assert load_family.cache_info().currsize < 12 or " --to " in line, line
        load_family.cache_clear()
print("all")
"""
    assert python(code) == "all"
    assert {line.split()[0] for line in lines} == set(GROUP_OF)


def test_plan_imports_no_modelling_code(tmp_path):
    # Llama is slower: transformers itself imports modelling code for its config
    random_model("BertModel", BERT).save_pretrained(tmp_path)
    heavy = ("transformers.modeling_utils", "transformers.activations", "torch._dynamo", "sympy")
    heavy += ("torch.distributed.tensor", "torch.distributed.checkpoint", "matplotlib", "datasets")
    assert imported_by(["plan", str(tmp_path), "--hidden-size", "24"], heavy) == []


@pytest.mark.parametrize("name", growkern.__all__)
def test_public_name_resolves_and_is_documented(name):
    value = getattr(growkern, name)
    assert name in dir(growkern)
    assert name == "__version__" or value.__doc__


def test_type_checkers_see_the_public_names():
    tree = ast.parse(Path(growkern.__file__).read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    seen = {a.name for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen | {"__version__"} == set(growkern.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'gorw'"):
        _ = growkern.gorw


def test_ops_work_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch, growkern
rows = torch.tensor([0, 1, 0])
print(growkern.expand(torch.eye(2), rows=rows).tolist())
logits = torch.zeros(2, 4)
print(round(float(growkern.kl_mlm_loss(logits, logits, torch.tensor([1, 2]), alpha=0.0)), 4))
"""
    assert python(code).splitlines() == ["[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]", "1.3863"]


# ------------------------------------------------------------------ facts stated once


def test_version_is_the_same_everywhere():
    version = PROJECT["version"]
    assert growkern.__version__ == importlib.metadata.version("growkern") == version
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == version
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(
    "project, expected",
    [
        ('name = "growkern"\nversion = "7.8.9"', "7.8.9"),
        ('name = "another"\nversion = "7.8.9"', "unknown"),
        (None, "unknown"),
    ],
)
def test_version_of_a_source_tree_that_is_not_installed(project, expected, tmp_path, monkeypatch):
    """A copy of the package; the interpreter sees no installed package, so no metadata either."""
    shutil.copytree(ROOT / "growkern", tmp_path / "growkern")
    if project is not None:
        (tmp_path / "pyproject.toml").write_text(f"[project]\n{project}\n")
    if sys.version_info < (3, 11):
        shutil.copytree(Path(tomllib.__file__).parent, tmp_path / "tomli")
    # the interpreter would import from its working directory first
    monkeypatch.chdir(tmp_path)
    code = "import growkern; print(growkern.__version__, growkern.__file__)"
    found = python(code, "-S", PYTHONPATH=str(tmp_path))
    assert found.split() == [expected, str(tmp_path / "growkern" / "__init__.py")]


def test_pins_cover_and_satisfy_the_requirements():
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    here = {pin.name: pin for pin in pins if pin.marker is None or pin.marker.evaluate()}
    extras = PROJECT["optional-dependencies"].values()
    for line in [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]:
        needed = Requirement(line)
        if needed.marker is None or needed.marker.evaluate():
            pinned = str(here[needed.name].specifier).removeprefix("==")
            assert needed.specifier.contains(pinned), f"{needed} but pinned {pinned}"
