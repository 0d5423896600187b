"""`growkern family draft`: a whole draft, the search for what no value shows, and the check."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import transformers
from rich.console import Group
from rich.text import Text
from transformers.models.auto import modeling_auto

from growkern.errors import GrowthError
from growkern.families.load import own_family
from growkern.growth.draft.matrices import Matrices, other_rows
from growkern.growth.draft.norms import find_norms
from growkern.growth.draft.probe import NoRule, probe, small_config
from growkern.growth.draft.sizes import Draft, find_sizes
from growkern.growth.draft.table import (
    add_conditions,
    add_final,
    add_scales,
    as_toml,
    find_kinds,
    other_flags,
    scale_field,
    table_of,
)
from growkern.growth.draft.watch import Watch
from growkern.growth.own_table import TableReport, check_family, faults_of, first_growths
from growkern.growth.source.refused import nearest_family

# tables that a search tries
MOST_TRIED = 10
# of a fused projection, besides the usual one
ORDERS = ("v|q|k", "q|v|k", "k|v|q")
WHY_FLAG = "a tiny model with it did not grow exactly"
Edit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class DraftedFamily:
    """Result of `draft_family`.

    Attributes:
        content: the table, as the values of its TOML.
        report: of the check, with one row for each growth of a tiny model.
        assumed: what names or a search decided, one line each; the check confirms it.
    """

    content: dict[str, Any]
    report: TableReport
    assumed: tuple[str, ...]

    @property
    def verified(self) -> bool:
        """True if the check grew a tiny model in every size, and no plan was wrong."""
        return self.report.ok and bool(self.report.growths)

    @property
    def toml(self) -> str:
        """The table as the text of a TOML file, which begins with what is assumed."""
        name = next(reversed(self.content["classes"]))
        word = "verified by growing a tiny model" if self.verified else "NOT verified"
        wrong = (f"{g.sizes}: {g.why}" for g in self.report.growths if g.verdict == "wrong")
        lines = [f"drafted from {name}, {word}", *(f"assumed: {line}" for line in self.assumed)]
        lines += [f"wrong: {' '.join(line.split())}" for line in (*self.report.faults, *wrong)]
        return "".join(f"# {line}\n" for line in lines) + as_toml(self.content)

    def to_dict(self) -> dict[str, Any]:
        """The draft as JSON values."""
        said = {"verified": self.verified, "assumed": list(self.assumed), "toml": self.toml}
        return {**said, "check": self.report.to_dict()}

    def table(self) -> Any:
        """The check, and what is assumed and refused, as a rich renderable."""
        lines = [f"assumed: {line}" for line in self.assumed]
        for name, row in self.content.get("refuse", {}).items():
            lines.append(f"refused: {name}={row.get('value', 'another')}: {row['why']}")
        lines.append("verified" if self.verified else "not verified")
        return Group(self.report.table(), *map(Text, lines))


def draft_family(config: Any) -> DraftedFamily:
    """Draft a family table from a config of transformers, and check it.

    Models with one stack of layers that read text. Only the values in this config have to be right;
    others become refusals. No weights are needed, and no code but transformers' runs.

    Raises:
        GrowthError: something in the class fits no rule; it names one tensor and the nearest table.
    """
    cls = class_for(config)
    if inner := type(config).sub_configs:
        raise GrowthError(
            f"{config.model_type}: its config holds others ({', '.join(inner)}), and a draft has "
            "one stack of layers that reads text"
        )
    small = small_config(config)
    small.architectures = [cls.__name__]
    try:
        draft = Draft(cls, small, probe(cls, small), Watch(cls, small))
        table = _table(draft)
    except NoRule as error:
        names = probe(cls, small).base
        raise GrowthError(f"{error}; {nearest_family(names)}") from error
    best = _searched(table, small, cls.__name__)
    found, report = best[0], best[1]
    _refuse_flags(found, small, cls.__name__)
    return DraftedFamily(found, report, (*draft.assumed, *best[2]))


def class_for(config: Any) -> Any:
    """The class to draft from: that of the config, or one with a head for tokens."""
    names = config.architectures or ()
    known = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )
    names = (*names, *(kinds[config.model_type] for kinds in known if config.model_type in kinds))
    for name in names:
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
    raise GrowthError(
        f"{config.model_type}: transformers {transformers.__version__} has no class for it that "
        'predicts tokens: name one in "architectures"'
    )


def _table(draft: Draft) -> dict[str, Any]:
    """The table of a draft, by measurement alone."""
    find_sizes(draft)
    layers = _layers(draft)
    spaces, keys = draft.spaces, "kv_heads" if "kv_heads" in draft.sizes else "q_heads"
    spaces["stream"], spaces["normed"] = {"kind": "stream"}, {"kind": "normed", "of": "stream"}
    spaces["q"] = {"kind": "heads", "heads": "q_heads", "part": "query"}
    spaces["k"] = {"kind": "heads", "heads": keys, "part": "key"}
    spaces["v"] = {"kind": "heads", "heads": keys}
    spaces["attn"] = {"kind": "heads", "heads": "q_heads"}
    spaces["final"] = {"kind": "tied_output", "of": "stream", "untied": "normed"}
    written = find_norms(draft, layers)
    embedding = (n for n, r in draft.rows.items() if r.get("extra") == "carry")
    first = next((n for n in embedding if n not in draft.outer_norm), None)
    Matrices(draft, written, [x for pair in layers.values() for x in pair]).find()
    other_rows(draft, first)
    if draft.outer_norm:
        # extra coordinates carry the mean through the FFN, to the norm behind it
        units = {key for key, space in spaces.items() if space["kind"] == "units"}
        passing = {f"{word}:{key}" for word in ("write", "read") for key in units}
        for name in [n for n in draft.rows if n.startswith(draft.stack)]:
            weight = draft.rows.get(re.sub("bias$", "weight", name), {})
            if passing & {*weight.get("axes", ())}:
                draft.rows[name]["into"] = draft.outer_norm
    add_conditions(draft)
    kinds = find_kinds(draft)
    add_scales(draft)
    add_final(draft)
    return table_of(draft, kinds)


def _layers(draft: Draft) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """What enters and leaves every layer. Sets the draft's stack and prefix."""
    model = draft.watch.model
    base = draft.cls.base_model_prefix
    draft.prefix = f"{base}." if hasattr(model, base) else ""
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == draft.layers
        and not re.search(r"\.\d+\.", name)
    ]
    if len(lists) != 1:
        raise NoRule(f"{len(lists)} lists of layers ({', '.join(lists)}); a draft has one")
    draft.stack = lists[0]
    calls = {call.name: call for call in draft.watch.calls}
    found = {}
    for layer in range(draft.layers):
        call = calls.get(f"{draft.stack}.{layer}")
        if call is None or call.x is None or call.y is None:
            raise NoRule(f"{draft.stack}.{layer} is not called as a module")
        found[layer] = call.x, call.y
    return found


