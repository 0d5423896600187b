"""Checks what `TwoStageTrainer` is given before any work, by the rules of `growkern.train.rules`.

Rules about settings and models have their facts in `Beginning.together`, which Python and run files
share. A trainer asks again only for what nobody knew before.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from accelerate import Accelerator
from accelerate.utils import str_to_bool
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments
from transformers.trainer_utils import has_length
from transformers.training_args import OptimizerNames
from transformers.utils import is_liger_kernel_available

from growkern.arguments import Limit, as_list, check_fields, check_kind, check_steps
from growkern.errors import GrowthError, nearest
from growkern.growth.plan import GrowthPlan
from growkern.growth.source import refuse_adapters
from growkern.train.distributed import (
    check_gradient_division,
    check_sharding,
    is_sharded,
    refuse_replicas,
)
from growkern.train.loss import Teachers, TeachersOfSources, check_prediction, is_two_stacks
from growkern.train.model import TwoStageConfig, layer_stacks, model_depth
from growkern.train.optimizer import OptimizerMaker
from growkern.train.rules import NOT_SHARDED, SHARD, check
from growkern.train.safety import OnNonfinite
from growkern.train.sections import (
    GrowthStep,
    InheritanceSchedule,
    LossOptions,
    OptimizerChoice,
    OptimizerOptions,
    check_choice,
    check_order,
)
from growkern.train.topk_teacher import TopKRows, TopKTeacher

if TYPE_CHECKING:
    from typing_extensions import Self

OPTIONS = {
    "two_stage": TwoStageConfig,
    "inheritance": InheritanceSchedule,
    "loss": LossOptions,
    "optimizer_options": OptimizerOptions,
}
PRECISIONS = ("fp32", "bf16", "pure-bf16")
# set by `accelerate launch`; accelerate follows it where the arguments say nothing
SWITCH = "ACCELERATE_MIXED_PRECISION"
# attribute in which transformers keeps the function that runs a block again
CHECKPOINTING = "_gradient_checkpointing_func"


@dataclass(frozen=True)
class Beginning:
    """All that a trainer begins with: the arguments of `TwoStageTrainer`, see there.

    Python gives them, or a run file: there models have no weights until all is checked. `planned`
    are the growths of a run file; None: they are not planned yet. `evaluates_first`: any model
    before its first step, not only one that was grown.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {"save_minutes": Limit(lambda x: x >= 0, "be 0 or more")}

    model: Any
    args: TrainingArguments
    options: dict[str, Any]
    two_stage: TwoStageConfig | None
    inheritance: InheritanceSchedule | None
    loss: LossOptions | None
    optimizer: OptimizerChoice
    optimizer_options: OptimizerOptions | None
    growth: Sequence[GrowthStep]
    precision: str | None
    on_nonfinite: OnNonfinite = "stop"
    save_minutes: float = 0.0
    teacher: Any = None
    teacher_tokenizer: Any = None
    planned: Sequence[GrowthPlan] | None = None
    evaluates_first: bool = False

    def optimizers(self) -> OptimizerMaker:
        """What makes the optimizer of each model of the run."""
        own, grows = self.optimizer_options, bool(self.growth)
        return OptimizerMaker(self.optimizer, own, self.args, self.options, grows=grows)

    def checked(self) -> "Self":
        """The same, if Python may begin with it; see `together` for the rest of the checks."""
        model, growth = self.model, self.growth
        check_kinds(self)
        check_fields(self)
        check_switches()
        check_trained_model(model)
        teachers = check_teachers(self.inheritance, self.teacher)
        check_choice(self.optimizer, self.optimizer_options)
        has_a_length = has_length(self.options.get("train_dataset"))
        made = self.together(teachers, sharded=is_sharded(model), has_length=has_a_length)
        if growth:
            check_order(growth, self.args.max_steps)
        return made

    def together(
        self, teachers: Sequence[Any] | None, *, sharded: bool, has_length: bool
    ) -> "Self":
        """The same with its precision, if settings, models and arguments of Trainer fit each other.

        Python comes here with its models, a run file with models on the meta device, before their
        weights are read. So a rule about both has its facts here alone.

        Args:
            teachers: that run, maybe none; None for one that is known by its likeliest tokens.
            sharded: whether every process holds a part of each parameter.
            has_length: whether the training data has a length.
        """
        args, options, model = self.args, self.options, self.model
        check_arguments(args, options)
        two_stage, growth = self.two_stage, self.growth
        check("trained model", cached=teachers is None, two_stacks=is_two_stacks(model))
        check_objectives(teachers or (), model)
        check("stages", two_stage=two_stage, has_length=has_length)
        if two_stage is not None:
            check("block", two_stage=two_stage, layers=model_depth(layer_stacks(model)))
            check("growth in stage 1", growth=growth, stage1_steps=two_stage.stage1_steps)
        self.optimizers().check(model, sharded=sharded)
        if growth:
            check_growths(growth, args, options, model)
        return replace(self, precision=choose_precision(args, self.precision))

    def in_steps(self, length: Callable[[], tuple[int, int]]) -> TwoStageConfig | None:
        """The two stages in optimizer steps; refuses step numbers that the run does not reach.

        `length` gives the steps of an epoch and of the run. It is asked only where they matter.
        """
        stages, inheritance, args = self.two_stage, self.inheritance, self.args
        steps, own = args.max_steps, self.optimizer_options
        if stages is not None and stages.stage1_epochs is not None:
            per_epoch, of_run = length()
            epochs, stages = stages.stage1_epochs, stages.in_steps(per_epoch)
            check("stage 1", stages=stages, epochs=epochs, per_epoch=per_epoch, steps=of_run)
            check("growth in stage 1", growth=self.growth, stage1_steps=stages.stage1_steps)
        if steps <= 0:
            if not has_length(self.options.get("train_dataset")):
                return stages
            _, steps = length()
        numbers = {
            "two_stage.stage1_steps": stages.stage1_steps if stages else None,
            "inheritance end_step": inheritance.end_step if inheritance else None,
            "optimizer.rewarm_steps": own.rewarm_steps if own else None,
            "warmup_steps": args.get_warmup_steps(steps),
            "eval_delay": args.eval_delay if args.eval_strategy == "steps" else None,
        }
        check_steps(steps, numbers, "steps of the run")
        return stages


