"""Checks the arguments of `TwoStageTrainer` before any work, and says how to correct them."""

import math
import os
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, str_to_bool
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import has_length
from transformers.utils import is_liger_kernel_available

from growkern.arguments import as_list, check_kind, check_steps
from growkern.errors import GrowthError
from growkern.growth.source.refused import refuse_adapters
from growkern.train.distributed.shard import (
    check_gradient_division,
    check_sharding,
    refuse_replicas,
)
from growkern.train.growth import GrowthStep
from growkern.train.loss.inheritance import Teachers, TeachersOfSources
from growkern.train.loss.inherited import is_two_stacks
from growkern.train.loss.options import InheritanceSchedule, LossOptions
from growkern.train.model.sub_model import TwoStageConfig
from growkern.train.optimizer import OptimizerOptions
from growkern.train.rules import check, refuse_first
from growkern.train.topk_teacher.teacher import TopKRows, TopKTeacher

OPTIONS = {
    "two_stage": TwoStageConfig,
    "inheritance": InheritanceSchedule,
    "loss": LossOptions,
    "optimizer_options": OptimizerOptions,
}
# attribute in which transformers keeps the function that runs a block again
CHECKPOINTING = "_gradient_checkpointing_func"
REENTRANT = (
    "gradient checkpointing with use_reentrant=True, which loses the gradients of the lowest "
    "trained layer: set gradient_checkpointing_kwargs={'use_reentrant': False}"
)


def check_trained_model(model: Any) -> None:
    """Refuse models that a trainer cannot train right."""
    if isinstance(model, DistributedDataParallel):
        raise GrowthError(
            "the model is wrapped in DistributedDataParallel: pass model.module. The trainer wraps "
            "it when several processes train"
        )
    refuse_adapters(model, "model")
    if isinstance(model, nn.Module):
        refuse_replicas(model, "model")
        check_gradient_division(model)
    for module in model.modules() if isinstance(model, nn.Module) else ():
        keywords = getattr(getattr(module, CHECKPOINTING, None), "keywords", {})
        if getattr(module, "gradient_checkpointing", False) and keywords.get("use_reentrant"):
            raise GrowthError(f"the model has {REENTRANT}")


def check_kinds(model: Any, growth: Any, **given: Any) -> None:
    """Refuse arguments of `TwoStageTrainer` of another kind."""
    check_kind("model", model, nn.Module, "a model of transformers, as from_pretrained loads it")
    for name, kind in OPTIONS.items():
        if given[name] is not None:
            check_kind(name, given[name], kind, f"growkern.{kind.__name__}")
    for one in as_list(growth):
        check_kind("growth", one, GrowthStep, "a list of growkern.GrowthStep")


def check_block_size(two_stage: TwoStageConfig | None, layers: int) -> None:
    """Check that a block of stage 1 is not larger than the model."""
    if two_stage is not None and two_stage.layers_per_block > layers:
        raise GrowthError(
            f"layers_per_block is {two_stage.layers_per_block}, but the model has {layers} "
            f"layers: give {layers} or less"
        )


def stages_in_steps(two_stage: TwoStageConfig | None, trainer: Trainer) -> TwoStageConfig | None:
    """The two stages with the length of stage 1 in optimizer steps."""
    if two_stage is None or two_stage.stage1_epochs is None:
        return two_stage
    check("stages", two_stage=two_stage, has_length=has_length(trainer.train_dataset))
    per_epoch, steps = _length_of_run(trainer)
    found = two_stage.in_steps(per_epoch)
    if found.stage1_steps is not None and found.stage1_steps > steps:
        raise GrowthError(
            f"two_stage.stage1_epochs is {two_stage.stage1_epochs}, which makes "
            f"{found.stage1_steps} steps of {per_epoch} per epoch: it must not be more than the "
            f"{steps} steps of the run"
        )
    return found


