"""Attention of sources, and of the models grown from them, before and after their training.

bert2BERT shows such maps in its Figures 9-12.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import growkern
from bench.paper.jobs import Job
from bench.paper.plans import Line, lines_of
from bench.paper.settings import SIZES, Setting
from bench.paper.systems import job_of, run_of
from growkern import GrowthStep
from growkern.growth.options import GrowthOptions
from growkern.plot.attention import plot_attention

# the tables with a grown model whose maps are drawn
DRAWN = {"table2": "fpi", "table5": "fpi_padded"}
MOMENTS = ("grown", "trained")
WHEN = ("right after growth", "after its training")
HEAD = """## Attention

Heads of the source, and below each the head that was grown from it (bert2BERT, Figures 9-12): first
right after growth, then after training. The copies of a head are equal at first, and differ in the
end.
"""
TEXT = "def read(self, size=-1):\n    return self.file.read(size)\n"


def picture_of(setting: Setting, moment: str) -> str:
    """The file of a setting's maps "grown", before the training, or "trained"."""
    return f"paper-attention-{setting.name}-{moment}.png"


def drawn_lines(size: str) -> list[Line]:
    """The lines whose maps are drawn."""
    lines = [
        (line, system) for name, system in DRAWN.items() for line in lines_of(name, size) or ()
    ]
    return [line for line, system in lines if line.system == system]


def draw_maps(folder: Path, rows: Mapping[str, Any], size: str, out: Path) -> list[Path]:
    """Draw the maps of the first seed, of every setting whose models are in the folder.

    Args:
        folder: of all jobs, with their models.
        rows: of finished jobs by their names.
        size: of the tables.
        out: folder for the pictures.

    Returns:
        The pictures.
    """
    made = []
    for line in drawn_lines(size):
        setting = line.setting
        jobs = (job_of(setting, line.system, 1, rate, setting.steps) for rate in setting.rates)
        found = [job for job in jobs if job.name in rows and _has_models(folder, job)]
        if not found:
            continue
        source, grown = folder / found[0].needs[0].name, folder / f"{found[0].name}-before"
        _grow_again(found[0], folder, grown)
        for moment, model in zip(MOMENTS, (grown, folder / found[0].name), strict=True):
            made.append(out / picture_of(setting, moment))
            plot_attention([source, model], TEXT, made[-1], lineage=grown)
    return made


def maps_text(results: Path) -> str:
    """The part of the page that shows the maps in a folder of results, or nothing."""
    parts = []
    for line in (line for size in SIZES for line in drawn_lines(size)):
        setting = line.setting
        pictures = [picture_of(setting, moment) for moment in MOMENTS]
        if all((results / picture).is_file() for picture in pictures):
            names = (f"{setting.name}, {moment}" for moment in WHEN)
            links = zip(names, pictures, strict=True)
            parts += [text for name, file in links for text in (f"![{name}]({file})", "")]
    return "\n".join([HEAD, *parts]) if parts else ""


def _has_models(folder: Path, job: Job) -> bool:
    return all((folder / one.name / "model.safetensors").is_file() for one in (job, *job.needs))


def _grow_again(job: Job, folder: Path, target: Path) -> None:
    """Write the model with which a job began."""
    step = run_of(job).growth
    assert isinstance(step, GrowthStep)
    options = {one.name: getattr(step, one.name) for one in fields(GrowthOptions)}
    how: dict[str, Any] = {**step.sizes, **options}
    source = folder / job.needs[0].name
    growkern.grow_checkpoint(source, target, overwrite=True, progress=False, **how)
