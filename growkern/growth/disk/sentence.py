"""Carries the modules of sentence-transformers over, so that embeddings stay those of the source.

`modules.json` lists what follows the transformer: a pooling over its tokens, then other modules.
With E the embedding of the source's coordinates in the target's (`growkern.growth.space`), the
pooled vector is E x where the source has x. A linear module behind the pooling takes

    W E x = x,   W[i, j] = E[j, i] / sum_k E[k, i]^2                                        (1)
"""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from growkern.errors import GrowthError
from growkern.files import read_json
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.source.files import refuse_links_out
from growkern.growth.source.refused import STATE_FILES, config_directory
from growkern.growth.space.spaces import Space

MODULES, CONFIG, WEIGHTS, MOST_BYTES = "modules.json", "config.json", "model.safetensors", 1_000_000
# the name of (1), and what its config needs
FOLD, DENSE = "growkern_fold", "sentence_transformers.models.Dense"
PLAIN = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}


def is_sentence_model(directory: Path | None) -> bool:
    """Whether a directory is that of a sentence-transformers model."""
    return directory is not None and (directory / MODULES).is_file()


def becomes_sentence_model(plan: Blueprint) -> bool:
    """Whether `write_modules` makes the target of a plan one of sentence-transformers."""
    source = plan.source.directory
    return source is not None and is_sentence_model(config_directory(source))


def check_modules(plan: Blueprint) -> None:
    """Refuse, before any work, modules that cannot be carried over to the target of a plan."""
    _read(plan)


def _read(plan: Blueprint) -> tuple[Path, list[dict[str, Any]], dict[str, Any], int] | None:
    """The source's modules, the target's config of the pooling, and the number of its modes."""
    if not becomes_sentence_model(plan):
        return None
    directory = config_directory(plan.source.directory or Path())
    refuse_links_out(file := directory / MODULES, directory)
    found = read_json(file, MOST_BYTES, "list of modules")
    modules = found if isinstance(found, list) else [None]
    entries = [module if isinstance(module, dict) else {} for module in modules]
    kinds = [str(module.get("type")).rpartition(".")[2] for module in entries]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise GrowthError(
            f"{file}: its modules are {', '.join(kinds)}; growth carries over a Transformer that a "
            "Pooling follows: remove the file to grow the transformer alone"
        )
    for module, kind in zip(entries[1:], kinds[1:], strict=True):
        path = module.get("path")
        if not isinstance(path, str) or Path(path).name != path or path in ("", ".."):
            raise GrowthError(f"{file}: {str(path)[:100]!r} is not the name of a folder")
        files = [*(directory / path).rglob("*")]
        for one in files:
            refuse_links_out(one, directory)
        needs = kind == "Dense" or any(one.suffix == ".bin" for one in files)
        if needs and not (directory / path / WEIGHTS).is_file():
            raise GrowthError(f"{directory / path}: no {WEIGHTS}: save the model as safetensors")
    file, space = (
        directory / entries[1]["path"] / CONFIG,
        plan.layout.space(plan.small.output_space),
    )
    config = read_json(file, MOST_BYTES, "config of a module")
    names = ("word_embedding_dimension", "embedding_dimension")
    widths = [x for x in names if isinstance(config, dict) and config.get(x) == space.source]
    if not widths:
        raise GrowthError(f"{file}: its {names[0]} is not the width of the model, {space.source}")
    named = config.get("pooling_mode")
    flags = sum(name.startswith("pooling_mode_") and x is True for name, x in config.items())
    modes = len(named) if isinstance(named, list) else max(1, flags)
    return directory, entries, {**config, **dict.fromkeys(widths, space.target)}, modes


def write_modules(plan: Blueprint, target: Path) -> None:
    """Write the modules of a grown checkpoint beside its transformer, with (1) if it is wider."""
    if (read := _read(plan)) is None:
        return
    directory, modules, config, modes = read
    for module in modules[1:]:
        (target / module["path"]).mkdir()
        for file in (directory / module["path"]).glob("*"):
            if file.is_file() and not any(fnmatch(file.name, state) for state in STATE_FILES):
                shutil.copyfile(file, target / module["path"] / file.name)
    _write(target / modules[1]["path"] / CONFIG, config)
    space = plan.layout.space(plan.small.output_space)
    if space.target != space.source:
        # a model that was grown before has one already
        name = f"{FOLD}_{sum(FOLD in module['path'] for module in modules)}"
        # the modes of a pooling lie one after another
        weight = torch.kron(torch.eye(modes).double(), fold_matrix(space)).to(plan.dtype)
        (target / name).mkdir()
        sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
        _write(target / name / CONFIG, {**sizes, **PLAIN})
        save_file({"linear.weight": weight.contiguous()}, target / name / WEIGHTS)
        modules.insert(2, {"name": name, "path": name, "type": DENSE})
    _write(target / MODULES, [{**module, "idx": i} for i, module in enumerate(modules)])


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def fold_matrix(space: Space) -> Tensor:
    """W of (1), (source, target) float64. Extra coordinates hold nothing of the source."""
    # entries of 0 and below could not be read behind a pooling that takes the largest
    write = torch.where(space.is_extra, 0.0, space.write).clamp(min=0)
    index = torch.where(space.is_extra, 0, space.write_index)
    squares = torch.zeros(space.source, dtype=torch.float64).index_add(0, index, write.square())
    matrix = torch.zeros(space.source, space.target, dtype=torch.float64)
    matrix[index, torch.arange(space.target)] = write / squares[index]
    return matrix
