"""The tables of the documentation that show one result each, all but those of training.

`bench.report` writes them into the pages. Where a result is missing, a table has only its head.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.shared.inputs import DRIFT
from bench.shared.results import quotable, table, with_commits

Row = dict[str, Any]
# the largest difference of outputs in another runtime: float32 through a few layers. A wrong theta,
# scale or window is off by 1e-2 and more. GELU of llama.cpp is a table of 16 bits
LARGEST = {"llama.cpp": 1e-3}
USUAL = 1e-4
# what the losses are compared on: words, and the end of the providers' names
COMPARED = (("with a teacher", ""), ("labels alone", ", labels alone"))
# providers of the linear loss in the documentation, by their names in the result
PROVIDERS = {
    "plain": "plain PyTorch",
    "torch.compile": "torch.compile of plain",
    "liger jsd": "Liger-Kernel, chunked JSD",
    "growkern": "growkern",
    "growkern, float32 logits": "growkern with float32 logits",
}
# the same on a GPU
ON_GPU = {
    "GEMMs alone": "its matrix products alone",
    "growkern": "growkern",
    "growkern, CUDA graph": "growkern, in a CUDA graph",
    "torch.compile": "torch.compile of plain",
    "torch.compile, float32 logits": "torch.compile of plain, float32 logits",
    "liger jsd": "Liger-Kernel, chunked JSD",
    "liger fused jsd": "Liger-Kernel, fused JSD",
    "orda": "orda-kernel",
    "liger kl": "plain logits and Liger-Kernel's KL",
    "plain": "plain PyTorch",
    "GEMMs alone, labels alone": "labels alone: its matrix products",
    "growkern, labels alone": "labels alone: growkern",
    "torch.compile, labels alone": "labels alone: torch.compile of plain",
    "plain, labels alone": "labels alone: plain PyTorch",
    "liger, labels alone": "labels alone: Liger-Kernel",
    "cut_cross_entropy, labels alone": "labels alone: Cut Cross-Entropy",
}


def rows_of(results: Path, name: str) -> list[Row]:
    """The rows of a result that may be quoted."""
    return list(quotable(results / f"{name}.json").get("rows", []))


def range_of(rows: Sequence[Row], key: str, digits: int) -> str:
    """The least and the largest number of the rows under a key, in words."""
    low, high = (f"{pick(row[key] for row in rows):.{digits}f}" for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def expand(results: Path) -> str:
    """`expand` on a CPU: ranges over index maps and scaling. Each table has one kind of output."""
    rows = rows_of(results, "expand")
    every, plain = ("contiguous", "tiled", "arbitrary"), ("no", "halved", "yes")
    runs, written = every[:2], ("routing, scaled",)
    kinds = (
        ("contiguous and tiled maps", runs, plain),
        ("arbitrary maps", ("arbitrary",), plain),
        ("any maps, with noise", every, ("noise",)),
        ('any maps, with routing: growth with `stream="copies"`', every, ("routing",)),
        ("any maps: reads a padded hidden state", every, ("padded",)),
        ("contiguous and tiled maps: writes a padded hidden state", runs, written),
        ("arbitrary maps: writes a padded hidden state", ("arbitrary",), written),
    )
    dtypes, tables = list(dict.fromkeys(row["dtype"] for row in rows)), []
    for words, key, digits in (
        ("fresh outputs: times eager indexing", "x eager", 1),
        ("outputs that exist (`out=`): share of the write limit", "of limit", 2),
    ):
        lines = []
        for name, maps, scaled in kinds:
            chosen = [row for row in rows if row["maps"] in maps and row["scaled"] in scaled]
            of = [[row for row in chosen if row["dtype"] == dtype] for dtype in dtypes]
            if chosen:
                cells = [range_of(same, key, digits) if same else "-" for same in of]
                lines.append([name, *cells])
        tables.append(table([words, *dtypes], lines))
    return "\n\n".join(tables)


def grow_checkpoint(results: Path) -> str:
    """Growth of a Llama from disk to disk, beside a copy of as many bytes."""
    lines = []
    for row in rows_of(results, "grow_checkpoint"):
        cold = ", files not in memory" if row["cache"] == "cold" else ""
        times = (f"{row[key]:.2g} s" for key in ("stream s", "cp, on disk s"))
        memory = f"{row['stream peak MB']:.0f} MB"
        lines.append([f"{row['target GB']:.2g} GB{cold}", *times, memory])
    return table(["grown on disk to", "time", "`cp` of the same bytes", "memory"], lines)


def grow_process(results: Path) -> str:
    """Time and memory of a whole process that grows a GPT-2 with its optimizer state."""
    document = quotable(results / "grow_optimizer.json")
    limit = document.get("machine", {}).get("memory_limit", "?")
    lines = [
        [
            row["way"],
            f"{row['written GB']:.1f} GB",
            f"{row['process peak MB']:.0f} MB",
            f"{row['base MB']:.0f} MB",
            f"{row['seconds']:.0f} s",
        ]
        for row in document.get("rows", [])
    ]
    head = [f"a whole process with `--memory-limit {limit}`", "written", "peak memory"]
    return table([*head, "of it imports of Python", "time"], lines)


def carry(results: Path) -> str:
    """Errors of BERT encoders at widths that are not multiples."""
    rows = [row for row in rows_of(results, "exactness") if "carry" in row]
    lines = [[row["sizes"], f"{row['carry']:g}", f"{row['error']:.1e}"] for row in rows]
    return table(["hidden size of a random BERT encoder", "`carry`", "error of the outputs"], lines)


def random_growths(results: Path) -> str:
    """How the random growths of `bench.fuzz_exactness` ended, of all families together."""
    rows, total = rows_of(results, "fuzz_exactness"), Counter[str]()
    for row in rows:
        total.update({word: n for word, n in row.items() if word != "family"})
    grown = (total[word] for word in ("exact", "approximate", "changed", "FAILED"))
    heads = ["families", "exact", "approximate", "changed as planned", "otherwise"]
    return table(heads, [[f"{len(rows)}", *map(str, grown)]] if rows else [])


def drafts(results: Path) -> str:
    """How many model types of transformers `growkern family draft` drafts exactly, by itself."""
    rows, lines = rows_of(results, "drafts"), []
    for words, shipped in (("have a table in the package", True), ("have none", False)):
        counts = Counter(row["draft"] for row in rows if row["table"] is shipped)
        others = counts["wrong"] + counts["failed"]
        lines += [[words, *map(str, (counts.total(), counts["exact"], others, counts["refused"]))]]
    heads = ["model types that predict tokens and", "number", "drafted exactly"]
    return table([*heads, "drafted, not exact", "refused"], lines if rows else [])


def linear_loss(results: Path) -> str:
    """The fused loss of 2048 rows beside other implementations."""
    rows = [r for r in rows_of(results, "linear_kl_mlm_loss") if r["shape"].startswith("2048x")]
    lines = [
        [
            f"{dtype}, {words}",
            f"{row['wall s']:.2f}",
            f"{row['x compile']:.2f}",
            f"{row['extra MiB']:.0f}",
            f"{row['gradient error']:.1e}",
        ]
        for dtype in ("float32", "bfloat16")
        for name, words in PROVIDERS.items()
        for row in rows
        if (row["dtype"], row["provider"]) == (dtype, name)
    ]
    head = ["2048 rows, vocabulary 32 000, widths 768 and 512, 2 threads", "seconds"]
    head += ["times of `torch.compile`", "extra memory, MiB"]
    return table([*head, "error of the KL gradient at 5 % drift"], lines)


def headlines(results: Path) -> list[dict[str, Any]]:
    """What each GPU measured of the headline: with peers, and without where the commit differs."""
    found = []
    for folder in sorted(path for path in results.glob("*") if path.is_dir()):
        whole, alone = (quotable(folder / f"{x}.json") for x in ("headline", "headline_alone"))
        same = whole and alone and whole["machine"]["commit"] == alone["machine"]["commit"]
        found += [document for document in (whole, {} if same else alone) if document]
    return found


def headline(results: Path) -> str:
    """The fused loss on a GPU beside other implementations, at the sizes of a large head."""
    lines, documents = [], headlines(results)
    for document in documents:
        rows = {row["provider"]: row for row in document.get("rows", [])}
        for name, words in ON_GPU.items():
            row = rows.get(name, {})
            if "wall s" in row:
                memory = f"{row['extra MiB'] / 1024:.1f}" if "extra MiB" in row else "-"
                error = f"{row['gradient error']:.1e}" if "gradient error" in row else "-"
                gpu = f"{document['machine']['gpu'].split()[1]}, {document['machine']['commit']}"
                lines.append([gpu, words, f"{1e3 * row['wall s']:.1f}", memory, error])
    head = ["GPU, commit", "8192 rows, V 128 256, widths 4096 and 2048, bfloat16", "ms"]
    made = table([*head, "extra memory, GiB", "gradient error"], lines)
    return with_commits(made, documents)


def on_gpus(results: Path) -> list[dict[str, Any]]:
    """The results of GPUs that the README quotes."""
    found = map(quotable, sorted(results.glob("*/train_llama.json")))
    return headlines(results) + [document for document in found if document]


# the providers beside growkern's loss in the README
BESIDE_LOSS = {
    "torch.compile": "`torch.compile`",
    "torch.compile, float32 logits": "the same with float32 logits",
    "liger jsd": "Liger-Kernel's chunked JSD",
}
# why a model did not load -> the word of the table; any other reason is unclear
REASONS = {
    "only Llama 3": "",  # the benchmark builds no other for torchtitan
    "no head for masked": "no logits",
    "Failed to export": "not exported",
    "not supported|No conversion|not yet impl|not recogni|module transformers has no": "no",
}


def measured_on_gpus(results: Path) -> list[list[str]]:
    """Rows of the README's table: the loss and a training step on each GPU that was measured."""
    lines = []
    for document in headlines(results):
        by_name = {row["provider"]: row for row in document.get("rows", [])}
        cells = {
            name: f"{1e3 * row['wall s']:.0f} ms, {row['extra MiB'] / 1024:.1f} GiB, gradient "
            f"error {row['gradient error']:.1%}"
            for name in ("growkern", *BESIDE_LOSS)
            if "gradient error" in (row := by_name.get(name, {}))
        }
        if "growkern" in cells:
            own = cells.pop("growkern")
            what = f"loss of 8192 tokens, {document['machine']['gpu']}, bfloat16, one teacher"
            what += f" (commit {document['machine']['commit']})"
            others = [f"{BESIDE_LOSS[name]}: {cell}" for name, cell in cells.items()]
            if not others and (gemms := by_name.get("GEMMs alone")):
                others = [f"its matrix products alone: {1e3 * gemms['wall s']:.0f} ms"]
            lines.append([what, own, "; ".join(others)])
    for document in map(quotable, sorted(results.glob("*/train_llama.json"))):
        by_name = {row["provider"]: row for row in document.get("rows", [])}
        if {"growkern", "plain"} <= by_name.keys():
            what = f"training step of a Llama of 1B with a teacher, {document['machine']['gpu']}"
            what += f" (commit {document['machine']['commit']})"
            own, plain = (
                f"{row['tokens/s']:,.0f} tokens/s, {row['peak GiB']:.0f} GiB"
                for row in (by_name["growkern"], by_name["plain"])
            )
            lines.append([what, own, f"plain PyTorch: {plain}"])
    return lines


