"""The one place that decides which implementation of an op runs."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from growkern.errors import GrowthError
from growkern.ops.backend import native, nvrtc
from growkern.ops.backend.launch import HAS_TRITON

BACKENDS = ("reference", "cpu", "triton", "cuda")


class Backend(NamedTuple):
    """One row of `growkern info`."""

    name: str
    live: bool
    reason: str


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _describe(name: str) -> Backend:
    if name == "reference":
        return Backend(name, True, f"plain PyTorch {torch.__version__}")
    if name == "cpu":
        return Backend(name, native.loaded() is not None, native.reason())
    if name == "cuda":
        return Backend(name, not nvrtc.why_not(), nvrtc.reason())
    if not HAS_TRITON:
        return Backend(name, False, "Triton is not installed: pip install triton")
    if torch.cuda.is_available():
        return Backend(name, True, f"on {torch.cuda.get_device_name()}")
    if _interpreted():
        return Backend(name, True, "interpreted (TRITON_INTERPRET=1): for tests, not for work")
    return Backend(name, False, "no GPU found by PyTorch")


def describe_backends() -> list[Backend]:
    """Every backend, whether it can run here, and what it runs on or why it cannot."""
    return [_describe(name) for name in BACKENDS]


# torch.compile cannot trace how the library is loaded, and a loss asks inside a compiled step
@torch.compiler.assume_constant_result
def _has_library() -> bool:
    return native.loaded() is not None


def choose_backend(
    requested: str | None,
    device: torch.device,
    supported: Sequence[str] = BACKENDS,
) -> str:
    """The backend that answers for tensors on `device`.

    Args:
        requested: a name of BACKENDS, or None (or "") to decide here: a GPU gets Triton, a CPU
            the compiled library, and "reference" stands in where those are missing. "cuda" is
            taken on request only, until it has been measured to be faster.
        device: where the tensors are.
        supported: the backends the op has for these dtypes; "reference" is always one.

    Raises:
        GrowthError: the requested backend is unknown, cannot run here, or not on this device.
    """
    if not requested:
        wanted = "cpu" if device.type == "cpu" else "triton"
        live = _has_library() if wanted == "cpu" else HAS_TRITON
        return wanted if wanted in supported and live else "reference"
    if requested not in BACKENDS:
        raise GrowthError(f"backend={requested!r} is unknown: use one of {', '.join(BACKENDS)}")
    if requested not in supported:
        raise GrowthError(
            f"backend={requested!r} does not do this operation: use {' or '.join(supported)}"
        )
    found = _describe(requested)
    if not found.live:
        raise GrowthError(f"backend={requested!r} cannot run here: {found.reason}")
    on_cpu = device.type == "cpu"
    wants_cpu = {"cpu": True, "cuda": False, "triton": _interpreted()}.get(requested, on_cpu)
    if wants_cpu != on_cpu:
        raise GrowthError(f"backend={requested!r} does not run on tensors on {device}")
    return requested
