"""The kernels that no GPU has run yet, each beside the one that it replaces: bits, then time.

Each check is a piece of its own: a kernel that hangs takes no other's time. Where a kernel cannot
take a call, or the device refuses it, another one answers. So launches are watched: a row names the
kernel that ran, and the piece fails if it is not the one that was asked for.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.launches.cases import once
from bench.launches.smoke import BARS, check_case
from bench.shared.harness import interleaved_ms, turns_ms
from bench.shared.inputs import make_case
from bench.shared.recorder import Recorder, fill_new_memory
from growkern.ops.expand import Routing, expand, many, on_triton
from growkern.ops.expand.call import ExpandCall
from growkern.ops.expand.hashes import line_keys
from growkern.ops.loss.rows import on_triton as rows_twice, once_on_triton as rows_once
from growkern.ops.loss.rows.once_on_triton import LEAST_COLUMNS, VARIABLE
from growkern.ops.loss.rows.options import Maths
from growkern.ops.loss.rows.state import Rows, Steps, n_numbers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS: tuple[dict[str, Any], ...] = ({}, {"routing": "col"}, {"routing": "row"}, {"noise": "col"})
# where columns are gathered: the most columns of a row in shared memory
GATHERED = {"shared memory": on_triton.MOST_WHOLE, "memory": 0}
# the share of a piece's time in which cases start: Python has started before, and one case is left
STARTS = 0.4


def run(recorder: Recorder) -> None:
    pieces: dict[str, Callable[[Recorder], None]] = {
        "check_lines": _lines,
        "check_gathers": _gathers,
        "check_once": _once,
        "rows": _time_of_rows,
        "gathers": _time_of_gathers,
    }
    fill_new_memory()
    pieces[recorder.document["piece"]](recorder)


def _differing(a: Tensor, b: Tensor) -> float:
    """The share of elements with other bits."""
    return (a.view(torch.uint8) != b.view(torch.uint8)).float().mean().item()


def _kernel(kernel: Any, constants: dict[str, Any]) -> str | None:
    """How a kernel reads that another one can stand for; None for all others."""
    if kernel is on_triton.expand_kernel:
        return "shared memory" if constants["WHOLE"] else "memory"
    if kernel is rows_once.rows_once_kernel:
        return "once"
    return "twice" if kernel is rows_twice.kl_mlm_rows_kernel else None


@contextlib.contextmanager
def kernels() -> Iterator[set[str]]:
    """How the kernels that are launched inside read. One that is refused is not among them."""
    ran: set[str] = set()

    def watched(launch: Callable[..., None]) -> Callable[..., None]:
        def launched(kernel: Any, *arguments: Any, **constants: Any) -> None:
            launch(kernel, *arguments, **constants)
            if name := _kernel(kernel, constants):
                ran.add(name)

        return launched

    with contextlib.ExitStack() as patches:
        for module in (on_triton, rows_once, rows_twice):
            launch = watched(module.launch)
            patches.enter_context(mock.patch.object(module, "launch", launch))
        yield ran


def _must_be(recorder: Recorder, case: str, ran: set[str], asked: str) -> str:
    """The kernels that ran, in words; a failure if not the one that was asked for."""
    words = " and ".join(sorted(ran)) or "none"
    # some processors keep gradients in float32, and such rows are read twice
    rehearsed = recorder.device == "cpu" and (asked, ran) == ("once", {"twice"})
    if ran != {asked} and not rehearsed:
        recorder.fail(f"{case}: asked for {asked}, ran: {words}")
    return words


# ------------------------------------------------------------------------- bits


def _lines(recorder: Recorder) -> None:
    """Keys of lines, one call's and a work list's, beside those of PyTorch."""
    device = torch.device(recorder.device)
    for n, offset, seed in ((1000, 0, 3), (77, 2**31 - 40, 2**62 + 12345), (8192, 7, 2**33 - 1)):
        copies = torch.stack([torch.arange(300) % 7, torch.full((300,), 7)], 1).to(device)
        out, weight = torch.empty(n, 300, device=device), torch.empty(1, 1, device=device)
        routing = Routing(1, copies)
        call = ExpandCall(out, weight, routing=routing, seed=seed, offsets=(offset, 0))
        packed, *lines = on_triton.lines_of_call(call)
        keys = many._LineKeys()
        keys.add(5, 1, 1)
        at = keys.add(n, offset, seed)
        found = [packed, *lines, *(x[at : at + n] for x in keys.on(device))]
        expected = [routing.packed, *line_keys(n, offset, seed, device) * 2]
        error = max(_differing(a, b) for a, b in zip(found, expected, strict=True))
        recorder.check(f"lines {n} from {offset}, seed {seed}", error, 0)


def _gathers(recorder: Recorder) -> None:
    """`expand` with rows in shared memory has the bits of the reference.

    A case compiles a kernel, which takes one to three seconds. So the first ones differ in all that
    counts, and the last ones are left out where time is short. The piece `gathers` compares other
    calls with gathers from memory.
    """
    rng = torch.Generator(recorder.device).manual_seed(0)
    sizes = recorder.pick(((19, 1000, 41, 2051), (300, 4096, 701, 8192)), ((9, 17, 20, 33),))
    axes = (sizes, (BF16, FP16, FP32), KINDS[::-1])
    places = sorted(itertools.product(*(range(len(axis)) for axis in axes)), key=sum)
    for number, place in enumerate(places):
        if time.perf_counter() - recorder.started > STARTS * recorder.limit_s:
            recorder.document["left out"] = len(places) - number
            recorder.flush()
            return
        size, dtype, kind = (axis[i] for axis, i in zip(axes, place, strict=True))
        case = make_case(size, dtype, rng, **kind)
        name = f"gathers {size} {dtype}, {kind}".replace("torch.", "")
        with kernels() as seen:
            made = expand(**case, backend="triton")
        ran = _must_be(recorder, name, seen, "shared memory")
        recorder.check(name, _differing(made, expand(**case, backend="reference")), 0, ran=ran)


def _once(recorder: Recorder) -> None:
    """The loss with rows that are read once, beside float64."""
    rng = torch.Generator(recorder.device).manual_seed(0)
    shapes = ((0, 0), (0, 0), recorder.pick((300, 128_256), (2, LEAST_COLUMNS)))
    for case in once(rng, shapes):
        with kernels() as ran:
            check_case(recorder, case, BARS)
        recorder.document["rows"][-1]["ran"] = _must_be(recorder, case.name, ran, "once")
        recorder.flush()


# ------------------------------------------------------------------------- time


def _time_of_rows(recorder: Recorder) -> None:
    """The row kernel on one chunk: read twice, read once, and a copy of as many bytes."""
    N, V = recorder.pick((1024, 128_256), (2, LEAST_COLUMNS))
    device = recorder.device
    z, u = (torch.randn(N, V, device=device) for _ in range(2))
    labels = torch.randint(V, (N,), device=device)
    grad, drows = torch.empty(N, V, dtype=BF16, device=device), torch.rand(2, N, device=device)
    steps = Steps(sums=True, grad=True)
    for K in (1, 0):
        kinds = torch.full((N,), 1 + 2 * K, dtype=torch.int32, device=device)
        state = torch.empty(n_numbers(K), N, device=device)
        rows = Rows(z, [u] * K, labels, kinds, V, Maths(1.0), False)

        def step(
            switch: str, rows: Rows = rows, state: Tensor = state, drows: Tensor = drows[: 1 + K]
        ) -> None:
            with mock.patch.dict(os.environ, {VARIABLE: switch}):
                rows_twice.rows_on_triton(rows, state, steps, drows, grad)

        switches, read = {"twice": "0", "once": "1"}, {}
        for asked, switch in switches.items():
            with kernels() as ran:
                step(switch)
            read[asked] = _must_be(recorder, f"{K} teachers", ran, asked)
        calls = {name: lambda f=step, x=switch: f(x) for name, switch in switches.items()}
        calls["copy of float32 logits"] = lambda: u.copy_(z)
        for name, ms in interleaved_ms(calls, recorder.pick(15, 1)).items():
            own = {"asked": name, "read": read[name]} if name in read else {"read": name}
            recorder.add({"rows": N, "columns": V, "teachers": K, **own, "ms": ms})


def _time_of_gathers(recorder: Recorder) -> None:
    """`expand` of one matrix, gathered in shared memory and from memory: bits, then time.

    The time is that on the device, and that by the clock.
    """
    C = recorder.pick(4096, 16)
    rng = torch.Generator(recorder.device).manual_seed(0)
    tiled = torch.arange(2 * C, device=recorder.device) % C
    for dtype in (BF16, FP32):
        for kind in KINDS[:2]:
            case = make_case((C, C, 2 * C, 2 * C), dtype, rng, **kind, scales=False)
            out = torch.empty(2 * C, 2 * C, dtype=dtype, device=recorder.device)
            ways = {"arbitrary": case, "tiled": case | {"cols": tiled, "rows": tiled}}
            for maps, given in ways.items():

                def step(most: int, given: dict[str, Any] = given, out: Tensor = out) -> None:
                    with mock.patch.object(on_triton, "MOST_WHOLE", most):
                        expand(**given, out=out, backend="triton")

                facts = {"dtype": str(dtype)[6:], "maps": maps, "kind": str(kind)}
                ran, made = {}, []
                for asked, most in GATHERED.items():
                    with kernels() as seen:
                        step(most)
                    ran[asked] = _must_be(recorder, " ".join(facts.values()), seen, asked)
                    made.append(out.clone())
                if differing := _differing(*made):
                    recorder.fail(f"{facts}: a share of {differing:.1e} of the bytes differs")
                calls = {name: lambda f=step, x=most: f(x) for name, most in GATHERED.items()}
                device = turns_ms(calls, recorder.pick(15, 1))
                whole = turns_ms(calls, recorder.pick(15, 1), wall=True)
                for name in calls:
                    own = {"device ms": sorted(device[name])[len(device[name]) // 2]}
                    own["wall ms"] = sorted(whole[name])[len(whole[name]) // 2]
                    recorder.add(facts | {"asked": name, "gathered in": ran[name], **own})
