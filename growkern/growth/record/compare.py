"""Compares a lineage with this version of growkern, with a new plan and with the source's files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.record.lineage import TRAINED, record_of, source_files, versions, without_times
from growkern.growth.record.recorded import Lineage
from growkern.package import version

# config fields that tell how a model was saved or loaded, and do not change the model
NOT_THE_MODEL = ("transformers_version", "architectures", "dtype")
# fields that do not decide the result: the version, and sentences about it
NOT_COMPARED = {"growkern", "findings"}


def version_notes(lineage: Lineage) -> list[str]:
    """One line per package that had another version when the checkpoint was grown."""
    then = lineage.data.get("versions", {})
    return [
        f"{lineage.file}: grown with {name} {then.get(name)}, this is {version}"
        for name, version in versions().items()
        if then.get(name) != version
    ]


def training_notes(lineage: Lineage) -> list[str]:
    """One line if the weights are not those of the growth any more."""
    line = f"{lineage.file}: the weights were trained or changed after the growth"
    return [line] if lineage.data.get(TRAINED) else []


def contradictions(lineage: Lineage, plan: GrowthPlan) -> list[str]:
    """Places where a lineage disagrees with a new plan or with the source's files.

    Returns:
        One line per top-level key, with the path of its first difference.
    """
    data, now = lineage.data, record_of(plan)
    # {}: a model in memory was grown
    if plan.source.directory is not None and data.get("source_files") != {}:
        now["source_files"] = without_times(source_files(plan.source))
    elif plan.source.directory is None:
        # a model in memory may have been loaded with another dtype than its file's
        del now["source_dtype"]
    left_out = {*NOT_COMPARED, *({"exact"} - data.keys())}
    if data.get("versions", {}).get("growkern") != version():
        # another version may judge differently
        left_out.add("exact")
    result = []
    for key in now.keys() - left_out:
        is_config = key.endswith("_config")
        where = next(_differences(data.get(key), now[key], is_config), None)
        if where is not None:
            result.append(f"{lineage.file}: {key}{where}")
    return sorted(result)


def _differences(then: Any, now: Any, is_config: bool) -> Iterator[str]:
    """Paths, as `.name.name`, at which two JSON values differ.

    Args:
        is_config: skip config fields that do not change the model or exist on one side only.
    """
    if not isinstance(then, dict) or not isinstance(now, dict):
        if then != now:
            yield ""
        return
    for name in {**now, **then}:
        if is_config and (name in NOT_THE_MODEL or name not in then or name not in now):
            continue
        if name not in then or name not in now:
            yield f".{name}"
        for rest in _differences(then.get(name), now.get(name), is_config):
            yield f".{name}{rest}"
