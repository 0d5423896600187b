"""What the trainer refuses before any work, and what it is told to do instead."""

import os
from typing import Any

from transformers import TrainingArguments

from growkern.errors import GrowthError
from growkern.train.cached_teacher.store import TeacherCache
from growkern.train.cached_teacher.teacher import CachedTeacher
from growkern.train.config import TwoStageConfig
from growkern.train.inheritance import InheritanceSchedule, Teachers


def check_block_size(two_stage: TwoStageConfig | None, layers: int) -> None:
    """A block of stage 1 fits into the model."""
    if two_stage is not None and two_stage.layers_per_block > layers:
        raise GrowthError(
            f"layers_per_block is {two_stage.layers_per_block}, the model has {layers} layers: "
            "a block cannot be larger than the model"
        )


def as_list(one_or_many: Any) -> list[Any]:
    return list(one_or_many) if isinstance(one_or_many, list | tuple) else [one_or_many]


def choose_teachers(
    inheritance: InheritanceSchedule | None, teacher: Any
) -> Teachers | CachedTeacher:
    if (inheritance is None) != (teacher is None):
        given, missing = (
            ("inheritance", "teacher") if teacher is None else ("teacher", "inheritance")
        )
        raise GrowthError(f"{given} is given without {missing}: pass both or neither")
    if inheritance is None:
        return Teachers([], None)
    if isinstance(teacher, TeacherCache):
        return CachedTeacher(teacher, inheritance)
    return Teachers(as_list(teacher), inheritance.teacher_weights)


def check_arguments(args: TrainingArguments, options: dict[str, Any]) -> None:
    """Refuse what would train another function or silently lose the sub-models."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    refusals = {
        "torch_compile=True makes one graph per depth and breaks on the fused loss: compile the "
        "blocks instead (`for block in stack: block.compile()`, stacks from layer_stacks)": (
            args.torch_compile
        ),
        "one process drives one device: start one per device (torchrun --nproc_per_node=N)": (
            args.n_gpu > 1
        ),
        "sharded training (FSDP, DeepSpeed) is not supported by this version: processes train "
        "under DistributedDataParallel": bool(args.fsdp or args.deepspeed),
        f"{started} processes were started and every one would train alone: without an accelerator "
        "set use_cpu=True": started > args.world_size,
        "average_tokens_across_devices=False gives the labels of small batches more weight: leave "
        "it on": args.world_size > 1 and not args.average_tokens_across_devices,
        "ddp_find_unused_parameters=False waits for ever for the layers that stage 1 leaves out: "
        "leave it unset": args.world_size > 1 and args.ddp_find_unused_parameters is False,
        "label_smoothing_factor is not part of the fused loss: leave it at 0": (
            args.label_smoothing_factor != 0
        ),
        "gradient checkpointing with use_reentrant=True loses the gradients of the lowest trained "
        "layer: set gradient_checkpointing_kwargs={'use_reentrant': False}": (
            args.gradient_checkpointing
            and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant", False)
        ),
    }
    for name in ("compute_loss_func", "compute_metrics", "model_init"):
        refusals[
            f"{name} cannot be used: the loss is fused with the head and logits are not made"
        ] = options.get(name) is not None
    for message, refused in refusals.items():
        if refused:
            raise GrowthError(message)
