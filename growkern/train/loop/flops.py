"""Counts the FLOPs of a run by its real tokens, so that no padding is counted.

The padding of a batch depends on the rows that one process gets. The FLOPs of the real tokens are
the same on any number of processes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from growkern.train.loop.meter import Meter
from growkern.train.loss.rows import DECODER_MASK, ROW_COUNTS, TAUGHT_BY, examples_of
from growkern.train.model.flops import Sizes
from growkern.train.model.head import IGNORE_INDEX
from growkern.train.model.sub_model import Part


class FlopCounter:
    """Adds up batches, and counts their FLOPs when these are asked for.

    The sizes stay on the device of the batch until then: the CPU must not wait for them.

    Args:
        teachers: the costs of the teachers that run.
        tokens: the key of a batch's tokens.
        decoder: whether the labels belong to a decoder beside an encoder.
    """

    def __init__(
        self,
        cost: Any,
        teachers: Sequence[Any] = (),
        tokens: str = "input_ids",
        *,
        decoder: bool = False,
    ) -> None:
        self.cost, self.teachers, self.tokens, self.decoder = cost, teachers, tokens, decoder
        self._waiting: list[tuple[Callable[[Sizes], float], Tensor, int | None]] = []
        self._of_rows: Tensor | float = 0.0

    def add(
        self, inputs: Mapping[str, Any], part: Part | None, meter: Meter, *, taught: bool
    ) -> None:
        """Add a batch that was trained on, unless it only filled up.

        Args:
            part: that trained.
            meter: gets the number of tokens.
            taught: whether the teachers ran.
        """
        counts = inputs.get(ROW_COUNTS)
        if counts is not None and counts.is_filler:
            return
        cost, teachers = self.cost, self.teachers if taught else ()
        apart = TAUGHT_BY in inputs

        def flops(sizes: Sizes) -> float:
            every = () if apart else teachers
            return cost.train_of(sizes, part) + sum(one.forward_of(sizes) for one in every)

        meter.add_tokens(inputs[self.tokens].numel())
        pairs = None if counts is None else counts.pairs
        self._waiting.append((flops, self._sizes(inputs), pairs))
        for number, teacher in enumerate(teachers if apart else ()):
            sizes = self._sizes(examples_of(inputs, number))
            self._waiting.append((teacher.forward_of, sizes, None))

    def _sizes(self, inputs: Mapping[str, Any]) -> Tensor:
        return real_sizes(inputs, self.tokens, decoder=self.decoder)

    def add_rows(self, rows_B: Tensor, by: Sequence[int] | None, *, taught: bool) -> None:
        """Add rows that reached the output projection.

        Args:
            rows_B: their number in each example, (B,).
            by: the number of the teacher of each example; None: all teach it.
            taught: as in `add`.
        """
        self._of_rows += rows_B.sum() * self.cost.head_row(train=True)
        for number, teacher in enumerate(self.teachers if taught else ()):
            own = slice(None) if by is None else [i for i, one in enumerate(by) if one == number]
            self._of_rows += rows_B[own].sum() * teacher.head_row(train=False)

    def drain(self) -> float:
        """The FLOPs since the last call."""
        total, self._of_rows = float(self._of_rows), 0.0
        if not self._waiting:
            return total
        device = self._waiting[0][1].device
        rows = torch.stack([sizes.to(device) for _, sizes, _ in self._waiting]).tolist()
        total += sum(
            flops(Sizes(*row)._replace(apart=apart))
            for (flops, _, apart), row in zip(self._waiting, rows, strict=True)
        )
        self._waiting.clear()
        return total


def real_sizes(batch: Mapping[str, Any], name: str, *, decoder: bool) -> Tensor:
    """The sizes of a batch without its padding: all of `Sizes` but the last, (6,) int64.

    Args:
        batch: a row without a mask counts whole. A decoder's row without a mask ends with its last
            label.
        name: key of the tokens.
        decoder: whether the labels belong to a decoder beside an encoder.
    """
    tokens_BS = batch[name]
    if not decoder and "attention_mask" not in batch:
        rows, length = tokens_BS.shape[:2]
        squares = rows * length**2
        return torch.tensor([rows, rows * length, rows * length, squares, squares, squares])
    lengths_B = others_B = _lengths(batch.get("attention_mask"), torch.ones_like(tokens_BS))
    if decoder:
        others_B = _lengths(batch.get(DECODER_MASK), batch["labels"] != IGNORE_INDEX)
    return torch.stack(
        [
            torch.tensor(len(tokens_BS), device=tokens_BS.device),
            lengths_B.sum(),
            others_B.sum(),
            lengths_B.square().sum(),
            others_B.square().sum(),
            (lengths_B * others_B).sum(),
        ]
    )


def _lengths(mask_BS: Any, marked_BS: Tensor) -> Tensor:
    """The real tokens of each row by its mask. Without a mask a row ends with its last mark."""
    if isinstance(mask_BS, Tensor) and mask_BS.shape == marked_BS.shape:
        return mask_BS.ne(0).sum(1)
    ends_S = torch.arange(1, marked_BS.shape[1] + 1, device=marked_BS.device)
    return (marked_BS.ne(0) * ends_S).amax(1)
