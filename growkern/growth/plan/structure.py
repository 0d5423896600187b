"""Compares which tensors source and target have: sizes may change that, and then no map exists.

ELECTRA, for example, projects its embeddings only where their size differs from the hidden size.
"""

from __future__ import annotations

from growkern.errors import UnfitError
from growkern.growth.plan.blueprint import Blueprint


def check_structure(plan: Blueprint) -> None:
    """Refuse a target that lacks a tensor of the source, or has one that comes from nowhere.

    Raises:
        UnfitError: the message names the tensor and the condition in the family's table.
    """
    if plan.options.is_baseline:
        return
    used = {name for task in plan.tasks for name in (task.source, task.upper)}
    for tensor in plan.small.own_tensors:
        if tensor.name not in used:
            raise UnfitError(
                f"a {plan.large.class_name} of these sizes has no {tensor.name}: it exists only "
                f"with {tensor.row.when}, and the source's would be lost"
            )
    own = {tensor.name for tensor in plan.small.own_tensors}
    for task in plan.tasks:
        if not task.is_made and task.source not in own:
            raise UnfitError(
                f"a {plan.large.class_name} of these sizes has a {task.name}, the source has none: "
                f"it exists only with {task.tensor.row.when}"
            )
