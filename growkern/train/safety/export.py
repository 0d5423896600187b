"""`growkern export`: makes an ordinary Hugging Face directory of a run's last checkpoint.

A sharded run saves the parts of its processes. Its end gathers them, but a run that is still going
on has only checkpoints. An export reads them in one process, without the GPUs of the run.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from growkern.errors import GrowthError, nearest, warn, without_bars
from growkern.growth.disk import check_target, complete_config, copy_companions, may_replace
from growkern.growth.history import LINEAGE_FILE, history_in
from growkern.growth.models import materialise, restore_buffers
from growkern.growth.record import DTYPES, keep_lineage, recorded_card, write_card
from growkern.growth.source import class_in, read_config
from growkern.publish import make_folder, read_manifest, workplace, write_manifest
from growkern.train.distributed import has_weights, load_weights
from growkern.train.model import load_language_model
from growkern.train.safety.checkpoints import exportable, first_whole, step_of

KIND = "exporting"


@without_bars()
def export(run: Path, target: Path, *, dtype: str | None = None, overwrite: bool = False) -> Path:
    """Write the model of a run's last whole checkpoint as a Hugging Face directory.

    The target appears complete, or is replaced in one step. The run is only read.

    Args:
        run: the output directory of a run, or one of its checkpoints.
        dtype: of the weights in the file, such as "bfloat16"; None keeps that of
            the checkpoint.

    Returns:
        The checkpoint that was exported.
    """
    checkpoint, wrong = first_whole(exportable(run))
    if checkpoint is None:
        reasons = "".join(f"; {path.name}: {reason}" for path, reason in wrong.items())
        raise GrowthError(
            f"{run} has no whole checkpoint to export{reasons}: give the output directory of a run"
        )
    for path, reason in wrong.items():
        warn(f"{path} is damaged ({reason}): exporting {checkpoint.name}")
    if dtype is not None and dtype not in DTYPES:
        raise GrowthError(f"dtype is {dtype!r}{nearest(dtype, DTYPES)}")
    wanted = None if dtype is None else DTYPES[dtype]
    target = target.absolute()
    workplace.delete_leftovers(target, KIND, may_replace)
    check_target(run, target, overwrite)
    make_folder(target.parent)
    model, step = _load(checkpoint), step_of(checkpoint)
    with workplace.Workplace(target, KIND, may_replace, resume=False) as place:
        new = place.open_new()
        manifest = read_manifest(checkpoint)
        copied = copy_companions(checkpoint, new, only=manifest)
        changed = [name for name, checksum in copied.items() if checksum != manifest[name][1]]
        if changed:
            raise GrowthError(f"{checkpoint / changed[0]} was changed: export again")
        try:
            model.to(wanted or model.dtype).save_pretrained(new)
        except SafetensorError as error:
            raise GrowthError(f"{target} cannot be written: {error}") from error
        complete_config(new)
        keep_lineage(history_in(checkpoint, model.config), new)
        if (new / LINEAGE_FILE).is_file():
            # some findings need the source's weights
            with contextlib.suppress(GrowthError):
                write_card(recorded_card(new, f", and trained until step {step} of its run"), new)
        # last, so that it covers every file
        write_manifest(new)
        place.publish(overwrite=overwrite)
    return checkpoint


def _load(checkpoint: Path) -> Any:
    if not has_weights(checkpoint):
        return load_language_model(checkpoint)
    config = read_config(checkpoint, any_family=True)
    with torch.device("meta"):
        model = class_in(checkpoint, config)._from_config(config, dtype=config.dtype)
    materialise(model, "cpu")
    restore_buffers(model)
    load_weights(model, checkpoint)
    return model
