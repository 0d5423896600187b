"""Compiles every kernel without a GPU and reads from its machine code how fast it can be.

    python -m bench.aot

The result is bench/results/aot.json: registers, spills, shared memory, widths of loads and stores,
and the speed these allow, for every architecture. Only kernels that have changed are compiled
again. The exit code is 1 if a kernel spills, or if its loads or stores are narrow without a reason.

The launches of Triton kernels are listed in bench/launches/aot_cases.py, those of CUDA kernels in
bench/shared/cuda_cases.py. NVRTC compiles them to machine code, so that no other tool has to read
its PTX. Without NVRTC their rows stay as they are.
"""

import contextlib
import functools
import hashlib
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

# Interpreted kernels cannot be compiled. Triton reads this variable when it decorates a kernel.
os.environ.pop("TRITON_INTERPRET", None)

import triton
from rich.console import Console

from bench.launches.aot_cases import AotCase
from bench.launches.sources import RAGGED_NAME, TARGETS, all_cases, options_of, source_of
from bench.shared import harness, results, roofline
from bench.shared.cuda_cases import RAGGED as RAGGED_ROWS, SHARED_LIMITS, CudaCase, cuda_cases
from bench.shared.roofline import HotCode, estimate, read_gcn, read_sass
from growkern.ops.backend import nvrtc
from growkern.ops.expand.on_triton import GATHER

BACKENDS = Path(triton.__file__).parent / "backends"
# some builds of Triton lack the AMD backend
ARCHS = [arch for arch in TARGETS if arch != "gfx942" or (BACKENDS / "amd").is_dir()]
CUOBJDUMP = BACKENDS / "nvidia/bin/cuobjdump"
# The least share of the bytes that must be loaded and stored at full width. The rest are values of
# a row that all threads read. In the rows of `expand` there are 8 bytes of them to 8 (gfx942) or 16
# bytes of weights. With columns gathered in shared memory there are 8 to 16 bytes of them to 32 of
# weights and of what columns share. In the backward pass of the loss there are 20 to 32 bytes of
# logits. A row that is read once has the sums of all its parts beside them.
WIDE_SHARE = 0.85
OTHER_SHARES = {"expand rows": 0.5, "expand FPI": 0.55}
OTHER_SHARES |= {"kl_mlm rows backward": 0.6, "kl_mlm once": 0.6}
UNCOUNTED = {"no estimate": "the kernel chooses widths at run time, so the code has all of them"}


Job = tuple[str, str, str]

# Vocabularies such as BERT's 30522 and GPT-2's 50257 are slower than multiples of 16. Compiling
# them for one architecture is enough to see by how much.
RAGGED_ARCH = "sm_90"


def _blocks(case: AotCase) -> list[int]:
    """Sizes of the block that one pass of the hot loop handles."""
    return [v for k, v in case.constexprs.items() if k.startswith("BLOCK_")]


def compile_case(case: AotCase, arch: str) -> dict[str, Any]:
    """Compile a Triton kernel for one architecture: its row of the table."""
    target = TARGETS[arch]
    compiled = triton.compile(source_of(case), target, options_of(case))
    if target.backend == "hip":
        usage, code = _usage_of_gcn(compiled.asm["amdgcn"]), read_gcn(compiled.asm["amdgcn"])
    else:
        usage, code = _usage_of_cubin(compiled.asm["cubin"])
    blocks = _blocks(case)
    # AMD's 64 lanes with 8 bytes each access as much at once as 32 lanes with 16 bytes
    wide = 512 // target.warp_size
    elements = math.prod(blocks) / (target.warp_size * case.num_warps)
    return {
        "kernel": case.name,
        "arch": arch,
        **usage,
        "shared_bytes": compiled.metadata.shared,
        "loads": _widths(code.loads),
        "stores": _widths(code.stores),
        "wide": wide,
        "wide_share": round(code.wide_share(wide), 2),
        "narrow": case.narrow,
        "wide_store_share": round(code.wide_share(wide, stores=True), 2),
        "narrow_stores": case.narrow_stores,
        **estimate(code, elements, case.traffic, arch, gathers=case.narrow == GATHER),
    }


