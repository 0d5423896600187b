"""Estimates the best possible speed of a kernel from its machine code.

The machine code shows how many loads, stores and instructions an element takes. A chip can do only
so many of each per second. The estimate is the slowest of four limits: memory, instruction issue,
special functions (exp, 1 / x) and load-store units. It ignores latency, so a kernel can be slower
but not faster.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Device(NamedTuple):
    """One chip, from its data sheet. The last three are rates per multiprocessor and clock."""

    name: str
    multiprocessors: int
    ghz: float
    tb_s: float
    lanes: int = 128
    special: int = 16
    load_store: int = 32


# The largest common chip of each architecture. An AMD compute unit has four vector units of 16
# lanes. It computes special functions at a quarter of their rate, and accesses 64 bytes of memory
# per clock.
DEVICES = {
    "sm_80": Device("A100 SXM 80 GB", 108, 1.41, 2.04),
    "sm_90": Device("H200 SXM", 132, 1.98, 4.8),
    "sm_100": Device("B200", 148, 1.965, 8.0),
    "sm_120": Device("RTX 5090", 170, 2.41, 1.79),
    "gfx942": Device("MI300X", 304, 2.1, 5.3, lanes=64, special=16, load_store=16),
}


@dataclass(frozen=True)
class HotCode:
    """The hot code of a kernel: its loops that load from global memory, or all of it without any.

    Attributes:
        instructions: how many a thread runs in one pass. AMD's scalar instructions are left out:
            they run at the same time on a unit of their own.
        special: how many of these are special functions.
        loads: bytes per load -> number of loads.
        stores: bytes per store -> number of stores.
        summing: how many instructions are in loops that load and store nothing: they add up.
        exchanges: how many of these are barriers, or move data between threads.
        gathers: how many instructions load one number from shared memory.
    """

    instructions: int
    special: int
    loads: dict[int, int]
    stores: dict[int, int]
    summing: int = 0
    exchanges: int = 0
    gathers: int = 0

    def wide_share(self, wide: int, *, stores: bool = False) -> float:
        """Share of the bytes that are accessed `wide` or more bytes at a time.

        Values that all threads read, such as a row's index or scale, count as narrow although
        they cost almost nothing.

        Args:
            wide: bytes of a wide access.
            stores: count stores instead of loads.
        """
        counts = self.stores if stores else self.loads
        total = sum(width * count for width, count in counts.items())
        wide_bytes = sum(width * count for width, count in counts.items() if width >= wide)
        return wide_bytes / total if total else 1.0

    @property
    def bytes(self) -> int:
        both = (*self.loads.items(), *self.stores.items())
        return sum(width * count for width, count in both)

    @property
    def accesses(self) -> int:
        return sum(self.loads.values()) + sum(self.stores.values())


class _Line(NamedTuple):
    operation: str
    width: int = 0  # bytes of a global access


# "/*0470*/  @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;"
_SASS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_SASS_WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_GCN_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}
# Cycles that a warp's load of 32 numbers at random places takes. In shared memory it is the largest
# number of them in one of 32 banks, on average. From memory it is what `expand` of bfloat16 with
# arbitrary maps took on an H200, 0.105 ms at commit cd617243, by its 128 loads for 128 numbers.
SHARED_GATHER, MEMORY_GATHER = 3.5, 13
# Accesses of global memory. LDGSTS loads straight into shared memory.
_SASS_ACCESSES = ("LDG", "LDGSTS", "STG")


def read_sass(text: str) -> HotCode:
    """Read NVIDIA machine code, as `cuobjdump -sass` prints it.

    A loop that reads shared memory 8 bytes or more at a time is hot, too: it reads the data that
    an earlier loop has put there.
    """
    instructions = _SASS.findall(text)
    lines = []
    for _, _, operation, _ in instructions:
        base, *parts = operation.split(".")
        width = next((_SASS_WIDTHS[p] for p in parts if p in _SASS_WIDTHS), 4)
        if base == "LDS" and width >= 8:
            operation = "LDG from shared memory"
        lines.append(_Line(operation, width if base in _SASS_ACCESSES else 0))
    loops = _natural_loops(_successors(instructions))
    exchanges = ("BAR", "SHFL", "STS", "LDS")
    return _hot(
        lines, loops, load="LDG", store="STG", special=("MUFU",), exchanges=exchanges,
        gathers=("LDS",),
    )  # fmt: skip


def _successors(instructions: Sequence[tuple[str, str, str, str]]) -> list[list[int]]:
    """For each instruction the ones that may run next."""
    at = {int(address, 16): i for i, (address, *_) in enumerate(instructions)}
    after = []
    for i, (_, predicate, operation, rest) in enumerate(instructions):
        base, target = operation.split(".")[0], re.search(r"0x([0-9a-f]+)", rest)
        follows = [i + 1] if i + 1 < len(instructions) else []
        if base in ("BRA", "CALL", "WARPSYNC") and target and int(target[1], 16) in at:
            # "BRA 0x90" always jumps; "BRA !P2, 0x90" may also continue with the next line
            always = base == "BRA" and not predicate and rest.strip() == target[0]
            follows = [at[int(target[1], 16)]] + (follows if not always else [])
        elif base in ("EXIT", "RET") and not predicate:
            follows = []
        after.append(follows)
    return after


def _natural_loops(after: Sequence[Sequence[int]]) -> list[list[int]]:
    """The instructions of every loop.

    A jump back is a loop only if the code can be reached in no other way than through the place
    it jumps to. Code that the compiler moved out of line jumps back, too, but is not a loop.
    """
    before: list[list[int]] = [[] for _ in after]
    for i, follows in enumerate(after):
        for j in follows:
            before[j].append(i)
    loops = []
    for i, follows in enumerate(after):
        for head in follows:
            if head <= i and i not in _reached([0], after, head):
                loops.append(sorted(_reached([i], before, head) | {head}))
    return loops


def _reached(start: list[int], edges: Sequence[Sequence[int]], never: int) -> set[int]:
    """The instructions that can be reached from `start` without passing through `never`."""
    seen: set[int] = set()
    todo = [i for i in start if i != never]
    while todo:
        i = todo.pop()
        if i not in seen:
            seen.add(i)
            todo += [j for j in edges[i] if j != never]
    return seen


def read_gcn(text: str) -> HotCode:
    """Read AMD assembly, as Triton keeps it. LLVM's comments name the loop of each block."""
    lines: list[_Line] = []
    loops: dict[str, list[int]] = {}
    block = loop = ""
    for raw in text.splitlines():
        line = raw.strip()
        # ".Ltmp7:" is a mark for debuggers and does not begin a block
        if label := re.match(r"\.L(BB\w+):|; %bb\.\d+:", line):
            block, loop = label[1] or "", ""
        if "Loop Header" in line:
            loop = block
        elif inside := re.search(r"in Loop: Header=(\w+)", line):
            loop = inside[1]
        operation = re.match(r"([vs]_\w+|(?:global|buffer|ds|flat)_\w+)", line)
        if not operation or operation[1].startswith("s_"):
            continue
        name, width = operation[1].replace("buffer_", "global_"), 0
        if access := re.match(r"global_(?:load|store)_(\w+)", name):
            width = _GCN_WIDTHS.get(access[1], 1 if "byte" in access[1] else 2)
        if loop:
            loops.setdefault(loop, []).append(len(lines))
        lines.append(_Line(name, width))
    special = ("v_exp", "v_rcp", "v_log", "v_rsq", "v_sqrt")
    return _hot(
        lines,
        loops.values(),
        load="global_load",
        store="global_store",
        special=special,
        exchanges=("ds_",),
        gathers=("ds_read_b", "ds_read_u", "ds_load_b", "ds_load_u", "ds_bpermute"),
    )


