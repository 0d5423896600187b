"""Processes that load data survive the signals that end a run, and end with their loader."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from growkern.train.safety.checkpoints import checkpoints_in, damage
from growkern.train.safety.signals import guard_workers
from tests.train.safety.runs import small_trainer

ROOT = Path(__file__).parents[3]


class Numbers(Dataset):
    """The process id of the worker; reading example 7 takes for ever."""

    def __init__(self, size=4):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == 7:
            time.sleep(1000)
        return os.getpid()


def remember(number):
    torch.utils.data.get_worker_info().dataset.size = 100 + number


class Sizes(Numbers):
    def __getitem__(self, index):
        return self.size


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_ignores_signals_of_others(number):
    loader = iter(guard_workers(DataLoader(Numbers(64), num_workers=1, prefetch_factor=1)))
    pid = int(next(loader))
    # the sender is neither the worker nor its parent
    subprocess.run(["kill", f"-{number.name}", str(pid)], check=True)
    assert [int(next(loader)) for _ in range(3)] == [pid] * 3
    del loader
    assert not is_alive(pid)


def test_a_worker_that_hangs_ends_with_its_loader():
    loader = iter(guard_workers(DataLoader(Numbers(8), num_workers=1, prefetch_factor=4)))
    pid = int(next(loader))
    for _ in range(3):
        next(loader)
    os.kill(pid, signal.SIGTERM)  # what the loader does after 5 seconds
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_workers_own_start_still_runs():
    loader = DataLoader(Sizes(), num_workers=1, worker_init_fn=remember)
    assert [int(size) for size in guard_workers(loader)] == [100] * 4
    assert guard_workers(plain := DataLoader(Sizes())) is plain
    assert plain.worker_init_fn is None


def test_a_guarded_loader_is_freed_at_once():
    """Garbage collection closes the queues of persistent workers before it tells them to end."""
    loader = guard_workers(DataLoader(Numbers(), num_workers=1, persistent_workers=True))
    pid, itself = int(next(iter(loader))), weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert itself() is None and not is_alive(pid)
    finally:
        gc.enable()


def main(folder):
    small_trainer(
        folder,
        args={
            "dataloader_num_workers": 2, "max_steps": 100_000, "save_steps": 100_000,
            "eval_strategy": "steps", "eval_steps": 3,
        },
    ).train()  # fmt: skip


def test_a_signal_to_all_processes_saves(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.train.safety.test_workers", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    lines = []
    while len(lines) < 4:
        lines.append(process.stdout.readline())
        assert lines[-1], process.stderr.read()
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert "SIGTERM after step" in errors, errors
    assert "Traceback" not in errors
    assert process.returncode == 143
    assert damage(checkpoints_in(tmp_path)[0]) is None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
