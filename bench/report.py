"""Makes tables and pictures from the results under bench/results. It measures nothing.

    python -m bench.report

It writes:

- the blocks of README.md and docs/*.md between `<!-- name -->` and `<!-- /name -->`,
- bench/results/aot.md and paper.md,
- the picture of every GPU's first losses, beside its JSON,
- bench/results/demo.png, readme.png and those of paper.md.

Where a result is missing, a table says "not measured yet". Where a piece failed, it says "failed"
and why. `--take DIRECTORY` first brings in the results of another machine. It never replaces a
better documented result.
"""

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from bench.on_gpu.gpu_table import gpu_table, gpus
from bench.paper.briefs import BRIEFS, NeverGrown, brief_text, never_grown, runs_beside, savings
from bench.paper.compare import Row, check_savings, committed, fixed_sizes
from bench.paper.models import Size
from bench.paper.page import write_page
from bench.shared import tables
from bench.shared.harness import parser_of
from bench.shared.pictures import READABLE, demo_table, draw_demo, draw_early
from bench.shared.results import RESULTS, ROOT, cell, read, table, take, with_commits
from growkern.families import growable_fields, load_family, supported_families
from growkern.plot.curves import first_crossing
from growkern.plot.figure import COLORS, GREY, new_figure
from testbed.growths import is_exact_in_any_width

# the README and the pages of the documentation
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# the keys of a row that say why its loads or stores may be narrow
NARROW = {"loads": "narrow", "stores": "narrow_stores"}


def aot_table(results: Path) -> str:
    """The text of aot.md: for every kernel and architecture the speed its machine code allows."""
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
        "at random places": "at random places",
    }

    def line(row: Row) -> list[str]:
        bound = row.get("bound") or f"not estimated: {row.get('no estimate', 'no counts')}"
        why = (f"{k}: {row[key]}" for k, key in NARROW.items() if row.get(key))
        return [*(cell((row | {"bound": bound}).get(key)) for key in columns), "; ".join(why)]

    head = (
        "# Machine code of the kernels\n\n"
        "`python -m bench.aot` compiles every kernel without a GPU and reads its machine code. "
        "Nothing here was timed.\n"
        f"Commit {document.get('commit', '?')}, {document.get('date', '?')[:10]}. "
        f"Triton {facts.get('triton', '?')}, and NVRTC {facts.get('nvrtc', '?')} for the kernels "
        "named CUDA.\n\n"
        "- Spilled and shared are bytes.\n"
        "- Loads and stores are those of one thread in the hot code: count x bytes per access.\n"
        "- Instructions and bytes are per element.\n"
        '- "of bandwidth" is the largest share of the chip\'s memory bandwidth that the kernel can '
        "use. Instruction issue, special functions and load-store units limit it. The chip's rates "
        "are from data sheets (`bench/shared/roofline.py`).\n"
        '- "at random places" is this share where columns are read at random places of a row. '
        "It rests on one measurement, of bfloat16 on an H200.\n"
        "- For a CUDA kernel this share may be too low: branches that exclude each other all "
        "count, and an unrolled loop counts completely.\n"
        "- The last column says why loads or stores may be narrow. All others are 16 bytes wide, "
        "or 8 on gfx942, whose 64 lanes then access as much as 32 lanes with 16 bytes.\n\n"
    )
    lines = [line(row) for row in document.get("rows", [])]
    return head + table([*columns.values(), "narrow, because"], lines) + "\n"


def families(results: Path) -> str:
    """One line a family: what is exact, what grows, and the classes."""
    usual, lines = growable_fields(load_family("llama")), []
    for model_type in supported_families():
        family = load_family(model_type)
        fields, (first, *others) = growable_fields(family), family.classes
        start = min(
            (re.split(r"For(?=[A-Z])|(Encoder|Model)$", x)[0] for x in family.classes), key=len
        )
        ends = (name.removeprefix(start).removeprefix("For") for name in others)
        widths = ["multiples", "any"][is_exact_in_any_width(family)]
        exact = widths if "stream" in family.growable else "it stays"
        classes = ", ".join([f"`{first}`", *ends])
        lines.append([f"`{model_type}`", exact, _beside(fields, usual), classes])
    public = (ROOT / "tests/families/newest.jsonl").read_text().splitlines()
    plans = sum('"refused":' not in row for row in public)
    said = f"{plans} of the {len(public)} newest configs in the tests plan; others are refused."
    heads = ["`model_type`", "exact hidden sizes", "sizes that grow", "classes"]
    return f"{table(heads, lines)}\n\n{said}"


