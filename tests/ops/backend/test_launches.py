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
# shared memory that a block of an H100 or H200 may have
MOST_SHARED = 227 << 10
# cases of the machine-code table that training and growth launch exactly like that
IN_TABLE = {
    "kl_mlm rows linear, bf16 gradient",
    "kl_mlm rows linear, bf16 gradient, V 30522",
    "kl_mlm rows linear, biases",
    "kl_mlm rows linear, fp32 gradient",
    "kl_mlm rows linear, no teacher",
    "kl_mlm once bf16 gradient",
    "kl_mlm once no teacher",
    "topk_kl_mlm tail bf16 gradient",
    "topk_kl_mlm tail bf16 gradient, V 30522",
    "expand many FPI bf16",
    "expand many AKI, noise bf16",
    "expand AKI, noise bf16",
    "expand many FPI, routing bf16",
    "expand FPI, routing bf16",
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


def environment():
    """Variables of a process that does not interpret kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # unoptimised, because only the errors of the compiler matter here
    return env | {"DISABLE_PTXAS_OPT": "1", "DISABLE_LLVM_OPT": "1"}


def fill(directory, *arguments):
    """Run `bench.launches.fill` in a process of its own: its rows."""
    line = [sys.executable, "-m", "bench.launches.fill", str(directory), "--jobs", "1", *arguments]
    done = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((directory / ROWS).read_text())["rows"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    directory = tmp_path_factory.mktemp("launches") / "cache"
    return directory, fill(directory, *([] if walks.times > 1 else ["--only", SAMPLE]))


def all_kernels():
    return {case.kernel.fn.__name__ for case in aot_cases.listed()}


def test_every_call_compiles_for_a_gpu(compiled):
    """With one row or one column too: Triton makes an argument of 1 a constant."""
    _, rows = compiled
    for row in rows:
        assert row["launches"] and "why not" not in row, row
        assert row["shared bytes"] <= MOST_SHARED, row
    assert {name for row in rows for name in row["kernels"]} == all_kernels()


def test_the_table_of_machine_code_is_of_launches_that_happen(compiled):
    assert {name for row in compiled[1] for name in row["in table"]} >= IN_TABLE


def test_losses_are_compiled_at_both_temperatures_and_without_a_teacher(compiled):
    """A temperature is a constant of a kernel, and so are the number of teachers and the dtypes."""
    found = {tuple(launch) for row in compiled[1] for launch in row["of the loss"]}
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
    assert {options["temperature"].default, cases.T} <= set(given["temperature"])


def groups(directory):
    return sorted(path.parent.name for path in (directory / "triton").glob("*/__grp__*.json"))


# a batch in one chunk, a batch whose last chunk is no multiple of 16, and the widest head
REAL_SHAPES = ((256, 32_000), (1030, 30_522)), ((256, 128_256),)
REAL = f"""
from functools import partial
from itertools import product
import torch
from bench.speed import linear_kl_mlm_loss as benchmark
from bench.launches import cases
from bench.launches.driver import absent_gpu
from bench.shared import loss_measure

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
print(len(some), sorted({{launch.kernel.__name__ for launch in launches}}))
"""


def test_launches_of_real_sizes_are_in_the_cache(compiled):
    """Triton makes kernels of their own for rows and vocabularies that are multiples of 16."""
    cache = compiled[0]
    before, env = groups(cache), {**environment(), **cache_variables(cache)}
    line = [sys.executable, "-c", REAL]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("22 ", "kl_mlm_rows", "tail", "scale_kernel")), (
        done.stdout
    )
    assert sorted(set(groups(cache)) - set(before)) == []


def test_losses_compile_for_rocm(tmp_path):
    """Triton for AMD does not know the limit on registers that NVIDIA's has."""
    import triton

    if not (Path(triton.__file__).parent / "backends" / "amd").is_dir():
        pytest.skip("this build of Triton has no AMD backend")
    rows = fill(tmp_path, "--arch", "gfx942", "--only", HEADLINE)
    assert len(rows) == 3 and all(row["launches"] for row in rows)
