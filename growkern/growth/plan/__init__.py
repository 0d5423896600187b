"""Plans a growth: the target, its tensors, and how exact they are."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.growth.plan.advice import refuse_idle_options, token_ids, uses
    from growkern.growth.plan.axes import axis_maps, AxisMap, old_entries
    from growkern.growth.plan.blueprint import Blueprint, Task
    from growkern.growth.plan.bounds import (add_errors, has_errors, predicts_tokens,
        source_coordinates)
    from growkern.growth.plan.exactness import Finding, NEW_TOKENS, OUTPUT_ERROR, WEIGHT_ROUNDINGS
    from growkern.growth.plan.growth_plan import (as_mixture, check_plan, GrowthPlan, GrowthReport,
        plan, plan_growth, PlanOfModel, with_source, with_stream)
    from growkern.growth.plan.pieces import (FIXED_BYTES, MEMORY_LIMIT, Piece, pieces_of,
        usable_cores, workers_within)
    from growkern.growth.plan.table import as_text
    from growkern.growth.plan.target import BY_LAYER, followed_fields, PLAIN_ROTARY
    from growkern.growth.plan.tensors.tensor import (build_each, build_tensor, kind_of, part_reader)
# fmt: on

__getattr__ = opener(__name__, __file__)
