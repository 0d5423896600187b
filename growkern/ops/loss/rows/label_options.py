"""The options of the label's term: their names, defaults, meanings and limits, for all losses.

`growkern.LossOptions` and section [loss] of a run file have the fields of `LabelOptions`, and
`growkern.inherited_loss` has them as arguments. A new option is added here, as a field, as a key of
`LabelArguments` and as a rule; to `Maths` in `state.py`; and to the losses beside this folder.
"""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, TypeVar

from growkern.errors import GrowthError

F = TypeVar("F", bound=Callable[..., Any])


class Rule(NamedTuple):
    """The values that an option may have."""

    inside: Callable[[float], bool]
    must: str  # the same in words


# written so that NaN fails
RULES = {
    "label_smoothing": Rule(lambda x: 0 <= x < 1, "lie in [0, 1)"),
    "z_loss": Rule(lambda x: 0 <= x < math.inf, "be 0 or more"),
}


class LabelArguments(TypedDict, total=False):
    """The fields of `LabelOptions` as keywords, for type checkers and editors."""

    label_smoothing: float
    z_loss: float


@dataclass(frozen=True)
class LabelOptions:
    """How the term of a label is computed, (9) of `kl_mlm_loss.py`.

    Args:
        label_smoothing: share of the label that is spread over the whole vocabulary, in [0, 1).
        z_loss: factor of the squared log of the softmax's denominator.

    Raises:
        GrowthError: a value is out of range.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            value = getattr(self, name)
            if not rule.inside(value):
                raise GrowthError(f"{name} is {value}: it must {rule.must}")


def check_names(options: Mapping[str, Any], function: str) -> None:
    """Raise the TypeError of Python if a function got other keywords than the options here."""
    for name in options:
        if name not in RULES:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def show_label_options(function: F) -> F:
    """Show every option in the signature and docstring of a function with `**label_options`.

    The line of the docstring about `label_options` is replaced by one for each option.
    """
    signature = inspect.signature(function)
    own = list(signature.parameters.values())[:-1]
    options = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default,
                          annotation=field.type)
        for field in dataclasses.fields(LabelOptions)
    ]  # fmt: skip
    function.__dict__["__signature__"] = signature.replace(parameters=[*own, *options])
    if function.__doc__ and LabelOptions.__doc__:  # python -OO has none
        lines = LabelOptions.__doc__.partition("Args:\n")[2].partition("\n\n")[0]
        function.__doc__ = re.sub(r" *label_options: .*", lambda _: lines, function.__doc__)
    return function
