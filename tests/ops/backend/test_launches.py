"""Every launch of every public op, specialised and compiled by Triton itself without a GPU."""

import contextlib
import inspect
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import growkern
from bench.launches import aot_cases, cases, smoke
from bench.launches.fill import ROWS, cache_variables
from growkern.ops.backend.launch import HAS_TRITON
from tests.shared import walks

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
HEADLINE = "16x128256 bfloat16, no option"
ROCM = ["--jobs", "1", "--arch", "gfx942", "--only", HEADLINE]
# shared memory that a block of an H100 or H200 may have
MOST_SHARED = 227 << 10
# cases of the machine-code table that training and growth launch exactly like that
SWEEP, TAIL = "kl_mlm rows linear, ", "topk_kl_mlm tail bf16 gradient"
IN_TABLE = {
    *(f"{SWEEP}bf16 gradient", f"{SWEEP}bf16 gradient, V 30522", f"{SWEEP}biases"),
    *(f"{SWEEP}fp32 gradient", f"{SWEEP}no teacher", TAIL, f"{TAIL}, V 30522"),
    *("kl_mlm once bf16 gradient", "kl_mlm once no teacher"),
    *("expand many FPI bf16", "expand many AKI, noise bf16", "expand AKI, noise bf16"),
    *("expand many FPI, routing bf16", "expand FPI, routing bf16"),
}


# What only `--walks 2` compiles. The kernels of the losses are compiled with each option for
# ready logits, and with all together for each loss, but for the linear one in float32: its dtypes
# are those of ready logits. `expand` of these dtypes and layouts has no branch that others lack.
OPTION = r"(divergence (rev|jsd, b)|label|z_loss|softcap|row_w|reduc|kl_rows|teacher_w|return)"
EACH_OPTION = rf"(linear|top-8) \S+ bfloat16, {OPTION}"
TWICE = r"linear \S+ float32, divergence"
OTHER_EXPAND = r"expand .*((?<!b)float16|float64|(noise|routing) col, (padded|strided|turned))"
FLOAT32_EXPAND = r"expand .* float32 to float32, (upper|noise|routing (row|col, amplitude))"
SAMPLE = rf"^(?!{EACH_OPTION}|{TWICE}|{OTHER_EXPAND}|{FLOAT32_EXPAND})"
# options of the losses that no kernel sees: PyTorch has dealt with them before
IN_PYTORCH = {"ignore_index", "num_items"}
# the slices of a vocabulary that is spread over ranks are read as the tiles of `vocab_tile` are
AS_TILES = {"group", "vocab_start"}


# unoptimised, because only the errors of the compiler matter here
UNOPTIMISED = {"DISABLE_PTXAS_OPT": "1", "DISABLE_LLVM_OPT": "1"}


def run(directory, *line):
    """Run Python in a process that does not interpret kernels: what it printed."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= UNOPTIMISED | cache_variables(directory)
    done = subprocess.run(
        [sys.executable, *line], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Rows of `bench.launches.fill`, and hashes of all launches; with `--walks 2` of all calls.

    What known_launches.json knows is not compiled again, but for some.
    """
    directory = tmp_path_factory.mktemp("launches")
    only = "" if walks.times > 1 else SAMPLE
    run(directory, "-m", "tests.ops.backend.known_launches", only, str(directory / "made.json"))
    made = json.loads((directory / "made.json").read_text())
    return made["rows"], made["made"]


def all_kernels():
    return {case.kernel.fn.__name__ for case in aot_cases.listed()}


def test_every_call_compiles_for_a_gpu(compiled):
    """With one row or one column too: Triton makes an argument of 1 a constant."""
    rows, _ = compiled
    for row in rows:
        assert row["launches"] and "why not" not in row, row
        assert row["shared bytes"] <= MOST_SHARED, row
    assert {name for row in rows for name in row["kernels"]} == all_kernels()


def test_the_table_of_machine_code_is_of_launches_that_happen(compiled):
    assert {name for row in compiled[0] for name in row["in table"]} >= IN_TABLE


