"""The trainer: `transformers.Trainer` with two stages, teachers and the fused loss.

One optimizer, one learning-rate schedule and one step count run through both stages. A step depends
only on the settings and the step number. A resumed run therefore gives the same bits as a run that
was never interrupted.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments

from growkern.growth.optimizer.clip import growth_clip_norm_
from growkern.growth.sharded.placement import free_gathered
from growkern.train.growth.step import check_new_layers
from growkern.train.loop.callbacks import use_own_callbacks
from growkern.train.loop.checks import (
    check_accelerator,
    check_arguments,
    check_block_size,
    check_objectives,
    check_step_numbers,
    check_trained_model,
    choose_teachers,
    stages_in_steps,
)
from growkern.train.loop.growing import GrowingTrainer
from growkern.train.loop.meter import Meter
from growkern.train.loop.passes import Passes, real_sizes
from growkern.train.loop.two_stage import TwoStageConfig
from growkern.train.loss.inheritance import InheritanceSchedule
from growkern.train.loss.models import check_model, inputs_of, is_two_stacks
from growkern.train.loss.options import LossOptions
from growkern.train.loss.rows import ROW_COUNTS, LossRows, RowCounts, count_kl_rows, take_rows
from growkern.train.loss.side import SideLossTrainer, check_side, side_loss_of
from growkern.train.loss.vocabulary import check_vocabularies
from growkern.train.model.flops import ModelCost, Sizes, cost_of
from growkern.train.model.head import IGNORE_INDEX, check_head, head_swap, softcap_of, take_logits
from growkern.train.model.load import is_causal
from growkern.train.model.sub_model import Part, find_stacks, layer_stacks, model_depth, only
from growkern.train.optimizer.choose import make_optimizer, plan_of_optimizer, plan_of_steps
from growkern.train.optimizer.options import OptimizerChoice, OptimizerOptions
from growkern.train.safety.stream import StreamTrainer
from growkern.train.topk_teacher.teacher import TopKTeacher


class TwoStageTrainer(SideLossTrainer, StreamTrainer, GrowingTrainer):
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
    # rows with a KL term in the whole accumulated batch of all processes
    _kl_items: Tensor | None = None

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
        self._decoder = is_two_stacks(model)
        self._causal = not self._decoder and is_causal(model)
        self.two_stage, self.inheritance, self.side = two_stage, inheritance, side_loss_of(model)
        self.loss = (loss or LossOptions()).with_smoothing(args.label_smoothing_factor)
        self._teachers = choose_teachers(inheritance, teacher)
        check_side(
            self.side,
            two_stage=two_stage is not None,
            teacher=inheritance is not None,
            cached=isinstance(self._teachers, TopKTeacher),
            grows=bool(options.get("growth")),
        )
        own = optimizer_options or OptimizerOptions()
        self._plan_of_optimizer = partial(
            plan_of_optimizer, choice=optimizer, own=own, args=args, options=options
        )
        self._make_optimizer = partial(make_optimizer, choice=optimizer, own=own, args=args)
        self._tokenizer = options.get("processing_class")
        self.take_model(model)
        check_vocabularies(model, self._teachers.models, self._tokenizer, teacher_tokenizer)
        self._teachers.freeze(model, args.device)
        self.models_beside = self._teachers.models

        super().__init__(model=model, args=args, **options)
        check_accelerator(self.accelerator)
        self.two_stage = stages_in_steps(two_stage, self)
        check_step_numbers(self, self.two_stage, inheritance, own.rewarm_steps)
        check_new_layers(self.growth, (self.two_stage and self.two_stage.stage1_steps) or 0)
        self.check_labels()
        self.data_collator = self._teachers.collator(self.data_collator, self.train_dataset)
        # Trainer counts the labels of an accumulated batch if the first is true, and counts them
        # shifted if the second is. Its own guess from the class is wrong for BERT and for GPT-2
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = self._causal
        self._teacher_costs = [ModelCost(one, find_stacks(one)) for one in self._teachers.models]
        self._row_flops: Tensor | float = 0.0
        self._passes = Passes()
        self.meter = Meter(self.add_up)
        use_own_callbacks(self)

    def take_model(self, model: Any) -> None:
        """Look at the model that will be trained from now on.

        Raises:
            GrowthError: it cannot be trained this way.
        """
        check_model(model, self._causal)
        check_head(model)
        self._softcap = softcap_of(model)
        self._stacks = layer_stacks(model) if self.two_stage else find_stacks(model)
        self._layers = model_depth(self._stacks) or model.config.num_hidden_layers
        check_block_size(self.two_stage, self._layers)
        self.growth_plan = self._plan_of_optimizer(model)
        self._vocabulary = self.check_size(model)
        self._cost = cost_of(model, self._stacks)

    def check_size(self, model: Any) -> int | None:
        """The columns that model and teachers share; refuses a model that does not fit them."""
        check_objectives(self._teachers, model, self._causal)
        return self._teachers.common_vocabulary(model, self._tokenizer)

    # ------------------------------------------------------------------- loss

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
        inputs, training = dict(inputs), model.training
        part, alpha = self._plan() if training else (None, 0.0)
        targets = self.take_targets(inputs)
        rows = self._take_rows(inputs, alpha, weighted=training)
        inputs = inputs_of(self.model, inputs, rows.labels_BS)
        options = self._loss_options(inputs, rows, alpha, num_items_in_batch)
        if training:
            options |= self.loss.arguments()
        with only(part, self._stacks):
            loss, parts, outputs = self._run(model, inputs, options)
        counted = training and num_items_in_batch is not None
        loss = self.with_side(loss, outputs, targets, counted=counted)
        if training:
            self._record(parts, rows, alpha, part)
            if num_items_in_batch is not None:
                # DDP averages the gradients, but the loss is divided by the labels of all processes
                loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _run(
        self, model: Any, inputs: dict[str, Any], options: dict[str, Any]
    ) -> tuple[Tensor, Any, Any]:
        """The fused loss at the model's head, the parts of the loss, and the other outputs."""
        with self.accelerator.autocast():
            loss_function = self._teachers.loss_function(inputs, options["alpha"])
        seen = []

        def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            loss, parts = loss_function(hidden, weight, student_bias=bias, **options)
            seen.append(parts)
            return loss

        with head_swap(self.accelerator.unwrap_model(model), loss_of):
            outputs = model(**inputs)
        return take_logits(outputs), seen[0], outputs

    def _plan(self) -> tuple[Part | None, float]:
        """The part that trains (None: the whole model) and the KL share of the current step."""
        step = self.state.global_step
        part = self.two_stage.part(step, self._layers) if self.two_stage else None
        part = part or self.new_part(step)
        return part, self.inheritance.rate_at(step) if self.inheritance else 0.0

    def _take_rows(self, inputs: dict[str, Any], alpha: float, *, weighted: bool) -> LossRows:
        """Remove the labels and row weights from a batch, and align them."""
        kl_rows = self.inheritance.kl_rows if self.inheritance and alpha > 0 else "labels"
        column = self.loss.row_weights
        if column is not None and not weighted:
            inputs.pop(column, None)
        return take_rows(
            inputs,
            causal=self._causal,
            kl_rows=kl_rows,
            row_weights=column if weighted else None,
            decoder=self._decoder,
        )

    def _loss_options(
        self, inputs: dict[str, Any], rows: LossRows, alpha: float, items: Tensor | int | None
    ) -> dict[str, Any]:
        """The arguments of the loss. The counts of the rows are removed from `inputs`."""
        counts: RowCounts | None = inputs.pop(ROW_COUNTS, None)
        options: dict[str, Any] = rows.options() | {
            "alpha": alpha,
            "vocab_size": self._vocabulary,
            "softcap": self._softcap,
            "return_parts": True,
        }
        masked = isinstance(rows.kl_rows, Tensor)
        every = self.inheritance is not None and self.inheritance.kl_rows == "all"
        if counts is not None:
            # rows without a term then cost nothing on a GPU
            options["max_rows"] = max(1, counts.live if masked and every else counts.labelled)
        if items is not None:
            options["num_items"] = torch.as_tensor(items)
        if alpha > 0 and self.inheritance is not None:
            schedule = self.inheritance
            options["temperature"] = schedule.temperature
            options["divergence"], options["beta"] = schedule.divergence, schedule.beta
            if masked and items is not None and self._kl_items is not None:
                options["num_items"] = (options["num_items"], self._kl_items)
        return options

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Count the labels of a whole accumulated batch, and keep the count of its KL rows."""
        # this may drop examples
        items = super()._get_num_items_in_batch(batch_samples, device)
        schedule, cached = self.inheritance, isinstance(self._teachers, TopKTeacher)
        if batch_samples and schedule is not None and (schedule.kl_rows == "all" or cached):
            kind: Any = {"causal": self._causal, "decoder": self._decoder}
            rows = [count_kl_rows(batch, schedule.kl_rows, **kind) for batch in batch_samples]
            self._kl_items = self.add_up(sum(rows, torch.zeros((), device=device)))
        return items

    def create_optimizer(self, *args: Any, **options: Any) -> torch.optim.Optimizer:
        """Trainer's, but `GrowthAdamW` for a model that was grown, and Muon if it was chosen."""
        if self.optimizer is None:
            free_gathered(self.model)
            self.optimizer = self._make_optimizer(self.model, self.growth_plan)
        return super().create_optimizer(*args, **options)

    def _clip_grad_norm(self, model: Any) -> Any:
        """Trainer's; a model that takes the steps of its source is clipped by its source's norm."""
        plan = plan_of_steps(self._bare_optimizer())
        if plan is None:
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        return growth_clip_norm_(model, self.args.max_grad_norm, plan=plan)

    # ---------------------------------------------------------------- records

    def _record(self, parts: Any, rows: LossRows, alpha: float, part: Part | None) -> None:
        labelled_BS = rows.labels_BS != IGNORE_INDEX
        kl_BS = rows.kl_rows if isinstance(rows.kl_rows, Tensor) else labelled_BS
        if rows.weights_BS is not None:
            # the parts leave these rows out
            labelled_BS, kl_BS = (mask & (rows.weights_BS != 0) for mask in (labelled_BS, kl_BS))
        self.meter.add_parts(parts, labelled_BS.sum(), kl_BS.sum())
        self.meter.add("alpha", alpha)
        self.meter.add("depth", float(part.depth if part else self._layers))
        live = ((labelled_BS | kl_BS) if alpha > 0 else labelled_BS).sum()
        per_row = self._cost.head_row(train=True)
        if alpha > 0:
            per_row += sum(cost.head_row(train=False) for cost in self._teacher_costs)
        self._row_flops += live * per_row

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """0: `store_flos` counts the FLOPs of this batch with those of the others."""
        part, alpha = self._plan()
        batch, length = inputs[self.model.main_input_name].shape
        counts = inputs.get(ROW_COUNTS)
        if counts is not None and counts.is_filler:
            return 0.0
        self.meter.add_tokens(batch * length)
        cost, teachers = self._cost, self._teacher_costs if alpha > 0 else []

        def flops(sizes: Sizes) -> float:
            return cost.train_of(sizes, part) + sum(one.forward_of(sizes) for one in teachers)

        sizes = real_sizes(inputs, self.model.main_input_name, decoder=self._decoder)
        self._passes.add(flops, sizes, None if counts is None else counts.pairs)
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
        rows = sequences * (decoder_length or length) * labelled
        sizes: dict[str, Any] = {"decoder_length": decoder_length}
        head = rows * self._cost.head_row(train=True)
        flops = {}
        if self.two_stage is not None and self.two_stage.stage1_steps:
            block = self.two_stage.layers_per_block
            depths = [min(n, self._layers) for n in range(block, self._layers + block, block)]
            parts = [self.two_stage.part_of(depth) for depth in depths]
            costs = [self._cost.train(sequences, length, part, **sizes) for part in parts]
            flops["stage 1"] = sum(costs) / len(costs) + head
        flops["a full step"] = self._cost.train(sequences, length, **sizes) + head
        if self._teacher_costs:
            flops["the teachers"] = sum(
                cost.forward(sequences, length, **sizes) + rows * cost.head_row(train=False)
                for cost in self._teacher_costs
            )
        return flops

    def store_flos(self) -> None:
        """Add the FLOPs since the last call: of layers and output projection, without padding."""
        self.current_flos += self._passes.drain() + float(self._row_flops)
        self._row_flops = 0.0
        super().store_flos()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a line, with the FLOPs so far and the numbers of the meter."""
        self.store_flos()
        logs["flops"] = self.state.total_flos
        if "loss" in logs:
            logs.update(self.meter.drain())
        super().log(logs, start_time)

    # ------------------------------------------------------------- evaluation

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
        targets = self.take_targets(inputs)
        rows = self._take_rows(inputs, 0.0, weighted=False)
        inputs = inputs_of(self.model, inputs, rows.labels_BS)
        options = self._loss_options(inputs, rows, 0.0, None) | {"reduction": "none"}
        with torch.no_grad(), self.compute_loss_context_manager():
            loss_BS, _, outputs = self._run(model, inputs, options)
            labelled_B = (rows.labels_BS != IGNORE_INDEX).sum(1)
            self.add_evaluated(loss_BS, labelled_B, outputs, targets)
        return loss_BS.sum() / labelled_B.sum().clamp(min=1), None, None
