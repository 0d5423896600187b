"""Compiles the CUDA C++ kernels of csrc/cuda at run time, caches the machine code and launches it.

No compiler or CUDA toolkit is needed. NVRTC, the compiler that comes with PyTorch, and the driver
are called by ctypes. A kernel takes one argument, a structure that its source file defines. Each
file is compiled once for each set of macros, architecture and version of NVRTC. This takes 0.1 to
0.5 s. The machine code is then kept on disk.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from growkern.errors import GrowthError
from growkern.files import write_whole
from growkern.package import folders

# of CUfunction_attribute, in cuda.h
MAX_DYNAMIC_SHARED_BYTES = 8
# names of csrc/cuda/device.h
TYPES = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "double",
}


class Kernel(NamedTuple):
    """A kernel of csrc/cuda, its file, and how to compile it."""

    name: str
    file: str
    macros: tuple[tuple[str, str | int], ...] = ()
    options: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """Compiler flags, the same for NVRTC and nvcc."""
        return ["-std=c++17", *self.options, *(f"-D{name}={value}" for name, value in self.macros)]


class Grid(NamedTuple):
    """The size of a launch: blocks, and the threads and dynamic shared memory of each."""

    blocks: int
    threads: int
    shared_bytes: int = 0


# ------------------------------------------------------------------- libraries


def _nvrtc_folders(major: str) -> Iterator[Path]:
    """Folders that may hold NVRTC: first those of pip packages, then those of CUDA toolkits."""
    packages = importlib.util.find_spec("nvidia")
    for place in (packages and packages.submodule_search_locations) or ():
        yield from (Path(place) / folder / "lib" for folder in (f"cu{major}", "cuda_nvrtc"))
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if nvcc := shutil.which("nvcc"):
        # nvcc is in the toolkit's bin, or a script in a bin beside the toolkit
        prefix = Path(nvcc).resolve().parents[1]
        homes += [prefix, prefix / "cuda"]
    yield from (home / folder for home in homes for folder in ("lib64", "lib"))


def _open_nvrtc(name: str, folder: Path | None = None) -> ctypes.CDLL | None:
    try:
        if folder is None:
            return ctypes.CDLL(name)
        # NVRTC opens this second library by its name alone, and finds it if it is loaded already
        for half in sorted(folder.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(half))
        return ctypes.CDLL(str(folder / name))
    except OSError:
        return None


@cache
def nvrtc() -> ctypes.CDLL | None:
    """The NVRTC of PyTorch's CUDA version, or None if there is none."""
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{major}"
    for folder in _nvrtc_folders(major):
        if (folder / name).is_file() and (library := _open_nvrtc(name, folder)):
            return library
    # from the system's library path
    return _open_nvrtc(name)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check_driver(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


def source_folder() -> Path | None:
    """csrc/cuda: in the package, or beside it in a source tree. None if it was not installed."""
    for folder in folders():
        for cuda in (folder / "csrc" / "cuda", folder.parent / "csrc" / "cuda"):
            if (cuda / "device.h").is_file():
                return cuda
    return None


def why_not() -> str:
    """Why CUDA C++ cannot run here; empty if it can."""
    if torch.version.hip or not torch.cuda.is_available():
        return "no NVIDIA GPU found by PyTorch"
    if source_folder() is None:
        return "installed without the sources of csrc: install growkern from its repository"
    if nvrtc() is None:
        return "no NVRTC beside PyTorch: pip install nvidia-cuda-nvrtc"
    return ""


def reason() -> str:
    """What CUDA C++ runs on here, or why it cannot."""
    return why_not() or f"NVRTC {nvrtc_version()}; not measured yet, Triton stays the default"


# --------------------------------------------------------------------- compile


@cache
def nvrtc_version() -> str | None:
    """The version of NVRTC, such as "13.0"; None without NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    lib = nvrtc()
    if lib is None:
        return None
    lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_cubin(kernel: Kernel, arch: str) -> bytes:
    """Compile a kernel to machine code for an architecture, such as "sm_90"."""
    lib, folder = nvrtc(), source_folder()
    assert lib is not None and folder is not None
    source = (folder / kernel.file).read_bytes()
    flags = [f"--gpu-architecture={arch}", f"-I{folder}", *kernel.flags]
    options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    name = kernel.file.encode()
    status = lib.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None)
    try:
        if not status and lib.nvrtcCompileProgram(program, len(flags), options):
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            first = (log.value.decode(errors="replace").strip() or "no log").splitlines()[0]
            raise GrowthError(f"NVRTC cannot compile {kernel.file} for {arch}: {first}")
        status = status or lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        status = status or lib.nvrtcGetCUBIN(program, cubin)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))
    if status:
        raise GrowthError(f"NVRTC failed on {kernel.file} for {arch}: status {status}")
    return cubin.raw


def cache_path(kernel: Kernel, arch: str) -> Path:
    """File of the cached machine code; its name is a hash of all that the code depends on."""
    folder = source_folder()
    assert folder is not None
    # csrc itself has the headers that the CPU's kernels include too
    headers = [*sorted(folder.parent.glob("*.h")), *sorted(folder.glob("*.h"))]
    digest = hashlib.sha256("\n".join([arch, str(nvrtc_version()), *kernel.flags]).encode())
    for path in (folder / kernel.file, *headers):
        digest.update(path.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "growkern" / f"{kernel.name}-{digest.hexdigest()[:32]}.cubin"


def cached_cubin(kernel: Kernel, arch: str) -> bytes:
    """`compile_cubin` with a cache on disk. Without a writable disk it compiles every time."""
    path = cache_path(kernel, arch)
    if path.is_file():
        return path.read_bytes()
    cubin = compile_cubin(kernel, arch)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # other processes may be compiling the same kernel
        write_whole(path, lambda partial: partial.write_bytes(cubin))
    return cubin


# ---------------------------------------------------------------------- launch


def _use_context(device: int) -> None:
    """Give this thread PyTorch's CUDA context if it has none, like some threads of autograd."""
    driver, context = _driver(), ctypes.c_void_p()
    _check_driver(driver.cuCtxGetCurrent(ctypes.byref(context)), "the current context")
    if not context:
        _check_driver(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "a context")
        _check_driver(driver.cuCtxSetCurrent(context), "setting a context")


@cache
def _function(kernel: Kernel, device: int) -> ctypes.c_void_p:
    major, minor = torch.cuda.get_device_capability(device)
    cubin = cached_cubin(kernel, f"sm_{major}{minor}")
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    _check_driver(driver.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {kernel.name}")
    status = driver.cuModuleGetFunction(ctypes.byref(function), module, kernel.name.encode())
    _check_driver(status, f"finding {kernel.name}")
    return function


# by kernel and device: the shared memory that `_allow` has set so far
_allowed: dict[tuple[Kernel, int], int] = {}


def _allow(kernel: Kernel, device: int, shared_bytes: int) -> None:
    """Allow a kernel more shared memory than kernels have by default.

    The limit only rises: after a smaller one the driver would refuse the launches that need more.
    """
    if shared_bytes > _allowed.get((kernel, device), 0):
        function = _function(kernel, device)
        status = _driver().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        _check_driver(status, f"{shared_bytes} bytes of shared memory for {kernel.name}")
        _allowed[kernel, device] = shared_bytes


def launch(kernel: Kernel, grid: Grid, args: ctypes.Structure, device: torch.device) -> None:
    """Run a kernel on PyTorch's current stream of a device; compile it the first time.

    Tensors whose addresses are in `args` must live until this returns. Memory of the device may be
    freed then, because PyTorch reuses it in the order of the stream. Pinned memory of the host may
    not: it must live until the kernel has ended.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        _use_context(index)
        _allow(kernel, index, grid.shared_bytes)
        address = ctypes.c_void_p(ctypes.addressof(args))
        status = _driver().cuLaunchKernel(
            _function(kernel, index),
            *(ctypes.c_uint(n) for n in (grid.blocks, 1, 1, grid.threads, 1, 1)),
            ctypes.c_uint(grid.shared_bytes),
            ctypes.c_void_p(torch.cuda.current_stream(index).cuda_stream),
            ctypes.byref(address),
            None,
        )
        _check_driver(status, f"launching {kernel.name}")


def shared_limit(device: torch.device) -> int:
    """The most bytes of shared memory that a block may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
