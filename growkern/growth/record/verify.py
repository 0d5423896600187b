"""`growkern.verify`: checks a grown model against its plan and its source.

There are four independent checks, from cheap to expensive:

    lineage  the lineage file of a directory agrees with a new plan and with the source's files
    rebuilt  every tensor equals the one that the plain PyTorch backend builds from the plan: copies
             bit for bit, sums and what was grown into another dtype up to rounding
    inverse  every weight gives back the source's, P_out U E_in = W (`Gather.inverse`). This shows
             that the function is kept, without a forward pass and without the code of growth
    outputs  source and grown model are compared on the same tokens: logits, KL, top-1, and greedy
             generation with a cache. Models of up to 50 million parameters run in float64. Larger
             ones in 16 bits may differ by twice what these do to the source's own outputs. The
             settings of generation, which choose tokens from logits, must be the same, and so
             must the ids that both tokenizer.json give to a token
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from growkern.arguments import path_of
from growkern.errors import GrowthError, listed
from growkern.families import Family, growable_fields, value_of
from growkern.growth.history import has_record, refuse_unrecorded
from growkern.growth.models import on_cpu_by_default
from growkern.growth.outputs import Float64, all_outputs, as_model, fits, random_inputs
from growkern.growth.plan import NEW_TOKENS, OUTPUT_ERROR, GrowthPlan, as_text, has_errors
from growkern.growth.record import compare, verdict
from growkern.growth.record.compare import TensorGroup
from growkern.growth.record.lineage import (
    RECORD,
    other_source,
    plan_from_lineage,
    read_lineage,
)
from growkern.growth.record.verdict import Level
from growkern.growth.source import Source, located, open_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """Result of `growkern.verify`. `print(report)` prints its tables.

    Attributes:
        ok: True if all checks passed and the outputs are as close as the plan says. A function
            that changed is a failure unless the options ask for it, as `method="aki"` does.
        plan: the plan that the model was compared with.
        groups: errors per kind of tensor.
        outputs: relative error of the outputs, KL in nats per token, share of tokens with the same
            best guess, and more, by their names in the table.
        tokens: number of tokens, or of images, that outputs were compared on.
        failure: the first failure in one line, "" if there is none.
        contradictions: places where the lineage file disagrees with the plan or the source's files.
        notes: one line per package that had another version when the model was grown, and per part
            of a model in memory that growth leaves out, such as hooks and rounded frequencies.
        level: what the measured outputs are, in the plan's words: "exact" up to rounding,
            "approximate" within the plan's bounds, or "changed". It is "exact" only if the plan
            says so.
        bound: the relative error of outputs that the plan allows.
    """

    ok: bool
    plan: GrowthPlan
    groups: tuple[TensorGroup, ...]
    outputs: Mapping[str, float]
    tokens: int
    failure: str
    contradictions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    level: Level = "exact"
    bound: float = 0.0

    def __repr__(self) -> str:
        return f"<VerifyReport of {self.plan!r}: {_verdict(self)[0]}>"

    def __str__(self) -> str:
        return as_text(self.table())

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, with the plan's own."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        groups = [dataclasses.asdict(group) for group in self.groups]
        # last, as it is long
        plan = values.pop("plan").to_dict()
        return {**values, "groups": groups, "plan": plan}

    def table(self) -> Any:
        """The report as a rich renderable."""
        table = Table(title="tensors", title_justify="left", box=SIMPLE, show_edge=False)
        table.padding = (0, 1, 0, 0)
        # short columns beside the names, which must be whole at 80 columns
        table.add_column("kind", no_wrap=True)
        for column in ("n", "rebuilt\nerror", "inverse\nerror"):
            table.add_column(column, justify="right")
        table.add_column("")
        for group in self.groups:
            word = Text("ok", "green") if group.ok else Text("FAIL", "red")
            back = "" if group.inverse_error is None else f"{group.inverse_error:.1e}"
            # the name up to the layer's number is the same for all kinds: leave it out
            kind = group.kind.rpartition("{l}.")[2]
            table.add_row(kind, str(group.count), f"{group.rebuilt_error:.1e}", back, word)
        failed = [Text(f"FAIL: {group.worst}", "red") for group in self.groups if not group.ok]
        what = self.plan.small.input
        outputs = Table(title=f"outputs on {self.tokens} {what}", title_justify="left")
        outputs.add_column("measure")
        outputs.add_column("value", justify="right")
        for name, value in self.outputs.items():
            outputs.add_row(name, f"{value:.3g}")
        said = [Text(line, "red") for line in self.contradictions]
        said += [Text(f"note: {line}", "yellow") for line in self.notes]
        return Group(table, *failed, Text(), outputs, *said, Text(*_verdict(self)))


@on_cpu_by_default
def verify(
    source: str | Path | PreTrainedModel,
    grown: str | Path | PreTrainedModel,
    *,
    tokens: Tensor | None = None,
    labels: Tensor | None = None,
    revision: str | None = None,
    lineage: str | Path | None = None,
) -> VerifyReport:
    """Check a grown model against its source.

    Args:
        source: the model or checkpoint directory that was grown, also a directory of
            `torch.distributed.checkpoint`, or a model on the Hub, `ORGANISATION/NAME`.
        grown: the model that `grow` returned, or a directory made by `grow_checkpoint`.
        tokens: ids to compare outputs on, (batch, length) int64; default: 4 x 32 random ones. For
            a model that reads images (batch, channels, height, width); default: 4 random ones.
        labels: target of every token, (batch, length) int64, -100 to ignore one. With labels the
            loss of both models is reported. For a causal model the caller must shift them.
        revision: branch, tag or commit of a source on the Hub.
        lineage: the lineage file of the growth, or a directory with it; default: that of `grown`.

    Raises:
        GrowthError: `grown` has no growth record, or does not belong to `source`.
    """
    source = located(source, revision)
    record = None if lineage is None else read_lineage(path_of("lineage", lineage, RECORD))
    opened_grown = _opened(grown, record.family if record else None)
    family = opened_grown.spec.family.whole
    opened = _opened(source, family if family.table is not None else None, opened_grown)
    wrong, notes, other = [], [], ""
    if record or opened_grown.directory is not None:
        record = record or read_lineage(_recorded(opened, opened_grown))
        plan, other = plan_from_lineage(opened, record), other_source(opened, record)
        wrong, notes = compare.contradictions(record, plan), compare.notes_of(record)
    else:
        own = getattr(grown, "growth_plan", None)
        if own is None:
            raise GrowthError(
                "the grown model has no growth_plan: pass the source first, then the model that "
                "grow() returned, or a directory made by grow_checkpoint()"
            )
        shown = own.upcycling.of(opened) if own.upcycling else opened
        plan = dataclasses.replace(own, source=shown)
    for whose, model in (("source", opened), ("grown model", opened_grown)):
        notes += [f"{whose}: {line}" for line in model.warned]
    _check_belongs(plan, opened_grown)
    groups = compare.compare_tensors(plan, opened_grown)
    tokens = random_inputs(opened) if tokens is None else tokens
    compare.check_tokens(opened, tokens)
    outputs, dtype = _compare(plan, (opened, source), (opened_grown, grown), tokens, labels)
    level, failure = verdict.measured_level(plan, outputs, dtype)
    if bad := [group for group in groups if not group.ok]:
        failure = (
            f"{len(bad)} of {len(groups)} kinds of tensors differ, first {bad[0].worst}: the model "
            "was trained since, or its weights are damaged"
        ) + (other and f", or the source is another. {other}")
    elif wrong and not failure:
        failure = f"the lineage disagrees with this growth: {listed(wrong, 1)}"
    if differing := verdict.differences(opened, opened_grown):
        failure, level = failure or differing, "changed"
    if share := outputs.get(compare.FAILING):
        notes.append(f"{share:.0%} of the outputs are not finite in both models: not compared")
    return VerifyReport(
        not failure,
        plan,
        groups,
        outputs,
        tokens.numel() if opened.spec.input == "tokens" else len(tokens),
        failure,
        tuple(wrong),
        tuple(notes),
        level,
        verdict.stated_bound(plan, outputs, dtype),
    )


def _opened(model: Any, family: Family | None, grown: Source | None = None) -> Source:
    """A model with all that its files have; the source of `grown` with the layers that it has."""
    second = grown is None or bool(grown.spec.second)
    how: Any = {"family": family, "dequantize": grown is not None, "second": second}
    return open_source(model, allow_nonfinite=True, **how)


def _recorded(source: Source, grown: Source) -> Path:
    """The directory of a grown checkpoint, if it has a record."""
    if not has_record(grown.directory) and has_record(source.directory):
        raise GrowthError(
            f"{grown.directory} is no grown checkpoint, but {source.directory} is: give the source "
            "first, then the grown checkpoint"
        )
    refuse_unrecorded(grown.directory or Path())
    return grown.directory or Path()


def _compare(
    plan: GrowthPlan,
    source: tuple[Source, Any],
    grown: tuple[Source, Any],
    tokens: Tensor,
    labels: Tensor | None,
) -> tuple[dict[str, float], torch.dtype]:
    """Outputs of `compare_outputs`, and the dtype whose rounding they carry.

    Args:
        source, grown: each opened, and as it was given.
    """
    if fits(source[0]) and fits(grown[0]):
        old, new = as_model(source[0]), as_model(grown[0])
        with Float64():
            outputs = compare.compare_outputs(plan, old, new, tokens, labels)
            # a few models enlarge the rounding of float32 far beyond that of others
            is_large = outputs[OUTPUT_ERROR] > verdict.rounding(torch.float32)
            is_rounded = plan.rounds_weights or (is_large and plan.dtype == torch.float32)
            outputs |= _samples(plan, old, tokens, is_rounded)
        # float32 weights were rounded when they were grown; where 16-bit ones are, the plan says so
        return outputs, torch.float32 if plan.dtype == torch.float32 else torch.float64
    old, new = float32_model(*source), float32_model(*grown)
    outputs = compare.compare_outputs(plan, old, new, tokens, labels)
    coarsest = max((old.dtype, new.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    del new
    # how far 16 bits move the outputs of a source that is too large for float64
    wide = old if old.dtype.itemsize > 2 else as_model(source[0], torch.float32)
    outputs |= _samples(plan, wide, tokens, plan.rounds_weights)
    if coarsest.itemsize > 2:
        return outputs, coarsest
    narrow = old if old.dtype == coarsest else as_model(source[0], coarsest)
    # random texts count too, as a few outputs alone may change little by chance
    texts = random_inputs(plan.source, compare.SEED, compare.FEW_TEXTS)
    error = compare.moved_error(plan, wide, narrow, tokens, texts)
    return {**outputs, verdict.ARITHMETIC_ERROR: error}, torch.float32


def float32_model(source: Source, given: Any) -> Any:
    """A source as a float32 model; a model in memory that was given is returned as it is."""
    return as_model(source, torch.float32) if isinstance(given, (str, Path)) else given


def _samples(plan: GrowthPlan, source: Any, tokens: Tensor, is_rounded: bool) -> dict[str, float]:
    """How far the errors that the plan names move the outputs of the source, float32 or wider."""
    result = {}
    adds_rows = plan.dtype.itemsize == 2 and any(f.measure == NEW_TOKENS for f in plan.findings)
    share = compare.rounding_error(plan, source, tokens) if is_rounded or adds_rows else 0.0
    if is_rounded:
        result[verdict.ROUNDING_ERROR] = share
    if has_errors(plan):
        result[verdict.PLANNED_ERROR] = compare.planned_error(plan, source, tokens)
    if adds_rows:
        logits = next(iter(all_outputs(source, tokens).values()))
        result[verdict.ROUNDED_LOGITS] = share * logits.abs().max().item()
    return result


def _check_belongs(plan: GrowthPlan, grown: Source) -> None:
    for task in plan.tasks:
        if task.name not in grown.dtypes:
            raise GrowthError(f"the grown model has no tensor {task.name}")
    expected = plan.dtypes
    for name, dtype in grown.dtypes.items():
        if dtype != expected[name] and dtype.is_floating_point:
            raise GrowthError(f"the grown {name} is {dtype}, not {expected[name]} as planned")
    keys = growable_fields(plan.small.family)
    for field, (_, size) in plan.size_changes().items():
        value = value_of(grown.spec.text, field, None)
        # a flag may narrow what the field says
        if value not in (size, None) and grown.spec.size(keys[field]) != size:
            raise GrowthError(f"the grown model has {field}={value}, its growth record {size}")


def _verdict(report: VerifyReport) -> tuple[str, str]:
    """The last line of a report, and its color."""
    if not report.ok:
        return report.failure, "red"
    if report.level == "exact":
        return "passed: the same function, up to rounding", "green"
    if verdict.unasked_change(report.plan):
        measured = f"{OUTPUT_ERROR} {report.outputs[OUTPUT_ERROR]:.1e}"
        return f"passed: the change in the plan does not show here, {measured}", "yellow"
    error = f"as planned: {OUTPUT_ERROR} {report.outputs[OUTPUT_ERROR]:.1e}"
    if report.level == "approximate":
        return f"passed: approximate, {error}, within the bound {report.bound:.1e}", "green"
    return f"differs, {error}", "yellow"
