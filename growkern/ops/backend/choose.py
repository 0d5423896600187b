"""Decides which implementation of an op runs: the backend that was asked for, or the best here."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from growkern.errors import GrowthError
from growkern.ops.backend import native, nvrtc
from growkern.ops.backend.launch import HAS_TRITON

# every op has the first three, `expand` all
COMMON = ("reference", "cpu", "triton")
BACKENDS = (*COMMON, "cuda")


class Backend(NamedTuple):
    """Whether a backend can run on this machine: one row of `growkern info`."""

    name: str
    live: bool
    reason: str  # what it runs on, or why it cannot


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _describe(name: str) -> Backend:
    if name == "reference":
        return Backend(name, True, f"plain PyTorch {torch.__version__}")
    if name == "cpu":
        live = native.loaded() is not None
        return Backend(name, live, native.reason() + ("" if live else f". {native.LOST}"))
    if name == "cuda":
        return Backend(name, not nvrtc.why_not(), nvrtc.reason())
    if not HAS_TRITON:
        return Backend(name, False, "Triton is not installed: pip install triton")
    if torch.cuda.is_available():
        return Backend(name, True, f"on {torch.cuda.get_device_name()}")
    if _interpreted():
        return Backend(name, True, "interpreted (TRITON_INTERPRET=1): slow, for tests")
    return Backend(name, False, "no GPU found by PyTorch")


def describe_backends() -> list[Backend]:
    """Every backend, and whether it can run here."""
    return [_describe(name) for name in BACKENDS]


# torch.compile cannot trace how the library is loaded, and a loss asks inside a compiled step
@torch.compiler.assume_constant_result
def _has_library() -> bool:
    return native.loaded() is not None


@torch.compiler.assume_constant_result
def _why_not(name: str) -> str:
    """Why a backend cannot run here; "" if it can."""
    backend = _describe(name)
    return "" if backend.live else backend.reason


def choose_backend(
    requested: str | None, device: torch.device, supported: Sequence[str] = COMMON
) -> str:
    """The backend that runs an op on tensors of a device.

    Args:
        requested: a name of BACKENDS. None or "": "triton" on a GPU, "cpu" on a CPU, and
            "reference" where these cannot run. "cuda" is for `expand` alone and must be requested,
            because its speed has not been measured yet.
        supported: the backends that the op has for these dtypes; "reference" is always one.
    """
    if not requested:
        # torch.compile traces this code: call only what it can trace
        wanted = "cpu" if device.type == "cpu" else "triton"
        live = _has_library() if wanted == "cpu" else HAS_TRITON
        return wanted if wanted in supported and live else "reference"
    if requested not in BACKENDS:
        raise GrowthError(f"backend={requested!r} is unknown: use one of {', '.join(BACKENDS)}")
    if requested not in supported:
        raise GrowthError(
            f"backend={requested!r} does not do this operation: use {' or '.join(supported)}"
        )
    if reason := _why_not(requested):
        raise GrowthError(f"backend={requested!r} cannot run here: {reason}")
    on_cpu = device.type == "cpu"
    wants_cpu = {"cpu": True, "cuda": False, "triton": _interpreted()}.get(requested, on_cpu)
    if wants_cpu != on_cpu:
        raise GrowthError(f"backend={requested!r} does not run on tensors on {device}")
    return requested
