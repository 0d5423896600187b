"""How much probability new tokens take, by a bound that holds for every input.

`growkern.growth.tensors.extras` starts a new token's logit at the mean of the old logits, minus
`NEW_TOKEN_MARGIN` where every token has a bias. With n new tokens and V old ones, the loss of any
text then rises by at most

    log(1 + n / V exp(-margin))                                                            (1)

A soft cap c turns a logit z into c tanh(z / c). (1) needs exp(c tanh(z / c)) to be convex. It is
up to z = c artanh(t), t = sqrt(1 + 1 / c^2) - 1 / c.
"""

from __future__ import annotations

import math

from growkern.families.model import ModelSpec

# exp(-10) = 4.5e-5. The token's row still gets its full gradient, and the bias is small enough for
# training to make up for it
NEW_TOKEN_MARGIN = 10.0
# in 16 bits the mean row is rounded, which moves its logit by less than log(2) unless old logits
# are in the hundreds
ROUNDING = 2.0
# logits of trained models stay below this, before a soft cap
LARGEST_LOGIT = 40.0


def predicts_tokens(model: ModelSpec) -> bool:
    """True if the model has a head over the vocabulary."""
    return any(
        "vocab" in t.axes and any(axis.startswith("read:") for axis in t.axes)
        for t in model.tensors
    )


def most_cost(small: ModelSpec, large: ModelSpec, itemsize: int) -> float:
    """(1): the largest rise of the loss by the new tokens of `large`, nats.

    Args:
        itemsize: bytes of a weight of the target.
    """
    old, new = small.size("vocab"), large.size("vocab")
    has_bias = any(t.axes == ("vocab",) for t in large.tensors)
    mass = (new - old) / old * math.exp(-NEW_TOKEN_MARGIN if has_bias else 0.0)
    return math.log1p(mass * (ROUNDING if itemsize == 2 else 1.0))


def largest_capped(small: ModelSpec) -> float:
    """The logit up to which (1) holds under the model's soft cap; infinity without one."""
    field = small.family.softcap
    cap = None if field is None else getattr(small.config, field, None)
    if not cap:
        return math.inf
    return float(cap * math.atanh(math.sqrt(1 + 1 / cap**2) - 1 / cap))
