"""Makes `save_pretrained` and `push_to_hub` of a grown model write its lineage and its card."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkern.growth.disk.companions import complete_config
from growkern.growth.disk.sentence import is_sentence_model
from growkern.growth.history import CARD_FILE, CHECKSUMS_FILE, LINEAGE_FILE
from growkern.growth.options import parse_size
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.record.card import add_tags, card_text, note_training, write_card
from growkern.growth.record.lineage import Settings, lineage_text, source_files, write_lineage
from growkern.growth.record.recorded import misfit
from growkern.growth.sharded.placement import local_tensor

# what `save_pretrained` takes by default
SHARD_SIZE = "50GB"
# entries of a weight that tell whether it was changed
SAMPLED = 251


def record_when_saved(model: Any, plan: GrowthPlan, backend: str | None, nonfinite: bool) -> None:
    """Let `save_pretrained` write `lineage.json` and `README.md` too, and `push_to_hub` send them.

    If the model was trained or cast since, the record says so, and so does a card that is there.
    `growkern.fold` and the next growth need it. A model whose shapes were changed is saved as any
    other; a record that is in the directory then stays.

    Args:
        backend: backend of the expansion kernel, or None.
        nonfinite: whether NaN and Inf in the source were grown.
    """
    # of the files before anybody changes them
    record = _Record(model, plan, backend, nonfinite, source_files(plan.source), _state(model))
    model.save_pretrained = record.save_pretrained
    model.push_to_hub = record.push_to_hub
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

    def _is_own(self) -> bool:
        return self.state == _state(self.model)

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        model, plan = self.model, self.plan
        is_first = args[0] if args else options.get("is_main_process", True)
        is_own = options.get("state_dict") is None and len(args) < 2 and self._is_own()
        directory = Path(save_directory)
        has_record = (directory / LINEAGE_FILE).is_file()
        is_whole = is_own or has_record or misfit(plan, model) is None
        if is_first and is_whole and not directory.is_file():
            size = parse_size("max_shard_size", options.get("max_shard_size", SHARD_SIZE))
            settings = Settings(self.backend, size, self.nonfinite)
            # before the weights, as `push_to_hub` sends the directory off at the end of the call
            directory.mkdir(parents=True, exist_ok=True)
            if has_record:
                # those of the weights that are replaced
                (directory / CHECKSUMS_FILE).unlink(missing_ok=True)
            write_lineage(lineage_text(plan, settings, self.files, trained=not is_own), directory)
            if is_own:
                is_sentence = is_sentence_model(directory)
                write_card(card_text(plan, settings, is_sentence=is_sentence), directory)
            else:
                note_training(directory)
        type(model).save_pretrained(model, save_directory, *args, **options)
        if is_first and not directory.is_file():
            complete_config(directory, plan.source, model.config)

    def upload_files(self, working_dir: Any, *args: Any, **options: Any) -> Any:
        # the end of `save_pretrained(push_to_hub=True)`
        complete_config(Path(working_dir), self.plan.source, self.model.config)
        return type(self.model)._upload_modified_files(self.model, working_dir, *args, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        if not self._is_own():
            return type(self.model).push_to_hub(self.model, repo_id, **options)
        return _upload(self.model, repo_id, **options)


def _upload(
    model: Any,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = SHARD_SIZE,
    tags: Sequence[str] | None = None,
) -> Any:
    """`push_to_hub` of transformers, which would replace the model card by an empty one.

    A card on the Hub that somebody wrote or edited stays, with the tags added.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr") and not create_pr:
        api.create_branch(name, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        _fetch_card(api, name, revision, Path(directory))
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        add_tags(tags or (), Path(directory))
        return api.upload_folder(
            repo_id=name,
            folder_path=directory,
            commit_message=commit_message or "Upload a model grown with growkern",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )


def _fetch_card(api: Any, name: str, revision: str | None, directory: Path) -> None:
    """Put the card of a model on the Hub into a directory, if there is one."""
    from huggingface_hub import errors

    try:
        file = api.hf_hub_download(name, CARD_FILE, revision=revision)
    except errors.LocalEntryNotFoundError:
        # the Hub cannot be reached
        raise
    except (errors.EntryNotFoundError, errors.RevisionNotFoundError):
        return
    shutil.copyfile(file, directory / CARD_FILE)


def _state(model: Any) -> tuple[tuple[torch.dtype, int, bytes], ...]:
    """Changes when a weight is written or cast.

    PyTorch counts the writes, except those through `Parameter.data`, as some optimizers make them.
    So some entries of each weight are read too.
    """
    return tuple((p.dtype, p._version, _sample(p)) for p in model.parameters())


def _sample(parameter: Tensor) -> bytes:
    """The bits of entries from all of a parameter."""
    flat = local_tensor(parameter).reshape(-1)
    chosen = flat[:: max(1, flat.numel() // SAMPLED)].cpu().contiguous()
    return chosen.view(torch.uint8).numpy().tobytes()
