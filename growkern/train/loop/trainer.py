"""The trainer: `transformers.Trainer` with two stages, teachers and the fused loss.

One optimizer, one learning-rate schedule and one step count run through both stages. A step depends
only on the settings and the step number. A resumed run therefore gives the same bits as a run that
was never interrupted.

The class below lists the methods of Trainer that differ, in Trainer's order. They call
collaborators, which know nothing of the trainer. `setup.py` makes them, and goes on with the run
when its model grows.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from growkern.errors import GrowthError, without_bars
from growkern.growth.optimizer import growth_clip_norm_
from growkern.growth.sharded import free_gathered
from growkern.train.distributed import without_shared
from growkern.train.loop import setup
from growkern.train.loop.checks import Beginning
from growkern.train.loop.growing import complete_directory
from growkern.train.loop.setup import make_collaborators, prepare
from growkern.train.loss import Batches, EvaluationSums, stream_loader, unchanged_random_state
from growkern.train.model import TokenCounts, TwoStageConfig, evaluating, setting
from growkern.train.objectives import evaluation_collator
from growkern.train.optimizer import bare, plan_of_steps, products_of
from growkern.train.safety import (
    EvaluationStopped,
    OnNonfinite,
    best_checkpoint,
    clip_on_cpu,
    guard_workers,
    misses_evaluation,
    own_random_numbers,
    plain_hub_errors,
    set_dtype,
)
from growkern.train.sections import (
    GrowthStep,
    InheritanceSchedule,
    LossOptions,
    OptimizerChoice,
    OptimizerOptions,
)


class TwoStageTrainer(Trainer):
    """Trains a language model in two stages, with the original model as a teacher if wanted.

    Batches are {input_ids, labels, ...}. Labels of causal models are not shifted. With an encoder
    and a decoder the labels belong to the decoder, and `decoder_input_ids` are made of them if the
    batch has none; a depth of stage 1 counts for both stacks. The loss is `linear_kl_mlm_loss`.
    Evaluation is the plain cross-entropy of the whole model without a teacher, as a mean over all
    labels.

    docs/training.md has the names of all logged values.

    Args:
        model: a ...ForMaskedLM or ...ForCausalLM model, or a model of an encoder and a
            decoder such as T5ForConditionalGeneration.
        args: of `transformers.Trainer`, which gets a copy. As there, the random numbers of the
            process are those of `args.seed` afterwards.
        two_stage: None trains the whole model in every step.
        inheritance: when and how strongly the teacher takes part; given together with `teacher`.
        teacher: a model, several models, a `TeacherCache` or a `ServedTeacher`. Or a dict of
            models, each for the examples whose "source" is its key. Models move to the device of
            the run, and are not changed otherwise.
        teacher_tokenizer: one per teacher that runs; compared with `processing_class`. None takes
            the one beside the weights. Without any, other special ids, families or sizes are
            refused.
        loss: label smoothing, z-loss and row weights. `args.label_smoothing_factor` counts too.
        optimizer: "auto" trains a model that was grown with `growkern.GrowthAdamW`, unless
            `args.optim` is no AdamW or a subclass has its own `get_optimizer_cls_and_kwargs`. Other
            models take the optimizer of these. "adamw" takes it always, "growth-adamw" never.
            "muon" takes Muon for the matrices of the blocks, and one of the two for all else.
        optimizer_options: section [optimizer] of a run file.
        growth: inside the run, in the order of their steps.
        precision: "fp32"; "bf16", which is autocast over float32 weights; "pure-bf16"; None follows
            `args.bf16`. Weights in half precision become float32, in place.
        on_nonfinite, save_minutes: as in section [training] of a run file.
        options: all other keyword arguments of `transformers.Trainer`. Collators may offer
            `set_epoch` and `frozen`, see `growkern.train.objectives.language_modeling`.

    Raises:
        GrowthError: models, teachers or arguments that cannot be trained this way.
    """

    optimizer: Any
    control: Any
    batches: Batches
    # compute_loss already divides by the labels of the whole accumulated batch
    loss_is_scaled_for_ga = True
    misses_evaluation = evaluates_start = evaluates_first = False

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *,
        two_stage: TwoStageConfig | None = None,
        inheritance: InheritanceSchedule | None = None,
        teacher: Any | Sequence[Any] | None = None,
        teacher_tokenizer: Any | Sequence[Any] | None = None,
        loss: LossOptions | None = None,
        optimizer: OptimizerChoice = "auto",
        optimizer_options: OptimizerOptions | None = None,
        growth: Sequence[GrowthStep] = (),
        precision: str | None = None,
        on_nonfinite: OnNonfinite = "stop",
        save_minutes: float = 0.0,
        **options: Any,
    ) -> None:
        names_own = type(self).get_optimizer_cls_and_kwargs
        if optimizer == "auto" and names_own is not Trainer.get_optimizer_cls_and_kwargs:
            # whatever it returns: its settings could not be handed on to GrowthAdamW
            optimizer = "adamw"
        run = Beginning(
            *(model, args or TrainingArguments(), options, two_stage, inheritance, loss, optimizer),
            *(optimizer_options, growth, precision, on_nonfinite, save_minutes),
            *(teacher, teacher_tokenizer),
        )
        self._begin(run.checked())

    def _begin(self, run: Beginning) -> None:
        # a run sets some of the arguments, and the caller may use them for another run
        run = replace(run, args=copy.copy(run.args))
        self.objective, self.optimizers, self.growths, self.shards = prepare(run)
        self.two_stage, self.inheritance = run.two_stage, run.inheritance
        self.precision, self.loss = run.precision, self.objective.loss
        # Trainer switches the cache off; here each forward pass does that for itself
        with setting(run.model.config, "use_cache", False):
            super().__init__(model=run.model, args=run.args, **run.options)
        made = make_collaborators(self, run)
        self.labelled, self.meter, self.stops, self.saver, self.steps = made

    def get_train_dataloader(self) -> Any:
        """Trainer's, with the rows of each batch counted on the CPU; or that of a stream."""
        data, size = self.train_dataset, self._train_batch_size
        collator = self.batches.collator(self.data_collator, data)
        with setting(self, "data_collator", collator):
            loader = stream_loader(data, collator, size, self.args)
            return guard_workers(super().get_train_dataloader() if loader is None else loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Trainer's, but a collator that draws masks draws the same at every evaluation."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        collator = evaluation_collator(self.data_collator)
        with setting(self, "data_collator", self.batches.collator(collator, dataset)):
            return guard_workers(super().get_eval_dataloader(eval_dataset))

    def create_optimizer(self, *args: Any, **options: Any) -> torch.optim.Optimizer:
        """Trainer's, but `GrowthAdamW` for a model that was grown, and Muon if it was chosen."""
        # a probe of the model may have gathered some of its shards
        free_gathered(self.model)
        if self.optimizer is None:
            decays = self.get_decay_parameter_names(self.model)
            self.optimizer = self.optimizers.make(self.model, decays)
        # by now Trainer has let go of what it had prepared before
        self.shards.prepare(self.model, self.accelerator)
        return super().create_optimizer(*args, **options)

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **options: Any) -> Any:
        """Train, through all growths. SIGINT, SIGTERM and SIGUSR1 save at the end of the step.

        The model is trained in place, and is in training mode and without gradients afterwards.
        If `args.save_strategy` is "no", signals end the run without a checkpoint. A signal in the
        last step raises too, after the run has ended.

        Args:
            resume_from_checkpoint: a checkpoint, or True for the latest whole one in
                `args.output_dir`.
            options: of `transformers.Trainer.train`.

        Raises:
            GrowthError: a checkpoint is damaged, or a step is not finite.
            KeyboardInterrupt: SIGINT ended the run.
            Terminated: SIGTERM or SIGUSR1 ended the run.
        """
        checkpoint = self.saver.chosen(resume_from_checkpoint)
        return setup.train_in_parts(self, checkpoint, partial(super().train, **options))

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """Trainer's, and the batches take the place of the checkpoint."""
        place = super()._init_training_state(max_steps, steps_per_epoch, epochs, checkpoint, trial)
        # a checkpoint restores the intervals that it was saved with
        self.state.compute_steps(self.args, max_steps)
        setup.note_evaluation(self)
        data, source = self.train_dataset, self.data_collator
        return self.batches.start(data, source, checkpoint, place, epochs, self.args)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        """Trainer's, but the last checkpoint stays beside the best one.

        Trainer deletes it if it keeps one checkpoint. A run that is killed before it has saved its
        model would then train again from the best one, and a growth continues from the last.
        """
        setup.make_up_evaluation(self)
        setup.store_flops(self)
        with setting(self.args, "save_total_limit", None):
            return super()._finalize_training(*args, **options)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Trainer's, with random numbers of each process's own, and what it gathers freed."""
        is_last = self.accelerator.sync_gradients
        # until here nothing would be lost by stopping at once
        self.stops.signals.defer()
        self.shards.begin_step(model, is_last=is_last)
        with own_random_numbers(self.args):
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.shards.end_step(self.model, is_last=is_last)
        self.steps.add(loss)
        self.labelled.add(loss)
        return loss

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of this step's depth and KL share; in evaluation that of the whole model.

        A subclass may return a loss of its own. If it divides by `num_items_in_batch`, the labels
        of all processes, it multiplies by `self.accelerator.num_processes`: gradients and logged
        losses are means over the processes. Without that, 4 processes train on and log a quarter.
        """
        objective, items, accelerator = self.objective, num_items_in_batch, self.accelerator
        if model.training:
            plan = objective.plan(self.state.global_step, self.two_stage, self.growths)
            loss, outputs = objective.train(model, inputs, plan, items, accelerator, self.meter)
        else:
            loss, outputs = objective.evaluate(model, inputs, items, accelerator)
        return (loss, outputs) if return_outputs else loss

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """Trainer's, after a step and after an epoch; a stop saves and raises."""
        step, control = self.state.global_step, self.control
        with self.growths.stop(control):
            try:
                super()._maybe_log_save_evaluate(*args, **options)
            except EvaluationStopped as stopped:
                self.stops.number = stopped.number
                control.should_evaluate, control.should_save = False, True
                super()._maybe_log_save_evaluate(*args, **options)
        if step >= self.state.max_steps:
            # there are no steps left to write behind
            self.saver.wait(step)
        if self._globalstep_last_logged == step:
            # Trainer subtracts the sum from itself, which leaves NaN in all later lines
            self._tr_loss.zero_()
        if self.stops.number:
            self.is_in_train = False
            self.control = self.callback_handler.on_train_end(self.args, self.state, control)
            self.stops.end_run(step, Path(str(self.args.output_dir)), self.saver.hint)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of a step without repeated examples, and their labels in all processes."""
        setup.make_up_evaluation(self)
        with self.meter.clock("data"):
            batches = self.batches.read(epoch_iterator, num_batches, self.state)
        if not batches:
            return [], None
        self.batches.prepare(batches, self.train_dataset, self._train_batch_size)
        items = self._get_num_items_in_batch(batches, device)
        self.batches.look_for_labels(batches, items, self.state)
        self.labelled.begin(items)
        self.objective.count(batches, device, self.accelerator)
        return batches, items

    def _clip_grad_norm(self, model: Any) -> Any:
        """Trainer's; a model that takes the steps of its source is clipped by its source's norm."""
        plan = plan_of_steps(bare(self.optimizer))
        if plan is None:
            norm = clip_on_cpu(model, self.args.max_grad_norm, self.accelerator)
            return super()._clip_grad_norm(model) if norm is None else norm
        self.accelerator.unscale_gradients()
        return growth_clip_norm_(model, self.args.max_grad_norm, plan=plan)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Trainer's, of all processes, right before the optimizer; a bad step is not taken."""
        if grad_norm is None:
            grad_norm = clip_on_cpu(model, math.inf, self.accelerator)
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not self.steps.is_taken(norm, self.state.global_step + 1):
            # parameters without a gradient stay as they are, and so does their optimizer state
            self.optimizer.zero_grad(set_to_none=True)
        elif self.args.process_index == 0:
            # each process has a share of these products, or repeats all of them
            self.current_flos += products_of(bare(self.optimizer))
        return norm

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Trainer's, with a mean over labels; training draws the same random numbers as without."""
        self._sums = EvaluationSums()
        self.stops.evaluated = 0
        try:
            with unchanged_random_state(), evaluating(self.model):
                output = super().evaluation_loop(
                    dataloader, description, True, ignore_keys, metric_key_prefix
                )
        finally:
            # the parameters are shards again
            free_gathered(self.model)
        self._sums.write(output.metrics, metric_key_prefix, self.eval_dataset)
        return output

    def prediction_step(self, model: Any, inputs: Any, *others: Any, **options: Any) -> Any:
        """The loss of a batch without a teacher. There are no logits to return."""
        if self.is_in_train:
            self.stops.end_evaluation()
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            rows = self.objective.evaluate_rows(model, inputs, self.accelerator)
            self._sums.add(*rows, self.accelerator)
        return rows[0].sum() / rows[1].sum().clamp(min=1), None, None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write what Trainer writes, as one checkpoint that appears when it is complete."""
        run = Path(self._get_output_dir(trial))
        write = partial(setup.write_checkpoint, self)
        with self.meter.clock("checkpoint"):
            saved = self.saver.save(self.model, run, self.state, write, self.shards)
        if saved is not None and self.args.push_to_hub:
            self._push_from_checkpoint(str(saved))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Trainer's; a sharded model reads its part, and a generator a directory of its own."""
        directory, model = Path(resume_from_checkpoint), model or self.model
        # the weights of a model that was grown from the checkpoint are there
        if directory != self.growths.source and not self.shards.load(model, directory):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Trainer's; see `_load_from_checkpoint`."""
        self.saver.wait(self.state.global_step)
        if not self.shards.load(self.model, Path(str(self.state.best_model_checkpoint))):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Trainer's; the optimizer's state grows with the model."""
        parts = self.model, bare(self.optimizer), self.lr_scheduler
        if self.growths.source is not None:
            self.growths.load_optimizer(*parts)
        elif not self.shards.sharded:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None:
            self.shards.load_optimizer(*parts, Path(checkpoint))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Trainer's, without the weights that share the memory of one that was loaded."""
        super()._issue_warnings_after_load(without_shared(load_result, self.model))

    @without_bars()
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's; all processes write a sharded model for a checkpoint, else it is gathered."""
        directory, is_first = Path(output_dir or str(self.args.output_dir)), self.args.should_save
        parts = self.model, self.processing_class, directory
        if not self.shards.save(*parts, self._save, is_first):
            super().save_model(str(directory), _internal_call=True)
        if is_first:
            complete_directory(self.model, directory)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a line, with the numbers of the collaborators; not the times of a part of the run."""
        setup.complete_line(self, logs)
        if not (self.growths.ends_here and "train_runtime" in logs):
            super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """0: the FLOPs of this batch are counted later, with those of the others."""
        plan = self.objective.plan(self.state.global_step, self.two_stage, self.growths)
        self.objective.flops.add(inputs, plan.part, self.meter, taught=plan.taught)
        return 0.0

    def init_hf_repo(self, *args: Any, **options: Any) -> None:
        """Trainer's; a Hub that cannot be reached is an error of one line."""
        with plain_hub_errors():
            super().init_hf_repo(*args, **options)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Trainer's; a sharded model is where its mesh and its offloading put it."""
        if not self.shards.sharded:
            super()._move_model_to_device(model, device)

    # what Trainer has no method for

    def fit_to(self, checkpoint: Path | None) -> None:
        """Give the model in memory the size of a checkpoint, unless it has it. Its weights are 0.

        Args:
            checkpoint: that will be loaded; None is the start of the run.

        Raises:
            GrowthError: the run would start again, but its first model has grown and is gone.
        """
        grown = self.growths.grown_at(checkpoint)
        if checkpoint is None and self.growths.grown:
            raise GrowthError(
                "the model has grown in this trainer, so the run cannot start again with the small "
                "one: make a new trainer, or give resume_from_checkpoint=True to continue the run"
            )
        if grown != self.growths.grown:
            setup.replace_model(self, partial(self.growths.unfilled, grown))

    def newest_whole_checkpoint(self) -> Path | None:
        """The latest whole checkpoint in the output directory, the same for all processes.

        Raises:
            GrowthError: there are checkpoints, but all of them are damaged.
        """
        newest: Path | None = self.saver.newest_whole()
        return newest

    def take_end(self, checkpoint: Path) -> None:
        """Take over the last checkpoint of a run that was killed after it, as if it ended now.

        Args:
            checkpoint: at `args.max_steps`. The model has its size.
        """
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        self.misses_evaluation = misses_evaluation(self.args, self.state, self.eval_dataset)
        setup.make_up_evaluation(self)
        best = best_checkpoint(checkpoint.parent, self.state)
        self.state.best_model_checkpoint = best and str(best)
        if self.args.load_best_model_at_end and best is not None:
            self._load_best_model()

    def save_final_model(self, dtype: torch.dtype) -> None:
        """Save the model, its tokenizer and the log history to the output directory.

        Args:
            dtype: of the weights in the file. The model in memory gets this dtype too. Weights that
                are too large for float16 stay as they are, with a warning.

        Raises:
            GrowthError: the disk takes no more. The checkpoints are as they were.
        """
        self.saver.wait(self.state.global_step)
        set_dtype(self.model, dtype)
        self.saver.save_final(
            self.state, lambda directory: self.save_model(str(directory), _internal_call=True)
        )

    def flops_per_step(
        self, sequences: int, length: int, labelled: float, decoder_length: int | None = None
    ) -> dict[str, float]:
        """Estimate the FLOPs of one optimizer step.

        Args:
            sequences: in a step, of all processes together.
            length: tokens per sequence.
            labelled: share of the tokens with a label; with an encoder and a decoder those of the
                decoder.
            decoder_length: tokens per sequence of a decoder beside an encoder; None: `length`.

        Returns:
            For "stage 1" (the mean over the depths; with two stages only), for "a full step", for
            "the teachers" (with teachers that run only) and for "the optimizer" (Muon's own
            products).
        """
        cost, teachers = self.objective.flops.cost, self.objective.flops.teachers
        rows = sequences * (decoder_length or length) * labelled
        sizes = TokenCounts.of_rows(sequences, length, decoder_length=decoder_length)
        head, flops = rows * cost.head_row(train=True), {}
        if self.two_stage is not None and self.two_stage.stage1_steps:
            block, layers = self.two_stage.layers_per_block, self.objective.layers
            depths = [min(n, layers) for n in range(block, layers + block, block)]
            parts = [self.two_stage.part_of(depth) for depth in depths]
            costs = [cost.train(sizes, part) for part in parts]
            flops["stage 1"] = sum(costs) / len(costs) + head
        flops["a full step"] = cost.train(sizes) + head
        if teachers:
            flops["the teachers"] = sum(
                teacher.forward(sizes) + rows * teacher.head_row(train=False)
                for teacher in teachers
            )
        if own := self.optimizers.products(self.model):
            flops["the optimizer"] = own
        return flops


def trainer_of_run(run: Beginning) -> TwoStageTrainer:
    """The trainer of a run file. All of it was checked when the file was resolved."""
    trainer = TwoStageTrainer.__new__(TwoStageTrainer)
    trainer._begin(run)
    return trainer