def _length_of_run(trainer: Trainer) -> tuple[int, int]:
    """The optimizer steps of an epoch and of the run, for data with a length."""
    args = trainer.args
    per_epoch = math.ceil(len(trainer.get_train_dataloader()) / args.gradient_accumulation_steps)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    return per_epoch, steps


def check_step_numbers(
    trainer: Trainer,
    two_stage: TwoStageConfig | None,
    inheritance: InheritanceSchedule | None,
    rewarm_steps: int,
) -> None:
    """Refuse step numbers that the run does not reach."""
    args, steps = trainer.args, trainer.args.max_steps
    if steps <= 0:
        if trainer.train_dataset is None or not has_length(trainer.train_dataset):
            return
        _, steps = _length_of_run(trainer)
    numbers = {
        "two_stage.stage1_steps": two_stage.stage1_steps if two_stage else None,
        "inheritance end_step": inheritance.end_step if inheritance else None,
        "optimizer.rewarm_steps": rewarm_steps,
        "warmup_steps": args.get_warmup_steps(steps),
        "eval_delay": args.eval_delay if args.eval_strategy == "steps" else None,
    }
    check_steps(steps, numbers, "steps of the run")


def choose_teachers(
    inheritance: InheritanceSchedule | None, teacher: Any
) -> Teachers | TopKTeacher:
    """Make the teachers of a trainer: those that run, possibly none, or one whose rows are read.

    Args:
        teacher: None, a model, several models, a dict of models by the names of their sources, or
            a teacher known by its k likeliest tokens.
    """
    if (inheritance is None) != (teacher is None):
        given, missing = (
            ("inheritance", "teacher") if teacher is None else ("teacher", "inheritance")
        )
        raise GrowthError(f"{given} is given without {missing}: pass both or neither")
    if inheritance is None:
        return Teachers([], None)
    if isinstance(teacher, TopKRows):
        return TopKTeacher(teacher, inheritance)
    if inheritance.tail is not None:
        raise GrowthError(
            f"inheritance tail is {inheritance.tail!r}, but a model gives every token its "
            "probability: leave it out"
        )
    by_source = isinstance(teacher, dict)
    models = list(teacher.values()) if by_source else as_list(teacher)
    for model in models:
        if not isinstance(model, nn.Module):
            raise GrowthError(
                f"teacher={model!r} is no model: load it first, with from_pretrained of its class, "
                "such as AutoModelForCausalLM"
            )
        refuse_adapters(model, "teacher")
        refuse_replicas(model, "teacher")
        check_sharding(model, "teacher")
    if not by_source:
        return Teachers(models, inheritance)
    return TeachersOfSources(teacher, inheritance)


def check_objectives(teachers: Teachers | TopKTeacher, model: Any, causal: bool) -> None:
    """Check that the teachers predict the same tokens as the model in training."""
    decoder = is_two_stacks(model)
    check("training", side=None, two_stacks=decoder, cached=isinstance(teachers, TopKTeacher))
    for one in teachers.models:
        name = f"the teacher ({type(one).__name__})"
        if is_two_stacks(one) != decoder:
            raise GrowthError(
                f"{name} and the model ({type(model).__name__}) differ: one of them has an encoder "
                "beside its decoder. Choose a teacher with the model's objective"
            )
        if decoder and _start(one) != _start(model):
            raise GrowthError(
                f"{name} starts a decoder's text and fills gaps with the tokens {_start(one)}, the "
                f"model with {_start(model)}: use a loop of your own with inherited_loss"
            )
    if not decoder:
        teachers.check_objective(causal)


def _start(model: Any) -> tuple[int, int]:
    """The ids of a decoder's first token and of padding."""
    return model.config.decoder_start_token_id, model.config.pad_token_id


# if one of these variables is set, accelerate shards the model, whatever the arguments say
_SWITCHES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)
_SHARDED = (
    "sharded training by accelerate (FSDP, DeepSpeed, Megatron) is not supported. Shard the model "
    "with growkern.shard or fully_shard before, or give [distributed] in a run file"
)


