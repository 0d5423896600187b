"""The picture of losses: its data, its limits, and names that cover nothing."""

import dataclasses
import functools
import io
import itertools
import json
import math
import re

import numpy as np
import pytest
from rich.console import Console

from growkern.errors import GrowthError
from growkern.plot.curves import (
    MEASURED,
    NOT_KNOWN,
    NOT_REACHED,
    runs_by_name,
    savings_cells,
    savings_table,
)
from growkern.plot.losses import (
    BEYOND,
    NO_SCRATCH,
    NO_VALIDATION,
    ONE_LOSS,
    UNFINISHED,
    draw,
    notes_on,
    plot_runs,
)
from tests.plot.runs import HISTORY, SCRATCH, curve, drawn, texts, write_run

THESE = "these FLOPs"
GROWN = curve("grown", [6.0, 4.5, 3.5])  # reaches 4 at 15
SLOW = curve("slow", [8.0, 7.0])
SMALL = curve("source", [8.0, 5.5], flops=[0.0, 6.0])
# a long early fall, as from random weights, and a grown model that starts near the end of it
FALLING = curve("scratch", [11.0, 7.0, 5.0, 4.0, 3.5, 3.2, 3.1, 3.05, 3.02, 3.0])
NEAR = curve("grown", [3.3, 3.2, 3.1, 3.05, 2.95])


def lines(axes):
    return {line.get_label(): line for line in axes.lines if line.get_gid() == "curve"}


def test_refuses_to_mix_training_and_validation_loss(tmp_path):
    runs = [write_run(tmp_path / "a", HISTORY), write_run(tmp_path / "b", HISTORY[1:2])]
    with pytest.raises(GrowthError, match="validation loss"):
        plot_runs(runs, tmp_path / "plot.png")


@pytest.mark.parametrize("kind", ["png", "svg", "PDF"])
def test_draws_a_picture_in_the_format_of_its_name(tmp_path, kind):
    pytest.importorskip("matplotlib")
    (tmp_path / "new").mkdir()
    out = tmp_path / "new" / f"plot.{kind}"
    plot_runs([write_run(tmp_path / name, HISTORY) for name in "ab"], out)
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "PDF": b"%PDF"}
    assert out.read_bytes().startswith(starts[kind])
    assert list((tmp_path / "new").iterdir()) == [out]
    # a picture is replaced by the next one, and nothing else is
    plot_runs([tmp_path / "a"], out)
    thesis = starts[kind] + b"years of work"
    out.write_bytes(thesis)
    with pytest.raises(GrowthError, match="exists and is not a picture of matplotlib"):
        plot_runs([tmp_path / "a"], out)
    assert out.read_bytes() == thesis


@pytest.mark.parametrize("name", ["plot.bmp2", "plot", "plot.pgf"])
def test_refuses_a_format_before_it_reads_a_run(tmp_path, name):
    pytest.importorskip("matplotlib")
    with pytest.raises(GrowthError, match=r"no format of a picture: .*png.*svg") as error:
        plot_runs([tmp_path / "no run"], tmp_path / name)
    assert "\n" not in str(error.value)
    with pytest.raises(GrowthError, match="no format of a picture"):
        draw([SCRATCH], tmp_path / name)
    assert not any(tmp_path.iterdir())


def test_a_picture_is_at_most_1600_pixels_wide(tmp_path):
    image = pytest.importorskip("PIL.Image")
    draw([SCRATCH, GROWN, SLOW], tmp_path / "plot.png", sources=[SMALL])
    with image.open(tmp_path / "plot.png") as picture:
        assert picture.width <= 1600


