"""The trainer: `transformers.Trainer` with two stages, teachers and the fused loss.

One optimizer, one learning-rate schedule and one step count run through both stages. A step depends
only on the settings and the step number. A resumed run therefore gives the same bits as a run that
was never interrupted.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments

from growkern.growth.optimizer.clip import growth_clip_norm_
from growkern.growth.sharded.placement import free_gathered
from growkern.train.growth.step import check_new_layers
from growkern.train.loop.callbacks import LoopCallback
from growkern.train.loop.checks import (
    check_accelerator,
    check_arguments,
    check_block_size,
    check_step_numbers,
    check_trained_model,
    choose_teachers,
    stages_in_steps,
)
from growkern.train.loop.growing import GrowingTrainer
from growkern.train.loop.meter import Meter
from growkern.train.loop.objective import Objective, Plan, add_up
from growkern.train.loop.progress import use_named_progress
from growkern.train.loop.tensorboard import use_safe_tensorboard
from growkern.train.loop.two_stage import TwoStageConfig
from growkern.train.loss.batches import Batches, LabelledSteps, has_index, unchanged_random_state
from growkern.train.loss.inheritance import InheritanceSchedule
from growkern.train.loss.options import LossOptions
from growkern.train.loss.rows import ROW_COUNTS, check_some_label
from growkern.train.loss.side import EvaluationSums, check_side, side_loss_of
from growkern.train.loss.streams import is_without_length, place_in_stream
from growkern.train.loss.vocabulary import check_vocabularies
from growkern.train.objectives.electra import GENERATOR, ReplacedTokenDetection
from growkern.train.objectives.language_modeling import evaluation_collator
from growkern.train.optimizer.choose import make_optimizer, plan_of_optimizer, plan_of_steps
from growkern.train.optimizer.options import OptimizerChoice, OptimizerOptions
from growkern.train.safety.stream import reader_of
from growkern.train.safety.workers import guard_workers
from growkern.train.topk_teacher.teacher import TopKTeacher


class TwoStageTrainer(GrowingTrainer):
    """Trains a language model in two stages, with the original model as a teacher if wanted.

    Batches are {input_ids, labels, ...}. Labels of causal models are not shifted. With an encoder
    and a decoder the labels belong to the decoder, and `decoder_input_ids` are made of them if the
    batch has none; a depth of stage 1 counts for both stacks. The loss is `linear_kl_mlm_loss`.
    `BertForPreTraining` and `ReplacedTokenDetection` add a loss of their own, computed plainly.
    Evaluation is the plain cross-entropy of the whole model without a teacher, as a mean over all
    labels.

    The `loss` of a log line is the mean over the steps since the last line, like Trainer's. Steps
    without a single label are left out. `mlm` is the mean over all labels. Log lines also hold
    flops (so far, without evaluation and padding), kl, top1_agreement, alpha, depth and
    tokens_per_second.

    Args:
        model: a ...ForMaskedLM or ...ForCausalLM model, a model of an encoder and a decoder
            such as T5ForConditionalGeneration, or one of the two above.
        args: of `transformers.Trainer`.
        two_stage: None trains the whole model in every step.
        inheritance: when and how strongly the teacher takes part; given together with `teacher`.
        teacher: a model, several models, a `TeacherCache`, a `ServedTeacher` or a
            `DistillKitTeacher`.
        teacher_tokenizer: one per teacher that runs; compared with `processing_class`. None takes
            the one beside the weights. Without any, other special ids or sizes are refused.
        loss: label smoothing, z-loss and row weights. `args.label_smoothing_factor` counts too.
        optimizer: "auto" trains a model that was grown with `growkern.GrowthAdamW`, others with
            the optimizer of `args`. "adamw" takes that of `args` always, "growth-adamw" never.
            "muon" takes Muon for the matrices of the blocks, and one of the two for all else.
        optimizer_options: section [optimizer] of a run file.
        options: all other keyword arguments of `GrowingTrainer` (growth), of `SafeTrainer`
            (precision, on_nonfinite, save_minutes) and of `transformers.Trainer`. Collators may
            offer `set_epoch` and `frozen`, see `growkern.train.objectives.language_modeling`.

    Raises:
        GrowthError: models, teachers or arguments that cannot be trained this way.
    """

    data_collator: Any
    optimizer: Any
    # compute_loss already divides by the labels of the whole accumulated batch
    loss_is_scaled_for_ga = True

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
        **options: Any,
    ) -> None:
        args = args or TrainingArguments()
        check_arguments(args, options)
        if two_stage is not None or any(x.new_layers_steps for x in options.get("growth", ())):
            # layers outside the sub-model get no gradient; accelerate may wrap one process too
            args.ddp_find_unused_parameters = True
        check_trained_model(model)
        self.two_stage, self.inheritance, self.side = two_stage, inheritance, side_loss_of(model)
        self.loss = (loss or LossOptions()).with_smoothing(args.label_smoothing_factor)
        teachers, tokenizer = choose_teachers(inheritance, teacher), options.get("processing_class")
        check_side(
            self.side,
            two_stage=two_stage is not None,
            teacher=inheritance is not None,
            cached=isinstance(teachers, TopKTeacher),
            grows=bool(options.get("growth")),
        )
        own = optimizer_options or OptimizerOptions()
        self._plan_of_optimizer = partial(
            plan_of_optimizer, choice=optimizer, own=own, args=args, options=options
        )
        self._make_optimizer = partial(make_optimizer, choice=optimizer, own=own, args=args)
        self.objective = Objective(
            model, self.loss, inheritance, teachers, tokenizer, in_stages=two_stage is not None
        )
        self.take_model(model)
        check_vocabularies(model, teachers.models, tokenizer, teacher_tokenizer)
        teachers.freeze(model, args.device)
        self.models_beside = teachers.models

        super().__init__(model=model, args=args, **options)
        check_accelerator(self.accelerator)
        # Trainer counts the labels of an accumulated batch if the first is true, and counts them
        # shifted if the second is. Its own guess from the class is wrong for BERT and for GPT-2
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = self.objective.causal
        if self.loss.row_weights is not None:
            # the column is not removed from the data then
            self.label_names = [*self.label_names, self.loss.row_weights]
        kind = {"causal": self.objective.causal, "decoder": self.objective.decoder}
        self.batches = Batches(self.accelerator, self.loss.row_weights, **kind)
        self._stream, self._labelled = None, LabelledSteps()
        self.two_stage = stages_in_steps(two_stage, self)
        check_step_numbers(self, self.two_stage, inheritance, own.rewarm_steps)
        check_new_layers(self.growth, (self.two_stage and self.two_stage.stage1_steps) or 0)
        self._check_labels()
        self.data_collator = teachers.collator(self.data_collator, self.train_dataset)
        self.meter = Meter(partial(add_up, accelerator=self.accelerator))
        self.add_callback(LoopCallback(self.batches, self.meter, inheritance))
        use_safe_tensorboard(self)
        use_named_progress(self)

    def take_model(self, model: Any) -> None:
        """Look at the model that will be trained from now on.

        Raises:
            GrowthError: it cannot be trained this way.
        """
        self.objective.take_model(model)
        check_block_size(self.two_stage, self.objective.layers)
        self.growth_plan = self._plan_of_optimizer(model)

    def check_size(self, model: Any) -> int | None:
        """The columns that model and teachers share; refuses a model that does not fit them."""
        return self.objective.check_size(model)

    # ------------------------------------------------------------------- data

    def get_train_dataloader(self) -> Any:
        """Trainer's, with the rows of each batch counted on the CPU; or that of a stream."""
        with self._collating(self.data_collator, self.train_dataset):
            stream = reader_of(self.train_dataset, self.args)
            if stream is None:
                return super().get_train_dataloader()
            return guard_workers(stream.loader(self.data_collator, self._train_batch_size))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Trainer's, but a collator that draws masks draws the same at every evaluation."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        # of several sets Trainer gives the name
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        with self._collating(evaluation_collator(self.data_collator, dataset), dataset):
            return super().get_eval_dataloader(eval_dataset)

    @contextlib.contextmanager
    def _collating(self, collator: Any, dataset: Any) -> Iterator[None]:
        """While active, data loaders are made with this collator, and count the rows."""
        own = self.data_collator
        self.data_collator = self.batches.collator(collator, dataset)
        try:
            yield
        finally:
            self.data_collator = own

    def _check_labels(self) -> None:
        """Check that the data for training and for evaluation has labels, where it has an index.

        Raises:
            GrowthError: it has none.
        """
        data, weights = self.eval_dataset, self.loss.row_weights
        sets = [(x, "evaluation") for x in (data.values() if isinstance(data, dict) else [data])]
        for one, name in [(self.train_dataset, "training"), *sets]:
            if not has_index(one):
                continue
            is_own, collator = name == "training", self.data_collator
            collator = collator if is_own else evaluation_collator(collator, one)
            size = self._train_batch_size if is_own else self.args.eval_batch_size
            with unchanged_random_state():
                check_some_label(
                    one,
                    self._get_collator_with_removed_columns(collator),
                    size,
                    weights if is_own else None,
                    causal=self.objective.causal,
                    name=name,
                )
            if is_own:
                self.batches.unlabelled = None

    # -------------------------------------------------------------- optimizer

    def create_optimizer(self, *args: Any, **options: Any) -> torch.optim.Optimizer:
        """Trainer's, but `GrowthAdamW` for a model that was grown, and Muon if it was chosen."""
        if self.optimizer is None:
            free_gathered(self.model)
            self.optimizer = self._make_optimizer(self.model, self.growth_plan)
        return super().create_optimizer(*args, **options)

    # --------------------------------------------------------------- training

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """Trainer's, which resumes data without a length in the first pass only."""
        trained = super()._init_training_state(
            max_steps, steps_per_epoch, epochs, checkpoint, trial
        )
        self._stream = reader_of(self.train_dataset, self.args)
        if self._stream is not None:
            # it is moved to its place, and nothing is skipped
            self._stream.start(checkpoint)
            trained = 0, 0
        elif checkpoint is not None and is_without_length(epochs):
            trained = place_in_stream(checkpoint, self.args)
        self.batches.done, self.batches.source = trained[1], self.data_collator
        return trained

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Trainer's; the loss of steps without a label is added up."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._labelled.add(loss, num_items_in_batch)
        return loss

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of the sub-model of this step, with the KL share of this step.

        In evaluation mode it is the loss of the whole model without a teacher.
        """
        objective, items, accelerator = self.objective, num_items_in_batch, self.accelerator
        if model.training:
            plan = self._plan()
            loss, outputs = objective.train(model, inputs, plan, items, accelerator, self.meter)
        else:
            loss, outputs = objective.evaluate(model, inputs, items, accelerator)
        return (loss, outputs) if return_outputs else loss

    def _plan(self) -> Plan:
        """The part that trains, and the KL share, in the current step."""
        step = self.state.global_step
        part = self.two_stage.part(step, self.objective.layers) if self.two_stage else None
        part = part or self.new_part(step)
        return Plan(part, self.inheritance.rate_at(step) if self.inheritance else 0.0)

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """Trainer's; the epoch of a stream is the share of the steps that were made."""
        if self._stream is not None:
            self.state.epoch = self.state.global_step / self.state.max_steps
        super()._maybe_log_save_evaluate(*args, **options)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of a step without repeated examples, and their labels in all processes."""
        if self._stream is not None:
            self._stream.skip(epoch_iterator)
        batches = self.batches.read(epoch_iterator, num_batches, self.state)
        if not batches:
            return [], None
        if self._stream is not None:
            self._stream.note(batches)
        self.batches.prepare(batches, self.train_dataset, self._train_batch_size)
        items = self._get_num_items_in_batch(batches, device)
        self.batches.look_for_labels(batches, items, self.state)
        self._labelled.begin(items)
        self.objective.count(batches, device, self.accelerator)
        return batches, items

    def _clip_grad_norm(self, model: Any) -> Any:
        """Trainer's; a model that takes the steps of its source is clipped by its source's norm."""
        plan = plan_of_steps(self._bare_optimizer())
        if plan is None:
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        return growth_clip_norm_(model, self.args.max_grad_norm, plan=plan)

    # ------------------------------------------------------------- evaluation

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Trainer's, with a mean over labels; training draws the same random numbers as without."""
        self._sums = EvaluationSums(self.side)
        with unchanged_random_state():
            output = super().evaluation_loop(
                dataloader, description, True, ignore_keys, metric_key_prefix
            )
        output.metrics.update(self._sums.means(metric_key_prefix))
        sets = self.eval_dataset
        if isinstance(sets, dict) and metric_key_prefix == f"eval_{next(iter(sets), '')}":
            # the one that plots and the choice of the best model look at
            output.metrics["eval_loss"] = output.metrics[f"{metric_key_prefix}_loss"]
        return output

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, None, None]:
        """The loss of a batch without a teacher. There are no logits to return."""
        self.end_evaluation_after_signal()
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            rows = self.objective.evaluate_rows(model, inputs, self.accelerator)
            self._sums.add(*rows, self.accelerator)
        return rows[0].sum() / rows[1].sum().clamp(min=1), None, None

    # ----------------------------------------------------------------- saving

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Trainer's; a generator gets a tokenizer of its own beside it."""
        super()._save(output_dir, state_dict)
        is_pair = isinstance(self.model, ReplacedTokenDetection)
        if is_pair and self.processing_class is not None and self.args.should_save:
            directory = Path(output_dir or str(self.args.output_dir)) / GENERATOR
            self.processing_class.save_pretrained(directory)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Trainer's; a generator and a discriminator are in two directories."""
        loaded = model or self.model
        if isinstance(loaded, ReplacedTokenDetection):
            loaded.load_both(Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if isinstance(self.model, ReplacedTokenDetection):
            self._load_from_checkpoint(str(self.state.best_model_checkpoint))
        else:
            super()._load_best_model()

    # ---------------------------------------------------------------- records

    def _save_rng_state(self, output_dir: str) -> None:
        """Trainer's, and save how far this process has read the stream."""
        super()._save_rng_state(output_dir)
        if self._stream is not None:
            self._stream.save(output_dir)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a line, with the FLOPs so far and the numbers of the meter."""
        self.store_flos()
        logs["flops"] = self.state.total_flos
        if "loss" in logs:
            logs.update(self.meter.drain())
            # of steps without a label the meter knows nothing, and Trainer counts them
            logs["loss"] = self._labelled.corrected(logs["loss"], self.accelerator)
        super().log(logs, start_time)

    def store_flos(self) -> None:
        """Add the FLOPs since the last call: of layers and output projection, without padding."""
        self.current_flos += self.objective.flops.drain()
        super().store_flos()

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """0: `store_flos` counts the FLOPs of this batch with those of the others."""
        counts, tokens = inputs.get(ROW_COUNTS), self.model.main_input_name
        if counts is None or not counts.is_filler:
            plan = self._plan()
            self.meter.add_tokens(inputs[tokens].numel())
            self.objective.flops.add(inputs, tokens, plan.part, taught=plan.alpha > 0)
        return 0.0

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
            For "stage 1" (the mean over the depths; with two stages only), for "a full step" and
            for "the teachers" (with teachers that run only).
        """
        count, layers = self.objective.flops.per_step, self.objective.layers
        return count(self.two_stage, layers, sequences, length, labelled, decoder_length)
