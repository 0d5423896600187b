"""python -m bench.aot [--json FILE]: compile every Triton kernel without a GPU, count registers.

A kernel module of growkern.ops takes part by having ``aot_cases()``.
"""

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# the interpreter's stand-ins cannot be compiled, and Triton decides when a kernel is decorated
os.environ.pop("TRITON_INTERPRET", None)

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import growkern.ops
from growkern.ops._launch import AotCase

CAPABILITIES = (80, 90, 100)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def all_cases() -> list[AotCase]:
    modules = (m.name for m in pkgutil.iter_modules(growkern.ops.__path__, "growkern.ops."))
    cases = []
    for name in modules:
        found = getattr(importlib.import_module(name), "aot_cases", list)
        cases += found()
    return cases


def _places(kind: Any) -> list[tuple[tuple[int, ...], Any]]:
    """The members of a tuple argument with their paths in it; an argument that is none, whole."""
    if isinstance(kind, tuple):
        return [((j,), member) for j, member in enumerate(kind)]
    return [((), kind)]


def _typed(kind: Any) -> Any:
    if isinstance(kind, tuple):
        return tuple(_typed(member) for member in kind)
    return kind if isinstance(kind, str) else "constexpr"


def _source(case: AotCase) -> ASTSource:
    names = case.kernel.arg_names
    given = {**case.signature, **case.constexprs}
    if sorted(given) != sorted(names):
        raise ValueError(f"{case.name}: arguments {sorted(set(given) ^ set(names))} do not match")
    signature = {name: _typed(case.signature.get(name)) for name in names}
    constants, attrs = dict(case.constexprs), {}
    for name, kind in case.signature.items():
        for place, one in _places(kind):
            path = (names.index(name), *place)
            if not isinstance(one, str):
                constants[path] = one
            elif one[0] in "*i" and name not in case.unaligned:
                attrs[path] = [["tt.divisibility", 16]]
    return ASTSource(case.kernel, signature, constants, attrs)


def _widest_store(ptx: str) -> int:
    """Bytes one thread writes at once, 16 at best: 2 or 4 mean that stores are not vectorised."""
    found = re.findall(r"st\.global[\w:.]*?(?:\.v(\d))?\.[bfsu](\d+)", ptx)
    return max((int(n or 1) * int(bits) // 8 for n, bits in found), default=0)


def compile_case(case: AotCase, capability: int) -> dict[str, Any]:
    """Registers, spilled bytes and shared memory of one kernel on one architecture."""
    # enable_fp_fusion is what the launchers pass, and from Triton 3.9 has to be said
    options = {"num_warps": case.num_warps, "enable_fp_fusion": False, "maxnreg": case.maxnreg}
    compiled = triton.compile(_source(case), GPUTarget("cuda", capability, 32), options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [str(CUOBJDUMP), "-res-usage", cubin.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = USAGE.search(report)
    if usage is None:
        raise RuntimeError(f"no resource usage in the report of cuobjdump:\n{report}")
    registers, stack, _, local = (int(x) for x in usage.groups())
    return {
        "kernel": case.name,
        "sm": capability,
        "registers": registers,
        # what does not fit in registers goes to the stack or to local memory
        "spilled_bytes": stack + local,
        "shared_bytes": compiled.metadata.shared,
        "widest_store": _widest_store(compiled.asm["ptx"]),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    args = parser.parse_args(argv)
    cases = [case for case in all_cases() if args.only in case.name]
    rows = [compile_case(case, sm) for case in cases for sm in CAPABILITIES]
    table = Table("kernel", "sm", "registers", "spilled", "shared", "widest store")
    for row in rows:
        table.add_row(*(str(x) for x in row.values()))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1))
    return int(any(row["spilled_bytes"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