def beside_compile(results: Path) -> str:
    """growkern's time and memory beside the compiled and the plain formula."""
    lines = []
    for name in ("kl_mlm_loss", "linear_kl_mlm_loss", "linear_kl_mlm_loss-intel"):
        document = quotable(results / f"{name}.json")
        rows, machine = document.get("rows", []), document.get("machine", {})
        op, _, other = name.partition("-")
        for words, end in COMPARED:
            for threads in (1, 2):
                ours = [
                    row | {"of plain": row["extra MiB"] / _beside(rows, row, end)["extra MiB"]}
                    for row in rows
                    if row["provider"] == f"growkern{end}"
                    and row.get("threads", machine.get("threads")) == threads
                ]
                if ours:
                    above = sum(row["x compile"] > 1 for row in ours)
                    cells = (range_of(ours, key, 2) for key in ("x compile", "of plain"))
                    title = f"`{op}`, {words}, threads: {threads}{', Intel' if other else ''}"
                    lines.append([title, *cells, f"{above} of {len(ours)}"])
    head = ["every shape and dtype", "times of `torch.compile`", "memory, of plain"]
    return table([*head, "slower than `torch.compile`"], lines)


def _beside(rows: Iterable[Row], ours: Row, end: str) -> Row:
    """The row of plain PyTorch for the same inputs."""
    keys = ("shape", "dtype", "threads", "labelled")
    return next(
        row
        for row in rows
        if row["provider"] == f"plain{end}" and all(row.get(k) == ours.get(k) for k in keys)
    )


