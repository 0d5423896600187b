"""Compiles a kernel of csrc for the CPU with cuda_on_cpu.h, and launches it like `nvrtc.launch`."""

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from growkern.ops.backend import Grid, Kernel
from growkern.ops.backend.nvrtc import source_folder

HERE = Path(__file__).parent
WRAPPER = """#include "{file}"
template <class Args> Args arguments_of(void (*)(Args));
using Args = decltype(arguments_of({name}));
void call(const void* args) {{ {name}(*static_cast<const Args*>(args)); }}
extern "C" const char* emulate(const void* args, unsigned blocks, unsigned threads, unsigned bytes,
                               bool eager) {{
    return growkern::emulation::run(call, args, blocks, threads, bytes, eager);
}}
"""
# of a whole run of tests: its workers and the processes they start compile a variant once
FOLDER = "GROWKERN_CUDA_EMULATION"


@functools.cache
def _compiled(kernel: Kernel) -> ctypes.CDLL:
    folder = Path(os.environ.get(FOLDER) or _folder().name)
    name = hashlib.sha256(repr((kernel.name, kernel.flags)).encode()).hexdigest()[:16]
    library = folder / f"{name}.so"
    if not library.exists():
        _compile(kernel, library)
    lib = ctypes.CDLL(str(library))
    lib.emulate.restype = ctypes.c_char_p
    return lib


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Of one process, where nobody has made one for more."""
    return tempfile.TemporaryDirectory(prefix="growkern-cuda-")


def _compile(kernel: Kernel, library: Path) -> None:
    csrc = source_folder()
    assert csrc is not None
    source = library.with_suffix(f".{os.getpid()}.cpp")
    source.write_text(WRAPPER.format(name=kernel.name, file=kernel.file))
    # products and sums round apart: what a kernel must get right does not hang on fusing them
    # a jump into another fibre's stack is no error here
    flags = ["-O1", "-g0", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-fPIC", "-shared"]
    flags.append("-Wno-unknown-pragmas")
    macros = [flag for flag in kernel.flags if not flag.startswith("--")]
    command = [os.environ.get("CXX", "g++"), *flags, *macros, f"-I{csrc}", f"-I{HERE}"]
    # whole or not there: another process may look at this moment
    partial = source.with_suffix(".so")
    subprocess.run([*command, "-o", str(partial), str(source)], check=True)
    partial.replace(library)


def emulate(
    kernel: Kernel,
    grid: Grid,
    args: ctypes.Structure,
    device: torch.device | None = None,
    *,
    eager: bool = False,
) -> None:
    """Runs a kernel; `eager` turns the order of threads round and lets copies arrive at once."""
    lib = _compiled(kernel)
    error = lib.emulate(ctypes.byref(args), *(ctypes.c_uint(n) for n in grid), eager)
    assert error is None, error.decode()
