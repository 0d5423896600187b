"""The surroundings of the tests of ops."""

import warnings

import pytest


@pytest.fixture(autouse=True)
def quiet_interpreter():
    """Masked lanes are inf - inf in NumPy, which says so; a kernel drops them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
        yield
