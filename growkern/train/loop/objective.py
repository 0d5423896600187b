"""The loss of a batch: of its labels and of teachers, at the depth of its step.

The fused loss takes the place of the model's output projection for the span of one call, so no
logits are made.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from growkern.train.loop.growing import GrowthInRun
from growkern.train.loop.meter import FlopCounter, Meter
from growkern.train.loss import (
    ROW_COUNTS,
    TAUGHT_BY,
    LossRows,
    RowCounts,
    Teachers,
    check_model,
    count_kl_rows,
    count_tokens,
    inputs_of,
    is_two_stacks,
    real_rows,
    router_inputs,
    router_term,
    router_weight,
    take_rows,
)
from growkern.train.model import (
    IGNORE_INDEX,
    ModelCost,
    ModelPart,
    TokenCounts,
    TwoStageConfig,
    check_head,
    find_stacks,
    head_options,
    head_swap,
    inside_ddp,
    is_causal,
    layer_stacks,
    model_depth,
    run_model,
    take_logits,
    text_model,
)
from growkern.train.model.sub_model import sub_model
from growkern.train.sections import InheritanceSchedule, LossOptions


class StepPlan(NamedTuple):
    """How a step trains."""

    part: ModelPart | None = None  # that trains; None: the whole model
    alpha: float = 0.0  # share of the KL divergence

    @property
    def taught(self) -> bool:
        """Whether there is a KL term."""
        return self.alpha > 0


WHOLE = StepPlan()


class _Run(NamedTuple):
    """A batch that has passed the model."""

    loss: Tensor
    rows: LossRows
    parts: Any
    outputs: Any
    taught_by: list[int] | None


class Objective:
    """What a model is trained and evaluated on.

    Args:
        loss: the options of the loss.
        inheritance: when and how strongly the teachers take part.
        teachers: that `inheritance` asks for, or none.
        in_stages: whether there is a stage 1.

    Attributes:
        causal: whether the model predicts the next token.
        decoder: whether the labels belong to a decoder beside an encoder.
        flops: of the steps.
    """

    # rows with a KL term, and real tokens, in the whole accumulated batch of all processes
    _kl_items: Tensor | None = None
    _tokens: Tensor | None = None

    def __init__(
        self,
        model: Any,
        loss: LossOptions,
        inheritance: InheritanceSchedule | None,
        teachers: Teachers,
        tokenizer: Any = None,
        *,
        in_stages: bool = False,
    ) -> None:
        self.loss, self.inheritance, self.teachers = loss, inheritance, teachers
        self._tokenizer, self._in_stages = tokenizer, in_stages
        self._loss_arguments = loss.arguments()
        self.decoder = is_two_stacks(model)
        self.causal = not self.decoder and is_causal(model)
        costs = [ModelCost(x, find_stacks(text_model(x))) for x in teachers.models]
        self.flops = FlopCounter(None, costs, model.main_input_name, decoder=self.decoder)

    def take_model(self, model: Any) -> None:
        """Look at the model that will be trained from now on."""
        check_model(model, self.causal)
        check_head(model)
        self._head_options = head_options(model)
        find = layer_stacks if self._in_stages else find_stacks
        self._stacks = find(text_model(model))
        self.layers = model_depth(self._stacks) or model.config.num_hidden_layers
        self._vocabulary = self.check_size(model)
        self._router_weight = router_weight(model)
        self.flops.cost = ModelCost(model, self._stacks)

    def check_size(self, model: Any) -> int | None:
        """The columns that model and teachers share; refuses a model that does not fit them."""
        return self.teachers.common_vocabulary(model, self._tokenizer)

    # ------------------------------------------------------------------- loss

    def plan(self, step: int, two_stage: TwoStageConfig | None, growths: GrowthInRun) -> StepPlan:
        """The part that trains, and the KL share, in a step."""
        part = two_stage.part(step, self.layers) if two_stage else None
        alpha = self.inheritance.alpha_at(step) if self.inheritance else 0.0
        return StepPlan(part or growths.part(step), alpha)

    def count(self, batches: list[Any], device: Any, accelerator: Any) -> None:
        """Count the rows of an accumulated batch that the terms beside the labels have.

        Args:
            batches: at least one, without repeated examples.
        """
        schedule, lacking = self.inheritance, self.teachers.lacks_rows
        if self._router_weight:
            tokens = torch.stack([count_tokens(batch) for batch in batches]).sum()
            self._tokens = add_up(accelerator, tokens.to(device))
        known = self.teachers.known
        if schedule is not None and (schedule.kl_rows == "all" or lacking or known is not None):
            kind: Any = {"causal": self.causal, "decoder": self.decoder, "known": known}
            rows = [count_kl_rows(batch, schedule.kl_rows, **kind) for batch in batches]
            self._kl_items = add_up(accelerator, sum(rows, torch.zeros((), device=device)))

    def flops_per_step(
        self,
        two_stage: TwoStageConfig | None,
        sequences: int,
        length: int,
        labelled: float,
        decoder_length: int | None = None,
    ) -> dict[str, float]:
        """Estimate the FLOPs of one optimizer step, by the name of what takes them.

        Args:
            two_stage: stage 1 costs a mean over its depths.
            sequences: in a step, of all processes together.
            length: tokens per sequence.
            labelled: share of the tokens with a label; those of a decoder if there is one.
            decoder_length: tokens per sequence of a decoder beside an encoder; None: `length`.
        """
        cost, teachers = self.flops.cost, self.flops.teachers
        rows = sequences * (decoder_length or length) * labelled
        sizes = TokenCounts.of_rows(sequences, length, decoder_length=decoder_length)
        head, flops = rows * cost.head_row(train=True), {}
        if two_stage is not None and two_stage.stage1_steps:
            block, layers = two_stage.layers_per_block, self.layers
            depths = [min(n, layers) for n in range(block, layers + block, block)]
            costs = [cost.train(sizes, two_stage.part_of(depth)) for depth in depths]
            flops["stage 1"] = sum(costs) / len(costs) + head
        flops["a full step"] = cost.train(sizes) + head
        if teachers:
            each = (x.forward(sizes) + rows * x.head_row(train=False) for x in teachers)
            flops["the teachers"] = sum(each)
        return flops

    def train(
        self, model: Any, inputs: Any, plan: StepPlan, items: Any, accelerator: Any, meter: Meter
    ) -> tuple[Tensor, Any]:
        """The loss of a batch in training, and the other outputs of the model.

        Args:
            model: in training, maybe wrapped.
            items: labels of the whole accumulated batch of all processes; None: of this batch.
            meter: gets the parts of the loss.
        """
        run = self._run(model, inputs, plan, accelerator, items, training=True)
        self._record(run, plan, meter)
        if self._router_weight:
            real_BS = real_rows(inputs, run.rows.labels_BS, causal=False)
            sums = partial(add_up, accelerator)
            term = router_term(inside_ddp(model), run.outputs, real_BS, sums)
            if term is not None:
                meter.add("aux_loss", term.mean().detach(), term.tokens)
                every = term.tokens if items is None or self._tokens is None else self._tokens
                # a batch that only fills up has none
                share = term.loss / every.clamp(min=1)
                run = run._replace(loss=run.loss + self._router_weight * share)
        loss = run.loss
        if items is not None and accelerator.num_processes > 1:
            # DDP averages the gradients, but the loss is divided by the labels of all processes
            loss = loss * accelerator.num_processes
        return loss, run.outputs

    def evaluate(self, model: Any, inputs: Any, items: Any, accelerator: Any) -> tuple[Tensor, Any]:
        """The loss of a batch without a teacher, and the other outputs; arguments of `train`."""
        run = self._run(model, inputs, WHOLE, accelerator, items)
        return run.loss, run.outputs

    def evaluate_rows(self, model: Any, inputs: Any, accelerator: Any) -> tuple[Tensor, Tensor]:
        """The losses (B, S) of a batch, and the labels of each example (B,)."""
        run = self._run(model, inputs, WHOLE, accelerator, None, reduction="none")
        return run.loss, (run.rows.labels_BS != IGNORE_INDEX).sum(1)

    def _run(
        self,
        model: Any,
        inputs: Any,
        plan: StepPlan,
        accelerator: Any,
        items: Any,
        *,
        training: bool = False,
        **options: Any,
    ) -> _Run:
        # accelerate looks at every module to unwrap a model
        inner, inputs = inside_ddp(model), dict(inputs)
        rows = self._take_rows(inputs, plan, weighted=training)
        inputs = inputs_of(inner, inputs, rows.labels_BS)
        options |= self._options(inputs, rows, plan, items)
        if training:
            options |= self._loss_arguments
        taught_by = inputs.get(TAUGHT_BY)
        with accelerator.autocast() if plan.taught else contextlib.nullcontext():
            loss_function = self.teachers.loss_function(inputs, plan.taught)
        seen = []

        def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            loss, parts = loss_function(hidden, weight, student_bias=bias, **options)
            seen.append(parts)
            return loss

        part = partial(sub_model, self._stacks, plan.part)
        with part():
            inputs |= router_inputs(inner)
        outputs = run_model("model", model, inputs, part(), head_swap(inner, loss_of))
        loss = take_logits(outputs)
        return _Run(loss, rows, seen[0], outputs, taught_by)

    def _take_rows(self, inputs: dict[str, Any], plan: StepPlan, *, weighted: bool) -> LossRows:
        """Remove the labels and row weights from a batch, and align them."""
        column = self.loss.row_weights
        if column is not None and not weighted:
            inputs.pop(column, None)
        return take_rows(
            inputs,
            causal=self.causal,
            kl_rows=self.inheritance.kl_rows if self.inheritance and plan.taught else "labels",
            row_weights=column if weighted else None,
            decoder=self.decoder,
            known=self.teachers.known if plan.taught else None,
        )

    def _options(
        self, inputs: dict[str, Any], rows: LossRows, plan: StepPlan, items: Tensor | int | None
    ) -> dict[str, Any]:
        """The arguments of the loss. The counts of the rows are removed from `inputs`."""
        counts: RowCounts | None = inputs.pop(ROW_COUNTS, None)
        options: dict[str, Any] = rows.options() | self._head_options
        options |= {"alpha": plan.alpha, "vocab_size": self._vocabulary, "return_parts": True}
        masked = isinstance(rows.kl_rows, Tensor)
        every = self.inheritance is not None and self.inheritance.kl_rows == "all"
        if counts is not None:
            # rows without a term then cost nothing on a GPU
            options["max_rows"] = max(1, counts.live if masked and every else counts.labelled)
        if items is not None:
            options["num_items"] = torch.as_tensor(items)
        if plan.taught and self.inheritance is not None:
            options |= self.inheritance.arguments()
            options["teacher_vocab_size"] = self.teachers.known
            if masked and items is not None and self._kl_items is not None:
                options["num_items"] = (options["num_items"], self._kl_items)
        return options

    def _record(self, run: _Run, plan: StepPlan, meter: Meter) -> None:
        rows = run.rows
        _, kl_BS = rows.masks()
        if rows.untaught is not None:
            before = rows.untaught + kl_BS.sum()
            meter.add("kl_rows_lost", rows.untaught / before.clamp(min=1), before)
        labelled_BS, kl_BS = rows.measured()
        labelled = labelled_BS.sum()
        is_same = not isinstance(rows.kl_rows, Tensor)
        meter.add_parts(run.parts, labelled, labelled if is_same else kl_BS.sum())
        meter.add("alpha", plan.alpha)
        meter.add("depth", float(plan.part.depth if plan.part else self.layers))
        live_BS = labelled_BS if is_same or not plan.taught else labelled_BS | kl_BS
        self.flops.add_rows(live_BS.sum(1), run.taught_by, taught=plan.taught)


def add_up(accelerator: Any, x: Tensor) -> Tensor:
    """The sum of a tensor over all processes."""
    if accelerator.num_processes == 1:
        return x
    total: Tensor = accelerator.reduce(x.to(accelerator.device), "sum")
    return total


def largest(accelerator: Any, x: Tensor) -> Tensor:
    """The largest of each number in all processes."""
    if accelerator.num_processes > 1:
        # accelerate has sums and means only
        dist.all_reduce(x := x.to(accelerator.device), dist.ReduceOp.MAX)
    return x