def compile_cuda(case: CudaCase, arch: str) -> dict[str, Any]:
    """Compile a CUDA kernel for one architecture: its row of the table."""
    usage, code = _usage_of_cubin(nvrtc.compile_cubin(case.kernel, arch))
    # A ragged kernel chooses the width of an access at run time. Its code holds accesses of all
    # widths, and counting them would mean nothing.
    ragged = case.narrow == RAGGED_ROWS
    # each element is stored once, so the stores tell their number
    elements = sum(width * count for width, count in code.stores.items()) / case.element_bytes
    return {
        "kernel": case.name,
        "arch": arch,
        **usage,
        "most registers": case.registers,
        "shared_bytes": case.grid.shared_bytes,
        "loads": _widths(code.loads),
        "stores": _widths(code.stores),
        "wide": 16,
        "wide_share": round(code.wide_share(16), 2),
        "narrow": case.narrow,
        "wide_store_share": round(code.wide_share(16, stores=True), 2),
        "narrow_stores": case.narrow_stores,
        **(UNCOUNTED if ragged else estimate(code, elements, case.traffic, arch)),
    }


def _widths(counts: dict[int, int]) -> str:
    return " ".join(f"{count}x{width}" for width, count in counts.items())


def _usage_of_cubin(cubin: bytes) -> tuple[dict[str, int], HotCode]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", "-sass", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", printed)
    if usage is None:
        raise RuntimeError(f"cuobjdump reported no resource usage:\n{printed[:2000]}")
    registers, stack, local = (int(x) for x in usage.groups())
    # values that do not fit in registers are on the stack or in local memory
    return {"registers": registers, "spilled_bytes": stack + local}, read_sass(printed)


def _usage_of_gcn(text: str) -> dict[str, int]:
    def number(field: str) -> int:
        match = re.search(rf"\.{field}:\s+(\d+)", text)
        if match is None:
            raise RuntimeError(f"the assembly has no {field}")
        return int(match[1])

    return {
        "registers": number("vgpr_count"),
        "spilled_bytes": number("private_segment_fixed_size"),
    }


def faults(row: dict[str, Any]) -> list[str]:
    """The faults of a kernel: spills, too many registers, narrow accesses without a reason."""
    name = f"{row['kernel']} on {row['arch']}"
    wrong = [f"{name}: {row['spilled_bytes']} bytes spilled"] if row["spilled_bytes"] else []
    if row["registers"] > row.get("most registers", 255):
        wrong.append(f"{name}: {row['registers']} registers, at most {row['most registers']}")
    shares = [least for of, least in OTHER_SHARES.items() if row["kernel"].startswith(of)]
    least = min(shares, default=WIDE_SHARE)
    if row["wide_share"] < least and not row["narrow"]:
        wrong.append(
            f"{name}: narrow loads {row['loads']} in the hot code, not {row['wide']} bytes"
        )
    if row["wide_store_share"] < least and not row["narrow_stores"]:
        wrong.append(
            f"{name}: narrow stores {row['stores']} in the hot code, not {row['wide']} bytes"
        )
    return wrong


@functools.cache
def _readers() -> str:
    """The source of the code that makes a row from machine code."""
    return "".join(Path(file).read_text() for file in (__file__, roofline.__file__))


@functools.cache
def _forget_places() -> None:
    """Triton hashes the number of a kernel's first line too: moved code would be compiled again."""
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("growkern.ops") else ():
            if isinstance(value, triton.JITFunction):
                value.starting_line_number = 0


def fingerprint(case: AotCase, arch: str) -> str:
    """A hash of all that a row depends on: kernel and callees, launch, compiler, this code."""
    _forget_places()
    launch = case._replace(kernel=case.kernel.cache_key)
    everything = (launch, arch, triton.__version__, _readers())
    return hashlib.sha256(repr(everything).encode()).hexdigest()[:16]


