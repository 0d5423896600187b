"""The fused losses: labels, and teachers by their logits or their likeliest tokens."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.ops.loss.linear.gemm import project
    from growkern.ops.loss.rows.inputs import check_columns, LossParts
    from growkern.ops.loss.rows.options import (IGNORE_INDEX, InheritedKeywords,
        LossCall, public)
    from growkern.ops.loss.rows.values import (Divergence, KL_OPTIONS, KLRows, LABEL_OPTIONS,
        LIMITS, Tail)
# fmt: on

__getattr__ = opener(__name__, __file__)
