"""Writes the model card of a grown checkpoint: where it comes from, and what it computes."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from growkern.growth.disk.sentence import is_sentence_model
from growkern.growth.options import GrowthOptions
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.record.lineage import Settings
from growkern.growth.source.hub import ID, hub_model
from growkern.units import human

CARD_FILE = "README.md"
# what the source's card says that is true of the grown model too
KEPT = ("license", "license_name", "license_link", "language", "datasets", "tags", "pipeline_tag")
EMBEDDINGS = (
    "With sentence-transformers, embeddings have the source's size: a linear module behind the "
    "pooling folds the copies of each coordinate. Where the model is exact, so are they."
)
# a card is read into memory
MOST_BYTES = 1_000_000


def source_name(plan: GrowthPlan) -> str:
    """The source's name on the Hub if it has one, else its directory's name or its class."""
    name = str(getattr(plan.small.config, "_name_or_path", "") or "")
    directory = plan.source.directory or Path(name)
    if (plan.source.directory is not None or name) and directory.is_dir():
        on_hub = hub_model(directory)
        return on_hub.id if on_hub else directory.resolve().name
    return name if ID.fullmatch(name) else plan.small.class_name


def command(plan: GrowthPlan, settings: Settings) -> str:
    """The command that grows the same model from the same source."""
    words = ["growkern", "grow", source_name(plan), "TARGET"]
    if on_hub := hub_model(plan.source.directory):
        words += ["--revision", on_hub.commit]
    for field, (old, new) in plan.size_changes().items():
        if old != new:
            words += [f"--{field.replace('_', '-')}", str(new)]
    for name in (field.name for field in fields(GrowthOptions)):
        value = getattr(plan.options, name)
        if value != getattr(GrowthOptions(scheme=plan.options.scheme), name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    if plan.options.scheme != GrowthOptions.scheme:
        words += ["--scheme", plan.options.scheme]
    if plan.dtype != plan.source.dtype:
        words += ["--dtype", str(plan.dtype).removeprefix("torch.")]
    if settings.allow_nonfinite:
        words.append("--allow-nonfinite")
    return shlex.join(words)


def write_card(plan: GrowthPlan, settings: Settings, directory: Path) -> None:
    """Write `README.md` into `directory`. Its bytes do not depend on where directories are.

    Licence, languages, data sets and tags are those of the source's card.

    Args:
        plan: the plan that was carried out.
        settings: further settings of the growth.
        directory: the grown checkpoint.
    """
    name, kept = source_name(plan), _kept(plan.source.directory)
    kept["tags"] = sorted({*kept.get("tags", ()), "growkern"})
    if ID.fullmatch(name):
        kept["base_model"] = name
    is_sentence = is_sentence_model(directory)
    library = "sentence-transformers" if is_sentence else "transformers"
    data = ModelCardData(library_name=library, **kept)
    rows = [
        f"| {field} | {old} | {new} |"
        for field, (old, new) in plan.size_changes().items()
        if old != new
    ]
    rows.append(f"| parameters | {human(plan.parameters('source'))} | {human(plan.parameters())} |")
    findings = [f"- {finding.line()}" for finding in plan.findings]
    lines = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}, grown with growkern",
        f"This {plan.large.class_name} was grown from {name} and was not trained since.",
        "\n".join(["|  | source | this model |", "| --- | --- | --- |", *rows]),
        "## What it computes",
        "\n".join(["Compared with its source:", "", *findings]),
        *([EMBEDDINGS] if is_sentence else []),
        "## How it was made",
        f"```bash\n{command(plan, settings)}\n```",
        "`lineage.json` says where every weight comes from.",
    ]
    (directory / CARD_FILE).write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def _kept(directory: Path | None) -> dict[str, Any]:
    """What the card of the source says of the grown model too."""
    file = directory / CARD_FILE if directory else None
    if file is None or not file.is_file() or file.stat().st_size > MOST_BYTES:
        return {}
    try:
        data = ModelCard(file.read_text(encoding="utf-8"), ignore_metadata_errors=True).data
    except Exception:
        # a card is free text: one that nobody can read says nothing
        return {}
    found = data.to_dict()
    return {name: found[name] for name in KEPT if found.get(name)}
