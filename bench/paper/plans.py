"""Which systems in which settings each table compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.paper import lines
from bench.paper.jobs import RATE_SEED, Job
from bench.paper.lines import Line
from bench.paper.settings import SETTINGS, Setting
from bench.paper.systems import SYSTEMS, job_of

# The lengths of runs, as shares of the setting's steps. A run that is stopped early ends at a high
# learning rate. So each length is a run of its own, whose rate falls to 0.
PARTS = (1 / 4, 1 / 2, 1.0)


@dataclass(frozen=True)
class Table:
    """A table of a paper, or of ours.

    Attributes:
        lines: (setting) -> its lines.
        baseline: system of the lines that others are compared with. Each is compared with the last
            one before it.
        classifies: whether the final models are fine-tuned and classify text.
    """

    title: str
    family: str
    lines: Callable[[Setting], list[Line]]
    baseline: str = "scratch"
    classifies: bool = False


TABLES = {
    "table2": Table(
        "bert2BERT, Table 2: BERT", "bert", lines.systems(*lines.COMPARED), classifies=True
    ),
    "table3": Table("bert2BERT, Table 3: smaller sources", "bert", lines.smaller_sources),
    "narrow": Table("Why narrow sources save less", "bert", lines.narrow_sources),
    "ages": Table("StackBERT, and sources of three ages", "bert", lines.ages),
    "table4": Table("bert2BERT, Table 4: the length of stage 1", "bert", lines.stages),
    "progressive": Table("Fewer layers first", "bert", lines.progressive),
    "table5": Table("bert2BERT, Table 5: GPT-2", "gpt2", lines.systems(*lines.COMPARED)),
    "layers": Table("More and narrower layers", "gpt2", lines.more_layers),
    "stages": Table("Stage 1 as a run before: GPT-2", "gpt2", lines.stage_before),
    "table6": Table(
        "bert2BERT, Table 6: T5",
        "t5",
        lines.systems("scratch", "direct_copy", "fpi", "aki", "fpi_padded"),
    ),
    "inheritance": Table("Knowledge Inheritance: taught, and alone", "gpt2", lines.inheritance),
    "domain": Table(
        "Knowledge Inheritance: from Python to C++", "gpt2", lines.domain, baseline="adapted"
    ),
    "symmetry": Table(
        "How copies are told apart: GPT-2",
        "gpt2",
        lambda setting: [
            *lines.systems("scratch", "fpi_none", "fpi_noise", "fpi_split")(setting),
            Line(setting, "fpi", "routing"),
            # copies against none, and rows of the next layer with both
            *lines.systems("aki", "fpi_padded", "aki_padded")(setting),
        ],
    ),
    "copies": Table(
        "How copies are told apart: BERT",
        "bert",
        lines.systems("scratch", "fpi_none", "fpi", "aki"),
    ),
    "rates": Table("A higher rate than short runs chose: BERT", "bert", lines.rates),
    "rates_gpt": Table("From scratch at other rates: GPT-2", "gpt2", lines.rates_of_scratch),
    "rates_t5": Table("A higher rate than short runs chose: T5", "t5", lines.rates),
    "optimizer": Table("The optimizer of a grown model", "gpt2", lines.optimizers),
    "muon": Table(
        "Muon after growth, beside Muon from scratch",
        "gpt2",
        lines.systems("scratch_muon", "padded_muon", "noise_muon"),
        baseline="scratch_muon",
    ),
    "depth": Table("Where new layers come from", "gpt2", lines.depth),
    "directions": Table("Width, depth or both", "gpt2", lines.directions),
    "moment": Table("When to grow", "gpt2", lines.moment),
    "one_run_search": Table("One run that starts small: a search", "qwen3", lines.one_run_search),
    "one_run": Table("One run that starts small", "qwen3", lines.one_run),
    "upcycling": Table("From dense to experts", "qwen3", lines.upcycling, baseline="continued"),
}


def jobs_of_rates(line: Line) -> list[Job]:
    """The runs that choose the learning rate of a line."""
    line = line.like or line
    setting, steps = line.setting, line.setting.rate_steps
    if not SYSTEMS[line.system].grows:
        steps = setting.untrained_rate_steps or steps
    return [job_of(setting, line.system, RATE_SEED, rate, steps) for rate in setting.rates]


def jobs_of_seed(line: Line, seed: int, rate: float) -> list[Job]:
    """The runs of a line with one seed, the shortest first."""
    setting = line.setting
    steps = sorted(max(1, round(part * setting.steps)) for part in (*line.parts, *PARTS))
    return [job_of(setting, line.system, seed, rate, length) for length in steps]


def lines_of(name: str, size: str) -> list[Line] | None:
    """The lines of a table at a size; None if it has no such size."""
    setting = SETTINGS.get((size, TABLES[name].family))
    return None if setting is None else TABLES[name].lines(setting)