def _beside(sizes: Collection[str], usual: Collection[str]) -> str:
    """The sizes of a family by how they differ from the usual ones; empty if they do not."""
    less, more = ([x for x in a if x not in b] for a, b in ((usual, sizes), (sizes, usual)))
    named = {"": sizes} if len(less) > len(usual) / 2 else {"not ": less, "also ": more}
    parts = (word + ", ".join(f"`{x}`" for x in some) for word, some in named.items() if some)
    return "; ".join(parts)


def speed(results: Path) -> str:
    """The README's table of what the loss and growth cost."""
    grown = tables.rows_of(results, "grow_checkpoint")
    lines = [*tables.gradient_errors(results), *tables.measured_on_gpus(results)]
    if grown:
        row = max(grown[:3], key=lambda row: row["target GB"])
        what = f"growing a Llama to {row['target GB']:.2f} GB, disk to disk, 2 cores"
        own = f"{row['stream s']:.1f} s, {row['stream peak MB']:.0f} MB beside Python"
        lines.append([what, own, f"`cp` of the same bytes: {row['cp, on disk s']:.1f} s"])
    made = table(["measured", "growkern", "beside it"], lines)
    return with_commits(made, tables.on_gpus(results))


def saved(results: Path) -> str:
    """The README's table of what growth saves; docs/savings.md has the other questions."""
    rows, small = committed(results), NeverGrown(("family", "scratch", "4x64"), Size(4, 32, 2))
    (few,) = savings(rows, GROWN, ("family",), [SMALL])
    (few_alone,) = never_grown(rows, NeverGrown(GROWN, SMALL), ("family",))
    (many,) = savings(rows, ("family", "chained", "4x64"), ("family",), ())
    (many_alone,) = never_grown(rows, small, ("loss",))
    many = re.sub(
        "not reached by (.*)", r"nothing: \1 seeds did not reach the loss from scratch", many
    )
    heads = ["you want", "tokens per parameter", "training FLOPs saved"]
    heads += ["the small one, never grown, to the same loss"]
    lines = [
        ["a family: GPT-2 of 4 x 64 and 4 x 128", "2", few, few_alone],
        ["a family: Qwen3 of 4 x 32 and 4 x 64", "20", many, many_alone],
    ]
    return table(heads, lines)


SMALL, GROWN = Size(4, 64, 4), ("table5", "fpi_padded", "")
Points = Sequence[tuple[float, ...]]


def family_saving(results: Path) -> str:
    """The first sentences of the README that have a number, and what a sceptic would try."""
    rows = committed(results)
    (grown,) = savings(rows, GROWN, ("family",), (SMALL,))
    (alone,) = never_grown(rows, NeverGrown(GROWN, SMALL), ("family",))
    return (
        "Two GPT-2, 4 x 64 and 4 x 128 (layers x width), at 2 tokens per parameter, "
        f"take **{grown} fewer training\nFLOPs** if the large one is grown from the small one "
        "than if both are trained from scratch to the same losses.\nThe small one, trained on to "
        f"the loss of the large one, takes {alone} fewer, but stays small."
    )


def _mean(curves: Sequence[Points]) -> Points:
    """FLOPs, the mean loss of several seeds, and half the range of the losses, point by point."""
    means = []
    for same in zip(*curves, strict=True):
        flops, losses = zip(*same, strict=True)
        spread = (max(losses) - min(losses)) / 2
        means.append((sum(flops) / len(same), sum(losses) / len(same), spread))
    return means


def _curves(rows: Mapping[str, Row]) -> dict[str, Points]:
    """FLOPs, losses and their spread over the seeds, of the small model, of both large ones."""
    line, pairs = runs_beside(rows, GROWN)
    small = [fixed_sizes(line.setting, seed, rows)[SMALL] for seed in pairs]

    def ends(runs: Sequence[Row]) -> Points:
        return [(row["source flops"] + row["flops"][-1], row["losses"][-1]) for row in runs]

    begun = [
        [(own[0]["source flops"], own[0]["losses"][0]), *ends(own)] for own, _ in pairs.values()
    ]
    return {
        "small": _mean(small),
        "scratch": _mean([ends(base) for _, base in pairs.values()]),
        "grown": _mean(begun),
    }


