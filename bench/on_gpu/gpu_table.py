"""The table of all GPUs: one figure of each piece of `bench.gpu`, or why there is none."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.shared.results import aside_of, read, table, with_commits
from bench.shared.tables import early_small

NOTHING = "not measured yet"
Row = dict[str, Any]


def _first(rows: Sequence[Row], **wanted: Any) -> Row | None:
    return next((r for r in rows if all(r.get(k) == v for k, v in wanted.items())), None)


def _expand_figure(rows: Sequence[Row]) -> str | None:
    row = _first(rows, dtype="bfloat16", maps="arbitrary", scaled="routing")
    if row is None:
        return None
    # all of them return a fresh tensor
    ours = row["ours ms"]
    words = f"{row['limit ms'] / ours:.2f} of a copy, {row['eager ms'] / ours:.1f} x eager"
    if compiled := row.get("compiled ms"):
        words += f", {compiled / ours:.1f} x torch.compile"
    return words


def _loss_figure(shape: str) -> Callable[[Sequence[Row]], str | None]:
    """Time and memory beside plain PyTorch, in bfloat16, for shapes that start with `shape`."""

    def figure(rows: Sequence[Row]) -> str | None:
        same = [r for r in rows if r["shape"].startswith(shape) and r["dtype"] == "bfloat16"]
        ours, plain = _first(same, provider="growkern"), _first(same, provider="plain")
        if not ours or not plain:
            return None
        words = [f"{plain['wall s'] / ours['wall s']:.1f} x plain"]
        if (compiled := _first(same, provider="torch.compile")) and "wall s" in compiled:
            words.append(f"{compiled['wall s'] / ours['wall s']:.1f} x torch.compile")
        words.append(f"{ours['extra MiB'] / plain['extra MiB']:.2f} of plain's memory")
        if copy := _first(same, provider="copy"):
            words.append(f"{ours['GB/s'] / copy['GB/s']:.2f} of a copy")
        if gemms := _first(same, provider="GEMMs alone"):
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


def _alone_figure(rows: Sequence[Row]) -> str | None:
    """Time of the loss over that of its GEMMs, in a CUDA graph and not, without peers."""
    gemms = _first(rows, provider="GEMMs alone")
    ways = {"growkern": "", "growkern, CUDA graph": " in a CUDA graph"}
    found = [(_first(rows, provider=name), words) for name, words in ways.items()]
    words = [
        f"{ours['wall s'] / gemms['wall s']:.2f}{how}" for ours, how in found if ours and gemms
    ]
    return f"{', '.join(words)} x its GEMMs alone" if words else None


def _device_figure(rows: Sequence[Row]) -> str | None:
    ours, gemms = _first(rows, step="growkern"), _first(rows, step="GEMMs alone")
    if not ours or not gemms:
        return None
    ours, gemms = (row["device ms"] for row in (ours, gemms))
    return f"{ours:.1f} ms, {ours / gemms:.2f} x its GEMMs alone"


def _once_figure(rows: Sequence[Row]) -> str | None:
    """The time of rows read once over that of rows read twice, where both kernels ran."""
    words = []
    for K, what in ((1, "a teacher"), (0, "labels alone")):
        once, twice = (_first(rows, read=name, teachers=K) for name in ("once", "twice"))
        if once and twice:
            words.append(f"{once['ms'] / twice['ms']:.2f} with {what}")
    return ", ".join(words) or None


def _gathers_figure(rows: Sequence[Row]) -> str | None:
    """The device's time of gathers in shared memory over that of gathers from memory."""
    words = []
    for new in (row for row in rows if row.get("gathered in") == "shared memory"):
        facts = {key: new[key] for key in ("dtype", "maps", "kind")}
        if old := _first(rows, **facts, **{"gathered in": "memory"}):
            routed = ", routing" if "routing" in new["kind"] else ""
            share = new["device ms"] / old["device ms"]
            words.append(f"{share:.2f} {new['dtype']}, {new['maps']}{routed}")
    return "; ".join(words) or None


def _checks_figure(rows: Sequence[Row]) -> str | None:
    return f"{len(rows)} right" if rows else None


def _early_figure(rows: Sequence[Row]) -> str | None:
    """What is saved of a given size, and of its loss by the model that is never grown."""
    found, plan = _first(rows, what="early saving", system="grown"), _first(rows, what="plan")
    if not found or found["source counted"] is None:
        return None
    least = "at least " if found["words"].startswith("at least") else ""
    return (
        f"saved of a given size, source counted: {least}{found['source counted']:.1%}; its loss by "
        f"the smaller model, never grown: at least {early_small(list(rows)):.0%} "
        f"(early: {plan['tokens per parameter']:.2f} tokens per parameter)"
    )


