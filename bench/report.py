"""Tables and pictures from the JSON under bench/results; nothing is measured here.

python -m bench.report rewrites the blocks of README.md between `<!-- name -->` and
`<!-- /name -->`, bench/results/aot.md, and the PNGs of every GPU beside its JSON. Where there is
no figure a table says "not measured yet", where a piece failed "failed" and why. Results of another
machine come in by `--take DIRECTORY`, which replaces nothing that is better documented.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.shared.results import RESULTS, ROOT, aside_of, cell, read, take

NOTHING = "not measured yet"
Row = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _good(path: Path) -> dict[str, Any]:
    """A document to quote: finished, right, and of real sizes."""
    document = read(path)
    return document if document.get("status", "ok") == "ok" and not document.get("toy") else {}


# ------------------------------------------------------------------------ CPU


def cpu_expand(results: Path) -> str:
    """Ranges over maps and scaling: times eager, share of the write limit."""
    rows = _good(results / "expand.json").get("rows", [])
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for words, kinds, noise in (
            ("contiguous and tiled maps", ("contiguous", "tiled"), False),
            ("arbitrary maps", ("arbitrary",), False),
            ("any maps, with noise as growth draws it", ("contiguous", "tiled", "arbitrary"), True),
        ):
            same = [row for row in rows if row["dtype"] == dtype and row["maps"] in kinds]
            found = [row for row in same if (row["scaled"] == "noise") == noise]
            if found:
                cells = [_range(found, "x eager", 1), _range(found, "of limit", 2)]
                lines.append([f"{dtype}, {words}", *cells])
    head = [
        "`expand`, 4096 x 4096 to 8192 x 8192, 2 threads",
        "times eager indexing, fresh output on both sides",
        "share of the write limit, `out=`",
    ]
    return table(head, lines)


def _range(rows: Sequence[Row], key: str, digits: int) -> str:
    low, high = (f"{pick(row[key] for row in rows):.{digits}f}" for pick in (min, max))
    return low if low == high else f"{low} to {high}"


# ------------------------------------------------------------------------ GPU


def _first(rows: Sequence[Row], **wanted: Any) -> Row | None:
    return next((r for r in rows if all(r.get(k) == v for k, v in wanted.items())), None)


def _expand_figure(rows: Sequence[Row]) -> str | None:
    row = _first(rows, dtype="bfloat16", maps="arbitrary", scaled="yes")
    if row is None:
        return None
    words = f"{row['of limit']:.2f} of a copy, {row['x eager']:.1f} x eager"
    if compiled := row.get("compiled ms"):
        words += f", {compiled / row['reused ms']:.1f} x torch.compile"
    return words


def _model_figure(method: str) -> Callable[[Sequence[Row]], str | None]:
    def figure(rows: Sequence[Row]) -> str | None:
        ours = _first(rows, method=method, provider="growkern")
        eager = _first(rows, method=method, provider="eager")
        if not ours or not eager:
            return None
        words = (
            f"{ours['of limit']:.2f} of a copy, {eager['wall ms'] / ours['wall ms']:.1f} x eager"
        )
        compiled = _first(rows, method=method, provider="torch.compile")
        if compiled and "wall ms" in compiled:
            words += f", {compiled['wall ms'] / ours['wall ms']:.1f} x torch.compile"
        return f"{words}; {ours['launches']} launches, error {ours['error']:.1e}"

    return figure


def _loss_figure(shape: str) -> Callable[[Sequence[Row]], str | None]:
    """Time and memory beside plain, in bfloat16, for shapes that begin so."""

    def figure(rows: Sequence[Row]) -> str | None:
        found = [r for r in rows if r["shape"].startswith(shape) and r["dtype"] == "bfloat16"]
        ours, plain = _first(found, provider="growkern"), _first(found, provider="plain")
        if not ours or not plain:
            return None
        words = [f"{plain['wall s'] / ours['wall s']:.1f} x plain"]
        if (compiled := _first(found, provider="torch.compile")) and "wall s" in compiled:
            words.append(f"{compiled['wall s'] / ours['wall s']:.1f} x torch.compile")
        words.append(f"{ours['extra MiB'] / plain['extra MiB']:.2f} of plain's memory")
        if copy := _first(found, provider="copy"):
            words.append(f"{ours['GB/s'] / copy['GB/s']:.2f} of a copy")
        if gemms := _first(found, provider="GEMMs alone"):
            words.append(f"{ours['wall s'] / gemms['wall s']:.2f} x its GEMMs alone")
        return f"{', '.join(words)}; gradient error {ours['gradient error']:.1e}"

    return figure


def _step_figure(rows: Sequence[Row]) -> str | None:
    ours, plain = _first(rows, provider="growkern"), _first(rows, provider="plain")
    if not ours or not plain:
        return None
    return (
        f"{ours['tokens/s']:.0f} tokens/s, {ours['tokens/s'] / plain['tokens/s']:.2f} x plain; "
        f"{ours['peak GiB']:.1f} GiB instead of {plain['peak GiB']:.1f}"
    )


def _gemm_figure(rows: Sequence[Row]) -> str | None:
    """The largest number of rows: time of the loss over that of its GEMMs."""
    found = [row for row in rows if row["op"] == "linear"]
    size = max((row["size"] for row in found), default=0)
    ours = _first(found, provider="growkern", size=size)
    gemms = _first(found, provider="GEMMs alone", size=size)
    return f"{ours['ms'] / gemms['ms']:.2f} x its GEMMs alone" if ours and gemms else None


def _checks_figure(rows: Sequence[Row]) -> str | None:
    return f"{len(rows)} right" if rows else None


def _suite_figure(rows: Sequence[Row]) -> str | None:
    passed, skipped = (sum(row[key] for row in rows) for key in ("passed", "skipped"))
    return f"{passed} passed, {skipped} skipped" if rows else None


# what, the piece it is read from, how
GPU_ROWS: tuple[tuple[str, str, Callable[[Sequence[Row]], str | None]], ...] = (
    ("`expand` against float64", "check_expand", _checks_figure),
    ("both losses against float64", "check_loss", _checks_figure),
    ("every option and the top-k loss against float64", "check_options", _checks_figure),
    ("CUDA C++ kernels against float64", "check_cuda", _checks_figure),
    ("the ops' own tests", "check_suite", _suite_figure),
    ("`compute-sanitizer`, four tools", "sanitize", _checks_figure),
    ("`expand`, bfloat16, 4096² to 8192², arbitrary maps, scaled", "bench_expand", _expand_figure),
    ("all tensors of a Llama, 1B to 3B, FPI", "bench_expand_model", _model_figure("fpi")),
    ("the same, AKI", "bench_expand_model", _model_figure("aki")),
    ("`kl_mlm_loss`, bfloat16, V 30 522", "bench_kl_mlm_loss", _loss_figure("9830x30522")),
    ("`kl_mlm_loss`, bfloat16, V 128 256", "bench_kl_mlm_loss", _loss_figure("8192x128256")),
    (
        "`linear_kl_mlm_loss`, bfloat16, BERT-base's head",
        "bench_linear_bert",
        _loss_figure("9830x30522"),
    ),
    (
        "`linear_kl_mlm_loss`, bfloat16, width 4096, V 128 256",
        "bench_linear_kl_mlm_loss",
        _loss_figure("8192x128256"),
    ),
    (
        "the same, 256 rows",
        "bench_linear_kl_mlm_loss",
        _loss_figure("256x128256"),
    ),
    ("`linear_kl_mlm_loss`, bfloat16, 25 600 rows, width 2048", "scaling", _gemm_figure),
    ("training step, BERT-base and a teacher", "train_bert", _step_figure),
    ("training step, Llama of 1B and a teacher", "train_llama", _step_figure),
)


def gpus(results: Path) -> list[Path]:
    """Directories with results of a GPU."""
    found = sorted({path.parent for path in results.glob("*/*.json")})
    return [folder for folder in found if any("gpu" in _facts(p) for p in folder.glob("*.json"))]


def _facts(path: Path) -> dict[str, Any]:
    return read(path).get("machine", {})


BROKEN = ("failed", "timeout", "crashed")


def _reason(document: dict[str, Any]) -> str:
    """The first line of why a piece failed, fit for a cell of a table."""
    lines = [line for why in document.get("failures", ()) for line in why.splitlines()[:1]]
    return (lines or ["no reason given"])[0][:120].replace("|", "/")


def _gpu_cell(path: Path, figure: Callable[[Sequence[Row]], str | None]) -> str:
    """A figure, or why there is none; a failure is never passed over in silence."""
    document, later = read(path), read(aside_of(path))
    status = document.get("status", "ok")
    if document.get("toy") or not document:
        words = NOTHING
    elif status in BROKEN:
        return f"{'' if status == 'failed' else f'{status}, '}failed: {_reason(document)}"
    elif status == "skipped":
        words = f"skipped: {document.get('reason', '')}"
    else:
        words = figure(document.get("rows", [])) or NOTHING
    if later.get("status") in BROKEN and not later.get("toy"):
        words += f"; a later run failed: {_reason(later)}"
    return words


def gpu_table(results: Path) -> str:
    folders = gpus(results)
    names = [
        next(f["gpu"] for p in sorted(folder.glob("*.json")) if "gpu" in (f := _facts(p)))
        for folder in folders
    ]
    lines = []
    for what, piece, figure in GPU_ROWS:
        cells = [_gpu_cell(folder / f"{piece}.json", figure) for folder in folders]
        lines.append([what, *(cells or [NOTHING])])
    return table(["`python -m bench.gpu`", *(names or ["GPU"])], lines)


# --------------------------------------------------------------- ahead of time


# what a row may say of its accesses
NARROW = {"loads": "narrow", "stores": "narrow_stores"}


def aot_table(results: Path) -> str:
    """Every kernel and architecture: what its machine code allows."""
    document = read(results / "aot.json")
    facts = document.get("machine", {})
    columns = {
        "kernel": "kernel",
        "arch": "arch",
        "registers": "registers",
        "spilled_bytes": "spilled",
        "shared_bytes": "shared",
        "loads": "loads",
        "stores": "stores",
        "instructions per element": "instr.",
        "bytes per element": "bytes",
        "bound": "bound",
        "of bandwidth": "of bandwidth",
    }

    def line(row: Row) -> list[str]:
        bound = row.get("bound") or f"not estimated: {row.get('no estimate', 'no counts')}"
        why = (f"{k}: {row[key]}" for k, key in NARROW.items() if row.get(key))
        return [*(cell((row | {"bound": bound}).get(key)) for key in columns), "; ".join(why)]

    head = (
        "# Machine code, read ahead of time\n\n"
        f"Commit {document.get('commit', '?')}, {document.get('date', '?')[:10]}. "
        f"Triton {facts.get('triton', '?')} and, for kernels named CUDA, NVRTC "
        f"{facts.get('nvrtc', '?')}; `python -m bench.aot`; nothing here was timed. Spilled and "
        "shared are bytes. Loads and stores are count x bytes a thread in the hot code; "
        'instructions and bytes are per element; "of bandwidth" is the most of the chip\'s memory '
        "bandwidth that instruction issue, special functions and load-store units leave, with "
        "data-sheet rates (`bench/shared/roofline.py`). Branches of a CUDA kernel that exclude "
        "each other count all, and a loop that is unrolled counts whole: there it may be more. The "
        "last column says why loads or stores are allowed to be narrow; all others are 16 bytes "
        "(8 on gfx942, whose 64 lanes ask for as much).\n\n"
    )
    lines = [line(row) for row in document.get("rows", [])]
    return head + table([*columns.values(), "narrow, because"], lines) + "\n"


# ------------------------------------------------------------------- pictures


def draw(folder: Path) -> list[Path]:
    """The pictures of one GPU, of what was measured on it."""
    scaling = _good(folder / "scaling.json").get("rows", [])
    ceilings = _good(folder / "ceilings.json").get("rows", [])
    if not scaling:
        return []
    jobs = (("speed", _draw_speed), ("memory", _draw_memory), ("roofline", _draw_roofline))
    made = []
    for name, drawn in jobs:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.add_subplot(xscale="log", yscale="log")
        drawn(axes, scaling, ceilings)
        axes.grid(alpha=0.25)
        axes.legend(fontsize="small")
        figure.savefig(folder / f"{name}.png", dpi=130)
        made.append(folder / f"{name}.png")
    return made


def _curves(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["op"], row["provider"]), []).append(row)
    return found


def slope(rows: Sequence[Row]) -> float:
    """Growth of time with work between the two largest sizes: 1 is in proportion."""
    a, b = sorted(rows, key=lambda row: row["size"])[-2:]
    return math.log(b["ms"] / a["ms"]) / math.log(b["size"] / a["size"])


def _draw_speed(axes: Any, rows: Sequence[Row], ceilings: Sequence[Row]) -> None:
    for (op, provider), curve in _curves(rows).items():
        label = f"{op}, {provider}" + (f", slope {slope(curve):.2f}" if len(curve) > 1 else "")
        axes.plot([r["size"] for r in curve], [r["ms"] for r in curve], marker="o", label=label)
    axes.set_xlabel("elements (expand), rows (losses)")
    axes.set_ylabel("ms")


def _draw_memory(axes: Any, rows: Sequence[Row], ceilings: Sequence[Row]) -> None:
    for (op, provider), curve in _curves(rows).items():
        if op != "expand" and all(r["extra MiB"] for r in curve):
            x, y = ([r[key] for r in curve] for key in ("size", "extra MiB"))
            axes.plot(x, y, marker="o", label=f"{op}, {provider}")
    axes.set_xlabel("rows")
    axes.set_ylabel("extra memory, MiB")


def _draw_roofline(axes: Any, rows: Sequence[Row], ceilings: Sequence[Row]) -> None:
    for (op, provider), curve in _curves(rows).items():
        x = [r["flops"] / r["bytes"] for r in curve]
        y = [r["flops"] / r["ms"] / 1e9 for r in curve]
        axes.plot(x, y, marker="o", linestyle="", label=f"{op}, {provider}")
    bandwidth = max((r["value"] for r in ceilings if r["ceiling"] == "copy"), default=None)
    rate = max((r["value"] for r in ceilings if r["ceiling"] == "GEMM bfloat16"), default=None)
    if bandwidth and rate:
        x = [0.1, rate / bandwidth, 1e4]
        label = f"measured: {bandwidth:.2f} TB/s, {rate:.0f} TFLOP/s"
        axes.plot(x, [min(rate, v * bandwidth) for v in x], color="0.4", label=label)
    axes.set_xlabel("FLOPs per byte that has to move")
    axes.set_ylabel("TFLOP/s")


# ----------------------------------------------------------------------- write

BLOCKS = {"cpu-expand": cpu_expand, "gpu": gpu_table}


def with_blocks(text: str, results: Path) -> str:
    """The text with every block between its marks made anew."""
    for name, block in BLOCKS.items():
        marks = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        body = f"{block(results)}\n"
        text = re.sub(marks, lambda m, body=body: m[1] + body + m[2], text, flags=re.S)
    return text


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--take", type=Path, help="first keep the results unpacked there")
    args = parser.parse_args(argv)
    for path in take(args.take, args.results) if args.take else ():
        print(f"kept: {path}")
    args.readme.write_text(with_blocks(args.readme.read_text(), args.results))
    (args.results / "aot.md").write_text(aot_table(args.results))
    made = [args.readme, args.results / "aot.md"]
    for folder in gpus(args.results):
        made += draw(folder)
        for aside in sorted(folder.glob("*.aside.json")):
            document = read(aside)
            print(f"{aside}: a later run {document.get('status')}: {document.get('failures')}")
    for path in made:
        print(path)
    return 0
