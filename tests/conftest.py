"""The surroundings of every test: the device, one thread, a wide terminal, and random walks."""

import gc
import os
import signal
import sys
import types

# Workers share the cores. Tests of threads ask for more themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test asks the Hub. Those about it talk to a server of their own.
os.environ["HF_HUB_OFFLINE"] = "1"

import tempfile
from pathlib import Path

import torch

if not torch.cuda.is_available():
    # before any kernel module is imported: Triton decides when a kernel is decorated
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from testbed import cuda_emulator, interpreter
from tests.shared import walks

ROOT = Path(__file__).parents[1]
# A worker takes whole files in this order. One of these as the last would let the others wait.
LONGEST = (
    "tests/ops/backend/test_launches.py",
    "tests/faults/test_growth.py",
    "tests/growth/sharded/test_grow_into.py",
    "tests/bench/test_gpu.py",
    "tests/faults/test_walk.py",
    "tests/ops/backend/test_aot.py",
    "tests/train/distributed/test_elastic.py",
    "tests/train/distributed/test_parity.py",
    "tests/bench/paper/test_tables.py",
    "tests/docs/test_pages.py",
    "tests/growth/test_fuzz.py",
    "tests/growth/plan/test_matrix.py",
    "tests/faults/test_training.py",
    "tests/ops/loss/test_inductor.py",
    "tests/unchanged/test_unchanged.py",
)
# long paths then break no line of a command's output
COLUMNS = "1000"
# where tokenised data goes, see `growkern.train.dataset.cache`, whose import takes seconds
TOKENS = "GROWKERN_TOKENS"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--walks", type=int, default=1, metavar="N", help="take N times the examples")
    parser.addoption(
        "--seed", type=int, metavar="S", help="draw other random examples, the same for the same S"
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    walks.times = config.getoption("--walks")
    walks.start = config.getoption("--seed")
    interpreter.make_quick()
    interpreter.convert_as_gpus()
    interpreter.allow_new_numpy()
    # the disk takes 10 ms each time. What is synchronised, and when, the tests of faults look at
    os.fsync = os.fstat
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # a script that runs the tests in the background hands down a SIGINT that is ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        # pytest's own output stays as wide as the terminal
        reporter._tw.fullwidth = reporter._tw.fullwidth
    os.environ["COLUMNS"] = COLUMNS
    if TOKENS not in os.environ:
        tokens = tempfile.TemporaryDirectory(prefix="growkern-tokens-")
        os.environ[TOKENS] = tokens.name
        os.environ["HF_DATASETS_CACHE"] = tokens.name
        config.add_cleanup(tokens.cleanup)
    if cuda_emulator.FOLDER not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="growkern-cuda-")
        os.environ[cuda_emulator.FOLDER] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {ROOT / name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    """Leave what is there now out of garbage collection: millions of objects that stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    if "accelerate.utils.memory" in sys.modules:
        # each training looks for garbage first: a seventh of a second among so many objects
        sys.modules["accelerate.utils.memory"].gc = types.SimpleNamespace(collect=int)


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def several_threads():
    """Compiled kernels share their work out, also on a machine with one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded():
    """A test draws the same numbers whatever ran before it."""
    torch.manual_seed(walks.start or 0)


@pytest.fixture(autouse=True)
def no_group_left():
    """A sharded run starts a process group that lives as long as the process."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def empty_is_nan():
    """``torch.empty`` is NaN inside a test, so a store that a kernel forgets cannot pass."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