def test_curves_are_the_losses_and_start_after_the_small_model(tmp_path, monkeypatch):
    curves = [SCRATCH, GROWN, SLOW]
    figure = drawn(monkeypatch, lambda: draw(curves, tmp_path / "a.png", sources=[SMALL]))
    found = lines(figure.axes[0])
    for one, before in zip(curves, (0.0, 6.0, 6.0), strict=True):
        assert tuple(found[one.name].get_ydata()) == one.losses
        assert tuple(found[one.name].get_xdata()) == tuple(x + before for x in one.flops)
    small, other = found["small model"], found["slow"]
    assert tuple(small.get_xdata()) == SMALL.flops
    # it is seen behind a curve that covers it
    assert small.get_linewidth() > 2 * other.get_linewidth()
    assert small.get_zorder() < other.get_zorder()
    mark = [line for line in figure.axes[0].lines if line.get_gid() == "mark"]
    assert [line.get_ydata()[0] for line in mark] == [4.0]
    assert texts(figure, "mark") == ["mark: final loss of scratch, 4.000"]


def test_says_in_the_picture_what_was_saved(tmp_path, monkeypatch):
    figure = drawn(monkeypatch, lambda: draw([SCRATCH, GROWN, SLOW], tmp_path / "a.png"))
    said = ["scratch: reference", "grown: saved 50% (a given size)", "slow: not reached"]
    assert texts(figure, "cost") == said
    bars = [bar for bar in figure.axes[1].patches if bar.get_gid() == "cost"]
    assert [bar.get_width() for bar in bars] == pytest.approx([30.0, 15.0, 10.0])
    figure = drawn(monkeypatch, lambda: draw([SCRATCH, GROWN], tmp_path / "a.png", sources=[SMALL]))
    # (15 + 6) / (30 + 6), (15 + 6) / 30 and 15 / 30 of the FLOPs
    shares = "42% (a family), 30% (a given size), 50% (the small one exists)"
    assert texts(figure, "cost")[1] == f"grown: saved {shares}"
    bars = [bar for bar in figure.axes[1].patches if bar.get_gid() == "cost"]
    assert [bar.get_x() for bar in bars] == [0.0, 6.0]


def test_a_curve_that_begins_below_the_mark_saves_at_least_that(tmp_path, monkeypatch):
    # of runs of several lengths: the shortest is below the mark already
    short = curve("short", [3.9, 3.5], [12.0, 30.0])
    long = curve("long", [3.9, 3.5], [33.0, 40.0])
    # before any training it costs nothing, and no less
    source = curve("source", [3.9, 3.5], [0.0, 30.0])
    curves = [SCRATCH, short, long, source]
    figure = drawn(monkeypatch, lambda: draw(curves, tmp_path / "a.png"))
    said = ["short: saved ≥ 60%", "long: costs ≤ 1.1 times as much", "source: saved 100%"]
    assert texts(figure, "cost")[1:] == [f"{words} (a given size)" for words in said]


@pytest.fixture
def generations(tmp_path):
    """Two small models, the second grown from the first, a model grown from it, and a scratch."""
    made = {
        1: (10, 8, "", None, [8.0, 5.0]),
        2: (20, 16, "fpi", 8, [5.0, 4.5]),
        3: (40, 32, "aki", 16, [4.5, 3.5]),
        4: (40, 32, "random", 16, [8.0, 6.0, 4.0]),
    }
    for number, (count, size, method, before, losses) in made.items():
        lines = history(losses)
        lines[-1] |= {"parameters": count, **({"kl": 0.1} if number == 3 else {})}
        run = write_run(tmp_path / "run" / f"generation-{number}", lines)
        (run / "config.json").write_text(json.dumps({"hidden_size": size}))
        if method:
            record = {"options": {"method": method}, "sizes": {"hidden_size": [before, size]}}
            (run / "lineage.json").write_text(json.dumps(record))
    return tmp_path / "run"


