"""Following one call of an op means opening few files, and the op's module names all of them."""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import growkern
from growkern.ops.adamw.factors import Factors, StatePart, UpdateRule
from growkern.ops.adamw.op import adamw_step
from growkern.ops.backend.choose import choose_backend
from growkern.ops.backend.launch import HAS_TRITON
from growkern.ops.expand.call import Routing

OPS = Path(growkern.__file__).parent / "ops"
ROOT = OPS.parents[1]
EXPAND = {f"expand/{name}.py" for name in ("op", "call", "hashes")}
# the table of backends, rows/op.py, is read but not run
LINEAR = {
    *("loss/linear_kl_mlm_loss.py", "loss/kl_mlm_loss.py", "loss/rows/options.py"),
    *("loss/rows/inputs.py", "loss/rows/state.py", "loss/rows/op.py"),
    *(f"loss/linear/{name}.py" for name in ("heads", "op", "gemm")),
}
ROWS = "loss/rows"
ADAMW = {"adamw/op.py", "adamw/factors.py"}
FILES = {
    ("adamw_step", "cpu"): {*ADAMW, "adamw/on_cpu.py", "csrc/cpu/adamw_body.cpp"},
    ("adamw_step", "triton"): {*ADAMW, "adamw/on_triton.py"},
    ("expand", "cpu"): {*EXPAND, "expand/on_cpu.py", "csrc/cpu/expand_body.cpp"},
    ("expand", "triton"): {*EXPAND, "expand/on_triton.py", "expand/noise_on_triton.py"},
    ("expand", "cuda"): {
        *(*EXPAND, "expand/on_cuda.py", "expand/on_triton.py", "csrc/cuda/expand_rows.cu")
    },
    ("linear_kl_mlm_loss", "cpu"): {
        *(*LINEAR, f"{ROWS}/on_cpu.py", "csrc/cpu/kl_mlm_body.cpp", "csrc/cpu/gemm_body.cpp")
    },
    ("linear_kl_mlm_loss", "triton"): {
        *(*LINEAR, f"{ROWS}/on_triton.py"),
        *(f"{ROWS}/triton_{name}.py" for name in ("kernel", "sums", "blocks")),
    },
}
# they hold no mathematics: one picks the instruction set, two order rows and columns
NOT_COUNTED = {f"csrc/cpu/{name}.cpp" for name in ("native", "expand", "pages")}
NOT_COUNTED |= {"csrc/cuda/row_lists.cu"}
MOST = {"adamw_step": 4, "expand": 6, "linear_kl_mlm_loss": 13}
MODULES = {
    "adamw_step": "growkern.ops.adamw.op",
    "expand": "growkern.ops.expand.op",
    "linear_kl_mlm_loss": "growkern.ops.loss.linear_kl_mlm_loss",
}


def call(op: str, backend: str, device: str) -> None:
    """One call with many options, and its backward."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    if op == "adamw_step":
        each = ((random(4, 1).abs(), random(6).abs()),) * 2
        factors = Factors(*each, (torch.ones(4, 1) > 0, torch.ones(6) > 0))
        part, rule = (
            StatePart(*(random(4, 6).abs() for _ in range(4))),
            UpdateRule(*[0.5] * 5, False, 1.0),
        )
        adamw_step(part, factors, 0.5, rule, backend=backend)
        return
    weight = random(8, 4).requires_grad_()
    if op == "expand":
        cols = torch.arange(6, device=device) % 4
        # columns 0, 1, 4 and 5 are copies of the first two, columns 2 and 3 the only ones
        number = torch.arange(6, device=device) // 4
        count = 1 + (cols < 2).long()
        routing = Routing(1, torch.stack([number, count], 1), amplitude=0.5)
        for options in ({"col_scale": random(6), "col_noise": random(6)}, {"routing": routing}):
            growkern.expand(weight, cols=cols, **options, backend=backend).sum().backward()
        return
    growkern.linear_kl_mlm_loss(
        random(5, 4).requires_grad_(), weight, random(5, 3), random(8, 3),
        torch.arange(5, device=device), student_bias=random(8).requires_grad_(),
        divergence="jsd", softcap=30.0, return_parts=True, backend=backend,
    )[0].backward()  # fmt: skip


def files_run_by(act: Callable[[], None]) -> set[str]:
    """The files of growkern/ops, except ops/backend, whose functions run in an act."""
    found = set()

    def note(frame, event, _):
        # text first: an interpreted kernel makes a hundred thousand calls
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(OPS)) and frame.f_code.co_name != "<module>":
            found.add(Path(name).relative_to(OPS).as_posix())

    act()  # the first call fills caches
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return {name for name in found if not name.startswith("backend/")}


@pytest.mark.parametrize("op, backend", FILES)
def test_the_module_names_every_file(op, backend):
    module = importlib.import_module(MODULES[op])
    paragraph = module.__doc__.partition("Reading order:")[2].partition("\n\n")[0]
    here = Path(module.__file__)
    named = {here, *(here.parent / name for name in re.findall(r"`([\w/]+\.py)`", paragraph))}
    named |= {ROOT / name for name in re.findall(r"`(csrc/[\w/.]+)`", paragraph)}
    assert all(path.is_file() for path in named)
    files = FILES[op, backend]
    assert {ROOT / x if x.startswith("csrc/") else OPS / x for x in files} <= named
    assert len(files) <= MOST[op]


def test_every_compiled_file_is_counted_or_named_as_not_counted():
    sources = [*ROOT.glob("csrc/**/*.cpp"), *ROOT.glob("csrc/**/*.cu")]
    compiled = {path.relative_to(ROOT).as_posix() for path in sources}
    counted = {name for files in FILES.values() for name in files if name.startswith("csrc/")}
    assert compiled - counted == NOT_COUNTED


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("op", MODULES)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of Triton's interpreter
def test_a_call_runs_no_other_file(op, backend, device):
    if backend == "triton" and not HAS_TRITON:
        pytest.skip("Triton is not installed")
    device = "cpu" if backend == "cpu" else device
    assert choose_backend(backend, torch.device(device)) == backend
    run = files_run_by(lambda: call(op, backend, device))
    run |= files_run_by(lambda: call(op, "reference", device))
    files = {name for name in FILES[op, backend] if name.endswith(".py")}
    if device == "cuda":
        assert run <= files  # a compiled kernel is not traced
    else:
        assert run == files - {"loss/rows/op.py"}