def test_losses_are_compiled_at_both_temperatures_and_without_a_teacher(compiled):
    """A temperature is a constant of a kernel, and so are the number of teachers and the dtypes."""
    found = {tuple(launch) for row in compiled[0] for launch in row["of the loss"]}
    dtypes = [("*fp32", "*bf16"), ("*fp32", "*fp32"), ("*bf16", "*bf16")]
    ways = [(0, 1.0), (1, 1.0), (1, cases.T)]
    assert found >= {(*way, *pair) for way in ways for pair in dtypes}
    # a CPU multiplies float16 in float32, a GPU does not
    assert (1, cases.T, "*fp32", "*fp16") in found


@pytest.mark.parametrize("name", ["kl_mlm_loss", "linear_kl_mlm_loss", "topk_kl_mlm_loss"])
def test_the_calls_have_every_option_of_a_loss(name, monkeypatch):
    options, given = inspect.signature(getattr(growkern, name)).parameters, {}

    def record(*tensors, **named):
        for option, value in named.items():
            given.setdefault(option, []).append(value)
        raise LookupError

    monkeypatch.setattr(cases, name, record)
    rng = torch.Generator().manual_seed(0)
    for case in itertools.chain(
        *(f(rng, smoke.TOY_SHAPES) for f in (cases.headline, cases.losses))
    ):
        if case.name.startswith({"k": "rows", "l": "linear", "t": "top-"}[name[0]]):
            with contextlib.suppress(LookupError):
                case.run("triton")
    named = {option for option, x in options.items() if x.kind == x.KEYWORD_ONLY}
    assert named - IN_PYTORCH - AS_TILES == given.keys()
    assert {0.0, cases.ALPHA} <= set(given["alpha"])
    assert {options["temperature"].default, 1.0} <= set(given["temperature"])


# a batch in one chunk, a batch whose last chunk is no multiple of 16, and the widest head
REAL_SHAPES = ((256, 32_000), (1030, 30_522)), ((256, 128_256),)
REAL = f"""
import json
from functools import partial
from itertools import product
import torch
from bench.speed import linear_kl_mlm_loss as benchmark
from bench.launches import cases
from bench.launches.driver import absent_gpu
from bench.shared import loss_measure
from tests.ops.backend.known_launches import install

made = install({{}}, compiles=False)
rng, shapes = torch.Generator().manual_seed(0), {REAL_SHAPES}
some = [case for case in cases.headline(rng, shapes[0]) if "bfloat16" in case.name]
# what the pieces of the linear loss measure, which call it with its defaults
for module in (benchmark, loss_measure):
    module.linear_kl_mlm_loss = partial(module.linear_kl_mlm_loss, backend="triton")
with absent_gpu() as launches:
    for case in some:
        case.run("triton")
    for shape, dtype in product(shapes[0][1:] + shapes[1], (torch.bfloat16, torch.float32)):
        student, teacher, labels = benchmark.make_inputs(*shape, 32, 16, dtype)
        benchmark.growkern(student, teacher, labels, 0.5).backward()
        benchmark.growkern_labels(student, None, labels, 0.0).backward()
print(json.dumps([len(some), sorted({{x.kernel.__name__ for x in launches}}), sorted(made)]))
"""


def test_launches_of_real_sizes_are_compiled(compiled, tmp_path):
    """Triton makes kernels of their own for rows and vocabularies that are multiples of 16."""
    count, kernels, made = json.loads(run(tmp_path, "-c", REAL).splitlines()[-1])
    assert count == 22
    assert {"kl_mlm_rows_kernel", "scale_kernel"} <= {*kernels} and "tail" in str(kernels)
    assert len(made) > 10 and not {*made} - compiled[1].keys()


def test_losses_compile_for_rocm(tmp_path):
    """Triton for AMD does not know the limit on registers that NVIDIA's has."""
    import triton

    if not (Path(triton.__file__).parent / "backends" / "amd").is_dir():
        pytest.skip("this build of Triton has no AMD backend")
    run(tmp_path, "-m", "bench.launches.fill", str(tmp_path), *ROCM)
    rows = json.loads((tmp_path / ROWS).read_text())["rows"]
    assert len(rows) == 3 and all(row["launches"] for row in rows)