@pytest.mark.parametrize(
    "numbers, names, before, mark, teacher",
    [
        # whatever the order: 10 FLOPs of each small model are before those of the third
        ((1, 2, 3, 4), "43", 20.0, 4.0, True),
        ((3, 2, 4), "43", 10.0, 4.0, True),
        ((1, 2, 3), "3", 20.0, None, True),
        ((2, 1), "2", 10.0, None, False),
        # of another size than the one from scratch, and no part of it
        ((1, 4), "41", 0.0, 4.0, False),
        ((3, 4), "43", 0.0, 4.0, True),
    ],
)
def test_small_models_and_the_mark(generations, monkeypatch, numbers, names, before, mark, teacher):
    runs = [generations / f"generation-{number}" for number in numbers]
    groups = []
    figure = drawn(monkeypatch, lambda: groups.extend(plot_runs(runs, generations / "a.png")))
    assert [group.name[-1] for group in groups] == list(names)
    assert [group.before for group in groups] == [0.0] * (len(names) - 1) + [before]
    assert (NO_SCRATCH in notes_on(groups)) == (mark is None)
    marks = [line.get_ydata()[0] for line in figure.axes[0].lines if line.get_gid() == "mark"]
    assert marks == ([] if mark is None else [mark])
    assert any("teacher included" in axes.get_xlabel() for axes in figure.axes) == teacher
    said = " ".join(texts(figure, "cost"))
    # what the small models cost is known where they are among the runs
    assert ("saved 75% (the small one exists)" in said) == (names == "43" and not before)
    share = "25% (a given size)" if before < 20 else "costs 1.25 times as much (a given size)"
    assert (share in said) == (names == "43" and before > 0)
    assert ("generation-4, from scratch (40 parameters): reference" in said) == ("4" in names)
    assert ("generation-1, never grown (10" in said) == ("1" in names)


def test_a_small_model_beyond_the_mark_is_named(tmp_path, monkeypatch):
    """In the picture and beside the table, whose numbers then mean nothing."""
    beyond = dataclasses.replace(SMALL, losses=(8.0, 3.9))
    for sources, notes in (([SMALL, beyond], [BEYOND]), ([SMALL], [])):
        groups = draw([SCRATCH, GROWN], tmp_path / "a.png", sources=sources)
        assert notes_on(groups) == notes and notes_on(groups[:1]) == []
    call = functools.partial(draw, [SCRATCH, GROWN], tmp_path / "a.png", sources=[beyond])
    figure, groups = drawn(monkeypatch, call), call()
    assert figure.get_supxlabel() == BEYOND
    assert "saved" not in "".join(texts(figure, "cost"))
    # the small one had 4 after 6 x 4 / 4.1 of 30 FLOPs, which is the answer where any size will do
    assert [cells[3:] for cells in savings_cells(groups)[1:]] == [["-", "-", "80%", "-"], ["-"] * 4]
    below = runs_by_name([SCRATCH, curve("grown", [3.9, 3.5])], [beyond])
    assert savings_cells(below)[2][2] == "6, below the mark at its start"


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_grown_model_alone_starts_after_the_small_one(seeds, tmp_path, monkeypatch):
    """Without a run from scratch, nothing is said of savings, whatever the small model reached."""
    for small in (SMALL, dataclasses.replace(SMALL, losses=(8.0, 0.5))):
        call = functools.partial(draw, [GROWN] * seeds, tmp_path / "a.png", sources=[small])
        (axes,) = drawn(monkeypatch, call).axes
        groups = call()
        found = {line.get_label(): line for line in axes.lines if line.get_gid() == "curve"}
        assert tuple(found["small model"].get_xdata()) == small.flops
        after = [small.flops[-1] + x for x in GROWN.flops]
        assert list(found["grown"].get_xdata()) == pytest.approx(after)
        assert not {text.get_gid() for text in axes.texts} & {"mark", "cost"}
        assert "saved" not in axes.get_title("left") and notes_on(groups) == [NO_SCRATCH]
        assert savings_cells(groups)[0][3:] == ["-"] * 4


def test_the_early_fall_is_in_an_overview_alone(tmp_path, monkeypatch):
    figure = drawn(monkeypatch, lambda: draw([FALLING, NEAR], tmp_path / "a.png"))
    main = figure.axes[0]
    low, high = main.get_ylim()
    assert low < 2.95 and 3.3 < high < 4.0
    # the compared curve fills at least half of the height
    assert (3.3 - 2.95) / (high - low) > 0.5
    (inset,) = main.child_axes
    assert inset.get_ylim()[1] >= 11.0
    assert {tuple(line.get_ydata()) for line in inset.lines} == {FALLING.losses, NEAR.losses}


def seeds(name, *losses):
    return [curve(name, one) for one in losses]


