"""`grow` and `grow_checkpoint`: a plan carried out, in memory or onto disk."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm
from transformers.initialization import no_init_weights

from growkern.errors import GrowthError
from growkern.growth.apply import build_tensor
from growkern.growth.files import STORED_DTYPES
from growkern.growth.options import GrowthOptions
from growkern.growth.plan import GrowthPlan, plan, plan_growth

LINEAGE_FILE = "lineage.json"
DTYPES = {str(d).removeprefix("torch."): d for d in STORED_DTYPES.values() if d.is_floating_point}
# what belongs to a checkpoint besides weights and config; only what exists is copied
COMPANION_PATTERNS = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "spiece.model",
    "sentencepiece*",
    "generation_config.json",
)


@dataclass(frozen=True)
class GrowthReport:
    """What `grow_checkpoint` did.

    Attributes:
        directory: the new checkpoint.
        plan: the plan it carried out.
        bytes_written: size of the weights, bytes.
        seconds: wall time of building and writing.
    """

    directory: Path
    plan: GrowthPlan
    bytes_written: int
    seconds: float


def grow(
    source: Any,
    *,
    target_config: Any | None = None,
    dtype: torch.dtype | None = None,
    allow_nonfinite: bool = False,
    backend: str | None = None,
    progress: bool = False,
    **how: Any,
) -> Any:
    """Make a bigger model out of a trained one.

    Args:
        source: a `transformers.PreTrainedModel` or a checkpoint directory.
        target_config: the target's config; or give its sizes by the config's own names.
        dtype: of the new weights; default the source's.
        allow_nonfinite: grow NaN and Inf as they are.
        backend: of the expansion kernel, see `growkern.expand`.
        progress: show a progress bar.
        **how: the fields of `growkern.growth.options.GrowthOptions` (method, depth, scheme,
            symmetry, seed, ...) and the target sizes (`hidden_size=1024`, ...).

    Returns:
        A model of the source's class in evaluation mode, on the CPU, with the plan as
        `model.growth_plan`. Save it with `save_pretrained`.

    Raises:
        GrowthError: before any work, when the source or the sizes cannot be used.

    Source: bert2BERT (Chen et al., ACL 2022), Eq. 5-16 and Algorithm 1; `expand` for the kernel.
    """
    grown = plan(
        source, target_config=target_config, dtype=dtype, allow_nonfinite=allow_nonfinite, **how
    )
    return _model_of(grown, _build_all(grown, backend=backend, progress=progress))


def _build_all(grown: GrowthPlan, *, backend: str | None, progress: bool) -> dict[str, Tensor]:
    state = {}
    total = grown.parameters() * grown.dtype.itemsize
    with tqdm(total=total, desc="growing", unit="B", unit_scale=True, disable=not progress) as bar:
        for task in grown.tasks:
            state[task.name] = build_tensor(grown, task, backend=backend)
            bar.update(state[task.name].nbytes)
    return state


def _model_of(grown: GrowthPlan, state: dict[str, Tensor]) -> Any:
    model_class = getattr(transformers, grown.source.class_name)
    with no_init_weights():
        model = model_class._from_config(grown.target_config, dtype=grown.dtype)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.growth_plan = grown
    return model.eval()


def grow_checkpoint(
    source_dir: Any,
    target_dir: Any,
    *,
    target_config: Any | None = None,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    allow_nonfinite: bool = False,
    backend: str | None = None,
    progress: bool = True,
    **how: Any,
) -> GrowthReport:
    """Grow a checkpoint directory into another one.

    The target appears whole, by a rename, or not at all; a replaced directory is removed only
    after that. Tokenizer and generation files come along, and `lineage.json` records how it was
    made. The grown weights are held in memory while they are written.

    Args:
        source_dir: config.json and safetensors, sharded or not.
        target_dir: where to; must not exist unless `overwrite`.
        max_shard_size: as in `save_pretrained`.
        Others: as in `grow`.

    Raises:
        GrowthError: bad source or sizes, an existing target, too little disk space; nothing is
            written then.
    """
    source_dir, target_dir = Path(source_dir), Path(target_dir)
    start = time.perf_counter()
    _check_target(source_dir, target_dir, overwrite)
    grown = plan(
        source_dir, target_config=target_config, dtype=dtype, allow_nonfinite=allow_nonfinite, **how
    )
    size = grown.parameters() * grown.dtype.itemsize
    _check_space(target_dir, size)
    model = _model_of(grown, _build_all(grown, backend=backend, progress=progress))
    staging = _staging_directory(target_dir)
    try:
        model.save_pretrained(staging, max_shard_size=max_shard_size)
        copy_companions(source_dir, staging)
        lineage = {**grown.to_dict(), "source": str(source_dir.resolve())}
        (staging / LINEAGE_FILE).write_text(json.dumps(lineage, indent=2) + "\n", encoding="utf-8")
        _swap_in(staging, target_dir)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise GrowthError(f"{target_dir}: {why}; nothing was changed") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return GrowthReport(target_dir, grown, size, time.perf_counter() - start)


def plan_from_lineage(source: Any, directory: Path) -> GrowthPlan:
    """The plan that made `directory` out of `source`, read back from its lineage file.

    Raises:
        GrowthError: no lineage file, or one that does not fit the source.
    """
    file = directory / LINEAGE_FILE
    if not file.is_file():
        raise GrowthError(f"{directory}: no {LINEAGE_FILE}; only grown checkpoints have one")
    try:
        lineage = json.loads(file.read_text(encoding="utf-8"))
        options = GrowthOptions(**lineage["options"])
        sizes = {name: pair[1] for name, pair in lineage["sizes"].items()}
        before = {name: pair[0] for name, pair in lineage["sizes"].items()}
        dtype = DTYPES[lineage["dtype"]]
    except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
        raise GrowthError(f"{file}: not a growth record: {error!r}") from error
    for name, value in before.items():
        if getattr(source.config, name, None) not in (value, None):
            raise GrowthError(
                f"{file}: made from a model with {name}={value}, this source has "
                f"{getattr(source.config, name)}"
            )
    return plan_growth(source, options, sizes, dtype=dtype)


def copy_companions(source_dir: Path, target_dir: Path) -> None:
    """Copy tokenizer and generation files that the target does not have yet."""
    for pattern in COMPANION_PATTERNS:
        for file in sorted(source_dir.glob(pattern)):
            if file.is_file() and not (target_dir / file.name).exists():
                shutil.copy2(file, target_dir / file.name)


# -------------------------------------------------------------------- files


def _check_target(source_dir: Path, target_dir: Path, overwrite: bool) -> None:
    if target_dir.exists() and not overwrite:
        raise GrowthError(f"{target_dir} exists; give another directory or overwrite (--overwrite)")
    if not target_dir.exists():
        return
    if not target_dir.is_dir():
        raise GrowthError(f"{target_dir} is a file; give a directory")
    source, target = source_dir.resolve(), target_dir.resolve()
    if source == target or target in source.parents:
        raise GrowthError(f"{target_dir} holds the source itself; give another directory")
    if any(target_dir.iterdir()) and not (target_dir / "config.json").is_file():
        raise GrowthError(
            f"{target_dir} holds something other than a checkpoint; only a checkpoint is replaced"
        )


def _existing_parent(target_dir: Path) -> Path:
    parent = target_dir.resolve().parent
    while not parent.exists():
        parent = parent.parent
    return parent


def _check_space(target_dir: Path, size: int) -> None:
    free = shutil.disk_usage(_existing_parent(target_dir)).free
    if free < size:
        raise GrowthError(
            f"{target_dir}: {size / 1e9:.2f} GB to write, {free / 1e9:.2f} GB free on that disk"
        )


def _staging_directory(target_dir: Path) -> Path:
    """A hidden directory beside the target: a rename within one file system is atomic."""
    try:
        target_dir.resolve().parent.mkdir(parents=True, exist_ok=True)
        name = f".{target_dir.name}.growing-"
        return Path(tempfile.mkdtemp(prefix=name, dir=target_dir.resolve().parent))
    except OSError as error:
        raise GrowthError(f"{target_dir}: {error.strerror or error}") from error


def _swap_in(staging: Path, target_dir: Path) -> None:
    staging.chmod(0o755)
    if not target_dir.exists():
        staging.rename(target_dir)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target_dir.name}.old-", dir=staging.parent))
    target_dir.rename(old / "replaced")
    try:
        staging.rename(target_dir)
    except OSError:
        (old / "replaced").rename(target_dir)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
