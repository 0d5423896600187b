"""Teachers with a source of examples each (Knowledge Inheritance, Qin et al. 2022, Table 3).

A row has the KL divergence from the teacher of its source alone. A teacher runs on its own examples
only. All rows have the divisors that they would have with one teacher, so the losses of the sources
add up to the loss of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops.loss.rows.inputs import LossParts
from growkern.train.distributed.shard import is_sharded
from growkern.train.loss.context import as_known
from growkern.train.loss.inheritance import Teachers, loss_beside
from growkern.train.loss.rows import TAUGHT_BY, check_keys, examples_of
from growkern.train.model.head import IGNORE_INDEX, teacher_inputs
from growkern.train.objectives.language_modeling import (
    SOURCE,
    Collator,
    EpochCollator,
    evaluation_collator,
)

# the loss of some examples, and where they are in the batch
Share = tuple[list[int], Callable[..., Any]]


class TeachersOfSources(Teachers):
    """Frozen models, one for the examples of each source.

    Args:
        models: by the name of their source.

    Raises:
        GrowthError: a model cannot be a teacher, or the models do not fit together.
    """

    def __init__(self, models: Mapping[str, Any]) -> None:
        super().__init__(list(models.values()), None)
        self.names = tuple(models)

    def loss_function(self, inputs: dict[str, Any], alpha: float) -> Callable[..., Any]:
        """The loss for a batch, after running each teacher on its examples.

        Args:
            inputs: of the models, without labels. The numbers of the teachers are removed.
            alpha: share of the KL term; at 0 no teacher runs.

        Raises:
            GrowthError: the batch does not name the teachers of its examples.
        """
        if alpha > 0:
            check_keys(inputs, TAUGHT_BY)
        by = inputs.get(TAUGHT_BY) or ()
        shares: list[Share] = []
        for number, model in enumerate(self.models if alpha > 0 else ()):
            examples = [i for i, one in enumerate(by) if one == number]
            # all processes have to run a sharded teacher, also one without examples
            if not examples and not is_sharded(model):
                continue
            own = examples_of(inputs, number) if examples else dict(inputs)
            del own[TAUGHT_BY]
            prediction = teacher_inputs(model, as_known(own, self.known))
            if examples:
                shares.append((examples, loss_beside([prediction], softcap=self.softcap)))
        inputs.pop(TAUGHT_BY, None)
        return partial(_sum, shares) if alpha > 0 else loss_beside([])


def _sum(
    shares: Sequence[Share], hidden_BSH: Tensor, weight_VH: Tensor, **options: Any
) -> tuple[Tensor, LossParts]:
    """The loss of a batch from those of its shares, and the means of its parts."""
    labelled_BS = options["labels"] != IGNORE_INDEX
    kl_rows, weights_BS = options["kl_rows"], options["row_weights"]
    kl_BS = kl_rows if isinstance(kl_rows, Tensor) else labelled_BS
    counts = [mask_BS.sum().clamp(min=1) for mask_BS in (labelled_BS, kl_BS)]
    options = {"num_items": tuple(counts)} | options
    if weights_BS is not None:
        # the parts leave these rows out
        labelled_BS, kl_BS = (mask & (weights_BS != 0) for mask in (labelled_BS, kl_BS))
    of_rows = {"labels", "kl_rows", "row_weights"}
    total: Any = 0.0
    parts, sizes = [], []
    for examples, loss_of in shares:
        own = {
            name: x[examples] if name in of_rows and isinstance(x, Tensor) else x
            for name, x in options.items()
        }
        loss, part = loss_of(hidden_BSH[examples], weight_VH, **own)
        total = total + loss
        parts.append(torch.stack([part.mlm, part.kl, part.top1_agreement, part.entropy]))
        mlm, kl = labelled_BS[examples], kl_BS[examples]
        sizes.append(torch.stack([x.sum() for x in (mlm, kl, kl, mlm | kl)]))
    sizes_P4 = torch.stack(sizes).to(parts[0].dtype)
    means_4 = (torch.stack(parts) * sizes_P4).sum(0) / sizes_P4.sum(0).clamp(min=1)
    return total, LossParts(*means_4.unbind())


class SourceCollator:
    """Adds the number of each example's teacher to the batches of another collator.

    Args:
        collator: makes the batches, of one row per example. It does not see the sources.
        names: of the sources, in the order of their teachers; empty for evaluation.
    """

    def __init__(self, collator: Collator, names: Sequence[str]) -> None:
        self.inner, self.numbers = collator, {name: i for i, name in enumerate(names)}

    def set_epoch(self, epoch: int) -> None:
        """Switch to an epoch, counted from 0."""
        if isinstance(self.inner, EpochCollator):
            self.inner.set_epoch(epoch)

    def frozen(self) -> Collator:
        """The variant for evaluation, which has no teacher."""
        return SourceCollator(evaluation_collator(self.inner), ())

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch = self.inner(
            [{name: x for name, x in feature.items() if name != SOURCE} for feature in features]
        )
        if not self.numbers:
            return batch
        found: list[Any] = [feature.get(SOURCE) for feature in features]
        strange = [name for name in found if name not in self.numbers]
        if strange:
            raise GrowthError(
                f"an example has the {SOURCE!r} {strange[0]!r}, which no teacher has: give each "
                f"example one of {', '.join(map(repr, self.numbers))}, the keys of teacher"
            )
        if len(batch["labels"]) != len(features):
            raise GrowthError(
                f"{len(features)} examples make a batch of {len(batch['labels'])} rows: teachers "
                "of one source each need one row per example, so leave out packing by the collator"
            )
        return batch | {TAUGHT_BY: [self.numbers[name] for name in found]}