def test_runs_of_one_name_are_a_mean_and_a_band(tmp_path, monkeypatch):
    scratch = seeds("scratch", [8.0, 6.0, 4.0], [9.0, 6.0, 4.4], [7.0, 6.6, 4.2])
    # the second one stops early: the mean ends there
    grown = [*seeds("grown", [5.0, 4.5, 3.9]), curve("grown", [5.2, 4.0])]
    figure = drawn(monkeypatch, lambda: draw([*scratch, *grown], tmp_path / "a.png"))
    found = lines(figure.axes[0])
    assert found["scratch"].get_ydata() == pytest.approx([8.0, 6.2, 4.2])
    assert found["grown"].get_ydata() == pytest.approx([5.1, 4.25])
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    at_start = band[np.isclose(band[:, 0], 0.0), 1]
    assert (at_start.min(), at_start.max()) == (7.0, 9.0)
    assert "band: min to max" in figure.axes[0].get_ylabel()
    said = texts(figure, "cost")
    assert said[0] == "scratch (3 runs): reference"
    # the mark, 4.2, is reached at 15 and at 8 1/3, on average at 11 2/3 of the reference's 20
    assert said[1] == "grown (2 runs): saved 42% (a given size)"


def test_a_reference_whose_seeds_differ_by_some_flops_reaches_its_mark(tmp_path, monkeypatch):
    longer = curve("scratch", [8.0, 6.0, 4.4], [0.0, 10.0, 20.2])
    scratch = [curve("scratch", [8.0, 6.0, 4.0]), longer]
    # the mean ends at 20 FLOPs, where the second run is at 6 - 1.6 x 10 / 10.2
    mark = (4.0 + 6.0 - 16 / 10.2) / 2
    grown = curve("grown", [5.0, 4.5, 3.9])
    figure = drawn(monkeypatch, lambda: draw([*scratch, grown], tmp_path / "a.png"))
    said = texts(figure, "cost")
    assert said[0] == "scratch (2 runs): reference"
    spent = 10 + 10 * (4.5 - mark) / 0.6
    assert said[1] == f"grown: saved {1 - spent / 20:.0%} (a given size)"


def test_the_table_says_what_the_picture_says():
    alone = savings_cells(runs_by_name([SCRATCH], []))
    assert alone == [["scratch", "8.00", "30", "-", "-", "-", "-"]]
    rows = savings_cells(runs_by_name([SCRATCH, GROWN, SLOW], [SMALL]))
    assert rows[1:] == [
        # whether it would have been there before 15 + 6 FLOPs is not known
        ["small model, never grown", "8.00", f"stopped at 20% of {THESE}", *"--", NOT_KNOWN, "-"],
        ["grown", "6.00", "21", "42%", "30%", NOT_KNOWN, "50%"],
        ["slow", "8.00", NOT_REACHED, "-", "-", "-", "-"],
    ]
    # the second seed reaches 3.5, its own mark, at 30 of 30
    scratch = [SCRATCH, curve("scratch", [9.0, 6.0, 5.0, 3.5])]
    grown = [GROWN, curve("grown", [6.5, 5.0, 4.5, 3.5])]
    rows = savings_cells(runs_by_name([*scratch, *grown], [], paired=True))
    assert rows[1] == ["grown", "6.00 to 6.50", "15 to 30", "-", "0% to 50%", "-", "-"]
    # they have one mark, 3.75, if they are no pairs: all of them reach it but the first
    rows = savings_cells(runs_by_name([*scratch, *grown], []))
    assert rows[0][2] == NOT_REACHED and rows[1][4] == "8% to 42%"


