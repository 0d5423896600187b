"""A step of AdamW with factors for every row and column."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.ops.adamw.factors import Factors, StatePart, UpdateRule
    from growkern.ops.adamw.step import adamw_step
# fmt: on

__getattr__ = opener(__name__, __file__)
