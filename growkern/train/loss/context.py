"""The context of a row: its document, and the tokens there that teachers lack.

A student whose vocabulary grew reads tokens that its teachers do not know. They are the last ids.

Shape letters used in this file: B examples, S positions.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def document_starts(batch: Mapping[str, Any]) -> Tensor | None:
    """Where the sequences of a packed batch start, (B, S) bool. None if it is not packed."""
    positions_BS = batch.get("position_ids")
    if positions_BS is None or positions_BS.ndim != 2 or batch.get("attention_mask") is not None:
        return None
    starts_BS = torch.ones_like(positions_BS, dtype=torch.bool)
    starts_BS[:, 1:] = positions_BS[:, 1:] != positions_BS[:, :-1] + 1
    return starts_BS


def taught_rows(
    batch: Mapping[str, Any],
    labels_BS: Tensor,
    known: int,
    *,
    causal: bool,
    decoder: bool = False,
) -> Tensor:
    """The rows whose label and context are tokens that the teachers know, (B, S) bool.

    The context is all of the document, and of a causal row only what it has seen.

    Args:
        batch: with the inputs.
        labels_BS: aligned.
        known: ids from here on are new to the teachers.
        causal: whether the model predicts the next token.
        decoder: whether the labels belong to a decoder beside an encoder.
    """
    new_label_BS, ids_BS = labels_BS >= known, batch.get("input_ids")
    if ids_BS is None:
        return ~new_label_BS
    new_BS, mask_BS = ids_BS >= known, batch.get("attention_mask")
    if mask_BS is not None and mask_BS.shape == new_BS.shape:
        new_BS = new_BS & mask_BS.bool()
    if decoder:
        # its inputs are its labels, one place later
        own_BS = batch.get("decoder_input_ids")
        read_BS = new_label_BS if own_BS is None else own_BS >= known
        seen_BS = (read_BS.cumsum(1) > 0) | new_BS.any(1, keepdim=True)
        return ~(new_label_BS | seen_BS)
    starts_BS = document_starts(batch)
    if starts_BS is None:
        starts_BS = torch.zeros_like(new_BS)
    upto_BS = new_BS.cumsum(1)
    if causal:
        before_BS = torch.where(starts_BS, upto_BS - new_BS.long(), 0).cummax(1).values
        return ~(new_label_BS | (upto_BS > before_BS))
    document_BS = starts_BS.cumsum(1)
    counts_BS = torch.zeros(
        len(new_BS), new_BS.shape[1] + 1, dtype=torch.long, device=new_BS.device
    )
    counts_BS = counts_BS.scatter_add_(1, document_BS, new_BS.long())
    return ~(new_label_BS | (counts_BS.gather(1, document_BS) > 0))


def as_known(inputs: dict[str, Any], known: int | None) -> dict[str, Any]:
    """The inputs of a teacher, with token 0 for those that it lacks. Their rows are not used.

    Args:
        inputs: of the student.
        known: as in `taught_rows`; None: the teacher knows all tokens.
    """
    if known is None:
        return inputs
    names = {"input_ids", "decoder_input_ids"} & inputs.keys()
    return inputs | {name: inputs[name].masked_fill(inputs[name] >= known, 0) for name in names}
