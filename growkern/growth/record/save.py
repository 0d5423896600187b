"""Makes `save_pretrained` and `push_to_hub` of a grown model write its lineage and its card.

The model card says where a checkpoint comes from, and what it computes.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData

from growkern.errors import human, without_bars
from growkern.files import text_of
from growkern.growth.disk import complete_config, is_unedited, stamped
from growkern.growth.history import CARD_FILE, CHECKSUMS_FILE, LINEAGE_FILE
from growkern.growth.models import local_tensor
from growkern.growth.options import GrowthOptions, parse_size
from growkern.growth.plan import GrowthPlan, with_stream
from growkern.growth.record.lineage import (
    CARD,
    GrowthSettings,
    card_of,
    kept_of_card,
    lineage_text,
    misfit,
    read_lineage,
    recorded_plan,
    source_files,
    write_lineage,
)
from growkern.growth.source import MODULES_FILE, is_hub_name, is_same, name_of

# every card of a growth has this tag
TAG = "growkern"
# of the card that `push_to_hub` of transformers writes where the Hub has none
EMPTY_CARD = "This model card has been automatically generated."
EMBEDDINGS = (
    "With sentence-transformers, embeddings have the source's size: a linear module behind the "
    "pooling folds the copies of each coordinate. Where the model is exact, so are they."
)


def _place(plan: GrowthPlan) -> str:
    """The source's name on the Hub or that of its directory; "" if it is only in memory."""
    name = str(getattr(plan.small.config, "_name_or_path", "") or "")
    directory = plan.source.directory or Path(name)
    if (plan.source.directory is not None or name) and directory.is_dir():
        return name_of(directory)
    return name if is_hub_name(name) else ""


def _choices(plan: GrowthPlan, settings: GrowthSettings) -> dict[str, Any]:
    """The arguments of `growkern.grow` that grow the same model again."""
    result: dict[str, Any] = {
        field: new for field, (old, new) in plan.size_changes().items() if old != new
    }
    stream = with_stream(replace(plan.options, stream="auto"), plan.small, plan.large).stream
    chosen = {name: getattr(plan.options, name) for name in ("method", "scheme")}
    # what "auto" stands for depends on these two
    default = GrowthOptions(stream=stream, **chosen)
    for name in (field.name for field in fields(GrowthOptions)):
        value = getattr(plan.options, name)
        if value != getattr(default, name):
            result[name] = value
    result |= {k: v for k, v in chosen.items() if v != getattr(GrowthOptions, k)}
    if plan.dtype != plan.source.dtype:
        result["dtype"] = plan.dtype
    return result | ({"allow_nonfinite": True} if settings.allow_nonfinite else {})


def command(plan: GrowthPlan, settings: GrowthSettings, source: str) -> str:
    """The command that grows the same model from the same source."""
    words = ["growkern", "grow", source, "TARGET"]
    if on_hub := plan.source.on_hub:
        words += ["--revision", on_hub.commit]
    for name, value in _choices(plan, settings).items():
        words.append(f"--{name.replace('_', '-')}")
        if name != "allow_nonfinite":
            words.append(str(value).removeprefix("torch."))
    return shlex.join(words)


def write_card(text: str, directory: Path) -> None:
    """Write `README.md` into `directory`, unless somebody else wrote or edited the one there."""
    file = directory / CARD_FILE
    if not os.path.lexists(file) or is_unedited(text_of(file)):
        file.write_text(text, encoding="utf-8")


def recorded_card(directory: Path, trained: str) -> str:
    """The card of a grown model that was `trained` since, from the record of its growth."""
    lineage = read_lineage(directory)
    is_sentence = (directory / MODULES_FILE).is_file()
    plan, how, record = recorded_plan(lineage), lineage.settings, lineage.data
    return card_text(plan, how, is_sentence=is_sentence, record=record, trained=trained)


def card_text(
    plan: GrowthPlan,
    settings: GrowthSettings,
    *,
    is_sentence: bool,
    tags: Iterable[str] = (),
    record: Mapping[str, Any] | None = None,
    trained: str = "",
) -> str:
    """The card of a grown checkpoint. It does not depend on where directories are.

    All of it stays true of a model that is trained later: other libraries copy a card as it is.
    Licence, languages, data sets and tags are those of the source's card. `is_sentence` says
    whether sentence-transformers loads the checkpoint. `record` is that of a growth whose source is
    not here: it has the name of the source, and what its card said. `trained` is how it was since.
    """
    place = _place(plan) if record is None else str(record["source"])
    kept = card_of(plan.source.directory) if record is None else kept_of_card(record.get(CARD, {}))
    name = place or plan.small.class_name
    kept["tags"] = sorted({*_listed(kept.get("tags")), *tags, TAG})
    # no directory or class has such a name
    if "/" in name:
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
    # a trained model lies elsewhere, where a directory's name leads nowhere
    source = "SOURCE" if trained and "/" not in name else name
    origin, made = name, f"```bash\n{command(plan, settings, source)}\n```"
    if not place:
        origin = f"a {name} in memory"
        given = "".join(f", {key}={value!r}" for key, value in _choices(plan, settings).items())
        code = f"```python\nlarge = growkern.grow(small{given})\n```"
        made = f"With the source as `small`:\n\n{code}"
    lines = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}, grown with growkern",
        f"This {plan.large.class_name} was grown from {origin}{trained}.",
        "\n".join(["|  | source | this model |", "| --- | --- | --- |", *rows]),
        "## What it computed when it was grown",
        "\n".join(["Before any training, compared with its source:", "", *findings]),
        *([EMBEDDINGS] if is_sentence else []),
        "## How it was made",
        made,
        "`lineage.json` says where every weight came from.",
    ]
    return stamped("\n\n".join(lines) + "\n")


