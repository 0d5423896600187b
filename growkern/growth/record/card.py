"""Writes the model card of a grown checkpoint: where it comes from, and what it computes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from growkern.growth.disk.stamp import STAMPED, is_unedited, read_card, stamped
from growkern.growth.history import CARD_FILE
from growkern.growth.options import GrowthOptions
from growkern.growth.plan.growth_plan import GrowthPlan, with_stream
from growkern.growth.record.lineage import Settings
from growkern.growth.source.hub import ID, hub_model, name_of
from growkern.printing import human

# every card of a growth has this tag
TAG = "growkern"
# what the source's card says that is true of the grown model too
KEPT = ("license", "license_name", "license_link", "language", "datasets", "tags", "pipeline_tag")
EMBEDDINGS = (
    "With sentence-transformers, embeddings have the source's size: a linear module behind the "
    "pooling folds the copies of each coordinate. Where the model is exact, so are they."
)
# sentences that hold until the model is trained: `note_training` replaces them
UNTRAINED = "and was not trained since."
TRAINED = "and was trained or changed since."
COMPARED, COMPARED_BEFORE = "Compared with its source:", "Before that, compared with its source:"
RECORD = "`lineage.json` says where every weight comes from."
RECORD_BEFORE = "`lineage.json` says where every weight came from when the model was grown."


def source_name(plan: GrowthPlan) -> str:
    """The source's name on the Hub if it has one, else its directory's name or its class."""
    return _place(plan) or plan.small.class_name


def _place(plan: GrowthPlan) -> str:
    """The source's name on the Hub or that of its directory; "" if it is only in memory."""
    name = str(getattr(plan.small.config, "_name_or_path", "") or "")
    directory = plan.source.directory or Path(name)
    if (plan.source.directory is not None or name) and directory.is_dir():
        return name_of(directory)
    return name if ID.fullmatch(name) else ""


def _choices(plan: GrowthPlan) -> dict[str, Any]:
    """The arguments of `growkern.grow` that make the plan again, apart from the dtype."""
    result: dict[str, Any] = {
        field: new for field, (old, new) in plan.size_changes().items() if old != new
    }
    asked = replace(plan.options, stream="auto")
    stream = with_stream(asked, plan.small, plan.large).stream
    chosen = {name: getattr(plan.options, name) for name in ("method", "scheme")}
    # what "auto" stands for depends on these two
    default = GrowthOptions(stream=stream, **chosen)
    for name in (field.name for field in fields(GrowthOptions)):
        value = getattr(plan.options, name)
        if value != getattr(default, name):
            result[name] = value
    result |= {k: v for k, v in chosen.items() if v != getattr(GrowthOptions, k)}
    return result


def command(plan: GrowthPlan, settings: Settings) -> str:
    """The command that grows the same model from the same source."""
    words = ["growkern", "grow", source_name(plan), "TARGET"]
    if on_hub := hub_model(plan.source.directory):
        words += ["--revision", on_hub.commit]
    for name, value in _choices(plan).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    if plan.dtype != plan.source.dtype:
        words += ["--dtype", str(plan.dtype).removeprefix("torch.")]
    if settings.allow_nonfinite:
        words.append("--allow-nonfinite")
    return shlex.join(words)


def python_code(plan: GrowthPlan, settings: Settings) -> str:
    """Python that grows the same model from a source that is only in memory, as `small`."""
    words = [f"{name}={value!r}" for name, value in _choices(plan).items()]
    if plan.dtype != plan.source.dtype:
        words.append(f"dtype={plan.dtype!r}")
    if settings.allow_nonfinite:
        words.append("allow_nonfinite=True")
    return f"large = growkern.grow({', '.join(['small', *words])})"


def write_card(text: str, directory: Path) -> None:
    """Write `README.md` into `directory`, unless somebody else wrote or edited the one there.

    Of such a file only the sentences that `note_training` changes are brought up to date.
    """
    file = directory / CARD_FILE
    if os.path.lexists(file) and not is_unedited(read_card(file)):
        note_training(directory, trained=False)
    else:
        file.write_text(text, encoding="utf-8")