def check_switches() -> None:
    """Refuse environment variables that tell accelerate to shard the model.

    `TrainingArguments` follow them too, so call this before those are made.
    """
    for name in _SWITCHES:
        value = os.environ.get(name) or "false"
        try:
            is_set = str_to_bool(value)
        except ValueError:
            raise GrowthError(
                f"the environment variable {name} is {value!r}, which is neither true nor false: "
                "unset it"
            ) from None
        if is_set:
            raise GrowthError(
                f"the environment variable {name} is {value!r}, which shards the model: unset it, "
                f"or run `accelerate config` again. {_SHARDED}"
            )


def check_arguments(args: TrainingArguments, options: dict[str, Any]) -> None:
    """Refuse arguments under which training would hang, crash or compute a wrong loss."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    check_switches()
    several, checkpointing = args.world_size > 1, args.gradient_checkpointing_kwargs or {}
    logits = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")
    refuse_first(
        {
            "torch_compile=True is not supported: it compiles one graph per depth and fails on the "
            "fused loss. Compile the blocks instead: `for block in stack: block.compile()` for "
            "each stack of growkern.train.model.sub_model.layer_stacks(model)": args.torch_compile,
            "one process can use one device only: start one process per device with "
            "torchrun --nproc_per_node=N": args.n_gpu > 1,
            f"leave fsdp and deepspeed unset: {_SHARDED}": args.fsdp or args.deepspeed,
            f"{started} processes were started, but each would train alone: on machines without an "
            "accelerator set use_cpu=True": started > args.world_size,
            "average_tokens_across_devices=False gives the labels of small batches more weight: "
            "set it to True": several and not args.average_tokens_across_devices,
            "ddp_find_unused_parameters=False would wait for ever for layers that do not run in "
            "stage 1: leave it unset": several and args.ddp_find_unused_parameters is False,
            REENTRANT: args.gradient_checkpointing and checkpointing.get("use_reentrant"),
            "bf16_full_eval and fp16_full_eval round the weights in training to half precision: "
            "unset them, and set precision='bf16' for a faster evaluation": (
                args.bf16_full_eval or args.fp16_full_eval
            ),
            "model_init cannot be used, because the teacher and the FLOPs belong to one model: "
            "pass model=model_init() instead": options.get("model_init"),
            "accelerator_config even_batches=False gives some processes a batch more, for which "
            "the others would wait for ever: leave it True. Rows that fill up the last batch do "
            "not count": several and not args.accelerator_config.even_batches,
            f"train_sampling_strategy={args.train_sampling_strategy!r} draws another order in each "
            'process and after a restart, so rows would be repeated and left out: use "random" or '
            '"sequential"': args.train_sampling_strategy not in ("random", "sequential"),
            "accelerator_config use_seedable_sampler=False draws another order after a restart, so "
            "rows would be repeated and left out: leave it True": (
                not args.accelerator_config.use_seedable_sampler
            ),
            "use_liger_kernel needs the package Liger: pip install liger-kernel": (
                args.use_liger_kernel and not is_liger_kernel_available()
            ),
        }
        | {
            f"{name} cannot be used: the loss is fused with the output projection, so there are no "
            "logits. Give it to a plain transformers.Trainer, with the trained model": (
                options.get(name) is not None
            )
            for name in logits
        }
    )


def check_accelerator(accelerator: Accelerator) -> None:
    """Refuse what accelerate was told by other ways than the arguments of the trainer."""
    kind = accelerator.distributed_type
    sharded = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
    compiler = accelerator.state.dynamo_plugin.backend.value
    refuse_first(
        {
            f"accelerate was set to {kind.value}: {_SHARDED}": kind in sharded,
            "accelerate was set to fp8, which the fused loss does not use: use bf16": (
                accelerator.mixed_precision == "fp8"
            ),
            "accelerate was set to compile the whole model, which fails on the fused loss: set "
            "dynamo_backend to 'no'": compiler not in (None, "NO", "no"),
        }
    )
