"""`growkern family draft`: a whole draft, the search for what no value shows, and the check."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto as auto

from growkern.arguments import check_kind
from growkern.errors import GrowthError
from growkern.families import ModelSpec, load_family, own_family
from growkern.files import parse_toml, toml_text
from growkern.growth.draft.probe import FITTING, Shapes, failure, shapes, small_fields
from growkern.growth.draft.table import table_of
from growkern.growth.draft.walk import Draft, Walk
from growkern.growth.own_table import TableReport, check_family, faults_of, growths_of
from growkern.growth.source import (
    leave_out_quantisation,
    located,
    quantisation_of,
    read_config,
    what_leads_on,
)

ROTARY = r'"positions": "rotary"[^}]*'
# what no value shows but may be true of a table -> patterns of its JSON, all of them there, and
# what takes their place; the likeliest first
GUESSES = {
    "pairs=adjacent": {ROTARY: r'\g<0>, "pairs": "adjacent"'},
    "whole_pairs=True": {ROTARY: r'\g<0>, "whole_pairs": true'},
    "each head has all three": {
        r'"write:q\|k\|v"': '"write:q"',
        r'("q": {[^}]*"part": "query)"': r'\1|key|value"',
    },
    "units cannot carry a mean": {r', "(extra|into)": "[^"]*"': ""},
    # each copy of an expert has its share of the probability, and so of what is added to it
    "a bias beside probabilities of experts": {
        r'correction_bias": {': r'\g<0>"scale": "1/experts", '
    },
    "what enters the head is divided by its width": {
        r'"final": {': r'\g<0>"scale": "stream", ',
        r'\["vocab", "read:final"\]': r'\g<0>, "scale": "stream"',
    },
    "blocks are divided by the root of the depth": {
        r'\[("write:experts", )?"write:stream"[^]]*\]': r'\g<0>, "scale": "sqrt(layers)"'
    },
    "scores have a constant scale": {r'"scale": "head_dim"': '"scale": "constant"'},
    "two projections lie side by side": {
        r'"write:(\w+)\|\1"': r'"write:two_\1"',
        r'"(\w+)": {("kind": "units",)': r'"two_\1": {\2 "size": "\1", "width": 2}, \g<0>',
    },
    # it takes growths away, and would hide other causes
    "positions follow from the number of heads": {
        r'("attention": {"positions": "(?!rotary).*"q_heads": )("\w+")': r"\1"
        r'{"field": \2, "fixed": true}',
    },
}


@dataclass(frozen=True)
class DraftedFamily:
    """Result of `draft_family`.

    Attributes:
        content: the table, as the values of its TOML.
        report: of the check, with one row for each growth of a tiny model.
        assumed: what names or a search decided, one line each; the check confirms it. All else
            was measured.
    """

    content: dict[str, Any]
    report: TableReport
    assumed: tuple[str, ...]

    @property
    def verified(self) -> bool:
        """True if a growth of a tiny model was exact, and no plan was wrong."""
        return self.report.verified

    @property
    def refused(self) -> dict[str, str]:
        """Size -> why the check could not grow it, neither evenly nor unevenly."""
        return self.report.sizes["refused"]

    @property
    def _notes(self) -> list[str]:
        """Whether the table is verified, what it grows, and what is assumed, refused and wrong."""
        name, (word, *grown) = next(reversed(self.content["classes"])), self.report.notes
        return [
            f"drafted from {name}, {word}; measured, but for what is assumed",
            *grown,
            *(f"refused: {size}: {why}" for size, why in self.refused.items()),
            *(f"assumed: {line}" for line in self.assumed),
            *(f"wrong: {g.sizes}: {g.why}" for g in self.report.growths if g.verdict == "wrong"),
        ]

    @property
    def toml(self) -> str:
        """The table as the text of a TOML file, which begins with the notes."""
        notes = (filter(str.isprintable, " ".join(note.split())) for note in self._notes)
        return "".join(f"# {''.join(note)}\n" for note in notes) + toml_text(self.content)

    def to_dict(self) -> dict[str, Any]:
        """The draft as JSON values."""
        said = {"verified": self.verified, "refused": self.refused, "assumed": [*self.assumed]}
        return {**said, "toml": self.toml, "check": self.report.to_dict()}

    def table(self) -> Any:
        """The check and the notes as a rich renderable."""
        return self.report.table(self._notes)


def draft_family(config: Any) -> DraftedFamily:
    """Draft a family table from a config of transformers, or a directory with one, and check it.

    Models with one stack of layers that read text. Only the values in this config have to be right;
    others become refusals. No weights are needed, and no code but transformers' runs.

    Raises:
        GrowthError: something in the class fits no rule; it names one tensor and the nearest table.
    """
    if isinstance(config, str | Path):
        config = read_config(located(config, weights=False), any_family=True)
    wanted = "a config of transformers, such as model.config, or a directory with a config.json"
    check_kind("config", config, transformers.PreTrainedConfig, wanted)
    tensors: Shapes = {}
    try:
        cls = class_for(config)
        inner = [k for k in type(config).sub_configs if getattr(config, k, None)]
        try:
            tensors, _ = shapes(cls, config)
        except Exception as error:
            if not inner:
                raise GrowthError(failure(f"its config makes no {cls.__name__}", error)) from error
        if inner:
            raise GrowthError(f"its config holds others, {', '.join(inner)}: a draft has one stack")
        config, (method, _) = copy.deepcopy(config), quantisation_of(config)
        leave_out_quantisation(config)
        found, report, assumed = _searched(*_measured(cls, config), cls.__name__)
        family = own_family("draft", found)
        for fault in (*faults_of(family, config), *report.faults):
            raise GrowthError(fault)
        ModelSpec.of(config, cls.__name__, family).check_sizes("its config")
        assumed += [f"its {method} weights stand for plain numbers"] if method else []
    except GrowthError as error:
        why = ""
        with contextlib.suppress(GrowthError):
            # the package may have a table, which may refuse a flag of this config
            ModelSpec.of(config, [*load_family(config.model_type).classes][-1])
            why = f"{config.model_type} has a table: it needs no draft: growkern plan SRC"
        raise GrowthError(why or f"{error}; {what_leads_on(config, tensors)}") from error
    return DraftedFamily(found, report, tuple(assumed))


def _measured(cls: Any, config: Any) -> tuple[dict[str, Any], Any]:
    """The table of a class, and the config of its first small model that runs."""
    why = ""
    for fitting in FITTING:
        try:
            small = type(config)(**small_fields(config, *fitting))
            small.architectures, small.use_cache = [cls.__name__], False
            small._experts_implementation = "eager"
            draft = Draft(cls, small)
        except Exception as error:
            # classes raise errors of any type where sizes do not fit
            why = failure("small models fail", error)
            continue
        try:
            Walk(draft)
            return table_of(draft), small
        except GrowthError as error:
            raise draft.error(str(error)) from error
    raise GrowthError(why)


def class_for(config: Any) -> Any:
    """The class to draft from: that of the config, or one with a head for tokens."""
    heads = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES | auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for name in (*(config.architectures or ()), heads.get(config.model_type, "")):
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
    for name in config.architectures or ():
        if not hasattr(transformers, name):
            raise GrowthError(f"{name} is no class of transformers {transformers.__version__}")
    raise GrowthError(
        f"{config.model_type}: transformers {transformers.__version__} has no class for it that "
        'predicts tokens: name one in "architectures"'
    )


def _searched(table: dict[str, Any], config: Any, class_name: str) -> tuple[Any, TableReport, Any]:
    """The table, read back from its text, with those guesses that make fewer growths wrong."""
    table = parse_toml(toml_text(table))
    report, assumed = check_family(own_family("draft", table), config, class_name), list[str]()
    wrong = {growth.sizes for growth in report.growths if growth.verdict == "wrong"}
    for why, edits in GUESSES.items():
        text = json.dumps(table)
        if not wrong or not all(re.search(pattern, text) for pattern in edits):
            continue
        for pattern, new in edits.items():
            text = re.sub(pattern, new, text)
        edited = parse_toml(toml_text(json.loads(text)))
        growths = growths_of(own_family("draft", edited), config, class_name, wrong)
        left = {growth.sizes for growth in growths if growth.verdict == "wrong"}
        if len(left) < len(wrong):
            table, wrong = edited, left
            assumed.append(f"{why}, by a search")
    if assumed:
        report = check_family(own_family("draft", table), config, class_name)
    return table, report, assumed
