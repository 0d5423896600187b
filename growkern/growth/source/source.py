"""Where the source's tensors come from: a model in memory or a checkpoint directory.

Both give the same thing: a config, a model class and, by the model's own tensor names, shapes and
dtypes at once and values on demand. A checkpoint is read through memory maps, one tensor at a
time; its headers are checked against the family table before anything is read.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from growkern.errors import GrowthError
from growkern.families.family import Family
from growkern.families.load import load_family
from growkern.growth.source.checks import (
    check_names_and_shapes,
    check_ties,
    check_values,
    refuse_nonfinite,
)
from growkern.growth.source.files import HANDLED, METADATA_FILE, read_headers


@dataclass(frozen=True)
class Source:
    """A trained model to grow.

    Attributes:
        dtypes: dtype of every tensor, by the model's names; tied duplicates left out.
        read: name -> tensor.
        directory: where it was read from, if anywhere (tokenizer files are copied from there).
        headers: where every tensor lies in the files of `directory`.
        device: of the tensors that are in memory.
    """

    family: Family
    config: Any
    class_name: str
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor] = field(repr=False)
    directory: Path | None = None
    headers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The most common floating dtype."""
        floating = [d for d in self.dtypes.values() if d.is_floating_point]
        return max(set(floating), key=floating.count)


def open_source(source: Any, *, allow_nonfinite: bool = False) -> Source:
    """Open a `PreTrainedModel` or a checkpoint directory for growth.

    Raises:
        GrowthError: an unsupported or quantised model, a missing, truncated or corrupt file, a
            tensor no rule covers, a shape that contradicts the config; on reading, NaN or Inf.
    """
    if isinstance(source, transformers.PreTrainedModel):
        opened = _open_model(source)
    elif isinstance(source, (str, Path)):
        opened = _open_directory(Path(source))
    else:
        raise GrowthError(
            f"source is a {type(source).__name__}; expected a PreTrainedModel or a directory"
        )
    return opened if allow_nonfinite else _refusing_nonfinite(opened)


def _refusing_nonfinite(source: Source) -> Source:
    checked: set[str] = set()

    def read(name: str) -> Tensor:
        tensor = source.read(name)
        if name not in checked:
            refuse_nonfinite(name, tensor)
        checked.add(name)
        return tensor

    return dataclasses.replace(source, read=read)


# ------------------------------------------------------------------- models


def _open_model(model: transformers.PreTrainedModel) -> Source:
    family = _family_of(model.config)
    class_name = type(model).__name__
    family.check_config(model.config, class_name)
    state = model.state_dict()
    expected = family.shapes(model.config, class_name)
    tied = _tied_names(family, model.config, class_name)
    found = {name: tuple(t.shape) for name, t in state.items()}
    check_names_and_shapes(expected, tied, found, class_name)
    check_ties(family, model.config, class_name, state.keys(), lambda name: state[name])
    own = {name: t for name, t in state.items() if name not in tied}
    dtypes = {name: t.dtype for name, t in own.items()}
    device = next(iter(own.values())).device

    def read(name: str) -> Tensor:
        return own[name].detach()

    return Source(
        family.of_class(class_name), model.config, class_name, dtypes, read, device=device
    )


def _family_of(config: Any) -> Family:
    if getattr(config, "quantization_config", None) is not None:
        raise GrowthError(
            "the checkpoint is quantised; grow the full-precision one and quantise the result"
        )
    return load_family(config.model_type)


def _tied_names(family: Family, config: Any, class_name: str) -> set[str]:
    if not family.shares(config):
        return set()
    return {t.name for t in family.tensors(config, class_name) if t.tied}


# -------------------------------------------------------------- directories