def _drifts(results: Path) -> dict[tuple[float, str, str], Row]:
    """The rows of the KL gradient's error, by drift, dtype and loss."""
    rows = (row for row in rows_of(results, "exactness") if "drift" in row)
    return {(row["drift"], row["dtype"], row["what"].split(", ")[1]): row for row in rows}


def drift(results: Path) -> str:
    """The error of the KL gradient, by how far the student is from its teacher; and the memory."""
    rows = _drifts(results)
    names = {"growkern": "`linear_kl_mlm_loss`", "plain": "plain PyTorch"}
    wide = {"plain_float32": "plain PyTorch, float32 logits"}
    ways = [("float32", x) for x in names] + [("bfloat16", x) for x in names | wide]
    lines = [
        [f"{distance:.0%}", *(f"{rows[(distance, *way)]['error']:.1e}" for way in ways)]
        for distance in dict.fromkeys(drift for drift, *_ in rows)
    ]
    costs = [
        ["a step of 2,048 rows at 5%", "-", "-"]
        + [f"{rows[DRIFT, 'bfloat16', x]['extra MiB']:,.0f} MiB" for x in names | wide]
    ]
    heads = (f"{dtype}, {(names | wide)[x]}" for dtype, x in ways)
    return table(["drift", *heads], lines + costs)