def check_kinds(settings: Beginning) -> None:
    """Refuse arguments of `TwoStageTrainer` of another kind."""
    wanted = "a model of transformers, as from_pretrained loads it"
    check_kind("model", settings.model, nn.Module, wanted)
    for name, kind in OPTIONS.items():
        if (value := getattr(settings, name)) is not None:
            check_kind(name, value, kind, f"growkern.{kind.__name__}")
    for step in as_list(settings.growth):
        check_kind("growth", step, GrowthStep, "a list of growkern.GrowthStep")


def check_trained_model(model: Any) -> None:
    """Refuse models that a trainer cannot train right."""
    if isinstance(model, DistributedDataParallel):
        raise GrowthError(
            "the model is wrapped in DistributedDataParallel: pass model.module. The trainer wraps "
            "it when several processes train"
        )
    refuse_adapters(model, "model")
    refuse_replicas(model, "model")
    check_gradient_division(model)
    checkpointed = (x for x in model.modules() if getattr(x, "gradient_checkpointing", False))
    functions = (getattr(module, CHECKPOINTING, None) for module in checkpointed)
    again = any(getattr(run, "keywords", {}).get("use_reentrant") for run in functions)
    check("checkpointing", where="the model has ", reentrant=again)


def check_arguments(args: TrainingArguments, options: dict[str, Any]) -> None:
    """Refuse arguments under which training would hang, crash or compute a wrong loss."""
    check("arguments", args=args, options=options, started=int(os.environ.get("WORLD_SIZE", "1")))
    again = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    check("checkpointing", where="", reentrant=args.gradient_checkpointing and again)
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise GrowthError("use_liger_kernel needs the package Liger: pip install liger-kernel")


def check_teachers(inheritance: InheritanceSchedule | None, teacher: Any) -> list[Any] | None:
    """Refuse teachers that are no models or do not fit the schedule; see `choose_teachers`.

    Returns:
        Those that run, or None for one that is known by its likeliest tokens.
    """
    by_source, runs = isinstance(teacher, dict), not isinstance(teacher, TopKRows)
    given = list(teacher.values()) if by_source else as_list(teacher)
    models = given if runs and teacher is not None else []
    number = len(given) if runs else None
    facts = {"given": teacher is not None, "by_source": by_source, "number": number}
    check("teachers", inheritance=inheritance, **facts)
    for model in models:
        if not isinstance(model, nn.Module):
            raise GrowthError(
                f"teacher={model!r} is no model: load it first, with from_pretrained of its class, "
                "such as AutoModelForCausalLM"
            )
        refuse_adapters(model, "teacher")
        refuse_replicas(model, "teacher")
        check_sharding(model, "teacher")
    return models if runs else None


