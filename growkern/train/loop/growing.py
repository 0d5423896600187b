"""A trainer whose model grows while it trains.

Before each growth the trainer saves a checkpoint of the smaller model. The larger model, its
optimizer and everything else continue from that checkpoint. A run that is killed after it and
resumed takes the same way, and so gets the same bits as a run that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import align_special_tokens
from transformers.training_args import OptimizerNames

from growkern.errors import GrowthError
from growkern.growth.history import history_of
from growkern.growth.optimizer.into import grow_optimizer_into
from growkern.growth.record.lineage import keep_lineage
from growkern.growth.record.recorded import misfit
from growkern.growth.sharded.placement import free_gathered
from growkern.train.distributed.checkpoint import sources_of
from growkern.train.distributed.options import DistributedOptions
from growkern.train.distributed.shard import is_sharded, prime
from growkern.train.growth.models import (
    Size,
    grown_model,
    layers_of,
    new_part,
    plan_before,
    sizes_of_run,
    unfilled_model,
)
from growkern.train.growth.step import GrowthStep, check_order, rewarmed
from growkern.train.model.sub_model import Part
from growkern.train.optimizer.choose import ADAMW
from growkern.train.safety.checkpoints import MANIFEST, step_of
from growkern.train.safety.signals import SignalWatch
from growkern.train.safety.trainer import SafeTrainer


class _Forgotten(NamedTuple):
    """The facts about a model that the one in its place shares."""

    dtype: torch.dtype
    distribution: DistributedOptions
    mesh: DeviceMesh | None
    generation: Any


class GrowingTrainer(SafeTrainer):
    """A trainer whose model grows at given steps.

    Args:
        model: that the run begins with.
        args: of `transformers.Trainer`.
        growth: inside the run, in the order of their steps.
        options: all other keyword arguments of `SafeTrainer`.

    Attributes:
        growth: the growths.
        grown: how many of them the model in memory has behind it.

    Raises:
        GrowthError: the sizes of a growth do not fit, or an argument cannot be used together with
            growth.
    """

    model: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        *,
        growth: Sequence[GrowthStep] = (),
        **options: Any,
    ) -> None:
        self.growth, self.grown = tuple(growth), 0
        if self.growth:
            _check(self.growth, model, args, options)
        super().__init__(model=model, args=args, **options)
        # after the dtype of the weights in training is known
        self._sizes = self._plan_growths() if self.growth else []
        for one, size in zip(self.growth, self._sizes[1:], strict=False):
            old, new = zip(*layers_of(size), strict=True)
            if one.new_layers_steps and (new == old or one.depth != "stack"):
                before, after = (" and ".join(map(str, layers)) for layers in (old, new))
                raise GrowthError(
                    f"the growth at step {one.at_step}: new_layers_steps needs new layers above "
                    f"the old ones, but {before} layers become {after} with depth={one.depth!r}"
                )
        self._class_name = type(model).__name__.removeprefix("FSDP")
        # the checkpoint of the smaller model from which the model in memory was just grown
        self._grown_from: Path | None = None
        self._ends_here = False

    # -------------------------------------------------------------------- runs

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **options: Any) -> Any:
        """Like `SafeTrainer.train`, through all growths to the end of the run."""
        if not self.growth:
            return super().train(resume_from_checkpoint, **options)
        checkpoint = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = self.newest_whole_checkpoint()
            if checkpoint is None:
                raise GrowthError(f"{self.args.output_dir} has no checkpoint to resume from")
        self.fit_to(Path(checkpoint) if checkpoint else None)
        # a signal during a growth would be lost in a finaliser
        with SignalWatch(f"stopped; to resume: {self.resume_hint}"):
            while True:
                if checkpoint and self._next_step() == step_of(Path(checkpoint)):
                    self._grow(Path(checkpoint))
                self._ends_here = False
                try:
                    result = super().train(checkpoint, **options)
                finally:
                    self._grown_from = None
                if not self._ends_here:
                    return result
                checkpoint = self._checkpoint_before_growth()

    def fit_to(self, checkpoint: Path | None) -> None:
        """Give the model in memory the size of a checkpoint, unless it has it. Its weights are 0.

        Args:
            checkpoint: that will be loaded; None is the start of the run.
        """
        step = 0 if checkpoint is None else step_of(checkpoint)
        grown = sum(one.at_step < step for one in self.growth)
        if grown != self.grown:
            old = self._forget_model()
            size = self._sizes[grown]
            model = unfilled_model(self._class_name, size, old.distribution, old.dtype, old.mesh)
            self._replace_model(model, old, grown)

    def _next_step(self) -> int | None:
        """The step of the next growth; None after the last one."""
        return self.growth[self.grown].at_step if self.grown < len(self.growth) else None

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """Like Trainer's; the step before a growth saves and ends this part of the run."""
        # Trainer calls this again when an epoch ends with the step
        if self.growth and not self._ends_here and self.state.global_step == self._next_step():
            self._ends_here = True
            control = self.control
            control.should_log = control.should_save = control.should_training_stop = True
        super()._maybe_log_save_evaluate(*args, **options)

    def evaluate_if_missed(self) -> None:
        """Like SafeTrainer's; numbers of a model that has grown since would be another's."""
        if self._grown_from is None:
            super().evaluate_if_missed()

    def _checkpoint_before_growth(self) -> Path:
        """The checkpoint of the smaller model that the last part of the run has saved.

        Raises:
            GrowthError: it could not be saved.
        """
        step = self.state.global_step
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{step}"
        if not (checkpoint / MANIFEST).is_file():
            raise GrowthError(
                f"the growth at step {step} continues from {checkpoint}, which could not be "
                f"saved; {self._last_save()}; make room, then resume: {self.resume_hint}"
            )
        return checkpoint

    # ------------------------------------------------------------------- growth

    def _grow(self, checkpoint: Path) -> None:
        """Replace the model by the larger one that is grown from a checkpoint."""
        growth, old = self.growth[self.grown], self._forget_model()
        source, _ = sources_of(checkpoint)
        planned = self._sizes[self.grown + 1].plan
        model = grown_model(source, growth, old.distribution, old.dtype, old.mesh, planned)
        self._replace_model(model, old, self.grown + 1)
        self._grown_from = checkpoint

    def _forget_model(self) -> _Forgotten:
        """Free the model in memory and its optimizer, before there is another one."""
        model = self.model
        self.optimizer = self.lr_scheduler = None
        self.accelerator.free_memory()
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, None)
        # whoever made this model may still hold it
        model.zero_grad()
        self.model = self.model_wrapped = None
        free_gathered(model)
        parameter = next(model.parameters())
        return _Forgotten(
            parameter.dtype,
            getattr(model, "distributed_options", None) or DistributedOptions(),
            parameter.device_mesh if isinstance(parameter, DTensor) else None,
            model.generation_config if model.can_generate() else None,
        )

    def _replace_model(self, model: Any, old: _Forgotten, grown: int) -> None:
        """Train a model of another size from now on."""
        if old.generation is not None:
            model.generation_config = old.generation
        model.config.use_cache = self.args.use_cache
        if self.sharded:
            prime(model)
        elif self.place_model_on_device:
            self._move_model_to_device(model, self.args.device)
        self.model = self.model_wrapped = model
        self.grown = grown
        self.take_model(model)

    def _plan_growths(self) -> list[Size]:
        """Plan every growth against the model that the run has until then.

        Raises:
            GrowthError: one of them cannot be done.
        """
        if isinstance(self.processing_class, (PreTrainedTokenizerBase, ProcessorMixin)):
            # Trainer does this when it begins to train
            align_special_tokens(self.model, self.processing_class)
        return sizes_of_run(self.model, self.growth, self.check_size)

    def check_size(self, model: Any) -> Any:
        """Look at a model on the meta device of a size that the run will grow to.

        Raises:
            GrowthError: it could not be trained.
        """

    def take_model(self, model: Any) -> None:
        """Look at the model that will be trained from now on."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Like Trainer's; the weights of a model that was grown from the checkpoint are there."""
        if Path(resume_from_checkpoint) != self._grown_from:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """Like Trainer's; the optimizer's state grows with the model."""
        if self._grown_from is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        directory, optimizer = self._grown_from, self._bare_optimizer()
        growth = self.growth[self.grown - 1]
        if growth.grows_moments:
            _, state = sources_of(directory)
            grow_optimizer_into(self.model, optimizer, state, moments=str(growth.moments))
        self.lr_scheduler.load_state_dict(torch.load(directory / SCHEDULER_NAME, weights_only=True))
        # the state of an optimizer would bring its rates along
        for group, rate in zip(
            optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = rate

    def new_part(self, step: int) -> Part | None:
        """The part that trains while only new layers do; None: the whole model."""
        if not self.grown:
            return None
        return new_part(step, self.growth[self.grown - 1], self._sizes[self.grown])

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Like Trainer's; a model that was grown keeps the record of its growths."""
        super()._save(output_dir, state_dict)
        plan = plan_before(self.model)
        if self.args.should_save and plan is not None and misfit(plan, self.model) is None:
            keep_lineage(history_of(self.model), Path(output_dir or str(self.args.output_dir)))

    # ------------------------------------------------------------ learning rate

    def create_scheduler(self, *args: Any, **options: Any) -> Any:
        """Like Trainer's; the rate rises again after each growth that asks for it."""
        is_new = self.lr_scheduler is None
        scheduler = super().create_scheduler(*args, **options)
        if is_new and any(one.rewarm_steps for one in self.growth):
            if not isinstance(scheduler, LambdaLR):
                raise GrowthError(
                    f"rewarm_steps needs a schedule that depends on the step alone, and "
                    f"{self.args.lr_scheduler_type} does not: use linear, cosine or constant"
                )
            scheduler.lr_lambdas = [
                partial(rewarmed, rate=one, growth=self.growth) for one in scheduler.lr_lambdas
            ]
        return scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a line, with the number of parameters if the model grows.

        The times of a part of the run are left out: they are not those of the run.
        """
        if self._ends_here and "train_runtime" in logs:
            return
        if self.growth and "loss" in logs:
            logs["parameters"] = sum(p.numel() for p in self.model.parameters())
        super().log(logs, start_time)


def _check(
    growth: Sequence[GrowthStep], model: Any, args: TrainingArguments, options: dict[str, Any]
) -> None:
    """Refuse growths, and arguments under which the model cannot be replaced.

    Raises:
        GrowthError: for the first one that cannot be used, with a way out.
    """
    steps = args.max_steps
    if steps <= 0:
        raise GrowthError("growth inside a run needs the number of steps: give max_steps")
    check_order(growth, steps)
    if not growth[0].at_step:
        raise GrowthError(
            "a growth at step 0 is not one inside a run: grow the model with growkern.grow first, "
            "or use a run file"
        )
    optimizers = options.get("optimizers")
    frozen = next((name for name, p in model.named_parameters() if not p.requires_grad), None)
    refusals = {
        f"{frozen} is frozen, and all parameters of the larger model train: leave it trainable, or "
        "grow the model between two trainings": frozen is not None,
        "model_init makes models of one size: pass the model": options.get("model_init"),
        "the optimizer that was passed holds the small model's parameters: set args.optim": (
            optimizers is not None and any(one is not None for one in optimizers)
        ),
        "load_best_model_at_end may find a checkpoint of another size: leave it out": (
            args.load_best_model_at_end
        ),
        'growth continues from a checkpoint: set save_strategy to "steps"': (
            args.save_strategy == "no"
        ),
        "growth continues from the optimizer's state: leave out save_only_model": (
            args.save_only_model
        ),
        "the model was sharded by fully_shard, and the larger model must be sharded alike: use "
        "growkern.shard": is_sharded(model) and not hasattr(model, "distributed_options"),
        f"the state of {OptimizerNames(args.optim).value} cannot be grown: set moments to "
        '"reset" in all growths': (
            args.optim not in ADAMW and any(one.grows_moments for one in growth)
        ),
    }
    for refusal, applies in refusals.items():
        if applies:
            raise GrowthError(refusal)