@pytest.mark.parametrize(
    "losses, cells",
    [
        # 20 FLOPs to 4: the best size, so that the grown one's 15 + 6 are 5% more
        ([8.0, 5.0, 4.0], ["20", "33%", "costs 1.05x"]),
        # as long as the reference and not there
        ([8.0, 7.0, 6.0, 5.0], [NOT_REACHED, "-", "30%"]),
        ([8.0, 7.0], [f"stopped at 33% of {THESE}", NOT_KNOWN, NOT_KNOWN]),
    ],
)
def test_a_given_loss_is_compared_with_the_best_size_that_is_never_grown(losses, cells):
    """A smaller model that is trained on alone has a line, and no share of another question."""
    sized = [dataclasses.replace(run, parameters=40) for run in (SCRATCH, GROWN)]
    long = dataclasses.replace(curve("long", losses), parameters=10)
    # the one that the grown model began with has this run's size, which answers for it
    source = dataclasses.replace(SMALL, parameters=10)
    groups = runs_by_name([*sized, long], [source])
    _, grown, alone = savings_cells(groups)
    assert [alone[2], alone[5], grown[5]] == cells
    assert alone[3:5] == ["-", "-"] and grown[3:5] == ["42%", "30%"]


def history(losses):
    lines = enumerate(losses)
    return [{"step": i, "flops": 10.0 * i, "eval_loss": loss, "epoch": i} for i, loss in lines]


@pytest.mark.parametrize("order, paired", [("ab", True), ("ba", False)])
def test_seeds_in_the_same_folders_are_compared_in_pairs(order, paired, tmp_path, monkeypatch):
    """Others have one mark, the mean of the references' final losses."""
    losses = {"a": ([8.0, 6.0, 4.0], [5.0, 4.0, 3.0]), "b": ([9.0, 7.0, 5.0], [5.2, 5.0, 4.0])}
    runs = [write_run(tmp_path / seed / "scratch", history(losses[seed][0])) for seed in "ab"]
    runs += [write_run(tmp_path / seed / "grown", history(losses[seed][1])) for seed in order]
    figure = drawn(monkeypatch, lambda: plot_runs(runs, tmp_path / "a.png"))
    # of 20: at 4 and 5 both take 10; at the mean 4.5 they take 5 and 15
    assert texts(figure, "cost")[1] == "grown (2 runs): saved 50% (a given size)"
    ends = [list(x.get_xdata()) for x in figure.axes[1].lines if x.get_marker() == "|"]
    assert ends[-1] == ([10.0, 10.0] if paired else [5.0, 15.0])


def boxes(figure, axes):
    renderer = figure.canvas.get_renderer()
    return [text.get_window_extent(renderer) for text in axes.texts]


def test_names_cover_nothing(tmp_path, monkeypatch):
    figure = drawn(monkeypatch, lambda: draw([FALLING, NEAR], tmp_path / "a.png"))
    main = figure.axes[0]
    for a, b in itertools.combinations(boxes(figure, main), 2):
        assert not a.overlaps(b)
    whole = figure.bbox
    for axes in figure.axes:
        for box in boxes(figure, axes):
            assert whole.x0 <= box.x0 and box.x1 <= whole.x1
    for line in main.lines:
        ends = line.get_transform().transform(np.column_stack(line.get_data()))
        steps = np.linspace(ends[:-1], ends[1:], 50).reshape(-1, 2)
        for box in boxes(figure, main):
            assert not ((steps > box.min) & (steps < box.max)).all(1).any()


def test_a_run_without_validation_gets_a_sentence(tmp_path, monkeypatch):
    training = [line for line in HISTORY if "eval_loss" not in line]
    run = write_run(tmp_path / "run", training)
    groups = []
    figure = drawn(monkeypatch, lambda: groups.extend(plot_runs([run], tmp_path / "a.png")))
    assert notes_on(groups) == [NO_VALIDATION]
    assert figure.get_supxlabel() == NO_VALIDATION
    one = write_run(tmp_path / "one", HISTORY[:1])
    groups = plot_runs([one], tmp_path / "a.png")
    figure = drawn(monkeypatch, lambda: plot_runs([one], tmp_path / "a.png"))
    assert notes_on(groups) == [ONE_LOSS]
    assert figure.get_supxlabel() == ONE_LOSS