def gradient_errors(results: Path) -> list[list[str]]:
    """The README's line: the error of the KL gradient in bfloat16, and what avoiding it costs."""
    rows = _drifts(results)
    if not rows:
        return []
    own, plain, wide = (
        rows[DRIFT, "bfloat16", name] for name in ("growkern", "plain", "plain_float32")
    )
    what = (
        "error of the gradient in bfloat16: 64 rows, vocabulary 30,522, widths 768 and 512, a "
        f"student that moved {DRIFT:.0%} away from its teacher. Extra memory for 2,048 rows"
    )
    told = [f"{row['error']:.1%}, {row['extra MiB']:,.0f} MiB" for row in (own, plain, wide)]
    return [[what, told[0], f"plain PyTorch: {told[1]}; with float32 logits: {told[2]}"]]


def top_k(results: Path) -> str:
    """What the loss sees of a teacher of which k tokens are kept."""
    rows = rows_of(results, "topk")
    by = {(row["student"].split()[0], row["T"], row["k"]): row for row in rows}
    lines = []
    for _, T, k in (key for key in by if key[0] == "grown"):
        both = [by[student, T, k] for student in ("grown", "random")]
        seen = [f"{1 - row['KL left out'] / row['KL, nats']:.0%}" for row in both]
        errors = [f"{row['gradient error']:.0%}" for row in both]
        wrong = [f"{row['renormalised']:.1f} x" for row in both]
        mass = f"{both[0]['teacher mass']:.0%}"
        lines.append([f"{T:g}", str(k), str(both[0]["bytes/row"]), mass, *seen, *errors, *wrong])
    students = ("grown", "random")
    ends = ("KL seen", "gradient error", "renormalised")
    head = ["temperature", "k", "bytes a row", "mass kept"]
    return table([*head, *(f"{end}, {who}" for end in ends for who in students)], lines)


def growth_adamw(results: Path) -> str:
    """GrowthAdamW beside PyTorch's fused AdamW."""
    document = quotable(results / "growth_adamw.json")
    lines = [
        [
            f"{row['growth']}, {row['dtype']}, {row['optimizer']}",
            f"{row['times fused AdamW']:.2f}",
            f"{row['extra MiB']:.1f}",
        ]
        for row in document.get("rows", [])
        if row["optimizer"].startswith("GrowthAdamW")
    ]
    threads = document.get("machine", {}).get("threads", "?")
    head = [f"a step over a GPT-2 of 2 layers x 768, {threads} threads"]
    return table([*head, "times AdamW(fused=True)", "extra memory, MiB"], lines)


# name in the rows, in the table and the picture
EARLY_SYSTEMS = (
    ("source", "12 layers of width 512, never grown"),
    ("scratch", "from scratch: 12 layers of width 768"),
    ("grown", "grown from the small model, defaults"),
    ("DirectCopy", "grown from the small model, `direct_copy`"),
    ("2 to 12 layers", "2 layers, grown to 12 inside the run, `stack`"),
)