def cuda_fingerprint(case: CudaCase, arch: str) -> str:
    # the file name is a hash of sources, flags, architecture and NVRTC
    source = nvrtc.cache_path(case.kernel, arch).name
    everything = (source, case._replace(kernel=None), arch, triton.__version__, _readers())
    return hashlib.sha256(repr(everything).encode()).hexdigest()[:16]


def _jobs(only: str, archs: Sequence[str]) -> list[Job]:
    """The kernels to compile, as (name, architecture, fingerprint)."""
    jobs = [
        (case.name, arch, fingerprint(case, arch))
        for case in all_cases()
        for arch in archs or ARCHS
        if only in case.name and arch in (case.archs or ARCHS)
        if not case.name.endswith(RAGGED_NAME) or arch == RAGGED_ARCH
    ]
    if nvrtc.nvrtc() is None:
        return jobs
    return jobs + [
        (case.name, arch, cuda_fingerprint(case, arch))
        for arch in archs or ARCHS
        for case in (cuda_cases(arch) if arch in SHARED_LIMITS else ())
        if only in case.name
    ]


def compile_all(
    only: str = "",
    archs: Sequence[str] = (),
    kept: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Compile all kernels.

    Args:
        only: take only kernels whose name contains this.
        archs: the architectures; empty for all.
        kept: older rows. Those with an unchanged fingerprint are reused.

    Returns:
        One row per kernel and architecture.
    """
    known = {row.get("fingerprint"): row for row in kept}
    wanted = _jobs(only, archs)
    jobs = [job for job in wanted if job[2] not in known]
    with contextlib.ExitStack() as stack:
        compiled = map(_compile_named, jobs)
        if len(jobs) > 2:
            # Compilers use one thread, so run several. A kernel cannot be sent to another process,
            # but its name can.
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(os.cpu_count(), mp_context=context))
            compiled = pool.map(_compile_named, jobs)
        known |= {row["fingerprint"]: row for row in compiled}
    rows = [known[mark] for _, _, mark in wanted]
    if nvrtc.nvrtc() is None:
        rows += [row for row in kept if row["kernel"].startswith("CUDA") and only in row["kernel"]]
    return rows


def _compile_named(job: Job) -> dict[str, Any]:
    name, arch, mark = job
    if name.startswith("CUDA"):
        (cuda,) = (case for case in cuda_cases(arch) if case.name == name)
        return compile_cuda(cuda, arch) | {"fingerprint": mark}
    (case,) = (case for case in all_cases() if case.name == name)
    return compile_case(case, arch) | {"fingerprint": mark}


def compilers() -> dict[str, str | None]:
    return {"triton": triton.__version__, "nvrtc": nvrtc.nvrtc_version()}


def main(argv: list[str]) -> int:
    parser = harness.parser_of(__doc__)
    parser.add_argument(
        "--json", type=Path, default=results.RESULTS / "aot.json", help="file to update"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="compile kernels whose name contains this, and save nothing",
    )
    parser.add_argument("--again", action="store_true", help="also compile unchanged kernels")
    parser.add_argument(
        "--arch",
        action="append",
        default=[],
        choices=ARCHS,
        help="compile for this architecture, and save nothing; may be repeated",
    )
    args = parser.parse_args(argv)
    before = results.read(args.json)
    kept = [] if args.again else before.get("rows", [])
    rows = compile_all(args.only, args.arch, kept)
    harness.show(rows, Console(width=None if sys.stdout.isatty() else 200))
    wrong = [fault for row in rows for fault in faults(row)]
    for fault in wrong:
        print(fault)
    if not args.only and not args.arch:
        document = {"op": "aot", "machine": compilers(), "rows": rows}
        # The result does not depend on the machine. If nothing changed, commit and date stay.
        if any(before.get(key) != value for key, value in document.items()):
            said = {**results.git_facts(), "sources": results.source_digest()}
            results.write(args.json, {"op": "aot", **said, "date": results.today(), **document})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
