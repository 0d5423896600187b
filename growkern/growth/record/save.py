"""Makes `save_pretrained` of a grown model write its lineage and its card."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

from growkern.growth.options import parse_size
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.record.card import write_card
from growkern.growth.record.lineage import Settings, source_files, write_lineage

# what `save_pretrained` takes by default
SHARD_SIZE = "50GB"


def record_when_saved(model: Any, plan: GrowthPlan, backend: str | None, nonfinite: bool) -> None:
    """Let `model.save_pretrained` write `lineage.json` and `README.md` too.

    A model that was trained or cast since is saved as any other: its record would be wrong.

    Args:
        model: what the plan made.
        plan: the plan that was carried out.
        backend: backend of the expansion kernel, or None.
        nonfinite: whether NaN and Inf in the source were grown.
    """
    # of the files before anybody changes them
    files, state = source_files(plan.source), _state(model)

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
        is_first = args[0] if args else options.get("is_main_process", True)
        is_own = options.get("state_dict") is None and len(args) < 2 and _state(self) == state
        if is_first and is_own and not Path(save_directory).is_file():
            size = parse_size("max_shard_size", options.get("max_shard_size", SHARD_SIZE))
            settings = Settings(backend, size, nonfinite)
            directory = Path(save_directory)
            # before the weights, as `push_to_hub` sends the directory off at the end of the call
            directory.mkdir(parents=True, exist_ok=True)
            write_lineage(plan, settings, files, directory)
            write_card(plan, settings, directory)
        return type(self).save_pretrained(self, save_directory, *args, **options)

    model.save_pretrained = MethodType(save_pretrained, model)


def _state(model: Any) -> tuple[tuple[Any, int], ...]:
    """Changes when a weight is written or cast. No weight is read."""
    return tuple((value.dtype, value._version) for value in model.parameters())
