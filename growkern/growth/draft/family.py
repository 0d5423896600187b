"""`growkern family draft`: a whole draft, the search for what no value shows, and the check."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations, islice
from typing import Any

import transformers
from rich.console import Group
from rich.text import Text
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from growkern.errors import GrowthError, reason
from growkern.families import own_family
from growkern.files import toml_lines
from growkern.growth.draft.probe import small_configs
from growkern.growth.draft.sizes import Draft
from growkern.growth.draft.table import table_of
from growkern.growth.draft.walk import Walk
from growkern.growth.own_table import TableReport, check_family, first_growths
from growkern.growth.source import described
from growkern.package import DOCS

# tables that a search tries
MOST_TRIED = 10
# of a growth, the worst last. Refusals say nothing of a table
VERDICTS = ("refused", "exact", "approximate", "changed", "wrong")


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
        """True if the check grew a tiny model, and no plan was wrong. Sizes may be refused."""
        return self.report.ok and bool(self.report.growths)

    @property
    def refused(self) -> dict[str, str]:
        """Size -> why the check could not grow it, neither evenly nor unevenly."""
        why = {name: said for name, (verdict, said) in self._sizes.items() if verdict == "refused"}
        return {name: " ".join(said.split()) for name, said in why.items()}

    @property
    def _sizes(self) -> dict[str, tuple[str, str]]:
        """Size -> the worst verdict of its growths alone, and why. Refusals count least."""
        found: dict[str, tuple[str, str]] = {}
        for growth in self.report.growths:
            if alone := re.fullmatch(r"(\S+) \d+ -> \d+", growth.sizes):
                one = growth.verdict, growth.why
                found[alone[1]] = max(
                    found.get(alone[1], one), one, key=lambda pair: VERDICTS.index(pair[0])
                )
        return found

    @property
    def measured(self) -> tuple[str, ...]:
        """What changed fields and the values in a tiny model showed, one line each."""
        norm, config = self.content.get("norm", {}), self.content.get("config", {})
        fields = (size.get("field") if isinstance(size, dict) else size for size in config.values())
        number = sum(map(len, self.content["tensors"].values()))
        return (
            f"sizes, by the axes that they move: {', '.join(f for f in fields if type(f) is str)}",
            f"what {number} kinds of tensors read and write, by the values in a tiny model",
            f"norms, by vectors: {norm.get('kind')}, {norm.get('placement')}",
        )

    @property
    def _notes(self) -> list[str]:
        """Whether the table is verified, and what is measured, assumed, refused and wrong."""
        name, flags = next(reversed(self.content["classes"])), self.content.get("refuse", {})
        word = "verified by growing a tiny model" if self.verified else "NOT verified"
        wrong = (f"{g.sizes}: {g.why}" for g in self.report.growths if g.verdict == "wrong")
        grown = {
            verdict: [name for name, (worst, _) in self._sizes.items() if worst == verdict]
            for verdict in VERDICTS[1:-1]
        }
        return [
            f"drafted from {name}, {word}",
            *(f"measured: {line}" for line in self.measured),
            *(f"{word} in: {', '.join(names)}" for word, names in grown.items() if names),
            *(f"refused: {size}: {why}" for size, why in self.refused.items()),
            *(f"assumed: {line}" for line in self.assumed),
            *(f"refused: {k}={r.get('value', 'another')}: {r['why']}" for k, r in flags.items()),
            *(f"wrong: {' '.join(line.split())}" for line in (*self.report.faults, *wrong)),
        ]

    @property
    def toml(self) -> str:
        """The table as the text of a TOML file, which begins with the notes."""
        sections = {k: v for k, v in self.content.items() if isinstance(v, dict) and k != "tensors"}
        sections |= {f"tensors.{part}": rows for part, rows in self.content["tensors"].items()}
        plain = {k: v for k, v in self.content.items() if not isinstance(v, dict)}
        lines = [*(f"# {note}" for note in self._notes), *toml_lines(plain)]
        for name, entries in sections.items():
            lines += ["", f"[{name}]", *toml_lines(entries)]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """The draft as JSON values."""
        said: dict[str, Any] = {"verified": self.verified, "refused": self.refused}
        said |= {name: list(getattr(self, name)) for name in ("assumed", "measured")}
        return {**said, "toml": self.toml, "check": self.report.to_dict()}

    def table(self) -> Any:
        """The check and the notes as a rich renderable."""
        return Group(self.report.table(), *map(Text, self._notes))


def draft_family(config: Any) -> DraftedFamily:
    """Draft a family table from a config of transformers, and check it.

    Models with one stack of layers that read text. Only the values in this config have to be right;
    others become refusals. No weights are needed, and no code but transformers' runs.

    Raises:
        GrowthError: something in the class fits no rule; it names one tensor and the nearest table.
    """
    try:
        cls = class_for(config)
        if inner := [k for k in type(config).sub_configs if getattr(config, k, None)]:
            raise GrowthError(
                f"{config.model_type}: its config holds others ({', '.join(inner)}), and a draft "
                "has one stack of layers that reads text"
            )
        draft = _measured(cls, config)
        Walk(draft)
        found, report, assumed = _searched(table_of(draft), draft.config, cls.__name__)
        if report.faults:
            raise GrowthError(report.faults[0])
    except GrowthError as error:
        what, _ = described(config.model_type, config.to_dict())
        raise GrowthError(
            f"{error}; {what}; extend its table by hand, and check yours with growkern family "
            f"draft SRC --table my.toml: {DOCS}/add_model.md"
        ) from error
    return DraftedFamily(found, report, (*draft.assumed, *assumed))


def _measured(cls: Any, config: Any) -> Draft:
    """The first small model of a class that runs, measured."""
    error = GrowthError("no config with few units fits the class")
    for small in small_configs(config):
        small.architectures = [cls.__name__]
        try:
            return Draft(cls, small)
        except Exception as other:
            # classes raise errors of any type where sizes do not fit
            error = other if isinstance(other, GrowthError) else GrowthError(reason(other))
    raise error


def class_for(config: Any) -> Any:
    """The class to draft from: that of the config, or one with a head for tokens."""
    causal, masked = (
        kinds.get(config.model_type, "")
        for kinds in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    )
    for name in (*(config.architectures or ()), causal, masked):
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
    raise GrowthError(
        f"{config.model_type}: transformers {transformers.__version__} has no class for it that "
        'predicts tokens: name one in "architectures"'
    )


def _searched(table: dict[str, Any], config: Any, class_name: str) -> tuple[Any, TableReport, Any]:
    """The table, or if the check calls it wrong, the first that is right with other facts."""
    report = check_family(own_family("draft", table), config, class_name)
    wrong = {growth.sizes for growth in report.growths if growth.verdict == "wrong"}
    guesses = [*_guesses(table, config)] if wrong else []
    pairs = chain.from_iterable(combinations(guesses, count) for count in (1, 2))
    for some in islice(pairs, MOST_TRIED):
        other = json.loads(json.dumps(table))
        for _, edit in some:
            edit(other)
        family = own_family("draft", other)
        if all(g.verdict != "wrong" for g in first_growths(family, config, class_name, wrong)):
            found = check_family(family, config, class_name)
            if found.ok:
                return other, found, [f"{' and '.join(why for why, _ in some)}, by a search"]
    return table, report, ()


def _guesses(table: dict[str, Any], config: Any) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """What no value shows but may be true of a table, and how it edits one, likeliest first."""

    def fact(key: str, value: Any, section: str = "attention") -> tuple[str, Any]:
        return f"{key}={value}", lambda table: table[section].update({key: value})

    attention, text = table["attention"], json.dumps(table["tensors"])
    if attention["positions"] == "rotary":
        yield fact("pairs", "halves" if attention.get("pairs") == "adjacent" else "adjacent")
        yield fact("partial", True)
        yield fact("whole_pairs", True)
    else:
        # positions follow from the number of heads
        yield fact("q_heads", {"field": table["config"]["q_heads"], "fixed": True}, "config")
    if "write:q|k|v" in text:
        mixed = {"kind": "heads", "heads": "q_heads", "part": "query|key|value"}
        yield "each head has all three", partial(_in_space, "write:q|k|v", "qkv", mixed)
    if '"carry"' in text:
        yield "units cannot carry a mean", partial(_edit_rows, {"extra": None, "into": None}, "")
    if "correction_bias" in text:
        # each copy of an expert has its share of the probability, and so of what is added to it
        shared = partial(_edit_rows, {"scale": "1/experts"}, "correction_bias")
        yield "a bias beside probabilities of experts", shared
    scalars = [key for key in config.to_dict() if re.search("attn.*scalar|scalar.*attn", key)]
    scale = {"scale": "constant", **dict(zip(["field"], scalars, strict=False))}
    yield "scores have a constant scale", lambda table: table["attention"].update(scale)
    for axis, key in sorted({*re.findall(r'"(write:(\w+)\|\2)"', text)}):
        pair = {"kind": "units", "size": table["spaces"][key]["size"], "width": 2}
        yield "two projections lie side by side", partial(_in_space, axis, "gated", pair)


def _in_space(axis: str, name: str, space: dict[str, Any], table: dict[str, Any]) -> None:
    """Put a space in the place of an axis."""
    text = json.dumps(table["tensors"]).replace(f'"{axis}"', f'"write:{name}"')
    table["tensors"], table["spaces"][name] = json.loads(text), space


def _edit_rows(facts: dict[str, Any], ending: str, table: dict[str, Any]) -> None:
    """Give all rows whose names end so these facts; None takes one away."""
    for name, row in chain.from_iterable(rows.items() for rows in table["tensors"].values()):
        for one in (row if isinstance(row, list) else [row]) if name.endswith(ending) else ():
            kept = {key: value for key, value in (one | facts).items() if value is not None}
            one.clear()
            one.update(kept)
