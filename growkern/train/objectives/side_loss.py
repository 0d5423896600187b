"""A loss beside that of the labels: next-sentence prediction and replaced-token detection."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class SideParts(NamedTuple):
    """Sums over the items of each example, such as its tokens. (B,) each."""

    losses_B: Tensor  # float
    correct_B: Tensor  # items that were predicted correctly
    items_B: Tensor


class SideLoss(Protocol):
    """A loss that is added to that of the labels: weight * sum of losses / number of items.

    Attributes:
        name: in log lines.
        weight: of the mean over all items.
        keys: keys of the batches that it needs.
        about: for the header of a run: how the two losses are computed.
    """

    name: str
    weight: float
    keys: tuple[str, ...]
    about: str

    def count(self, batch: dict[str, Any]) -> Tensor:
        """The number of items of a batch, 0-d."""

    def take(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The targets. Keys that the model does not take are removed from the inputs."""

    def losses(self, outputs: Any, targets: dict[str, Tensor]) -> SideParts:
        """The losses of a batch.

        Args:
            outputs: of the model.
            targets: from `take`.
        """
