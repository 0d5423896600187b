"""Drafts the family table of a model from its class in transformers, and proves it by growing it.

Shapes are probed on the meta device, one config field after another (`probe`). Roles
follow from the values in a tiny float64 model (`walk`). What is left, such as which entries of a
head turn together, is searched (`family`). The check of `growkern.growth.own_table` has the last
word: without it a draft is never called verified.
"""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.growth.draft.family import draft_family
# fmt: on

__getattr__ = opener(__name__, __file__)
