"""The surroundings of the tests of ops."""

import warnings

import pytest
import torch


@pytest.fixture(autouse=True)
def quiet_interpreter():
    """Masked lanes are inf - inf in NumPy, which says so; a kernel drops them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
        yield


class CurrentDevice:
    """Stands in for CUDA's current device."""

    def __init__(self, monkeypatch):
        self.index = 0
        for name in ("_exchange_device", "_maybe_exchange_device"):
            monkeypatch.setattr(torch.cuda, name, self.exchange)

    def exchange(self, index):
        before = self.index
        self.index = index if index >= 0 else before
        return before


@pytest.fixture
def current_device(monkeypatch):
    return CurrentDevice(monkeypatch)