def _hot(
    lines: list[_Line],
    loops: Iterable[Sequence[int]],
    *,
    load: str,
    store: str,
    special: tuple[str, ...],
    exchanges: tuple[str, ...],
    gathers: tuple[str, ...],
) -> HotCode:
    hot: set[int] = set()
    summing: set[int] = set()
    for loop in loops:
        if any(lines[i].operation.startswith(load) for i in loop):
            hot |= set(loop)
            if not any(lines[i].operation.startswith(store) for i in loop):
                summing |= set(loop)
    code = [lines[i] for i in sorted(hot)] if hot else lines

    def widths(kind: str) -> dict[int, int]:
        sizes = [x.width for x in code if x.width and x.operation.startswith(kind)]
        return {width: sizes.count(width) for width in sorted(set(sizes), reverse=True)}

    return HotCode(
        len(code),
        sum(x.operation.startswith(special) for x in code),
        widths(load),
        widths(store),
        len(summing),
        sum(lines[i].operation.startswith(exchanges) for i in summing),
        sum(x.operation.startswith(gathers) for x in code),
    )


def estimate(
    code: HotCode, elements: float, traffic: float | None, arch: str, *, gathers: bool = False
) -> dict[str, object]:
    """Estimate which limit a kernel meets first, and how much of the bandwidth that leaves.

    Args:
        code: the hot code.
        elements: how many elements one thread handles in it.
        traffic: least bytes per element that must cross the device's memory; None: all bytes that
            the code accesses.
        arch: the architecture, such as "sm_90".
        gathers: whether its narrow loads take numbers at any places of the memory.

    Returns:
        "bytes per element", "instructions per element", how many of them are in loops that add up,
        the "exchanges" there, "bound" (the limit) and "of bandwidth" (at most this share of the
        memory bandwidth). With `gathers` also this share "at random places", where each narrow load
        of a warp takes `MEMORY_GATHER` cycles. For an unknown architecture "no estimate".
    """
    if arch not in DEVICES:
        return {"no estimate": f"the rates of {arch} are not known"}
    chip = DEVICES[arch]
    clock = chip.multiprocessors * chip.ghz * 1e9
    traffic = code.bytes / elements if traffic is None else traffic
    seconds = {
        "memory": traffic / (chip.tb_s * 1e12),
        "issue": code.instructions / elements / (clock * chip.lanes),
        "special functions": code.special / elements / (clock * chip.special),
        "load-store": (code.accesses + SHARED_GATHER * code.gathers)
        / elements
        / (clock * chip.load_store),
    }
    bound = max(seconds, key=seconds.__getitem__)
    narrow = sum(count for width, count in code.loads.items() if width < 8)
    random = MEMORY_GATHER * narrow / elements / (clock * chip.load_store)
    at_random = round(seconds["memory"] / max(random, seconds[bound]), 2)
    return {
        "bytes per element": round(traffic, 2),
        "instructions per element": round(code.instructions / elements, 1),
        "of them summing": round(code.summing / elements, 1),
        "exchanges": code.exchanges,
        "bound": bound,
        "of bandwidth": round(seconds["memory"] / seconds[bound], 2),
        **({"at random places": at_random} if gathers else {}),
    }