def draw_family(results: Path) -> list[Path]:
    """Draw the README's picture: what two sizes cost together, grown and from scratch."""
    if not (rows := committed(results)):
        return []
    figure = new_figure(4.6)
    axes = figure.add_axes((0.075, 0.13, 0.9, 0.78))
    curves = _curves(rows)
    # both sizes are wanted, so that the small one is paid for in any case
    (paid, begun, _), *_ = curves["grown"]
    curves["scratch"] = [(paid + flops, *loss) for flops, *loss in curves["scratch"]]
    curves["trained on"] = [point for point in curves["small"] if point[0] >= paid]
    curves["small"] = [point for point in curves["small"] if point[0] <= paid]
    for name, color, dashes, width, words, place in (
        ("trained on", GREY, ":", 1.5, "the small model, never grown", (8.4, 3.15)),
        ("small", GREY, "-", 1.5, "the small model", (1.7, 4.12)),
        ("scratch", "black", (0, (4, 2)), 1.5, "the large model, from scratch", (8.5, 3.92)),
        ("grown", COLORS[1], "-", 1.5, "the large model,\ngrown from the small one", (3.2, 3.28)),
    ):
        x, y, spread = zip(*((flops / 1e12, *loss) for flops, *loss in curves[name]), strict=True)
        style = {"color": color, "linestyle": dashes, "linewidth": width, "elinewidth": 2}
        axes.errorbar(x, y, spread, marker="o", markersize=7, capsize=5, **style)
        axes.text(*place, words, color=color, fontsize=READABLE)
    whole, mark, _ = curves["scratch"][-1]
    flops, losses, _ = zip(*curves["grown"], strict=True)
    needed = first_crossing(flops, losses, mark) or whole
    arrow = {"arrowstyle": "<->", "color": COLORS[2], "linewidth": 2.5, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (needed / 1e12, mark), (whole / 1e12, mark), arrowprops=arrow)
    (saved,) = savings(rows, GROWN, ("family",), (SMALL,))
    for words, at, place, color in (
        (f"same loss,\n{saved} fewer FLOPs", ((needed + whole) / 2e12, mark), (11.8, 3.62), 2),
        ("growth keeps the loss", (paid / 1e12, begun), (4.3, 3.74), 1),
    ):
        line = {"arrowstyle": "-", "color": COLORS[color]}
        style = {"color": COLORS[color], "fontsize": READABLE}
        axes.annotate(words, at, place, arrowprops=line, **style)
    axes.set_ylim(3.1, 4.3)
    axes.set_xlim(0, 16.2)
    axes.set_xlabel(
        "training FLOPs of both models, 1e12 (points: ends of runs; bars: three seeds)",
        fontsize=READABLE,
    )
    axes.set_ylabel("validation loss", fontsize=READABLE)
    axes.tick_params(labelsize=READABLE - 2)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    words = "Two sizes of GPT-2 wanted, 2 tokens per parameter: is the large one cheaper grown?"
    axes.set_title(words, fontsize=READABLE, loc="left")
    figure.savefig(results / "readme.png")
    return [results / "readme.png"]


BLOCKS = {
    "saved": saved,
    "speed": speed,
    "demo": demo_table,
    "saving": family_saving,
    "families": families,
    "expand": tables.expand,
    "grow-checkpoint": tables.grow_checkpoint,
    "grow-process": tables.grow_process,
    "carry": tables.carry,
    "drafts": tables.drafts,
    "random-growths": tables.random_growths,
    "outside": tables.outside,
    "gpu": gpu_table,
    "early": tables.early,
    "headline": tables.headline,
    "linear-loss": tables.linear_loss,
    "beside-compile": tables.beside_compile,
    "drift": tables.drift,
    "top-k": tables.top_k,
    "growth-adamw": tables.growth_adamw,
    **{f"savings-{name}": partial(brief_text, name=name) for name in BRIEFS},
}


def with_blocks(text: str, results: Path) -> str:
    """Replace every block between its marks by a new one."""
    for name, block in BLOCKS.items():
        if f"<!-- {name} -->" not in text:
            continue
        marks = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        body = f"{check_savings(name, block(results))}\n"
        text = re.sub(marks, lambda m, body=body: m[1] + body + m[2], text, flags=re.S)
    return text


def main(argv: list[str]) -> int:
    parser = parser_of(__doc__)
    words = "first bring in the results in this directory, which holds <gpu>/<piece>.json"
    parser.add_argument("--take", type=Path, metavar="DIRECTORY", help=words)
    args = parser.parse_args(argv)
    for path in take(args.take) if args.take else ():
        print(f"saved: {path}")
    for page in PAGES:
        page.write_text(with_blocks(page.read_text(), RESULTS))
    (RESULTS / "aot.md").write_text(aot_table(RESULTS))
    made = [*PAGES, RESULTS / "aot.md", *draw_demo(RESULTS)]
    made += write_page(RESULTS) + draw_family(RESULTS)
    for folder in gpus(RESULTS):
        made += draw_early(folder)
        for aside in sorted(folder.glob("*.aside.json")):
            document = read(aside)
            print(f"{aside}: a later run: {document.get('status')} {document.get('failures')}")
    for path in made:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
