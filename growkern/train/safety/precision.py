"""The dtype of the weights in training, and the dtype of the arithmetic."""

from __future__ import annotations

import os
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from growkern.errors import GrowthError, GrowthWarning, nearest
from growkern.train.distributed.shard import is_sharded
from growkern.train.safety.checkpoints import behind_link

PRECISIONS = ("fp32", "bf16", "pure-bf16")
# set by `accelerate launch`; accelerate follows it where the arguments say nothing
SWITCH = "ACCELERATE_MIXED_PRECISION"
HALF = (torch.bfloat16, torch.float16)


def set_arguments(args: TrainingArguments, *, in_parts: bool) -> None:
    """Set the arguments that a run needs, whatever they were.

    Args:
        args: of the trainer; changed.
        in_parts: whether there are steps in which a part of the model trains.
    """
    if in_parts:
        # layers outside the sub-model get no gradient; accelerate may wrap one process too
        args.ddp_find_unused_parameters = True
    args.output_dir = str(behind_link(Path(str(args.output_dir))))
    # the filter replaces NaN by an average, in the log alone
    args.logging_nan_inf_filter = False
    if args.data_seed is None:
        # accelerate would take the seed that PyTorch has when training begins, and each process
        # and each resumed run may have another one
        args.data_seed = args.seed


def set_precision(model: Any, args: TrainingArguments, precision: str | None) -> str:
    """Give a model the weights that its training needs, and set the autocast of the arguments.

    Weights in half precision become float32 here, in place. Other weights stay as they are.

    The cause: bfloat16 has 8 significant bits, so a step below 1/512 of a weight is lost. The
    weights of norms are about 1 and would never change.

    Args:
        model: the model in training.
        args: of the trainer; changed if `precision` asks for autocast.
        precision: "fp32"; "bf16", which is autocast over float32 weights; "pure-bf16", where
            weights and optimizer state are bfloat16 too; None follows `args.bf16` and
            `args.fp16`, then the environment variable that `accelerate launch` sets.

    Returns:
        The precision that was chosen: one of the above, or "fp16".

    Raises:
        GrowthError: `precision` is unknown or contradicts the arguments.
    """
    of_args = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    where = f"the training arguments set {of_args}=True: give one of the two"
    of_launcher = os.environ.get(SWITCH, "no")
    if of_args is None and of_launcher in ("bf16", "fp16"):
        of_args = of_launcher
        instead = f', or give precision = "{of_args}"' if of_args in PRECISIONS else ""
        where = f"the environment variable {SWITCH} is {of_args!r}: unset it{instead}"
    if precision is not None and precision not in PRECISIONS:
        raise GrowthError(f"precision is {precision!r}{nearest(precision, PRECISIONS)}")
    if precision is not None and of_args not in (None, precision):
        default = ", also where a run file says nothing" if precision == "fp32" else ""
        raise GrowthError(f"precision is {precision!r}{default}, but {where}")
    chosen = precision or of_args or "fp32"
    if chosen == "bf16":
        args.bf16, args.mixed_precision = True, "bf16"
    if chosen == "pure-bf16":
        warnings.warn(
            "pure-bf16: weights and optimizer state are bfloat16, so steps below 1/512 of a weight "
            'are lost and norms hardly train; precision = "bf16" keeps float32 weights',
            GrowthWarning,
            stacklevel=4,
        )
        strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        kept = {n: b for n, b in model.named_buffers() if any(word in n for word in strict)}
        model.to(torch.bfloat16)
        for name, buffer in kept.items():
            # near 5, bfloat16 would not tell the biases of a router apart
            model.get_buffer(name).data = buffer.data
    elif is_sharded(model):
        if any(p.dtype in HALF for p in model.parameters()):
            # FSDP2 follows `to`; an assigned `data` would not reach its shards
            model.to(torch.float32)
    else:
        for tensor in chain(model.parameters(), model.buffers()):
            if tensor.dtype in HALF:
                tensor.data = tensor.data.float()
    return chosen
