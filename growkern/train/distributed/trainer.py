"""`transformers.Trainer` for models that FSDP2 has sharded. Other models train as in Trainer.

Trainer and accelerate neither wrap nor move such a model. Its gradients, norms, evaluations and
checkpoints are handled here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME

from growkern.growth.disk.config_file import complete_config
from growkern.growth.sharded.placement import free_gathered
from growkern.train.distributed.checkpoint import (
    Parts,
    copy_to_host,
    load_optimizer,
    load_weights,
    optimizer_parts,
    save_groups,
    weight_parts,
    write_parts,
)
from growkern.train.distributed.options import DistributedOptions
from growkern.train.distributed.shard import is_sharded, prime, whole_state


class ShardedTrainer(Trainer):
    """A trainer that takes sharded models as they are.

    Args:
        model: sharded by `fully_shard`, or whole.
        args: of `transformers.Trainer`.
        options: all other keyword arguments of `transformers.Trainer`.

    Attributes:
        sharded: whether the model is sharded.
        async_checkpoints: whether a checkpoint of a sharded model is copied, and written while
            training continues. As in the options of `growkern.shard`; by default it is.
        models_beside: frozen sharded models that run in a step. What they gathered is freed after
            the backward pass.
    """

    models_beside: Sequence[Any] = ()

    def __init__(self, model: Any, args: TrainingArguments, **options: Any) -> None:
        self.sharded = is_sharded(model)
        chosen: DistributedOptions = getattr(model, "distributed_options", DistributedOptions())
        self.async_checkpoints = self.sharded and chosen.async_checkpoints
        self._in_checkpoint = False
        self._copied: Parts = {}
        if self.sharded:
            prime(model)
        super().__init__(model=model, args=args, **options)

    # --------------------------------------------------------------- preparation

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Trainer's; a sharded model is where its mesh and its offloading put it."""
        if not is_sharded(model):
            super()._move_model_to_device(model, device)

    def create_optimizer(self, *args: Any, **options: Any) -> torch.optim.Optimizer:
        """Trainer's, over the shards: a probe of the model may have gathered some of them."""
        free_gathered(self.model)
        return super().create_optimizer(*args, **options)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Trainer's; accelerate adds autocast to a sharded model and nothing else."""
        if self.sharded and training and not getattr(model, "_is_accelerate_prepared", False):
            self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
            # accelerate leaves alone what it has prepared
            model._is_accelerate_prepared = True
        return super()._wrap_model(model, training, dataloader)

    # --------------------------------------------------------------------- steps

    def training_step(self, model: Any, *args: Any, **options: Any) -> Tensor:
        """Trainer's; the gradients of a sharded model are added up at the last micro-batch."""
        is_last = self.accelerator.sync_gradients
        if self.sharded:
            model.set_requires_gradient_sync(is_last)
        loss = super().training_step(model, *args, **options)
        if self.sharded and is_last:
            # with set_reshard_after_backward(False) they are gathered still, and clipping would
            # find no gradients
            free_gathered(self.model)
        for one in self.models_beside:
            free_gathered(one)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Trainer's, over the gradients of all processes."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Trainer's; afterwards the parameters are shards again."""
        try:
            return super().evaluation_loop(*args, **options)
        finally:
            free_gathered(self.model)

    # --------------------------------------------------------------- checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Trainer's; of a sharded model every process writes its part."""
        self._in_checkpoint, self._copied = self.sharded, {}
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._in_checkpoint = False

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Trainer's; a sharded model is gathered, except for a checkpoint."""
        directory = Path(output_dir or self.args.output_dir)
        if self._in_checkpoint:
            directory.mkdir(parents=True, exist_ok=True)
            self._write(weight_parts(self.model), directory)
            if self.args.should_save:
                self._save_companions(directory)
        elif self.sharded:
            state = whole_state(self.model, keep=self.args.should_save)
            if self.args.should_save:
                super()._save(str(directory), state_dict=state)
        else:
            super()._save(output_dir, state_dict)
        if self.args.should_save:
            plan = getattr(self.model, "growth_plan", None)
            complete_config(directory, plan and plan.source, getattr(self.model, "config", None))

    def _write(self, parts: Parts, directory: Path) -> None:
        """Write parts of this process, or copy them for `take_copied`."""
        if self.async_checkpoints:
            self._copied |= copy_to_host(parts)
        else:
            write_parts(parts, directory)

    def take_copied(self) -> Parts:
        """The parts of the last checkpoint that are to be written in the background."""
        copied, self._copied = self._copied, {}
        return copied

    def _save_companions(self, directory: Path) -> None:
        """Write the files that make a model directory of the weights."""
        config = self.model.config
        config.architectures = [type(self.model).__name__.removeprefix("FSDP")]
        config.save_pretrained(directory)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(directory)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(directory)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        directory, optimizer = Path(output_dir), self._bare_optimizer()
        self._write(optimizer_parts(self.model, optimizer), directory)
        if self.args.should_save:
            save_groups(optimizer, directory)
            torch.save(self.lr_scheduler.state_dict(), directory / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.sharded:
            load_weights(self.model, Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Trainer's, without the weights that share the memory of one that was loaded."""
        missing, state = set(load_result.missing_keys), self.model.state_dict(keep_vars=True)
        loaded = {id(value) for name, value in state.items() if name not in missing}
        absent = [name for name in load_result.missing_keys if id(state.get(name)) not in loaded]
        super()._issue_warnings_after_load(
            SimpleNamespace(missing_keys=absent, unexpected_keys=load_result.unexpected_keys)
        )

    def _load_best_model(self) -> None:
        if self.sharded:
            self._load_from_checkpoint(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | os.PathLike[str] | None) -> None:
        if not self.sharded:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        directory = None if checkpoint is None else Path(checkpoint)
        # a checkpoint of the model alone has neither
        if directory is not None and (directory / SCHEDULER_NAME).is_file():
            load_optimizer(self.model, self._bare_optimizer(), directory)
            scheduler = torch.load(directory / SCHEDULER_NAME, weights_only=True)
            self.lr_scheduler.load_state_dict(scheduler)

    def _bare_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside the wrapper of accelerate."""
        optimizer: Any = self.optimizer
        return getattr(optimizer, "optimizer", optimizer)
