"""The growths that a source has behind it, as far as they are known.

Step sizes of a grown model follow from all of its growths (`growkern.growth.optimizer.moments`).
`growkern.growth.record.recorded` makes plans of what is found here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from growkern.bounded import read_bounded, read_json
from growkern.errors import GrowthError

LINEAGE_FILE, CHECKSUMS_FILE, CARD_FILE = "lineage.json", "checksums.json", "README.md"
# an entry has 500 bytes; there is one for each tensor
MOST_LINEAGE_BYTES = 64_000_000
# the key of a record with those of the growths before it, the latest first
EARLIER = "earlier_growths"
# a card is read into memory
MOST_CARD_BYTES = 1_000_000
# every card of a growth has this tag
CARD_TAG = "growkern"


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


def history_of(model: Any) -> History:
    """The growths of a model in memory, or of the directory that it was loaded from."""
    plan = getattr(model, "growth_plan", None)
    if plan is not None:
        # the weights of the model before would stay in memory as long as this
        return History(replace(plan, source=replace(plan.source, read=no_weights, headers={})))
    directory = getattr(model, "name_or_path", "")
    return history_in(Path(directory)) if directory else History()


def history_in(directory: Path) -> History:
    """The growths of the model in a directory."""
    file = directory / LINEAGE_FILE
    try:
        if file.is_file():
            return history_from(read_json(file, MOST_LINEAGE_BYTES, "lineage"))
        if (directory / CHECKSUMS_FILE).is_file() or _has_card(directory / CARD_FILE):
            return History(records=(f"{file} is missing, but other files of a growth are there",))
    except GrowthError as error:
        return History(records=(str(error),))
    return History()


def history_from(lineage: Any) -> History:
    """The growths of a model, from the content of its lineage file."""
    if not isinstance(lineage, dict):
        return History(records=(f"its {LINEAGE_FILE} is damaged",))
    earlier = lineage.get(EARLIER)
    if not isinstance(earlier, list):
        earlier = [f"its {LINEAGE_FILE} is of an older version, which kept no earlier growths"]
    else:
        # sentences in a file are not printed
        lost = f"its {LINEAGE_FILE} lacks the record of an earlier growth"
        earlier = [one if isinstance(one, dict) else lost for one in earlier]
    own = {key: value for key, value in lineage.items() if key != EARLIER}
    return History(records=(own, *earlier))


def _has_card(file: Path) -> bool:
    """Whether a file is the card of a growth."""
    if not file.is_file():
        return False
    text = read_bounded(file, MOST_CARD_BYTES, "model card").decode(errors="replace")
    return f"\n- {CARD_TAG}\n" in text


def no_weights(name: str) -> Any:
    """Read a tensor of a source that is not there any more: always refused."""
    raise GrowthError(
        f"{name} of the source cannot be read: a saved plan has no weights of a model in "
        "memory: make the plan again from the source"
    )
