"""Records a growth, and verifies a grown model against its source."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.growth.record.compare import compare_outputs, planned_error
    from growkern.growth.record.lineage import (DTYPES, growth_plan_of, GrowthSettings, identity,
        keep_lineage, lineage_text, misfit, plan_of_source, source_files, unknown_growth,
        write_lineage)
    from growkern.growth.record.save import (card_text, record_when_saved, recorded_card,
        write_card)
    from growkern.growth.record.verdict import measured_level, PLANNED_ERROR
# fmt: on

__getattr__ = opener(__name__, __file__)
