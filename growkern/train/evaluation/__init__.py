"""Evaluation of models: loss on text."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.train.evaluation.evaluate import read_arguments
# fmt: on

__getattr__ = opener(__name__, __file__)