def _open_directory(directory: Path) -> Source:
    config = _read_config(directory)
    family = _family_of(config)
    if not config.architectures:
        raise GrowthError(
            f'{directory / "config.json"}: no "architectures"; add the model class, for example '
            f'"architectures": ["{next(iter(family.classes))}"]'
        )
    class_name = config.architectures[0]
    family.check_config(config, class_name)
    check_values(directory / "config.json", family.of_class(class_name), config)
    expected = family.shapes(config, class_name)
    headers = _read_headers(directory, expected)
    stored = family.stored_names(config, class_name)
    names = _canonical_names(family, class_name, headers, expected, stored)
    _leave_out_other_heads(family, config, class_name, names)
    tied = _tied_names(family, config, class_name)
    found = {name: headers[raw].shape for name, raw in names.items()}
    check_names_and_shapes(expected, tied, found, str(directory))
    check_ties(family, config, class_name, names.keys(), lambda name: headers[names[name]].read())
    own = {name: headers[raw] for name, raw in names.items() if name not in tied}

    for name, header in own.items():
        if not header.dtype.is_floating_point:
            raise GrowthError(f"{header.file}: {name} has dtype {header.dtype}; {HANDLED}")
    dtypes = {name: header.dtype for name, header in own.items()}

    def read(name: str) -> Tensor:
        return own[name].read()

    return Source(family.of_class(class_name), config, class_name, dtypes, read, directory, own)


def _read_headers(directory: Path, expected: Mapping[str, Any]) -> Mapping[str, Any]:
    if not (directory / METADATA_FILE).is_file():
        return read_headers(directory)
    from growkern.growth.source.distributed import read_distributed

    return read_distributed(directory, expected)


def _read_config(directory: Path) -> Any:
    file = directory / "config.json"
    if not directory.is_dir():
        raise GrowthError(f"{directory}: no such directory")
    if (directory / METADATA_FILE).is_file() and not file.is_file():
        # trainers save sharded weights in a directory of their own below the model's
        file = directory.parent / "config.json"
    if not file.is_file():
        raise GrowthError(f"{directory}: no config.json; expected a Hugging Face checkpoint")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise GrowthError(f"{file}: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GrowthError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(data, dict) or "model_type" not in data:
        raise GrowthError(f'{file}: no "model_type"')
    load_family(str(data["model_type"]))
    try:
        return transformers.AutoConfig.from_pretrained(file.parent)
    except Exception as error:
        # the library validates configs with several exception types; all mean a bad file
        raise GrowthError(f"{file}: {str(error).strip().splitlines()[-1].strip()}") from error


def _canonical_names(
    family: Family,
    class_name: str,
    headers: Mapping[str, Any],
    expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, str],
) -> dict[str, str]:
    """The model's name -> the name in the file.

    Files differ from the model in four known ways: names that the table calls `stored`, a head
    class saved without its body's prefix (or the reverse), `gamma`/`beta` for the norms, and
    buffers that are no longer stored.
    """
    renamed = {file: name for name, file in stored.items()}
    prefix = family.classes[class_name].prefix
    prefixes = {c.prefix for c in family.classes.values() if c.prefix}
    ignored = [re.escape(name).replace(r"\{l\}", r"\d+") for name in family.ignored]
    names = {}
    for raw in headers:
        name = renamed.get(raw, raw)
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        candidates = [name, prefix + name]
        candidates += [name.removeprefix(p) for p in prefixes if not prefix]
        bare = candidates[-1] if not prefix else name.removeprefix(prefix)
        if any(re.fullmatch(pattern, bare) for pattern in ignored):
            continue
        names[next((c for c in candidates if c in expected), name)] = raw
    return names


def _leave_out_other_heads(
    family: Family, config: Any, class_name: str, names: dict[str, str]
) -> None:
    """Drop, with a warning, tensors of another class of the family.

    The published BERT files name BertForMaskedLM in their config and hold a pooler and a
    next-sentence head besides; loading them drops those too.
    """
    own = family.shapes(config, class_name)
    known = {name for other in family.classes for name in family.shapes(config, other)}
    others = [name for name in names if name not in own and name in known]
    for name in others:
        del names[name]
    if others:
        warnings.warn(
            f"{class_name} has no {', '.join(others)}: left out of the growth", stacklevel=2
        )
