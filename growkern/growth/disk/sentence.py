"""Carries the modules of sentence-transformers over, so that embeddings stay those of the source.

`modules.json` lists what follows the transformer: a pooling over its tokens, then other modules.
A linear module behind the pooling folds the copies of each coordinate (`Space.fold`).
"""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from growkern.errors import GrowthError
from growkern.files import read_json
from growkern.growth.plan import Blueprint
from growkern.growth.source import (
    CONFIG_FILE,
    MODULES_FILE,
    MOST_BYTES,
    STATE_FILES,
    config_directory,
    refuse_links_out,
)

# the name of the fold, and what its config needs
FOLD, DENSE = "growkern_fold", "sentence_transformers.models.Dense"
PLAIN = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
WEIGHTS, WIDTHS = "model.safetensors", ("word_embedding_dimension", "embedding_dimension")


def read_modules(plan: Blueprint) -> list[dict[str, Any]] | None:
    """The list of modules of a plan's source; None without one. Others are refused."""
    directory = plan.source.directory and config_directory(plan.source.directory)
    if directory is None or not (file := directory / MODULES_FILE).is_file():
        return None
    refuse_links_out(file, directory)
    found = read_json(file, MOST_BYTES, "list of modules")
    modules = [x if isinstance(x, dict) else {} for x in (found if isinstance(found, list) else ())]
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise GrowthError(
            f"{file}: its modules are {', '.join(kinds)}; growth carries over a Transformer that a "
            "Pooling follows: remove the file to grow the transformer alone"
        )
    for path, kind in zip([module.get("path") for module in modules[1:]], kinds[1:], strict=True):
        if not isinstance(path, str) or Path(path).name != path or path in ("", ".."):
            raise GrowthError(f"{file}: {str(path)[:100]!r} is not the name of a folder")
        for inside in (files := [*(directory / path).rglob("*")]):
            refuse_links_out(inside, directory)
        needs = kind == "Dense" or any(inside.suffix == ".bin" for inside in files)
        if needs and not (directory / path / WEIGHTS).is_file():
            raise GrowthError(f"{directory / path}: no {WEIGHTS}: save the model as safetensors")
    config = read_json(file := directory / modules[1]["path"] / CONFIG_FILE, MOST_BYTES, "config")
    width = plan.layout.space(plan.small.output_space).source
    if not isinstance(config, dict) or width not in map(config.get, WIDTHS):
        raise GrowthError(f"{file}: its {WIDTHS[0]} is not the width of the model, {width}")
    return modules


def write_modules(plan: Blueprint, modules: list[dict[str, Any]] | None, target: Path) -> None:
    """Write `modules` beside the grown transformer, with the fold if it is wider."""
    if modules is None:
        return
    directory = config_directory(plan.source.directory or Path())
    space = plan.layout.space(plan.small.output_space)
    for module in modules[1:]:
        (target / module["path"]).mkdir()
        for file in (directory / module["path"]).glob("*"):
            if file.is_file() and not any(fnmatch(file.name, state) for state in STATE_FILES):
                shutil.copyfile(file, target / module["path"] / file.name)
    config = read_json(file := target / modules[1]["path"] / CONFIG_FILE, MOST_BYTES, "config")
    _write(file, {k: space.target if k in WIDTHS else x for k, x in config.items()})
    if space.target != space.source:
        # a model that was grown before has one already
        name = f"{FOLD}_{sum(FOLD in module['path'] for module in modules)}"
        named = config.get("pooling_mode")
        flags = sum(key.startswith("pooling_mode_") and x is True for key, x in config.items())
        # the modes of a pooling lie one after another
        modes = torch.eye(len(named) if isinstance(named, list) else max(1, flags)).double()
        weight = torch.kron(modes, space.fold()).to(plan.dtype).contiguous()
        (target / name).mkdir()
        sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
        _write(target / name / CONFIG_FILE, {**sizes, **PLAIN})
        save_file({"linear.weight": weight}, target / name / WEIGHTS)
        modules = [*modules[:2], {"name": name, "path": name, "type": DENSE}, *modules[2:]]
    _write(target / MODULES_FILE, [{**module, "idx": i} for i, module in enumerate(modules)])


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