def early_results(results: Path) -> list[dict[str, Any]]:
    """The result of each seed that a GPU has trained."""
    found = map(quotable, sorted(results.glob("*/gpt_110m_?.json")))
    return [document for document in found if document.get("rows")]


def early_seeds(results: Path) -> Iterator[list[Row]]:
    """The rows of each seed that a GPU has trained."""
    return (document["rows"] for document in early_results(results))


def early_runs(rows: list[Row], system: str, *, ends: bool | None = None) -> list[Row]:
    return [r for r in rows if r.get("system") == system and ends in (None, r.get("ends a run"))]


def flops_before(rows: list[Row], system: str) -> float:
    """FLOPs of the small model, for systems that need one."""
    return early_runs(rows, "source")[-1]["flops"] if system in ("grown", "DirectCopy") else 0.0


def early_small(rows: list[Row]) -> float:
    """The least share that the small model, never grown, saves to the loss of scratch; or 0."""
    mark, end = (early_runs(rows, name, ends=True)[-1] for name in ("scratch", "source"))
    return 1 - end["flops"] / mark["flops"] if end["loss"] <= mark["loss"] else 0.0


def early(results: Path) -> str:
    """Every run's FLOPs and last loss, and what the system saves by each of three questions."""
    lines = []
    for rows in early_seeds(results):
        whole, small = early_runs(rows, "scratch")[-1]["flops"], early_small(rows)
        for system, words in EARLY_SYSTEMS:
            ends, before = early_runs(rows, system, ends=True), flops_before(rows, system)
            spent = f"{(before + ends[-1]['flops']) / whole:.2f}"
            saving = next(
                (r for r in early_runs(rows, system) if r.get("what") == "early saving"), {}
            )
            at_least = "≥ " if saving.get("words", "").startswith("at least") else ""
            saved = ["-", "-", f"≥ {small:.0%}" if system == "source" else "-"]
            if (counted := saving.get("source counted")) is not None:
                family = saving["saved"] / (1 + before / whole)
                saved = [f"{at_least}{share:.0%}" for share in (family, counted)]
                saved[0] = saved[0] if before else "-"
                # the small model may have been there earlier too
                most = f"≤ {1 - (1 - counted) / (1 - small):.0%}"
                saved.append("not known" if at_least and small else most)
            lines.append([words, spent, *saved])
    found = early_results(results)
    gpus = ", ".join(f"{x['machine']['gpu']}, commit {x['machine']['commit']}" for x in found)
    heads = [f"GPT-2 ({gpus})" if found else "GPT-2", "FLOPs, scratch's = 1"]
    return with_commits(
        table([*heads, "a family", "a given size", "any size will do"], lines), found
    )


def outside(results: Path) -> str:
    """How many growths of each family each runtime loads, with the outputs of the source there."""
    found: dict[str, dict[tuple[str, ...], list[dict[str, Any]]]] = {}
    for row in rows_of(results, "outside"):
        column = row["runtime"], row["version"]
        found.setdefault(row["family"], {}).setdefault(column, []).append(row)
    columns = list(dict.fromkeys(column for own in found.values() for column in own))
    alike: dict[tuple[str, ...], list[str]] = {}
    for family, own in sorted(found.items()):
        alike.setdefault(tuple(_loaded(own.get(x, [])) for x in columns), []).append(f"`{family}`")
    # short enough to be read
    lines = [
        [", ".join(families[i : i + 8]), *cells]
        for cells, families in alike.items()
        for i in range(0, len(families), 8)
    ]
    return table(["family", *(" ".join(column) for column in columns)], lines)


def is_alike(row: Row) -> bool:
    """Whether a runtime loads a grown model, with the outputs of its source there."""
    return row.get("off", 1.0) < LARGEST.get(row["runtime"], USUAL)


def _loaded(rows: list[dict[str, Any]]) -> str:
    good = [is_alike(x) for x in rows if x["growth"] != "source"]
    told = " ".join(x.get("why", "") for x in rows)
    why = next((word for text, word in REASONS.items() if re.search(text, told)), "unclear")
    return f"{sum(good)}/{len(good)}" if good else why if rows else ""
