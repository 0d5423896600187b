"""Whatever a public function is handed is as before when it returns, and when it raises.

So is what all libraries of a process share. What a function changes by its docstring is in
`CHANGES`, and nothing else changes.
"""

import contextlib
import dataclasses
import inspect
import random
import sys
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch

import growkern
from growkern.cli.commands import app
from tests.shared import walks
from tests.unchanged.rows import ROWS
from tests.unchanged.state import differences, of_process, of_process_changed, of_values

PACKAGE = str(Path(growkern.__file__).parent)
# command -> what does its work
DOORS = {
    "plan": "plan",
    "grow": "grow_checkpoint",
    "verify": "verify",
    "family draft": "draft_family",
    "train": "run",
    "export": "export",
    "cache-teacher": "cache_teacher",
    "eval": "evaluate",
    "plot": "plot_runs",
    "info": "collect",
}
# Call -> what its docstring says that it changes, as patterns of places. Nothing else may change,
# and each of these does. "values" are a tensor's numbers, "trains" is its requires_grad.
OUTPUT = {"argument 1/*"}
GRADIENTS = {"argument 1.grad*", "argument 2.grad*"}
# as Trainer, which sets all of them to `args.seed`
SEEDS = {"numbers of torch", "numbers of Python", "numbers of numpy"}
ACCELERATE = "model._is_accelerate_prepared"
CHANGES = {
    "grow_from_files_to_files": OUTPUT,
    "an_export": OUTPUT,
    "a_picture": OUTPUT,
    "a_cache": {"argument 2/*"},
    "grow_into_a_model": {
        "argument 0.*weight values",
        "argument 0.growth_plan*",
        # a model that is saved keeps the record of its growth
        *(f"argument 0.{x}" for x in ("save_pretrained", "_upload_modified_files")),
        "argument 0.generation_config.max_new_tokens",
    },
    "freeze": {"argument 0.* trains"},
    "widen_a_module": {"argument 1.[03].* values"},
    "expand_a_matrix": {"out values"},
    "loss_of_logits": {"argument 1.grad*"},
    "loss_of_heads": GRADIENTS,
    "loss_of_likeliest": GRADIENTS,
    "adamw": {"argument 0.*"},
    "muon": {"argument 0.*"},
    # of the one parameter with a gradient
    "a_step_of_adamw": {
        "model.*k_proj.weight values",
        "optimizer.state*",
        "optimizer.param_groups.0.params.1 values",
    },
    "clip": {"argument 0.*.k_proj.weight.grad values"},
    "moments_into": {"argument 1.state*", "argument 1.param_groups.0"},
    "compiled_blocks": {
        "argument 0.model.layers.?._compiled_call_impl",
        "argument 0.*gradient_checkpointing*",
        "argument 0.*require_grads_hook*",
        "argument 0.model.embed_tokens._forward_hooks*",
    },
    # it starts the communication of the processes, for which PyTorch sets `sys.excepthook`
    "shards": {"argument 0*", "processes", "hooks"},
    "a_trainer": SEEDS,
    "a_trainer_of_an_encoder": SEEDS,
    "training": {
        "model.* values",
        "model.*.training",
        "model.*.k_proj.weight.grad*",
        ACCELERATE,
        "numbers of torch",
    },
    "evaluation": {ACCELERATE},
    "a_run": SEEDS,
}
CASES = [(name, make) for name, makes in ROWS.items() for make in makes]
MAKES = [make for _, make in CASES]
# calls whose cost is seconds: they are not interrupted
LONG = {"draft", "a_table_is_checked", "a_picture", "compiled_blocks", "a_run"}
# parts of a call after which it is interrupted
PARTS = [i / 12 for i in range(1, 12)] if walks.times > 1 else [1 / 3]


class Interrupted(BaseException):
    """Raised in the middle of a call."""


class Interruption:
    """Counts the calls of functions of the package, and raises in one of them, or soon after.

    It raises in none that cleans up: a function cannot be cleaner than its own end.
    """

    def __init__(self, at=None):
        self.at, self.calls = at, 0

    def __enter__(self):
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _see(self, frame, event, _argument):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        self.calls += 1
        if self.at is None or self.calls < self.at or code.co_flags & inspect.CO_GENERATOR:
            return
        if not _cleans_up(frame):
            raise Interrupted


def _cleans_up(frame):
    while frame is not None:
        if frame.f_code.co_name in ("__exit__", "__del__", "close", "_callback"):
            return True
        frame = frame.f_back
    return False


def changed(name, make, folder, at=None):
    """What differs after a call, and how many functions it called."""
    folder.mkdir()
    row = ROWS[name][make](folder)
    given, process = of_values(**row.given()), of_process()
    watch = contextlib.nullcontext() if make in LONG and at is None else Interruption(at)
    with watch as interruption:
        try:
            row.call()
        except Interrupted:
            pass
        finally:
            row.close()
    found = differences(given, of_values(**row.given()))
    return found | of_process_changed(process, of_process()), getattr(interruption, "calls", 0)


@pytest.fixture(autouse=True)
def alone():
    """The process as it was, whatever a call starts."""
    numbers, others = random.getstate(), np.random.get_state()  # noqa: NPY002
    # the same numbers would hide that a seed was set
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(3)
    yield
    random.setstate(numbers)
    np.random.set_state(others)  # noqa: NPY002


def test_every_public_name_and_every_command_has_a_row():
    assert {name for name in growkern.__all__ if not is_value(name)} <= ROWS.keys()
    groups = {group.name: group.typer_instance for group in app.registered_groups}
    commands = {name_of(command) for command in app.registered_commands}
    for group, inner in groups.items():
        commands |= {f"{group} {name_of(command)}" for command in inner.registered_commands}
    assert DOORS.keys() == commands
    assert set(DOORS.values()) <= ROWS.keys()
    assert len(MAKES) == len(set(MAKES)) and CHANGES.keys() <= set(MAKES)


def is_value(name):
    """Whether a public name is a text, an error or a record of values, which does no work."""
    value = getattr(growkern, name)
    is_error = isinstance(value, type) and issubclass(value, Exception)
    return isinstance(value, str) or is_error or dataclasses.is_dataclass(value)


def name_of(command):
    return command.name or command.callback.__name__.replace("_", "-")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "make"), CASES, ids=MAKES)
def test_all_is_as_before(name, make, tmp_path):
    said = CHANGES.get(make, set())
    found, calls = changed(name, make, tmp_path / "whole")
    assert {x for x in found if not any(fnmatch(x, pattern) for pattern in said)} == set()
    assert {pattern for pattern in said if not any(fnmatch(x, pattern) for x in found)} == set()
    if make in LONG:
        return
    for i, part in enumerate(PARTS):
        found, _ = changed(name, make, tmp_path / f"part {i}", at=int(part * calls) + 1)
        said_then = said | {"model.*.grad*"} if make == "training" else said
        assert {x for x in found if not any(fnmatch(x, p) for p in said_then)} == set(), part
