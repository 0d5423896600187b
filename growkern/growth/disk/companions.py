"""Writes what a checkpoint has besides its weights: config, tokenizer, processor, licence.

Tokenizers and processors save files under many names (`spm.model`, `tekken.json`, their own code).
`CARRIED` has patterns of these. Files that code or a config beside them names are copied too. Other
files, such as notes, pictures and logs, stay behind, and a warning names them.

transformers drops the keys of config.json that its own classes no longer read. Other software reads
them, and computes with defaults where they are missing. So the config is completed with keys of the
source, and with those of older software.

Embeddings of sentence-transformers stay those of the source. `modules.json` lists what follows the
transformer: a pooling over its tokens, then other modules. A linear module behind the pooling folds
the copies of each coordinate (`Space.fold`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from growkern.errors import GrowthError, listed, warn
from growkern.families import Family, inner, load_family, supported_families
from growkern.files import copy_file, read_json
from growkern.growth.models import fit_cache, untrained_model
from growkern.growth.plan import Blueprint
from growkern.growth.source import (
    MODULES_FILE,
    STATE_FILES,
    Source,
    beside_weights,
    config_directory,
    load_config,
    refuse_links_out,
    refuse_misread,
)

if TYPE_CHECKING:
    from growkern.growth.disk.stream import ShardLayout

# the name of the fold, and what its config needs
FOLD, DENSE = "growkern_fold", "sentence_transformers.models.Dense"
PLAIN = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
# of a list of modules, or of the config of one
MOST_BYTES, MOST_NAMED = 1_000_000, 8
# configs, code, templates, tokenizers and licences, in small letters
CARRIED = (
    *("*.json", "*.py", "*.jinja", "*.model*", "*.tiktoken", "*.tokenizer", "*.codes", "*.spm"),
    *("*.bpe", "*.vocab", "*vocab*.txt", "*merges*.txt", "*dict*.txt", "*token*.txt"),
    *("*licen[cs]e*", "*notice*", "*policy*"),
)
WEIGHTS, WIDTHS = "model.safetensors", ("word_embedding_dimension", "embedding_dimension")


def companions(directory: Path) -> list[Path]:
    """The files of a checkpoint directory that are copied beside a model made from it.

    A link is followed if it ends inside the directory, or inside the cached repository that the
    directory is a snapshot of. Other links could end at anybody's file: a warning names them.
    """
    found = []
    for file in beside_weights(directory):
        try:
            refuse_links_out(file, directory)
        except GrowthError as error:
            warn(f"left out: {error}")
            continue
        if file.is_file():
            found.append(file)
    own = [file for file in found if file.name.endswith((".py", "_config.json"))]
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in own)
    kept = [
        file
        for file in found
        # all chat templates lie in a folder of theirs
        if file.parent != directory
        or file.name in text
        or any(fnmatch(file.name.lower(), x) for x in CARRIED)
    ]
    if left := sorted(file.name for file in {*found} - {*kept}):
        warn(f"not copied, as no loader is known to need it: {listed(left, MOST_NAMED)}")
    return kept


def copy_companions(
    source: Path, target: Path, only: Collection[str] | None = None
) -> dict[str, str]:
    """Copy companion files with plain modes; of those in `only`, if it is given.

    Returns the checksum of each file, as it was read, by its path.
    """
    checksums = {}
    for file in companions(source):
        name = file.relative_to(source).as_posix()
        if only is None or name in only:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            checksums[name] = copy_file(file.resolve(), target / name)
    return checksums


def write_companions(
    directory: Path, grown: Blueprint, layout: ShardLayout, beside: Path
) -> dict[str, str]:
    """Write config, index and companion files beside the weights in `directory`.

    `beside` is the checkpoint to copy companion files from, or a subdirectory of it. Returns the
    checksums of the files that were copied, as they were read.
    """
    model, source = grown.large, grown.source
    with torch.device("meta"):
        made = untrained_model(model, grown.dtype)
    made.config.architectures = [model.class_name]
    try:
        made.config.save_pretrained(directory)
    except OSError:
        raise
    except Exception as error:
        # the type of the error depends on the version of transformers
        why = " ".join(str(error).split())[-300:]
        raise GrowthError(f"transformers refuses to save the config: {why}") from error
    complete_config(directory, source, made.config, model.config)
    layout.write_index(directory)
    companions_of = config_directory(beside)
    stamps = source.stamps
    # a file that came since may not be whole
    names = {os.path.relpath(name, companions_of) for name in stamps.found} if stamps else None
    copied = copy_companions(companions_of, directory, only=names)
    generation = grown.generation
    if made.can_generate() and generation is not None:
        fit_cache(model, generation)
        # written by transformers and not copied, so that `save_pretrained` gives the same bytes
        generation.save_pretrained(directory)
        copied.pop(GENERATION_CONFIG_NAME, None)
    return copied


# of the source's files and of the package that wrote them
NOT_KEPT = ("_name_or_path", "transformers_version")
# what transformers before version 4.56 calls the dtype
OLD_DTYPE = "torch_dtype"


def complete_config(
    directory: Path, source: Source | None = None, model: Any = None, planned: Any = None
) -> None:
    """Add to the config.json of `save_pretrained` what transformers left out.

    - Older names of what growth set, such as `rope_theta` (`growkern.families.spec.OlderKey`).
    - Every key of the source's config.json that growth did not change, with the source's value. It
      needs the source, and the config of the saved model.

    A config of a family without a table stays as it is. The file is then read again: it must say
    what the `planned` config says or, without one, what the file of `save_pretrained` said.
    """
    file = directory / "config.json"
    saved = json.loads(file.read_text(encoding="utf-8"))
    kind = saved.get("model_type")
    if source is None and kind not in supported_families():
        return
    family = load_family(kind) if source is None else source.spec.family
    before = {} if source is None else json.loads(source.config.to_json_string())
    given = {} if source is None else source.keys
    small = source and source.config
    result = {**saved, **_unchanged(given, before, saved, small, model)}
    if family.under is None:
        result = _with_older(family, result, given, before)
    else:
        # the text's part by itself, as the rest stays
        old, keys, new = (inner(x, family.under) for x in (before, given, saved))
        models = (config and family.text(config) for config in (small, model))
        part = {**new, **_unchanged(keys, old, new, *models)}
        result[family.under] = part = _with_older(family, part, keys, old)
        # files of version 4 may have fields of the text beside those of the whole
        fields = {key.field for key in family.older} | part.keys()
        for key in (given.keys() - saved.keys()) & fields:
            result[key] = part.get(key)
    planned = planned or load_config(directory)
    # as transformers writes it
    file.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    refuse_misread(file, family, planned, load_config(directory), small)


def _unchanged(
    given: Mapping[str, Any],
    before: Mapping[str, Any],
    saved: Mapping[str, Any],
    small: Any,
    large: Any,
) -> dict[str, Any]:
    """The keys of the source's config.json that say of the target what they say of the source.

    `before` and `saved` are the configs of both, as transformers writes them; `small` and `large`
    are the same as objects, whose attributes have more names.
    """
    kept = {}
    for key, value in given.items():
        if key == OLD_DTYPE:
            kept[key] = saved.get("dtype", value)
        elif key in NOT_KEPT:
            continue
        elif key in saved or key in before:
            # null means a default that may follow from the sizes
            if key in saved and key in before and saved[key] == before[key] and value is not None:
                kept[key] = value
        else:
            # other names of sizes, such as num_hidden_layers of BART
            old, new = getattr(small, key, None), getattr(large, key, None)
            kept[key] = value if old == new else new
    return kept


def _with_older(
    family: Family, config: dict[str, Any], given: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """A config with the older keys of its family; those that nothing describes are left out."""
    result = dict(config)
    beside = {key.of.rpartition(".")[2] for key in family.older if key.form == "value"}
    for key in family.older:
        value = key.value(config, result.pop(key.field, None), beside)
        stays = not key.is_pattern and value == key.value(before, None, beside)
        # a value may contradict the new form, which counts where both stand
        if key.field in given and stays and (key.form != "value" or given[key.field] == value):
            result[key.field] = given[key.field]
        elif value is not None:
            result[key.field] = value
    return result


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
    config = read_json(file := directory / modules[1]["path"] / CONFIG_NAME, MOST_BYTES, "config")
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
    config = read_json(file := target / modules[1]["path"] / CONFIG_NAME, MOST_BYTES, "config")
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
        _write(target / name / CONFIG_NAME, {**sizes, **PLAIN})
        save_file({"linear.weight": weight}, target / name / WEIGHTS)
        modules = [*modules[:2], {"name": name, "path": name, "type": DENSE}, *modules[2:]]
    _write(target / MODULES_FILE, [{**module, "idx": i} for i, module in enumerate(modules)])


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
