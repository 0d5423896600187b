"""Carries the modules of sentence-transformers over, so that embeddings stay those of the source.

`modules.json` lists what follows the transformer: a pooling over its tokens, then perhaps a
normalisation and dense layers. The grown transformer has more coordinates. With E the embedding of
the source's coordinates in the target's (`growkern.growth.space`), the pooled vector is E x where
the source has x, as pooling acts on each coordinate alone. A linear module behind the pooling takes

    W E x = x,   W[i, j] = E[j, i] / sum_k E[k, i]^2                                        (1)

so all modules behind it stay as they are, and vectors that were indexed before still fit.
"""

from __future__ import annotations

import json
import reprlib
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from growkern.errors import GrowthError
from growkern.files import read_json
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.source.config import config_directory
from growkern.growth.source.files import refuse_links_out
from growkern.growth.source.refused import STATE_FILES
from growkern.growth.space.spaces import Space

MODULES_FILE, CONFIG_FILE, WEIGHTS_FILE = "modules.json", "config.json", "model.safetensors"
# a list has a few entries, and a module a few options
MOST_BYTES, MOST_MODULES, MOST_FILES = 1_000_000, 32, 64
# classes of modules, by the last part of their names
TRANSFORMER, POOLING, DENSE = "Transformer", "Pooling", "Dense"
DENSE_CLASS = "sentence_transformers.models.Dense"
IDENTITY = "torch.nn.modules.linear.Identity"
# a product that is this close to the identity was not trained; bfloat16 has 8 bits
ROUNDING = 2.0**-7
# the folder and the name of (1)
FOLD = "growkern_fold"
# fields of the pooling's config, of which each version has one
WIDTHS = ("word_embedding_dimension", "embedding_dimension")
# and how it names its modes, whose results are joined
MODES, MODE_PREFIX = "pooling_mode", "pooling_mode_"


class Module(NamedTuple):
    """An entry of `modules.json`."""

    entry: Mapping[str, Any]
    kind: str
    path: str


def is_sentence_model(directory: Path | None) -> bool:
    """Whether a directory is that of a sentence-transformers model."""
    return directory is not None and (directory / MODULES_FILE).is_file()


def becomes_sentence_model(plan: Blueprint) -> bool:
    """Whether `write_modules` makes the target of a plan one of sentence-transformers."""
    source = plan.source.directory
    return source is not None and is_sentence_model(config_directory(source))


def read_modules(directory: Path) -> list[Module]:
    """The modules of a directory; none if it is not that of sentence-transformers."""
    file = directory / MODULES_FILE
    if not is_sentence_model(directory):
        return []
    refuse_links_out(file, directory)
    data = read_json(file, MOST_BYTES, "list of modules")
    if not isinstance(data, list) or not 1 <= len(data) <= MOST_MODULES:
        raise GrowthError(f"{file}: not a list of modules")
    result = [_module(file, entry) for entry in data]
    kinds = [module.kind for module in result]
    if kinds[:2] != [TRANSFORMER, POOLING] or result[0].path:
        raise GrowthError(
            f"{file}: its modules are {', '.join(kinds)}; growth carries over a Transformer at the "
            "top of the directory that a Pooling follows: remove the file to grow the transformer "
            "alone"
        )
    for module in result[1:]:
        _check_folder(directory, module)
    return result


def _module(file: Path, entry: Any) -> Module:
    module = entry if isinstance(entry, dict) else {}
    kind, path = module.get("type"), module.get("path")
    if not isinstance(kind, str) or not isinstance(path, str):
        raise GrowthError(f"{file}: {reprlib.repr(entry)} is no module: it needs type and path")
    if Path(path).name != path or path in (".", "..") or "\0" in path:
        raise GrowthError(f"{file}: {reprlib.repr(path)} is not the name of a folder")
    return Module(module, kind.rpartition(".")[2], path)


def _check_folder(directory: Path, module: Module) -> None:
    """Refuse the folder of a module that cannot be copied, or whose weights are pickled."""
    folder = directory / module.path
    for file in _files(folder):
        refuse_links_out(file, directory)
        if not file.is_file():
            raise GrowthError(f"{file}: not a regular file")
    pickled = any(fnmatch(file.name, "*.bin") for file in _files(folder))
    has_weights = (folder / WEIGHTS_FILE).exists()
    if (pickled or module.kind == DENSE) and not has_weights:
        code = "from sentence_transformers import SentenceTransformer as S; "
        code += f"S({str(directory)!r}).save({directory.name + '-whole'!r})"
        raise GrowthError(
            f"{folder}: the weights of the module are pickled or missing: save the model as "
            f'safetensors first: python -c "{code}"'
        )


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    if len(files) > MOST_FILES:
        raise GrowthError(f"{folder}: {len(files)} files, more than a module has")
    return files