def test_what_a_run_tells_is_drawn_in_panels_of_their_own(tmp_path, monkeypatch):
    seen = {"step": 1, "mfu": 0.5, "step_time": 1.0, "data_time_share": 0.05}
    speeds = [{**seen, "flops": 5.0 * n, "maxrss": 3e9 * n} for n in (1, 2)]
    unknown = {"step": 2, "flops": 7.0, "mfu": math.nan, "tokens_per_second": "7"}
    run = write_run(tmp_path / "run", [*HISTORY, *speeds, unknown])
    figure = drawn(monkeypatch, lambda: plot_runs([run], tmp_path / "a.png"))
    label, memory, mfu = figure.axes[1:]
    # a loss need not begin at 0
    assert label.get_title("left") == "label loss" and label.get_ylim()[0] > 6
    assert (memory.get_title("left"), mfu.get_title("left")) == (MEASURED["maxrss"][0], "MFU")
    assert [line.get_xydata().tolist() for line in memory.lines] == [[[5, 3], [10, 6]]]
    assert [line.get_xydata().tolist() for line in mfu.lines] == [[[5, 0.5], [10, 0.5]]]
    assert memory.get_ylim()[0] == 0 and memory.get_xlim() == figure.axes[0].get_xlim()
    assert memory.get_xlabel() == "FLOPs"
    # the memory of imports alone is none of the run's, and waiting counts if it is long
    other = {"maxrss": 3e9, "data_time_share": 0.2}
    run = write_run(tmp_path / "flat", [*HISTORY, *({**x, **other} for x in speeds)])
    figure = drawn(monkeypatch, lambda: plot_runs([run], tmp_path / "a.png"))
    words = ["label loss", MEASURED["data_time_share"][0], "MFU"]
    assert [axes.get_title("left") for axes in figure.axes[1:]] == words


def test_panels_stand_in_rows_that_are_about_equally_full(tmp_path, monkeypatch):
    names = ("kl", "top1_agreement", "grad_norm", "expert_entropy", "expert_largest_share")
    same = {"label_loss": 3.0, "loss": 3.0, **dict.fromkeys(names, 0.5), "expert_equal_share": 0.25}
    lines = [{"step": n, "flops": 5.0 * n, **same} for n in (1, 2)]
    run = write_run(tmp_path / "run", lines)
    figure = drawn(monkeypatch, lambda: plot_runs([run], tmp_path / "a.png"))
    main, *panels = figure.axes
    # the label loss is the curve; the run is named once
    assert [x.get_title("left") for x in panels] == [MEASURED[name][0] for name in names]
    assert main.get_title("left").startswith("run") and "run" not in "".join(texts(figure))
    tops = [round(panel.get_position().y1, 3) for panel in panels]
    assert len({*tops[:3]}) == len({*tops[3:]}) == 1 and tops[0] > tops[3]
    assert [line.get_ydata()[0] for line in panels[-1].lines] == [0.5, 0.25]


@pytest.mark.parametrize("points, marker", [(17, "o"), (40, "")])
def test_all_points_of_a_single_run_are_marked_or_none(points, marker, tmp_path, monkeypatch):
    one = curve("one", [9 - n / 8 for n in range(points)], [*range(points)])
    (line,) = drawn(monkeypatch, lambda: draw([one], tmp_path / "a.png")).axes[0].lines
    assert line.get_marker() == marker and line.get_markevery() == (0, 1 if marker else 5)


def test_a_mark_of_an_unfinished_run_gets_a_sentence(tmp_path):
    """Its last loss is not its final one. Another run may be unfinished: it just ends earlier."""
    whole = write_run(tmp_path / "whole", HISTORY)
    write_run(tmp_path / "part" / "checkpoint-5", HISTORY)
    part, out = tmp_path / "part", tmp_path / "a.png"
    assert notes_on(plot_runs([part, whole], out)) == [UNFINISHED]
    assert notes_on(plot_runs([whole, part], out)) == notes_on(plot_runs([part], out)) == []


def test_names_that_begin_alike_are_told_apart_in_few_columns():
    names = ["aki_two_stage", "aki_two_stage_inheritance"]
    groups = runs_by_name([SCRATCH, *(curve(name, [6.0, 3.0]) for name in names)], [])
    console = Console(file=io.StringIO(), width=50)
    console.print(savings_table(groups))
    # names of generations are longer than their column, and are broken at the comma alone
    fresh = dataclasses.replace(SCRATCH, name="generation-3", method="random")
    wide = Console(file=io.StringIO(), width=80)
    wide.print(savings_table(runs_by_name([fresh, *groups[1].curves], [SMALL])))
    assert re.search(r"│ generation-3, .*\n│ from scratch ", wide.file.getvalue())
    lines = [line.split("│") for line in console.file.getvalue().splitlines() if "│" in line]
    assert "".join(line[1].strip() for line in lines) == "".join(["scratch", *names])
    assert {len("│".join(line)) for line in lines} <= set(range(51))


