"""One task per target tensor: which source tensor it comes from, and its part in the growth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from growkern.families.spec import TensorSpec
from growkern.growth.layout import Layer

if TYPE_CHECKING:
    from growkern.growth.plan import GrowthPlan

# what a source computes where it lacks a tensor: x and 0
MADE = ("identity", "zero")


@dataclass(frozen=True)
class Task:
    """One target tensor.

    Attributes:
        tensor: its name, axes and layer in the target.
        shape: its shape.
        source: the source tensor it comes from; "identity" or "zero" where the source has none
            and computes what that would.
        upper: the same tensor of the next source layer, where AKI mixes it in.
        source_layer: layer of `source`, or None.
        into: the source norm that the written vector enters, where the table names it.
        identity: its part in an identity block: "zero", or "unit" / "affine" for the norms that
            are taken apart so that an inserted post-norm block repeats its input.
    """

    tensor: TensorSpec
    shape: tuple[int, ...]
    source: str
    upper: str | None
    source_layer: Layer
    into: str | None
    identity: str | None

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def is_made(self) -> bool:
        """The source has no such tensor."""
        return self.source in MADE


def make_tasks(plan: GrowthPlan) -> Iterator[Task]:
    """The tasks of a plan, in the order of the family's table; tied duplicates have none."""
    family, class_name = plan.source.family, plan.source.class_name
    shares = family.shares(plan.target_config)
    sources = {(t.template, t.layer): t for t in family.tensors(plan.source.config, class_name)}
    for tensor in family.tensors(plan.target_config, class_name):
        if not (shares and tensor.tied):
            yield _task(plan, tensor, sources)


def _task(plan: GrowthPlan, tensor: TensorSpec, sources: dict[Any, TensorSpec]) -> Task:
    family = plan.source.family
    shape = tuple(family.axis_size(plan.target_config, axis) for axis in tensor.axes)
    layer = None if tensor.layer is None else plan.layer_maps[tensor.stack][tensor.layer]
    source = sources.get((tensor.template, layer))
    upper = None
    # a norm over whole heads goes with them, any other with the stream
    moves = tensor.norm is None or family.spaces[tensor.norm[1]].kind == "heads"
    if plan.options.method == "aki" and layer is not None and moves:
        # the last source layer has no next one: it is expanded as in FPI
        above = sources.get((tensor.template, layer + 1))
        upper = above.name if above else None
    return Task(
        tensor,
        shape,
        source=str(tensor.fallback) if source is None else source.name,
        upper=upper,
        source_layer=f"{tensor.stack}.{layer}" if tensor.stack and layer is not None else layer,
        into=tensor.into if source is None else source.into,
        identity=_identity_role(plan, tensor),
    )


def _identity_role(plan: GrowthPlan, tensor: TensorSpec) -> str | None:
    family, layer = plan.source.family, tensor.layer
    if layer is None:
        return None
    is_inserted = (tensor.stack, layer) in plan.inserted
    if tensor.is_one_of(family.zero_in_identity):
        return "zero" if is_inserted else None
    if tensor.is_one_of(family.inner_norms) and is_inserted:
        return "unit"
    if family.outer_norm is not None and tensor.is_one_of((family.outer_norm,)):
        if (tensor.stack, layer + 1) in plan.inserted:
            return "unit"
        return "affine" if is_inserted else None
    return None
