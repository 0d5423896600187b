"""One device for the whole suite; memory that nobody wrote reads as NaN, not as zeros."""

import os

import torch

if not torch.cuda.is_available():
    # before any kernel module is imported: Triton decides when a kernel is decorated
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def empty_is_nan():
    """``torch.empty`` is NaN inside a test, so a store that a kernel forgets cannot pass."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
