"""The trainer: `transformers.Trainer` with two stages, teachers and the fused loss.

One optimizer, one learning-rate schedule and one step count run through both stages. A step depends
only on the settings and the step number. A resumed run therefore gives the same bits as a run that
was never interrupted.

The class below lists the methods of Trainer that differ, in Trainer's order. They call
collaborators, which know nothing of the trainer, and get what they need with each call.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
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
from growkern.growth.history import GROWN_KEY
from growkern.growth.optimizer import growth_clip_norm_
from growkern.growth.sharded import free_gathered
from growkern.train.distributed import prime, without_shared
from growkern.train.loop.callbacks import LoopCallback, warn_of_imbalance
from growkern.train.loop.checks import Beginning, check_accelerator, length_of_run
from growkern.train.loop.display import use_own_displays, warn_of_divergence
from growkern.train.loop.growing import Former, complete_directory
from growkern.train.loop.meter import Meter, memory_and_peak
from growkern.train.loop.objective import add_up, largest
from growkern.train.loop.setup import HALF, prepare, take_model
from growkern.train.loss import (
    Batches,
    EvaluationSums,
    are_sent,
    stream_loader,
    unchanged_random_state,
)
from growkern.train.model import TwoStageConfig, evaluating, setting
from growkern.train.objectives import evaluation_collator
from growkern.train.optimizer import bare, plan_of_steps, products_of
from growkern.train.safety import (
    EvaluationStopped,
    OnNonfinite,
    Saver,
    SignalWatch,
    StepWatch,
    Stops,
    best_checkpoint,
    clip_on_cpu,
    evaluates_start,
    guard_workers,
    misses_evaluation,
    own_random_numbers,
    plain_hub_errors,
    set_dtype,
    step_of,
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
    Evaluation is the plain cross-entropy of the whole model, without a teacher, over all labels.

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
    data_collator: Any
    label_names: Any
    batches: Batches
    # compute_loss already divides by the labels of the whole accumulated batch
    loss_is_scaled_for_ga = True
    misses_evaluation = evaluates_start = False

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
        self.precision, self.evaluates_first = run.precision, run.evaluates_first
        # Trainer switches the cache off; here each forward pass does that for itself
        with setting(run.model.config, "use_cache", False):
            super().__init__(model=run.model, args=run.args, **run.options)
        self._make_collaborators(run)

    def _make_collaborators(self, run: Beginning) -> None:
        """Make the other collaborators, and check what Trainer knows by now."""
        accelerator, objective, args = self.accelerator, self.objective, self.args
        teachers, columns = objective.teachers, objective.loss.columns
        check_accelerator(accelerator)
        # Trainer counts the labels of an accumulated batch if the first is true, and counts them
        # shifted if the second is. Its own guess from the class is wrong for BERT and for GPT-2
        self.model_accepts_loss_kwargs, self._loss_shifts_labels = True, objective.causal
        # which columns Trainer must leave in the data
        self.label_names = [*self.label_names, *columns, *teachers.columns]
        self.growths.plan(self.model, objective.check_size, run.planned)
        # the data loader of the run counts its rows
        kind = {"causal": objective.causal, "decoder": objective.decoder}
        self.batches = Batches(accelerator, columns, **kind)
        self.two_stage = run.in_steps(lambda: length_of_run(args, len(self.get_train_dataloader())))
        own = teachers.collator(self.data_collator, sent=are_sent(self.train_dataset, accelerator))
        without, check = self._get_collator_with_removed_columns, self.batches.check_labels
        check(self.train_dataset, without(own), self._train_batch_size, "training")
        sets, last = self.eval_dataset, without(evaluation_collator(own))
        for data in sets.values() if isinstance(sets, dict) else [sets]:
            check(data, last, args.eval_batch_size, "evaluation")
        self.data_collator = teachers.trained(own, self.train_dataset)
        self.stops = Stops(accelerator)
        self.meter = Meter(partial(add_up, accelerator), partial(largest, accelerator))
        self.saver = Saver(args, accelerator, self.stops)
        watched = accelerator, self.stops, self.saver
        self.steps = StepWatch(run.on_nonfinite, run.save_minutes, *watched)
        told = self.batches, self.meter, self.growths, self.steps, self.saver
        self.add_callback(LoopCallback(*told, objective.inheritance))
        use_own_displays(self)

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
        self.meter.reset()
        self.fit_to(checkpoint)
        message, growths = f"stopped; to resume: {self.saver.hint}", self.growths
        # An exception of a signal may skip the end of a `torch.no_grad`. A signal during a growth
        # would be lost in a finaliser.
        has_grad = torch.set_grad_enabled(torch.is_grad_enabled())
        with has_grad, SignalWatch(message, enabled=bool(growths.steps)):
            while True:
                if checkpoint is not None and growths.is_due(step_of(checkpoint)):
                    self._replace_model(partial(growths.grow, checkpoint))
                growths.ends_here = False
                try:
                    watch = SignalWatch(message, enabled=self.args.save_strategy != "no")
                    with watch as self.stops.signals:
                        result = self._train_part(checkpoint, options)
                finally:
                    growths.source = None
                if not growths.ends_here:
                    warn_of_divergence(self.state.log_history, growths.since)
                    return result
                checkpoint = self.saver.before_growth(self.state.global_step)

    def _train_part(self, checkpoint: Path | None, options: dict[str, Any]) -> Any:
        """Train until the model grows or the run ends."""
        warn_of_imbalance(self.model, self.callback_handler.callbacks)
        try:
            result = super().train(None if checkpoint is None else str(checkpoint), **options)
        except BaseException:
            # the error that ends the run counts; the checkpoint is complete or gone
            with contextlib.suppress(GrowthError):
                self.saver.wait(self.state.global_step)
            raise
        self.saver.wait(self.state.global_step)
        if self.stops.of_any():
            self.saver.end_run(self.state.global_step)
        return result

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """Trainer's, and the batches take the place of the checkpoint."""
        place = super()._init_training_state(max_steps, steps_per_epoch, epochs, checkpoint, trial)
        # a checkpoint restores the intervals that it was saved with
        self.state.compute_steps(self.args, max_steps)
        grows = self.growths.source is not None
        is_first = self.evaluates_first or hasattr(self.model.config, GROWN_KEY)
        is_new = grows or (not self.state.global_step and is_first)
        self.evaluates_start = is_new and evaluates_start(self.args, self.state)
        # numbers of a model that has grown since would be another's
        misses = misses_evaluation(self.args, self.state, self.eval_dataset)
        self.misses_evaluation = misses and not grows
        data, source = self.train_dataset, self.data_collator
        return self.batches.start(data, source, checkpoint, place, epochs, self.args)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        """Trainer's, but the last checkpoint stays beside the best one.

        Trainer deletes it if it keeps one checkpoint. A run that is killed before it has saved its
        model would then train again from the best one, and a growth continues from the last.
        """
        self._make_up_evaluation()
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
        self.meter.add_loss(loss)
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
            except EvaluationStopped:
                control.should_evaluate, control.should_save = False, True
                super()._maybe_log_save_evaluate(*args, **options)
        if step >= self.state.max_steps:
            # there are no steps left to write behind
            self.saver.wait(step)
        if self.stops.number:
            self.is_in_train = False
            self.control = self.callback_handler.on_train_end(self.args, self.state, control)
            self.saver.end_run(step)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of a step without repeated examples, and their labels in all processes."""
        self._make_up_evaluation()
        with self.meter.clock("data"):
            batches = self.batches.read(epoch_iterator, num_batches, self.state)
        if not batches:
            return [], None
        self.batches.prepare(batches, self.train_dataset, self._train_batch_size)
        items = self._get_num_items_in_batch(batches, device)
        self.batches.look_for_labels(batches, items, self.state)
        self.meter.count_step(items)
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
            self.meter.skipped += 1
            # parameters without a gradient stay as they are, and so does their optimizer state
            self.optimizer.zero_grad(set_to_none=True)
        elif self.args.process_index == 0:
            # each process has a share of these products, or repeats all of them
            self.current_flos += products_of(bare(self.optimizer))
        return norm

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **options: Any) -> Any:
        """Trainer's, with a mean over labels; training draws the same random numbers as without."""
        self._sums, self.stops.evaluated = EvaluationSums(), 0
        options |= {"metric_key_prefix": metric_key_prefix, "prediction_loss_only": True}
        try:
            with unchanged_random_state(), evaluating(self.model):
                output = super().evaluation_loop(*args, **options)
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
        run, args, save = Path(self._get_output_dir(trial)), self.args, super()._save_checkpoint

        def write(staging: Path) -> None:
            here = setting(args, "output_dir", str(staging)), setting(args, "push_to_hub", False)
            # for the best one Trainer would look there, and wait for the other processes
            no_best = setting(self.state, "best_global_step", None)
            with here[0], here[1], no_best, setting(self.shards, "in_checkpoint", True):
                save(model, trial)

        with self.meter.clock("checkpoint"):
            saved = self.saver.save(self.model, run, self.state, write, self.shards)
        if saved is not None and self.args.push_to_hub:
            self._push_from_checkpoint(str(saved))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Trainer's; a sharded optimizer is written in parts."""
        if not self.shards.sharded:
            return super()._save_optimizer_and_scheduler(output_dir)
        parts = self.model, bare(self.optimizer), self.lr_scheduler
        self.shards.save_optimizer(*parts, Path(output_dir), is_first=self.args.should_save)

    def _save_rng_state(self, output_dir: str) -> None:
        """Trainer's, which makes the directory in each process; a stream's place, and the log's."""
        super()._save_rng_state(output_dir)
        self.meter.save(Path(output_dir), self.args.process_index)
        if self.batches.stream is not None:
            self.batches.stream.save(Path(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Trainer's, and the log line that the checkpoint interrupts."""
        super()._load_rng_state(checkpoint)
        self.meter.load(Path(str(checkpoint)), self.args.process_index, self.args.world_size)

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
        self.store_flos()
        logs["flops"] = self.state.total_flos
        if "loss" in logs:
            memory, peak = memory_and_peak(self.args.device)
            is_half = self.args.bf16 or self.args.fp16 or self.model.dtype in HALF
            logs.update(self.meter.drain(logs["flops"], peak if is_half else 0.0, memory))
            logs.update(self.growths.event(self.state.log_history))
            logs["parameters"] = sum(p.numel() for p in self.model.parameters())
        # a mean since the last start alone, and NaN after a step that was skipped
        logs.pop("train_loss", None)
        if not (self.growths.ends_here and "train_runtime" in logs):
            super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """0: the FLOPs of this batch are counted later, with those of the others."""
        plan = self.objective.plan(self.state.global_step, self.two_stage, self.growths)
        self.objective.flops.add(inputs, plan.part, self.meter, taught=plan.taught)
        return 0.0

    def store_flos(self) -> None:
        """Trainer's, with the FLOPs since the last call, without those of padding."""
        self.current_flos += self.objective.flops.drain()
        super().store_flos()

    def init_hf_repo(self, *args: Any, **options: Any) -> None:
        """Trainer's; a Hub that cannot be reached is an error of one line."""
        with plain_hub_errors():
            super().init_hf_repo(*args, **options)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Trainer's; a sharded model is where its mesh and its offloading put it."""
        if not self.shards.sharded:
            super()._move_model_to_device(model, device)

    def fit_to(self, checkpoint: Path | None) -> None:
        """Give the model in memory the size of a checkpoint, unless it has it. Its weights are 0.

        Args:
            checkpoint: that will be loaded. None, the start, is refused once the model has grown.
        """
        grown = self.growths.grown_at(checkpoint)
        if checkpoint is None and self.growths.grown:
            raise GrowthError(
                "the model has grown in this trainer, so the run cannot start again with the small "
                "one: make a new trainer, or give resume_from_checkpoint=True to continue the run"
            )
        if grown != self.growths.grown:
            self._replace_model(partial(self.growths.unfilled, grown))

    def _replace_model(self, make: Callable[[Former], Any]) -> None:
        """Train a model of another size, which is made when the one before is gone from memory."""
        old = self._forget_model()
        model = make(old)
        if old.generation is not None:
            model.generation_config = old.generation
        if self.shards.sharded:
            prime(model)
        elif self.place_model_on_device:
            self._move_model_to_device(model, self.args.device)
        self.model = self.model_wrapped = model
        take_model(self.objective, self.optimizers, model)

    def _forget_model(self) -> Former:
        """Free the model in memory and its optimizer, before there is another one."""
        model, handler = self.model, self.callback_handler
        self.optimizer = self.lr_scheduler = None
        self.accelerator.free_memory()
        handler.model = handler.optimizer = handler.lr_scheduler = None
        self.model = self.model_wrapped = None
        return Former.of(model)

    def _make_up_evaluation(self) -> None:
        """Evaluate a model that was just grown, or a checkpoint if a signal has prevented that."""
        starts, self.evaluates_start = self.evaluates_start, False
        if starts:
            # the schedule does not go by it, and no checkpoint holds this model
            self._evaluate(None, None, skip_scheduler=True)
        misses, self.misses_evaluation = self.misses_evaluation, False
        if misses and (metrics := self._evaluate(None, None)):
            self._determine_best_metric(metrics, None)

    def take_end(self, checkpoint: Path) -> None:
        """Take over the last checkpoint of a run that was killed after it, as if it ended now."""
        self.fit_to(checkpoint)
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        self.misses_evaluation = misses_evaluation(self.args, self.state, self.eval_dataset)
        self._make_up_evaluation()
        best = best_checkpoint(checkpoint.parent, self.state)
        self.state.best_model_checkpoint = best and str(best)
        if self.args.load_best_model_at_end and best is not None:
            self._load_best_model()

    def save_final_model(self, dtype: torch.dtype) -> None:
        """Save the model, its tokenizer and the log history to the output directory.

        Args:
            dtype: of the weights in the file. The model in memory gets this dtype too. Weights that
                are too large for float16 stay as they are, with a warning.
        """
        self.saver.wait(self.state.global_step)
        set_dtype(self.model, dtype)
        write = partial(self.save_model, _internal_call=True)
        self.saver.save_final(self.state, lambda directory: write(str(directory)))


def trainer_of_run(run: Beginning) -> TwoStageTrainer:
    """The trainer of a run file. All of it was checked when the file was resolved."""
    trainer = TwoStageTrainer.__new__(TwoStageTrainer)
    trainer._begin(run)
    return trainer
