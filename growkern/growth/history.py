"""The growths that a source has behind it, as far as they are known.

Step sizes of a grown model follow from all of its growths (`growkern.growth.optimizer.moments`).
`growkern.growth.record.lineage` makes plans of what is found here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError, a_kind
from growkern.families import Family, own_family
from growkern.files import read_json

LINEAGE_FILE, CHECKSUMS_FILE, CARD_FILE = "lineage.json", "checksums.json", "README.md"
# keys that every lineage file has
NEEDED = ("options", "settings", "tensors", "dtype", "source_dtype")
# an entry has 500 bytes; there is one for each tensor
MOST_LINEAGE_BYTES = 64_000_000
# the key of a record with those of the growths before it, the latest first
EARLIER = "earlier_growths"
# keys of a record with a table that is not part of the package, and with its checksum
TABLE_KEY, TABLE_SUM_KEY = "family_table", "family_table_sha256"
# key of every grown model's config. transformers keeps it, wherever a model is saved
GROWN_KEY = "grown_by_growkern"
FIX = "copy it from the grown model"


@dataclass(frozen=True)
class History:
    """The growths that made a model.

    Attributes:
        plan: the `GrowthPlan` of the last one, if the model is in memory.
        records: otherwise the contents of its lineage file and of those before it, the latest
            first. None of them is checked. A record that is not known is a sentence that says why,
            and the last one.
    """

    plan: Any = field(default=None, repr=False)
    records: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def lost(self) -> str:
        """Why a growth is not known; "" if there is a record of each."""
        if self.plan is not None:
            lost: str = self.plan.source.history.lost
            return lost
        last = self.records[-1] if self.records else ""
        return last if isinstance(last, str) else ""


def forgotten(why: str) -> str:
    """What a lost record means, as a clause."""
    return (
        f"the source was grown before, and how is not known ({why}), so the factors of "
        "growth_lr_multipliers count from this growth alone"
    )


def has_record(directory: Path | None) -> bool:
    """True if a directory has a lineage file."""
    return directory is not None and (directory / LINEAGE_FILE).is_file()


def refuse_unrecorded(grown: Path) -> None:
    """Refuse a directory without a lineage file, where one is needed."""
    if not has_record(grown):
        raise GrowthError(
            f"{grown}: no {LINEAGE_FILE}: give a grown checkpoint; if this one was trained since, "
            f"add --lineage with the {LINEAGE_FILE} of the growth (in Python lineage=...)"
        )


def history_of(model: Any) -> History:
    """The growths of a model in memory, or of the place that it was loaded from."""
    plan = getattr(model, "growth_plan", None)
    if plan is not None:
        # the weights of the model before would stay in memory as long as this
        return History(replace(plan, source=replace(plan.source, read=no_weights, headers={})))
    return history_in(directory_of(model), getattr(model, "config", None))


def directory_of(model: Any) -> Path | None:
    """The directory that a model in memory was loaded from, or its snapshot in the Hub's cache."""
    name = str(getattr(model, "name_or_path", None) or "")
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    # here, as it costs as much as all of a command that is refused
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        commit = getattr(getattr(model, "config", None), "_commit_hash", None)
        file = try_to_load_from_cache(name, "config.json", revision=commit)
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None


def history_in(directory: Path | None, config: Any) -> History:
    """The growths of a model whose weights are in a directory; None: that is not known."""
    file = (directory or Path()) / LINEAGE_FILE
    try:
        if directory is not None and file.is_file():
            return history_from(file, read_json(file, MOST_LINEAGE_BYTES, "lineage"))
    except GrowthError as error:
        return History(records=(f"{error}: {FIX}",))
    if getattr(config, GROWN_KEY, False):
        return History(records=(f"{file} is missing: {FIX}",))
    return History()


def history_from(file: Path, lineage: Any) -> History:
    """The growths of a model, from the content of its lineage file."""
    if not isinstance(lineage, dict):
        return History(records=(f"{file} is damaged: {FIX}",))
    earlier = lineage.get(EARLIER)
    # sentences in a file are not printed
    lost = f"{file} lacks the record of an earlier growth"
    records = earlier if isinstance(earlier, list) else [None]
    earlier = [record if isinstance(record, dict) else lost for record in records]
    own = {key: value for key, value in lineage.items() if key != EARLIER}
    return History(records=(own, *earlier))


def family_in(directory: Path) -> Family | None:
    """The table of one's own by which a directory was grown, if its record has one."""
    file = directory / LINEAGE_FILE
    if not file.is_file() or TABLE_KEY.encode() not in file.read_bytes():
        return None
    return family_from(file, read_json(file, MOST_LINEAGE_BYTES, "lineage"))


def family_from(file: Path, lineage: Any) -> Family | None:
    """The unchanged table of one's own in the content of a lineage file, if it has one."""
    table = lineage.get(TABLE_KEY) if isinstance(lineage, dict) else None
    if table is None:
        return None
    if not isinstance(table, dict):
        raise GrowthError(f"{file}: {TABLE_KEY} is {a_kind(table)}: {FIX}")
    family = own_family(f"{file}: {TABLE_KEY}", table)
    if family.checksum != lineage.get(TABLE_SUM_KEY):
        raise GrowthError(f"{file}: {TABLE_KEY} was changed since the growth: {FIX}")
    return family


def no_weights(name: str, _entry: int | None = None) -> Any:
    """Read a tensor of a source that is not there any more: always refused."""
    raise GrowthError(
        f"{name} of the source cannot be read: a saved plan has no weights of a model in "
        "memory: make the plan again from the source"
    )
