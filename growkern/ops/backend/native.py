"""Finds and loads the compiled CPU library (csrc/cpu), or says why it cannot be used.

This module imports neither Triton nor the compiler of PyTorch.
"""

import ctypes
import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from growkern.errors import warn
from growkern.package import folders

FILE_NAME = "libgrowkern.so"
# the numbers of csrc/cpu/native.h are indices into this
ISA_NAMES = ("portable", "AVX2", "AVX-512", "AVX-512 with bfloat16")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
HOW_TO_BUILD = (
    "install a C++17 compiler, then growkern again from its sources: `pip install "
    "--force-reinstall --no-deps ./growkern`"
)
LOST = (
    "Without it growth, the losses and GrowthAdamW run in plain PyTorch on a CPU: slower, and with "
    "more memory"
)
HOW_TO_REBUILD = "rebuild it with `make setup` or `pip install --no-deps --editable .`"


def _candidates() -> list[Path]:
    """Files of the library: in the package, or where an editable install keeps it."""
    places = [folder / "_lib" / FILE_NAME for folder in folders()]
    try:
        files = metadata.files("growkern") or []
    except metadata.PackageNotFoundError:
        files = []
    places += [Path(str(f.locate())) for f in files if f.name == FILE_NAME]
    return [path for path in places if path.is_file()]


def source_stamp(root: Path) -> str | None:
    """A checksum of the library's sources in `root`/csrc, as CMakeLists.txt computes it.

    None if the sources are not there: a wheel brings the library alone.
    """
    files = [*root.glob("csrc/*.h"), *root.glob("csrc/cpu/*.h"), *root.glob("csrc/cpu/*.cpp")]
    if not (root / "csrc/cpu/native.cpp").is_file():
        return None
    listed = {file.relative_to(root).as_posix(): file.read_bytes() for file in files}
    lines = (f"{hashlib.sha256(listed[name]).hexdigest()} {name}\n" for name in sorted(listed))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _is_current(lib: ctypes.CDLL) -> bool:
    """Whether the library is built from the sources beside the package, if there are any."""
    try:
        stamp_of = lib.growkern_sources
    except AttributeError:
        return False
    stamp_of.restype = ctypes.c_char_p
    stamps = [source_stamp(folder.parent) for folder in folders()]
    return all(stamp in (None, stamp_of().decode()) for stamp in stamps)


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    candidates = _candidates()
    if not candidates:
        return None, f"built without the compiled library: {HOW_TO_BUILD}"
    # torch is loaded before: an OpenMP runtime of the same name is then loaded only once
    try:
        lib = ctypes.CDLL(str(candidates[0]))
    except OSError as error:
        return None, f"{candidates[0]} cannot be loaded: {error}"
    if not _is_current(lib):
        why = f"{candidates[0]} is not built from the sources in csrc: {HOW_TO_REBUILD}"
        warn(f"the compiled library is not used: {why}")
        return None, why
    lib.growkern_advise_huge.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
    lib.growkern_advise_huge.restype = None
    threads = "OpenMP" if lib.growkern_has_openmp() else "one thread, built without OpenMP"
    return lib, f"compiled, {ISA_NAMES[lib.growkern_best_isa()]}, {threads}"


def loaded() -> ctypes.CDLL | None:
    """The library, loaded once. None if it cannot be used; `reason` says why."""
    return _load()[0]


def reason() -> str:
    """The library's instruction set and threads on this machine, or why it cannot be used."""
    return _load()[1]


def available_isas() -> range:
    """The instruction sets of the library that this processor has, as indices into ISA_NAMES."""
    lib = loaded()
    return range(lib.growkern_best_isa() + 1 if lib is not None else 0)


def acc_torch_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that products and sums of `x` are kept in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def advise_huge_pages(x: torch.Tensor) -> None:
    """Ask the system for pages of 2 MiB under fresh CPU memory. It pays from 8 MiB on.

    Nothing may have been written to `x`: single bytes of it may be overwritten.
    """
    lib = loaded()
    size = x.numel() * x.element_size()
    if lib is not None and x.device.type == "cpu" and size >= 8 << 20:
        lib.growkern_advise_huge(x.data_ptr(), size, torch.get_num_threads())