def _searched(
    table: dict[str, Any], config: Any, class_name: str
) -> tuple[dict[str, Any], TableReport, tuple[str, ...]]:
    """The table, or if the check calls it wrong, the first of its variants that is right."""
    report = check_family(own_family("draft", table), config, class_name)
    if report.ok or report.faults:
        return table, report, ()
    wrong = {growth.sizes for growth in report.growths if growth.verdict == "wrong"}
    for number, (what, other) in enumerate(_variants(table, config)):
        if number == MOST_TRIED:
            break
        family = own_family("draft", other)
        if all(g.verdict != "wrong" for g in first_growths(family, config, class_name, wrong)):
            found = check_family(family, config, class_name)
            if found.ok:
                return other, found, (f"{what}, by a search",)
    return table, report, ()


def _variants(table: dict[str, Any], config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Other tables with one or two facts changed that no value shows, likeliest first."""
    edits = [*_edits(table, config)]
    for count in (1, 2):
        for some in combinations(edits, count):
            other = copy.deepcopy(table)
            for _, edit in some:
                edit(other)
            yield " and ".join(name for name, _ in some), other


def _edits(table: dict[str, Any], config: Any) -> Iterator[tuple[str, Edit]]:
    attention = table["attention"]

    def attend(**facts: Any) -> Edit:
        return lambda other: other["attention"].update(facts)

    if attention["positions"] == "rotary":
        pairs = "halves" if attention.get("pairs") == "adjacent" else "adjacent"
        yield f"pairs={pairs}", attend(pairs=pairs)
        yield "a part of each head turns", attend(partial=True)
    axes = {axis for row in _rows(table) for axis in row.get("axes", ())}
    if (fused := "write:q|k|v") in axes:
        mixed = {"kind": "heads", "heads": "q_heads", "part": "query|key|value"}
        yield "each head has its query, key and value", _replace(fused, "write:qkv", mixed)
    if attention["positions"] == "rotary":
        yield "whole pairs turn", attend(whole_pairs=True)
    field = scale_field(config)
    how = {"scale": "constant", **({"field": field} if field else {})}
    yield "scores have a constant scale", attend(**how)
    if "experts" in table["spaces"]:
        last = "write:experts", "read:experts"
        yield "every copy of an expert has its whole weight", _replace(*last, beside="write:stream")
    for axis in sorted(axes):
        first, _, second = axis.removeprefix("write:").partition("|")
        if first == second:
            pair = {"kind": "units", "size": table["spaces"][first]["size"], "width": 2}
            gated = _replace(axis, "write:gated", pair)
            yield "two projections of a unit lie side by side", gated
    if fused in axes:
        for order in ORDERS:
            yield f"heads in the order {order}", _replace(fused, f"write:{order}")


def _rows(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for rows in table["tensors"].values():
        for row in rows.values():
            yield from row if isinstance(row, list) else [row]


def _replace(
    old: str, new: str, space: dict[str, Any] | None = None, *, beside: str | None = None
) -> Edit:
    """An edit that gives an axis another space, in all rows or those with the axis `beside`."""

    def edit(table: dict[str, Any]) -> None:
        if space:
            table["spaces"][new.partition(":")[2]] = space
        for row in _rows(table):
            axes = row.get("axes", ())
            if old in axes and (beside is None or beside in axes):
                row["axes"] = [new if axis == old else axis for axis in axes]

    return edit


def _refuse_flags(table: dict[str, Any], config: Any, class_name: str) -> None:
    """Refuse the other value of every flag with which a tiny model does not grow exactly."""
    family = own_family("draft", table)
    stream = table["config"]["stream"]
    for flag, other in other_flags(config, table.get("refuse", {})):
        try:
            growths = [*first_growths(family, other, class_name, {stream})]
            is_right = not faults_of(family, other) and all(g.verdict != "wrong" for g in growths)
        except Exception:
            # classes raise errors of any type with flags that exclude each other
            is_right = False
        if not is_right:
            value = not getattr(config, flag)
            table.setdefault("refuse", {})[flag] = {"value": value, "why": WHY_FLAG}
