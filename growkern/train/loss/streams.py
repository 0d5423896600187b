"""Data sets that are read from start to end, without an index: streams.

The loader of several processes either sends batches from the first process to the others, or lets
each process read all examples and keep its own. The first is accelerate's default for streams.
A `TokenStream` does neither: its processes read their own parts of it.
"""

import math
import sys
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from growkern.errors import GrowthError
from growkern.train.dataset.stream import TokenStream


def are_sent(dataset: Any, accelerator: Any) -> bool:
    """Whether the first process reads the data set and sends the batches to the others.

    Args:
        dataset: of a trainer.
        accelerator: of the trainer.
    """
    if accelerator.num_processes == 1 or isinstance(dataset, TokenStream):
        return False
    chosen = accelerator.dispatch_batches
    return isinstance(dataset, IterableDataset) if chosen is None else bool(chosen)


def check_stream(dataset: Any, accelerator: Any) -> None:
    """Refuse a stream whose last examples would count more than once.

    Args:
        dataset: of a trainer.
        accelerator: of the trainer.

    Raises:
        GrowthError: each process reads the stream, and accelerate fills up its end with examples
            from its start.
    """
    is_shared = isinstance(dataset, IterableDataset) and not isinstance(dataset, TokenStream)
    if is_shared and accelerator.num_processes > 1 and not are_sent(dataset, accelerator):
        raise GrowthError(
            "dispatch_batches=False repeats examples at the end of a data set without an index: "
            "leave it unset, and pad all batches to one length"
        )


def examples_in_last_sent(loader: Any, rank: int, batch_size: int) -> int:
    """How many examples of the last batch that was sent are not repetitions.

    Args:
        loader: of accelerate, which sends batches. It knows how many examples were left.
        rank: of this process.
        batch_size: examples in the batch of each process.
    """
    return min(max(loader.remainder - rank * batch_size, 0), batch_size)


def is_without_length(epochs: int) -> bool:
    """Whether Trainer does not know how long an epoch is, by the epochs that it plans."""
    return epochs == sys.maxsize


def place_in_stream(checkpoint: str | Path, args: TrainingArguments) -> tuple[int, int]:
    """Where a run was in a data set without a length.

    Trainer counts such an epoch as `max_steps` long. `epoch` of a checkpoint is the number of
    complete passes through the data, plus the batches since then over those of `max_steps` steps.

    Args:
        checkpoint: directory.
        args: of the trainer.

    Returns:
        The complete passes, and the batches of the next pass that were trained on.
    """
    state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    part, passes = math.modf(state.epoch or 0.0)
    batches = round(part * state.max_steps * args.gradient_accumulation_steps)
    return int(passes), 0 if args.ignore_data_skip else batches