def card_text(plan: GrowthPlan, settings: Settings, *, is_sentence: bool) -> str:
    """The card of a grown checkpoint. It does not depend on where directories are.

    Licence, languages, data sets and tags are those of the source's card.

    Args:
        is_sentence: whether sentence-transformers loads the checkpoint.
    """
    name, kept = source_name(plan), _kept(plan.source.directory)
    kept["tags"] = sorted({*_listed(kept.get("tags")), TAG})
    if ID.fullmatch(name):
        kept["base_model"] = name
    library = "sentence-transformers" if is_sentence else "transformers"
    data = ModelCardData(library_name=library, **kept)
    rows = [
        f"| {field} | {old} | {new} |"
        for field, (old, new) in plan.size_changes().items()
        if old != new
    ]
    rows.append(f"| parameters | {human(plan.parameters('source'))} | {human(plan.parameters())} |")
    findings = [f"- {finding.line()}" for finding in plan.findings]
    origin, made = name, f"```bash\n{command(plan, settings)}\n```"
    if not _place(plan):
        origin = f"a {name} in memory"
        made = f"With the source as `small`:\n\n```python\n{python_code(plan, settings)}\n```"
    lines = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}, grown with growkern",
        f"This {plan.large.class_name} was grown from {origin} {UNTRAINED}",
        "\n".join(["|  | source | this model |", "| --- | --- | --- |", *rows]),
        "## What it computes",
        "\n".join([COMPARED, "", *findings]),
        *([EMBEDDINGS] if is_sentence else []),
        "## How it was made",
        made,
        RECORD,
    ]
    return stamped("\n\n".join(lines) + "\n")


def note_training(directory: Path, *, trained: bool = True) -> None:
    """Let the card of a growth, if there is one, say whether the weights are others now.

    Args:
        trained: False: they are those of the growth again.
    """
    file = directory / CARD_FILE
    before = text = read_card(file)
    pairs = ((UNTRAINED, TRAINED), (COMPARED, COMPARED_BEFORE), (RECORD, RECORD_BEFORE))
    swaps = [pair if trained else pair[::-1] for pair in pairs]
    if swaps[0][0] in text and swaps[-1][0] in text:
        for old, new in swaps:
            text = text.replace(old, new)
        unedited = STAMPED.fullmatch(text) if is_unedited(before) else None
        file.write_text(stamped(unedited[1]) if unedited else text, encoding="utf-8")


def add_tags(tags: Sequence[str], directory: Path) -> None:
    """Add tags to the card in a directory. One that nobody edited still counts as unedited."""
    file = directory / CARD_FILE
    text = read_card(file)
    if not tags or not text:
        return
    unedited = STAMPED.fullmatch(text) if is_unedited(text) else None
    card = ModelCard(unedited[1] if unedited else text, ignore_metadata_errors=True)
    card.data["tags"] = list(dict.fromkeys([*_listed(card.data.get("tags")), *tags]))
    file.write_text(stamped(str(card)) if unedited else str(card), encoding="utf-8")


def _kept(directory: Path | None) -> dict[str, Any]:
    """What the card of the source says of the grown model too."""
    text = read_card(directory / CARD_FILE) if directory else ""
    # huggingface_hub warns of a card without metadata, which is nothing to warn of here
    if not text.lstrip().startswith("---"):
        return {}
    try:
        data = ModelCard(text, ignore_metadata_errors=True).data
    except Exception:
        # a card is free text: one that nobody can read says nothing
        return {}
    found = {name: _texts(value) for name, value in data.to_dict().items() if name in KEPT}
    return {name: value for name, value in found.items() if value}


def _listed(value: Any) -> list[Any]:
    """A value of a card that may be one or many, as a list."""
    return value if isinstance(value, list) else [value] if value else []


def _texts(value: Any) -> str | list[str]:
    """A text or a list of texts; other values of a list are left out, and others are empty."""
    if isinstance(value, list):
        return [text for text in map(_texts, value) if isinstance(text, str) and text]
    # half of a surrogate pair, which YAML can spell, cannot be written
    is_text = isinstance(value, str) and value == value.encode(errors="ignore").decode()
    return value if is_text else ""