def choose_teachers(inheritance: InheritanceSchedule | None, teacher: Any) -> Teachers:
    """Make the teachers of a trainer: those that run, possibly none, or one whose rows are read.

    Args:
        teacher: None, a model, several models, a dict of models by the names of their sources, or
            a teacher known by its k likeliest tokens.
    """
    if inheritance is None:
        return Teachers([], None)
    if isinstance(teacher, TopKTeacher):
        return teacher
    if isinstance(teacher, TopKRows):
        return TopKTeacher(teacher, inheritance)
    if isinstance(teacher, dict):
        return TeachersOfSources(teacher)
    return Teachers(as_list(teacher), inheritance)


def check_objectives(teachers: Sequence[Any], model: Any) -> None:
    """Check that teachers predict the same tokens as the model in training."""
    for number, teacher in enumerate(teachers):
        name = type(teacher).__name__
        check_prediction(f"teacher {number} ({name})", teacher, model)
        if is_two_stacks(model):
            configs = teacher.config, model.config
            ids = [(x.decoder_start_token_id, x.pad_token_id) for x in configs]
            check("starts", ids=ids, teacher=name)


def check_growths(
    growth: Sequence[GrowthStep], args: TrainingArguments, options: dict[str, Any], model: Any
) -> None:
    """Refuse growths inside a run that the arguments or the model rule out."""
    frozen = next((name for name, p in model.named_parameters() if not p.requires_grad), None)
    foreign = is_sharded(model) and not hasattr(model, "distributed_options")
    facts = {"frozen": frozen, "foreign": foreign, "optim": OptimizerNames(args.optim).value}
    check("growth in a run", growth=growth, args=args, options=options, **facts)


def choose_precision(args: TrainingArguments, wanted: str | None) -> str:
    """The precision of a run: "fp32", "bf16", "pure-bf16" or "fp16".

    Args:
        wanted: as in `TwoStageTrainer`. None follows `args.bf16` and `args.fp16`, then the
            environment variable that `accelerate launch` sets.
    """
    if wanted is not None and wanted not in PRECISIONS:
        raise GrowthError(f"precision is {wanted!r}{nearest(wanted, PRECISIONS)}")
    of_args = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    switch = os.environ.get(SWITCH, "no")
    of_launcher = switch if of_args is None and switch in ("bf16", "fp16") else None
    check(
        "precision",
        wanted=wanted,
        default=", also where a run file says nothing" if wanted == "fp32" else "",
        of_args=of_args,
        of_launcher=of_launcher,
        variable=SWITCH,
        instead=f', or give precision = "{of_launcher}"' if of_launcher in PRECISIONS else "",
    )
    return wanted or of_args or of_launcher or "fp32"


def steps_per_epoch(rows: int, args: TrainingArguments) -> int:
    """The optimizer steps of an epoch as its rows let one expect, before there is a loader."""

    def batches(rows: int, size: int) -> int:
        return rows // size if args.dataloader_drop_last else -(-rows // size)

    each = batches(batches(rows, args.train_batch_size), args.world_size)
    return math.ceil(each / args.gradient_accumulation_steps)


def length_of_run(args: TrainingArguments, batches: int) -> tuple[int, int]:
    """The optimizer steps of an epoch of so many batches, and those of the run."""
    per_epoch = math.ceil(batches / args.gradient_accumulation_steps)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    return per_epoch, steps


# --------------------------------------------------------------- accelerate

# if one of these variables is set, accelerate shards the model, whatever the arguments say
_SWITCHES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
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
                f"the environment variable {name} is {value!r}, which shards the model, "
                f"and {NOT_SHARDED}: unset it, or run `accelerate config` again, and {SHARD}"
            )


def check_accelerator(accelerator: Accelerator) -> None:
    """Refuse what accelerate was told by other ways than the arguments of the trainer."""
    compiler = accelerator.state.dynamo_plugin.backend.value
    kind, precision = accelerator.distributed_type.value, accelerator.mixed_precision
    check("accelerator", kind=kind, precision=precision, compiler=compiler)