# ------------------------------------------------------------------ writing


def check_modules(plan: Blueprint) -> None:
    """Refuse, before any work, modules that cannot be carried over to the target of a plan."""
    if plan.source.directory is None:
        return
    directory = config_directory(plan.source.directory)
    modules = read_modules(directory)
    if modules:
        width = plan.layout.space(plan.small.output_space).source
        _pooling(directory, modules[1], width, width)


def write_modules(plan: Blueprint, target: Path) -> None:
    """Write the modules of a grown checkpoint beside its transformer, with (1) if it is wider."""
    if plan.source.directory is None:
        return
    directory = config_directory(plan.source.directory)
    modules = read_modules(directory)
    if not modules:
        return
    space = plan.layout.space(plan.small.output_space)
    config, modes = _pooling(directory, modules[1], space.source, space.target)
    matrix, dense = fold_matrix(space), []
    if not _is_identity(matrix):
        # a model that was grown before has one already
        name = f"{FOLD}_{sum(FOLD in module.path for module in modules)}"
        # the modes of a pooling lie one after another
        _write_dense(target / name, torch.kron(torch.eye(modes).double(), matrix).to(plan.dtype))
        dense = [_module(target, {"name": name, "path": name, "type": DENSE_CLASS})]
    _write_list(directory, target, [*modules[:2], *dense, *modules[2:]])
    _write_json(target / modules[1].path / CONFIG_FILE, config)


def fold_matrix(space: Space) -> Tensor:
    """W of (1), (source, target) float64. Extra coordinates hold nothing of the source."""
    # entries of 0 and below could not be read behind a pooling that takes the largest
    write = torch.where(space.is_extra, 0.0, space.write).clamp(min=0)
    index = torch.where(space.is_extra, 0, space.write_index)
    squares = torch.zeros(space.source, dtype=torch.float64).index_add(0, index, write.square())
    matrix = torch.zeros(space.source, space.target, dtype=torch.float64)
    matrix[index, torch.arange(space.target)] = write / squares[index]
    return matrix


def _is_identity(matrix: Tensor) -> bool:
    size = len(matrix)
    return matrix.shape == (size, size) and torch.allclose(
        matrix, torch.eye(size, dtype=matrix.dtype), rtol=0, atol=ROUNDING
    )


def _pooling(directory: Path, module: Module, old: int, new: int) -> tuple[dict[str, Any], int]:
    """The config of a pooling over `new` coordinates in place of `old`, and its number of modes."""
    file = directory / module.path / CONFIG_FILE
    config = read_json(file, MOST_BYTES, "config of a module")
    if not isinstance(config, dict):
        raise GrowthError(f"{file}: not a JSON object")
    widths = [name for name in WIDTHS if config.get(name) == old]
    if not widths:
        raise GrowthError(f"{file}: its {WIDTHS[0]} is not the width of the model, {old}")
    named = config.get(MODES)
    flags = [name for name in config if name.startswith(MODE_PREFIX) and config[name] is True]
    modes = len(named) if isinstance(named, list) else max(1, len(flags))
    return {**config, **dict.fromkeys(widths, new)}, modes


def _write_list(directory: Path, target: Path, modules: Sequence[Module]) -> None:
    """Write `modules.json`, and copy the folders of its modules that the target lacks."""
    entries = [{**module.entry, "idx": number} for number, module in enumerate(modules)]
    _write_json(target / MODULES_FILE, entries)
    for module in modules[1:]:
        folder = target / module.path
        if folder.exists():
            continue
        folder.mkdir()
        for file in _files(directory / module.path):
            if not any(fnmatch(file.name, pattern) for pattern in STATE_FILES):
                shutil.copyfile(file.resolve(), folder / file.name)


def _write_dense(folder: Path, weight: Tensor) -> None:
    folder.mkdir()
    config = {
        "in_features": weight.shape[1],
        "out_features": weight.shape[0],
        "bias": False,
        "activation_function": IDENTITY,
    }
    _write_json(folder / CONFIG_FILE, config)
    save_file({"linear.weight": weight.contiguous()}, folder / WEIGHTS_FILE)


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