def test_the_jump_of_a_growth_is_drawn_and_told(tmp_path, monkeypatch):
    losses = [50.0, 3.0, *(2.0 - n / 10 for n in range(18))]
    lines = [{"step": n, "eval_loss": x, "flops": 10.0 * n} for n, x in enumerate(losses)]
    grown = [{"step": 6, "loss": 2.0, "flops": 60.0}, {**lines[6], "eval_loss": 6.5}]
    lines[7:7] = [*grown, {"step": 7, "loss": 2.0, "flops": 70.0, "growth": 1}]
    run = write_run(tmp_path / "run", lines)
    figure = drawn(monkeypatch, lambda: plot_runs([run], tmp_path / "a.png"))
    main = figure.axes[0]
    (said,) = texts(figure, "growth")
    assert said == "grows\nloss 1.600, then 6.500" and 6.5 < main.get_ylim()[1] < 50
    (points,) = (x for x in main.lines if x.get_gid() == "growth" and x.get_marker() == "o")
    assert list(points.get_xdata()) == [60.0] * 2
    assert list(points.get_ydata()) == pytest.approx([1.6, 6.5])


def test_an_unfinished_run_is_named_with_its_step_and_has_no_savings(tmp_path, monkeypatch):
    sizes = {"growth/hidden_size": 96, **{f"growth/n{x}": x for x in range(4)}, "growth/layers": 4}
    grown = {"step": 12, "eval_loss": 5.0, "flops": 120.0, "growth": 1, **sizes}
    for place, lines in (("part/checkpoint-12", [grown]), ("whole", [])):
        (tmp_path / place).mkdir(parents=True)
        text = json.dumps({"log_history": [*HISTORY, *lines]})
        (tmp_path / place / "trainer_state.json").write_text(text)
    asked = {"training": {"steps": 40}, "growth": [{"sizes": {"layers": 4}}]}
    (tmp_path / "part" / "run.json").write_text(json.dumps({"run": asked}))
    runs = [tmp_path / "part", tmp_path / "whole"]
    alone = drawn(monkeypatch, lambda: plot_runs(runs[:1], tmp_path / "a.png"))
    assert alone.axes[0].get_title("left") == "part (unfinished: step 12 of 40)"
    # those that were asked for come first
    said = "layers 4\nhidden_size 96\nn0 0\nand 3 more"
    assert texts(alone, "growth") == [f"grows to\n{said}"]
    # that of growth 0 is at the start, where only a small model's curve can end
    file = tmp_path / "part" / "checkpoint-12" / "trainer_state.json"
    file.write_text(file.read_text().replace('"growth": 1', '"growth": 0'))
    (group,) = plot_runs(runs[:1], tmp_path / "a.png")
    for sources, at in (([], []), ([SMALL], [6.0])):
        call = functools.partial(draw, group.curves, tmp_path / "a.png", sources=sources)
        main = drawn(monkeypatch, call).axes[0]
        assert [x.get_xdata()[0] for x in main.lines if x.get_gid() == "growth"] == at
    assert main.texts[0].get_text() == f"grown to\n{said}"
    both = drawn(monkeypatch, lambda: plot_runs(runs, tmp_path / "a.png"))
    assert texts(both, "cost")[0] == "part (unfinished: step 12 of 40): reference"
    assert "saved" not in "".join(texts(both)) and "more" not in "".join(texts(both))
    assert savings_cells(plot_runs(runs, tmp_path / "a.png"))[1][3:] == ["-"] * 4
    # the other way round the control is finished
    assert savings_cells(plot_runs(runs[::-1], tmp_path / "a.png"))[1][6] == "0%"
