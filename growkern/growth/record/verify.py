"""Is the grown model what the plan says, and does it compute what the source computes?

Independent answers, from cheap to dear:

    lineage  what a directory's lineage file says is what the plan gives, of these source files
    replay   every tensor equals the plan carried out again by the plain PyTorch backend
    fold     P_out U E_in = W (`record.fold`): read back through the copies, every weight
             is the source's; this is function preservation tensor by tensor, without a forward pass
             or the growth code
    outputs  source and grown model on the same tokens: logits, KL, top-1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from growkern.errors import GrowthError
from growkern.growth.plan.blueprint import Task
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.record.fold import fold_tensor
from growkern.growth.record.lineage import (
    contradictions,
    plan_from_lineage,
    read_lineage,
    version_notes,
)
from growkern.growth.record.origins import origin_of
from growkern.growth.record.outputs import (
    check_tokens,
    compare_outputs,
    load_model,
    load_source,
    random_tokens,
)
from growkern.growth.source.source import Source, open_source
from growkern.growth.tensors.tensor import build_tensor

# relative logit error in float32 that rounding explains; a wrong tensor shows as 1e-3 and more
OUTPUT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class TensorGroup:
    """All tensors of one kind (the same row of the family table).

    Attributes:
        replay_error: largest relative difference to the plan carried out again.
        fold_error: largest relative (Frobenius) difference of the folded weight to the source's,
            None where folding does not apply (norms, AKI, random weights).
        worst: the tensor with the largest error.
    """

    kind: str
    count: int
    replay_error: float
    fold_error: float | None
    worst: str
    ok: bool


@dataclass(frozen=True)
class VerifyReport:
    """Result of `growkern.verify`; print `report.table()`.

    Attributes:
        ok: every tensor passed and, where the plan is exact, so did the outputs.
        outputs: relative logit error, KL in nats per token, top-1 agreement.
        failure: one line on what failed, "" otherwise.
        contradictions: what the lineage file says otherwise than the plan and the source's files.
        notes: one line per package that was another version when the model was grown.
    """

    ok: bool
    plan: GrowthPlan
    groups: tuple[TensorGroup, ...]
    outputs: Mapping[str, float]
    tokens: int
    failure: str
    contradictions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def table(self) -> Any:
        """The report as a rich renderable."""
        from growkern.growth.record.verify import verify_table

        return verify_table(self)


def verify(
    source: Any, grown: Any, *, tokens: Tensor | None = None, labels: Tensor | None = None
) -> VerifyReport:
    """Check a grown model against its source.

    Args:
        source: the model or checkpoint directory that was grown, also one of
            `torch.distributed.checkpoint`.
        grown: what `grow` returned, or a directory made by `grow_checkpoint`.
        tokens: (batch, length) int64 ids to compare outputs on; default 4 x 32 random ones.
        labels: (batch, length) int64 targets of the tokens' rows, -100 where there is none; gives
            both models' loss. A causal model's are shifted by the caller.

    Raises:
        GrowthError: `grown` has no growth record, or does not belong to `source`.
    """
    opened = open_source(source, allow_nonfinite=True)
    opened_grown = open_source(grown, allow_nonfinite=True)
    wrong, notes = [], []
    if opened_grown.directory is not None:
        lineage = read_lineage(opened_grown.directory)
        plan = plan_from_lineage(opened, lineage)
        wrong, notes = contradictions(lineage, plan), version_notes(lineage)
    else:
        plan = dataclasses.replace(_own_plan(grown), source=opened)
    _check_belongs(plan, opened_grown)
    groups = tuple(_check_groups(plan, opened_grown))
    if tokens is None:
        tokens = random_tokens(opened)
    check_tokens(opened, tokens)
    outputs = compare_outputs(plan, load_source(opened, source), load_model(grown), tokens, labels)
    failure = ""
    if bad := [group for group in groups if not group.ok]:
        failure = f"{len(bad)} kinds of tensors differ, first {bad[0].worst}"
    elif plan.exact and not outputs["relative error"] <= OUTPUT_TOLERANCE:
        failure = f"planned exact, but outputs differ by {outputs['relative error']:.1e}"
    elif wrong:
        failure = f"the lineage says otherwise in {len(wrong)} places, first {wrong[0]}"
    count = tokens.numel()
    return VerifyReport(
        not failure, plan, groups, outputs, count, failure, tuple(wrong), tuple(notes)
    )


def _own_plan(grown: Any) -> GrowthPlan:
    plan = getattr(grown, "growth_plan", None)
    if plan is None:
        raise GrowthError(
            "the grown model has no growth_plan; pass what grow() returned or a directory made by "
            "grow_checkpoint()"
        )
    return plan


def _check_belongs(plan: GrowthPlan, grown: Source) -> None:
    for task in plan.tasks:
        if task.name not in grown.dtypes:
            raise GrowthError(f"the grown model has no tensor {task.name}")
    for name, dtype in grown.dtypes.items():
        if dtype != plan.dtype and dtype.is_floating_point:
            raise GrowthError(f"the grown {name} is {dtype}, its growth record says {plan.dtype}")
    for field, (_, size) in plan.size_changes().items():
        found = getattr(grown.config, field, None)
        if found not in (size, None):
            raise GrowthError(f"the grown model has {field}={found}, its growth record {size}")


# ------------------------------------------------------------------ tensors


def _check_groups(plan: GrowthPlan, grown: Source) -> list[TensorGroup]:
    by_kind: dict[str, list[Task]] = {}
    for task in plan.tasks:
        by_kind.setdefault(task.tensor.template, []).append(task)
    return [_check_group(plan, grown, kind, tasks) for kind, tasks in by_kind.items()]


def _check_group(plan: GrowthPlan, grown: Source, kind: str, tasks: list[Task]) -> TensorGroup:
    replay, fold, ok, worst = 0.0, None, True, (-1.0, tasks[0].name)
    for task in tasks:
        actual = grown.read(task.name).cpu()
        expected = build_tensor(plan, task, backend="reference")
        error, within = _replay_error(actual, expected)
        replay = max(replay, error)
        folded = _folded(plan, task, actual)
        if folded is not None:
            fold_error = _relative(folded, plan.source.read(task.source).cpu().double())
            fold = max(fold or 0.0, fold_error)
            within &= fold_error <= _fold_tolerance(actual.dtype)
            error = max(error, fold_error)
        ok &= within
        # a failure outranks any larger error that rounding explains
        worst = max(worst, (error + (0 if within else 1e9), task.name))
    return TensorGroup(kind, len(tasks), replay, fold, worst[1], ok)


def _replay_error(actual: Tensor, expected: Tensor) -> tuple[float, bool]:
    """Largest relative difference, and whether one rounding of the storage explains it all."""
    eps = torch.finfo(actual.dtype).eps
    actual64, expected64 = actual.double(), expected.double()
    difference = (actual64 - expected64).abs()
    # 4 steps where products round twice, 1 for 16-bit types; 1 % of 1.0 is just 1 step of bf16,
    # but rounding moves few elements, never all of them
    is_narrow = actual.dtype.itemsize == 2
    allowed = (1 if is_narrow else 4) * eps * expected64.abs()
    moved = is_narrow and _relative(actual64, expected64) > eps / 4
    scale = expected64.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    both_nonfinite = ~torch.isfinite(actual64) & ~torch.isfinite(expected64)
    wrong = (~(difference <= allowed) & ~both_nonfinite).any()
    return (difference.nan_to_num(0.0).max() / scale).item(), not (bool(wrong) or moved)


def _relative(actual: Tensor, truth: Tensor) -> float:
    norm = truth.norm()
    return ((actual - truth).norm() / norm).item() if norm > 0 else actual.norm().item()


def _fold_tolerance(dtype: torch.dtype) -> float:
    return (2 if dtype.itemsize == 2 else 16) * torch.finfo(dtype).eps


def _folded(plan: GrowthPlan, task: Task, grown: Tensor) -> Tensor | None:
    """A weight read back, where all of it is the source tensor's."""
    origin = origin_of(plan, task)
    if origin.holds != "copies" or task.upper is not None or task.tensor.norm:
        return None
    return fold_tensor(origin, lambda name: plan.layout.space(name, task.source_layer), grown)


def verify_table(report: VerifyReport) -> Group:
    """Per kind of tensor: replayed and folded errors; then the outputs."""
    table = Table(title="tensors", title_justify="left")
    for column in ("kind", "tensors", "replay error", "fold error", ""):
        is_text = column in ("kind", "")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    for group in report.groups:
        verdict = Text("ok", "green") if group.ok else Text(f"FAIL: {group.worst}", "red")
        fold = "" if group.fold_error is None else f"{group.fold_error:.1e}"
        # layers are told from the rest by their number
        kind = group.kind.rpartition("{l}.")[2]
        table.add_row(kind, str(group.count), f"{group.replay_error:.1e}", fold, verdict)
    outputs = Table(title=f"outputs on {report.tokens} tokens", title_justify="left")
    outputs.add_column("measure")
    outputs.add_column("value", justify="right")
    for name, value in report.outputs.items():
        outputs.add_row(name, f"{value:.3g}")
    kept = "exact to rounding" if report.plan.exact else "not exact, as planned"
    state = Text(f"passed ({kept})", "green") if report.ok else Text(report.failure, "red")
    said = [Text(line, "red") for line in report.contradictions]
    said += [Text(f"note: {line}", "yellow") for line in report.notes]
    return Group(table, outputs, *said, state)