def _listed(value: Any) -> list[Any]:
    """A value of a card that may be one or many, as a list."""
    return value if isinstance(value, list) else [value] if value else []


# what `save_pretrained` takes by default
SHARD_SIZE = "50GB"
# entries of a weight that tell whether it was changed
SAMPLED = 251


def record_when_saved(model: Any, plan: GrowthPlan, backend: str | None, nonfinite: bool) -> None:
    """Let `save_pretrained` write `lineage.json` and `README.md` too, and `push_to_hub` send them.

    There is no card for a plan without findings.
    If the model was trained or cast since, the record says so.
    The next growth needs it. A model whose shapes were changed is saved as any
    other; a record that is in the directory then stays. `nonfinite` says whether NaN and Inf were
    grown.
    """
    # of the files before anybody changes them
    record = _Record(model, plan, backend, nonfinite, source_files(plan.source), _state(model))
    model.save_pretrained = record.save_pretrained
    model._upload_modified_files = record.upload_files


@dataclass
class _Record:
    """How a model was grown; its methods replace those of the model, and are pickled with it.

    Attributes:
        state: of the model's weights at that time; None for a copy of the model.
    """

    model: Any
    plan: GrowthPlan
    backend: str | None
    nonfinite: bool
    files: Mapping[str, Any]
    state: tuple[Any, ...] | None

    def __getstate__(self) -> dict[str, Any]:
        # PyTorch counts the writes to a copy anew, so the copy counts as changed
        return {**vars(self), "state": None}

    @property
    def _is_judged(self) -> bool:
        # a card says what was found. Later the source may be gone, or may have changed
        return "findings" in vars(self.plan)

    def _is_own(self) -> bool:
        return self.state == _state(self.model)

    @without_bars()
    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        model, plan = self.model, self.plan
        is_first = args[0] if args else options.get("is_main_process", True)
        # transformers lets all processes call it, and writes in the first
        is_first = model.should_save_on_this_rank(is_first)
        is_own = options.get("state_dict") is None and len(args) < 2 and self._is_own()
        directory = Path(save_directory)
        has_record = (directory / LINEAGE_FILE).is_file()
        is_whole = is_own or has_record or misfit(plan, model) is None
        if is_first and is_whole and not directory.is_file():
            size = parse_size("max_shard_size", options.get("max_shard_size", SHARD_SIZE))
            settings = GrowthSettings(self.backend, size, self.nonfinite)
            # before the weights, as `push_to_hub` sends the directory off at the end of the call
            directory.mkdir(parents=True, exist_ok=True)
            if has_record:
                # those of the weights that are replaced
                (directory / CHECKSUMS_FILE).unlink(missing_ok=True)
            write_lineage(lineage_text(plan, settings, self.files, trained=not is_own), directory)
            if is_own and self._is_judged:
                write_card(self._card(directory), directory)
        type(model).save_pretrained(model, save_directory, *args, **options)
        if is_first and not directory.is_file():
            self._complete(directory)

    def _card(self, directory: Path, tags: Iterable[str] = ()) -> str:
        settings = GrowthSettings(self.backend, allow_nonfinite=self.nonfinite)
        is_sentence = (directory / MODULES_FILE).is_file()
        return card_text(self.plan, settings, is_sentence=is_sentence, tags=tags)

    def _complete(self, directory: Path) -> None:
        planned, config = self.plan.large.config, self.model.config
        # an edited config need not say what the plan says
        known = planned if is_same(planned, config) else None
        complete_config(directory, self.plan.source, config, known)

    def upload_files(self, working_dir: Any, *args: Any, **options: Any) -> Any:
        # the end of `push_to_hub` and of `save_pretrained(push_to_hub=True)`, which have put the
        # card of the Hub there, or an empty one
        directory = Path(working_dir)
        self._complete(directory)
        text = text_of(directory / CARD_FILE)
        if self._is_own() and self._is_judged and (EMPTY_CARD in text or is_unedited(text)):
            tags = _listed(ModelCard(text).data.get("tags"))
            (directory / CARD_FILE).write_text(self._card(directory, tags), encoding="utf-8")
        return type(self.model)._upload_modified_files(self.model, working_dir, *args, **options)


def _state(model: Any) -> tuple[tuple[torch.dtype, int, bytes], ...]:
    """Changes when a weight is written or cast.

    PyTorch counts the writes, except those through `Parameter.data`, as some optimizers make them.
    So some entries of each weight are read too.
    """
    state = []
    for parameter in model.parameters():
        flat = local_tensor(parameter).reshape(-1)
        chosen = flat[:: max(1, flat.numel() // SAMPLED)].cpu().contiguous()
        bits = chosen.view(torch.uint8).numpy().tobytes()
        state.append((parameter.dtype, parameter._version, bits))
    return tuple(state)
