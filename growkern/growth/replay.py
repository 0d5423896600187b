"""`growkern.replay`: repeats a growth from its lineage file."""

from __future__ import annotations

import warnings
from pathlib import Path

from growkern.arguments import path_of
from growkern.growth.grow import carry_out
from growkern.growth.plan.growth_plan import GrowthPlan, GrowthReport
from growkern.growth.plan.pieces import MEMORY_LIMIT
from growkern.growth.record.compare import contradictions, version_notes
from growkern.growth.record.lineage import RECORD
from growkern.growth.record.recorded import plan_from_lineage, read_lineage
from growkern.growth.source.hub import located
from growkern.growth.source.source import open_source


def replay(
    lineage: str | Path,
    source_dir: str | Path,
    target_dir: str | Path,
    *,
    overwrite: bool = False,
    memory_limit: int | str = MEMORY_LIMIT,
    resume: bool = True,
    progress: bool = True,
    revision: str | None = None,
) -> GrowthReport:
    """Repeat a growth: the same source gives the same files, byte for byte.

    It warns if package versions or the source differ from the first time. The result may then
    differ.

    Args:
        lineage: the lineage file of a grown checkpoint, or the checkpoint's directory.
        source_dir: the source checkpoint, or a model on the Hub, `ORGANISATION/NAME`.
        target_dir: directory to create.
        overwrite, memory_limit, resume, progress, revision: as in `growkern.grow_checkpoint`.

    Returns:
        The report of the growth.

    Raises:
        GrowthError: the lineage is missing, damaged or does not fit the source; and as in
            `growkern.grow_checkpoint`.
    """
    record = read_lineage(path_of("lineage", lineage, RECORD))
    source_path, target = path_of("source_dir", source_dir), path_of("target_dir", target_dir)
    notes = version_notes(record)

    def make_plan() -> GrowthPlan:
        place = located(source_path, revision)
        source = open_source(
            place,
            allow_nonfinite=True,
            family=record.family,
            dequantize=record.options.dequantize,
        )
        plan = plan_from_lineage(source, record)
        for line in [*notes, *contradictions(record, plan)]:
            warnings.warn(line, stacklevel=4)
        return plan

    return carry_out(
        make_plan,
        record.settings,
        source_path,
        target,
        overwrite=overwrite,
        memory_limit=memory_limit,
        resume=resume,
        progress=progress,
    )
