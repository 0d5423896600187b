"""Compiles a kernel of csrc for the CPU with cuda_on_cpu.h, and launches it like `nvrtc.launch`."""

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from growkern.ops.backend.nvrtc import Grid, Kernel, source_folder

HERE = Path(__file__).parent
WRAPPER = """#include "{name}.cu"
template <class Args> Args arguments_of(void (*)(Args));
using Args = decltype(arguments_of({name}));
void call(const void* args) {{ {name}(*static_cast<const Args*>(args)); }}
extern "C" const char* emulate(const void* args, unsigned blocks, unsigned threads, unsigned bytes,
                               unsigned cluster, bool eager) {{
    return growkern::emulation::run(call, args, blocks, threads, bytes, cluster, eager);
}}
"""
_folder = tempfile.TemporaryDirectory(prefix="growkern-cuda-")


@functools.cache
def _compiled(kernel: Kernel) -> ctypes.CDLL:
    csrc = source_folder()
    assert csrc is not None
    library = Path(_folder.name) / f"{abs(hash(kernel))}.so"
    source = library.with_suffix(".cpp")
    source.write_text(WRAPPER.format(name=kernel.name))
    # products and sums round apart: what a kernel must get right does not hang on fusing them
    # a jump into another fibre's stack is no error here
    flags = [
        "-O1",
        "-g0",
        "-U_FORTIFY_SOURCE",
        "-ffp-contract=off",
        "-fPIC",
        "-shared",
        "-Wno-unknown-pragmas",
    ]
    macros = [flag for flag in kernel.flags if not flag.startswith("--")]
    command = [os.environ.get("CXX", "g++"), *flags, *macros, f"-I{csrc}", f"-I{HERE}"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    lib = ctypes.CDLL(str(library))
    lib.emulate.restype = ctypes.c_char_p
    return lib


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
    found = lib.emulate(ctypes.byref(args), *(ctypes.c_uint(n) for n in grid), eager)
    assert found is None, found.decode()