def _family_figure(rows: Sequence[Row]) -> str | None:
    """What is saved by question: both sizes, the larger one, or its loss by any model."""
    plan, found = _first(rows, what="plan"), _first(rows, what="saving by question")
    if not plan or not found:
        return None

    def said(key: str) -> str:
        return "loss not reached" if found[key] is None else f"{found[key]:.1%}"

    least = "at least " if found["at least"] else ""
    return (
        f"saved of a family: {least}{said('family')}; of a given size, 12 x 384 with 12 x 256 "
        f"counted: {said('given size, source counted')}, in one run: "
        f"{said('given size, one run')}; if any size will do, by 6 x 256, never grown: "
        f"{said('given loss, never grown')} "
        f"(early: {plan['tokens per parameter']:.1f} tokens per parameter)"
    )


# what was measured, the piece it is read from, and how to word its figure
GPU_ROWS: tuple[tuple[str, str, Callable[[Sequence[Row]], str | None]], ...] = (
    ("`expand` against float64", "check_expand", _checks_figure),
    ("both losses against float64", "check_loss", _checks_figure),
    ("every option and the top-k loss against float64", "check_options", _checks_figure),
    ("CUDA C++ kernels against float64", "check_cuda", _checks_figure),
    ("hashes of lines in one launch, beside PyTorch's", "check_lines", _checks_figure),
    ("columns gathered in shared memory, beside memory", "check_gathers", _checks_figure),
    ("rows read once, against float64", "check_once", _checks_figure),
    ("rows read once, times rows read twice", "rows", _once_figure),
    ("`expand` through shared memory, times from memory", "gathers", _gathers_figure),
    (
        "`expand`, bfloat16, 4096² to 8192², arbitrary maps, routing, fresh output",
        "bench_expand",
        _expand_figure,
    ),
    ("`kl_mlm_loss`, bfloat16, V 30 522", "bench_kl_mlm_loss", _loss_figure("9830x30522")),
    ("`kl_mlm_loss`, bfloat16, V 128 256", "bench_kl_mlm_loss", _loss_figure("8192x128256")),
    (
        "`linear_kl_mlm_loss`, bfloat16, BERT-base's head",
        "bench_linear_bert",
        _loss_figure("9830x30522"),
    ),
    (
        "`linear_kl_mlm_loss`, bfloat16, width 4096, V 128 256",
        "headline",
        _loss_figure("8192x128256"),
    ),
    ("the same, without peers", "headline_alone", _alone_figure),
    ("the same, on the device alone", "timeline", _device_figure),
    ("the same, 256 rows", "bench_linear_kl_mlm_loss", _loss_figure("256x128256")),
    ("training step, BERT-base and a teacher", "train_bert", _step_figure),
    ("training step, Llama of 1B and a teacher", "train_llama", _step_figure),
    *(
        (f"GPT-2 grown to 110 million parameters, seed {n}", f"gpt_110m_{n}", _early_figure)
        for n in (1, 2, 3)
    ),
    ("a family of GPT-2, 12 x 256 and 12 x 384", "family", _family_figure),
)


def gpus(results: Path) -> list[Path]:
    """The directories with results of a GPU."""
    folders = sorted({path.parent for path in results.glob("*/*.json")})
    return [folder for folder in folders if any("gpu" in _facts(p) for p in folder.glob("*.json"))]


def _facts(path: Path) -> dict[str, Any]:
    return read(path).get("machine", {})


BROKEN = ("failed", "timeout", "crashed")


def _reason(document: dict[str, Any]) -> str:
    """The first line of the reason why a piece failed, as a cell of a table."""
    lines = [line for why in document.get("failures", ()) for line in why.splitlines()[:1]]
    return (lines or ["no reason given"])[0][:120].replace("|", "/")


def _gpu_cell(path: Path, figure: Callable[[Sequence[Row]], str | None]) -> str:
    """The figure of a piece, or the reason why there is none. A failure is always named."""
    document, later = read(path), read(aside_of(path))
    commit = f" (commit {document.get('machine', {}).get('commit', '?')})"
    status = document.get("status", "ok")
    if document.get("toy") or not document:
        words = NOTHING
    elif status in BROKEN:
        return f"{'' if status == 'failed' else f'{status}, '}failed: {_reason(document)}{commit}"
    elif status == "skipped":
        words = f"skipped: {document.get('reason', '')}"
    else:
        words = figure(document.get("rows", [])) or NOTHING
        if words != NOTHING:
            words += commit
    if later.get("status") in BROKEN and not later.get("toy"):
        words += f"; a later run failed: {_reason(later)}"
        words += f" (commit {later.get('machine', {}).get('commit', '?')})"
    return words


def gpu_table(results: Path) -> str:
    """The table of all GPUs, one column for each."""
    folders = gpus(results)
    if not folders:
        return "No GPU has been measured yet."
    names = [
        next(f["gpu"] for p in sorted(folder.glob("*.json")) if "gpu" in (f := _facts(p)))
        for folder in folders
    ]
    lines, shown = [], []
    for what, piece, figure in GPU_ROWS:
        cells = [_gpu_cell(folder / f"{piece}.json", figure) for folder in folders]
        if set(cells) != {NOTHING}:
            lines.append([what, *cells])
            found = (read(folder / f"{piece}.json") for folder in folders)
            shown += [x for x in found if x and not x.get("toy")]
    return with_commits(table(["`python -m bench.gpu`", *names], lines), shown)
