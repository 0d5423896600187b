"""`replay`: a growth carried out again from its lineage file."""

from __future__ import annotations

import warnings
from pathlib import Path

from growkern.growth.grow import carry_out
from growkern.growth.plan.growth_plan import GrowthPlan, GrowthReport
from growkern.growth.plan.pieces import MEMORY_LIMIT
from growkern.growth.record.lineage import (
    contradictions,
    plan_from_lineage,
    read_lineage,
    version_notes,
)
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
) -> GrowthReport:
    """Grow `source_dir` as `lineage` says: out of the same source, the same files to the byte.

    Warns where versions differ from those of the first time, and where this is another source;
    what comes out may then differ.

    Args:
        lineage: the lineage file of a grown checkpoint, or its directory.
        Others: as in `growkern.grow_checkpoint`.

    Raises:
        GrowthError: no lineage, a damaged one, or one that does not fit the source; and as in
            `growkern.grow_checkpoint`.
    """
    record, source_dir = read_lineage(Path(lineage)), Path(source_dir)
    notes = version_notes(record)

    def make_plan() -> GrowthPlan:
        plan = plan_from_lineage(open_source(source_dir, allow_nonfinite=True), record)
        for line in [*notes, *contradictions(record, plan)]:
            warnings.warn(line, stacklevel=4)
        return plan

    return carry_out(
        make_plan,
        record.settings,
        source_dir,
        Path(target_dir),
        overwrite=overwrite,
        memory_limit=memory_limit,
        resume=resume,
        progress=progress,
    )
