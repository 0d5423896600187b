"""The objectives of a run: the batches that text becomes, and the models of ELECTRA as one."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.train.objectives.language_modeling import (CausalLMCollator, check_probability,
        choose, Collator, EpochCollator, evaluation_collator, IndexedDataset, MaskedLMCollator,
        OuterCollator, PASS, SOURCE)
    from growkern.train.objectives.spans import DenoisingCollator, SpanCorruptionCollator
# fmt: on

__getattr__ = opener(__name__, __file__)
