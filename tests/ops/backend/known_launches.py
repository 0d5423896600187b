"""The launches that test_launches has compiled: shared bytes by a hash of all they depend on.

    DISABLE_PTXAS_OPT=1 DISABLE_LLVM_OPT=1 python -m tests.ops.backend.known_launches

writes known_launches.json anew. Launches that it lacks are compiled by every run of the tests.
"""

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import triton

RECORD = Path(__file__).with_suffix(".json")
# launches with a lower hash, a few, are always compiled, and have to be as the record says
AGAIN = "05"


def mark_of(source, options, target):
    """A hash of kernel and callees, specialisation, options, architecture and compiler."""
    # of Triton's own libraries, which its version tells, the names alone: no two clones share paths
    libraries = {"extern_libs": [name for name, _ in options.get("extern_libs") or ()]}
    chosen = sorted({**options, **libraries}.items())
    everything = (triton.__version__, str(target), chosen, source.hash())
    return hashlib.sha256(repr(everything).encode()).hexdigest()[:16]


def install(known, compiles=True):
    """Let Triton's launcher compile only what is not in `known`, or nothing at all.

    Returns:
        shared bytes by hash of all that was launched, which grows.
    """
    from triton.runtime import driver

    truly, made = triton.compiler.compile, {}
    # Triton hashes the number of a kernel's first line too: moved code would be compiled again
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("growkern.ops") else ():
            if isinstance(value, triton.JITFunction):
                value.starting_line_number = 0

    def compile_unknown(source, target=None, options=None, **rest):
        mark = mark_of(source, options, target)
        if compiles and (mark not in known or mark < AGAIN):
            kernel = truly(source, target=target, options=options, **rest)
            made[mark] = kernel.metadata.shared
            assert known.get(mark, made[mark]) == made[mark], "python -m " + __spec__.name
            return kernel
        made[mark] = known.get(mark, 0)
        metadata = SimpleNamespace(**options, shared=made[mark])
        launcher = driver.active.launcher_cls(source, metadata)
        no_code = dict.fromkeys(("function", "packed_metadata"))
        return SimpleNamespace(
            metadata=metadata, run=launcher, launch_metadata=lambda *_: None, **no_code
        )

    triton.compiler.compile = compile_unknown
    return made


def main():
    from bench.launches import cases, fill, sources  # noqa: F401 they import all kernels
    from tests.ops.backend.test_launches import SAMPLE

    only, file = sys.argv[1:] or (SAMPLE, RECORD)
    made = install(json.loads(RECORD.read_text()) if sys.argv[1:] else {})
    rows = fill._compile_some("sm_90", only, 0, 1)
    document = {"rows": rows, "made": made} if sys.argv[1:] else made
    Path(file).write_text(json.dumps(document, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
