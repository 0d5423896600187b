"""The plan of a growth: what every target tensor is made of, and what that keeps exact.

Pure: reads configs and headers, touches no weights. `growkern.growth.apply` carries it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

import growkern
from growkern.errors import GrowthError
from growkern.families.family import Family
from growkern.families.spec import TensorSpec
from growkern.growth import maps
from growkern.growth.layout import Layer, Layout
from growkern.growth.options import GrowthOptions
from growkern.growth.source import Source, open_source
from growkern.growth.target import finish_target, growable_fields, resolve_target

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


@dataclass(frozen=True)
class Finding:
    """One statement on what the growth keeps.

    Attributes:
        level: "exact", "approximate" (the error is bounded and small) or "changed".
        what: the part of the model it speaks of.
        why: the reason, with the size of the error where it is known.
    """

    level: str
    what: str
    why: str


@dataclass(frozen=True)
class GrowthPlan:
    """How a source becomes a target; made by `growkern.plan`, printed with `print(plan.table())`.

    Attributes:
        source: the opened source.
        target_config: the target's Hugging Face config.
        options: method, depth, scheme, symmetry, seed.
        layer_maps: per stack, the source layer of every target layer.
        inserted: (stack, target layer) of the identity blocks.
        dtype: of the grown weights.
    """

    source: Source
    target_config: Any
    options: GrowthOptions
    layer_maps: Mapping[str, tuple[int, ...]]
    inserted: frozenset[tuple[str, int]]
    dtype: torch.dtype

    # ---- structure

    @cached_property
    def layout(self) -> Layout:
        source = self.source
        return Layout(
            source.family,
            source.config,
            self.target_config,
            self.options,
            tied=source.family.has_tied_head(source.config, source.class_name),
            dtypes=(source.dtype, self.dtype),
        )

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """One task per target tensor; tied duplicates have none."""
        family, class_name = self.source.family, self.source.class_name
        shares = family.shares(self.target_config)
        targets = family.tensors(self.target_config, class_name)
        sources = {(t.template, t.layer): t for t in family.tensors(self.source.config, class_name)}
        return tuple(self._task(t, sources) for t in targets if not (shares and t.tied))

    def _task(self, tensor: TensorSpec, sources: dict[Any, TensorSpec]) -> Task:
        family = self.source.family
        shape = tuple(family.axis_size(self.target_config, axis) for axis in tensor.axes)
        layer = None if tensor.layer is None else self.layer_maps[tensor.stack][tensor.layer]
        source = sources.get((tensor.template, layer))
        upper = None
        # a norm over whole heads goes with them, any other with the stream
        moves = tensor.norm is None or family.spaces[tensor.norm[1]].kind == "heads"
        if self.options.method == "aki" and layer is not None and moves:
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
            identity=self._identity_role(tensor),
        )

    def _identity_role(self, tensor: TensorSpec) -> str | None:
        family, layer = self.source.family, tensor.layer
        if layer is None:
            return None
        is_inserted = (tensor.stack, layer) in self.inserted
        if tensor.is_one_of(family.zero_in_identity):
            return "zero" if is_inserted else None
        if tensor.is_one_of(family.inner_norms) and is_inserted:
            return "unit"
        if family.outer_norm is not None and tensor.is_one_of((family.outer_norm,)):
            if (tensor.stack, layer + 1) in self.inserted:
                return "unit"
            return "affine" if is_inserted else None
        return None

    # ---- what it keeps

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        from growkern.growth.exactness import findings

        return findings(self)

    @property
    def exact(self) -> bool:
        """True when the target computes the source's outputs to rounding."""
        return all(finding.level == "exact" for finding in self.findings)

    # ---- numbers

    def parameters(self, which: str = "target") -> int:
        """Parameters of the "source" or "target", shared tensors counted once."""
        config = self.target_config if which == "target" else self.source.config
        shapes = self.source.family.shapes(config, self.source.class_name)
        own = {task.tensor.template for task in self.tasks}
        tensors = self.source.family.tensors(config, self.source.class_name)
        return sum(torch.Size(shapes[t.name]).numel() for t in tensors if t.template in own)

    def flops_per_token(self, which: str = "target") -> int:
        """Training FLOPs per token, 6 per weight that multiplies a vector (embeddings look up)."""
        config = self.target_config if which == "target" else self.source.config
        tensors = self.source.family.tensors(config, self.source.class_name)
        shapes = self.source.family.shapes(config, self.source.class_name)
        matrices = [t for t in tensors if any(axis.startswith("read:") for axis in t.axes)]
        return 6 * sum(torch.Size(shapes[t.name]).numel() for t in matrices)

    def size_changes(self) -> dict[str, tuple[int, int]]:
        """Config field -> (source, target) for every size that may grow."""
        family = self.source.family
        return {
            field: (family.size(self.source.config, key), family.size(self.target_config, key))
            for field, key in growable_fields(family).items()
        }

    def maps(self) -> dict[str, dict[str, int]]:
        """Per space in use: sizes, fewest and most copies of a coordinate, extra coordinates."""
        axes = {axis.partition(":")[2] for task in self.tasks for axis in task.tensor.axes}
        used = {name for names in axes for name in names.split("|")}
        found = {}
        for name in (name for name in self.source.family.spaces if name in used):
            space = self.layout.space(name, 0)
            count = space.write_index[~space.is_extra].bincount(minlength=space.source)
            found[name] = {
                "source": space.source,
                "target": space.target,
                "fewest": int(count.min()),
                "most": int(count.max()),
                "extra": int(space.is_extra.sum()),
            }
        return found

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable summary; with the source it is enough to repeat the growth."""
        return {
            "growkern": growkern.__version__,
            "family": self.source.family.model_type,
            "model_class": self.source.class_name,
            "options": self.options.to_dict(),
            "sizes": {name: list(pair) for name, pair in self.size_changes().items()},
            "maps": self.maps(),
            "layer_maps": {stack: list(layers) for stack, layers in self.layer_maps.items()},
            "identity_layers": sorted(self.inserted),
            "parameters": [self.parameters("source"), self.parameters("target")],
            "flops_per_token": [self.flops_per_token("source"), self.flops_per_token("target")],
            "dtype": str(self.dtype).removeprefix("torch."),
            "bytes": self.parameters("target") * self.dtype.itemsize,
            "exact": self.exact,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }

    def table(self) -> Any:
        """The plan as a rich renderable."""
        from growkern.growth.show import plan_table

        return plan_table(self)


def plan(
    source: Any,
    *,
    target_config: Any | None = None,
    dtype: torch.dtype | None = None,
    allow_nonfinite: bool = False,
    **how: Any,
) -> GrowthPlan:
    """Work out a growth without doing it: sizes, maps, cost, and what stays exact.

    Args:
        source: a `transformers.PreTrainedModel` or a checkpoint directory (only the config and the
            safetensors headers are read).
        target_config: the target's config; or give its sizes by the config's own names
            (`hidden_size=1024`, `n_embd=...`, `num_hidden_layers=...`).
        dtype: of the grown weights; default the source's.
        allow_nonfinite: grow NaN and Inf as they are.
        **how: the fields of `GrowthOptions` and the target sizes.

    Raises:
        GrowthError: an unsupported source, a bad or missing file, sizes that do not fit.
    """
    options, dims = GrowthOptions.split_off(how)
    opened = open_source(source, allow_nonfinite=allow_nonfinite)
    return plan_growth(opened, options, dims, target_config, dtype)


def plan_growth(
    opened: Source,
    options: GrowthOptions,
    dims: dict[str, int],
    target_config: Any | None = None,
    dtype: torch.dtype | None = None,
) -> GrowthPlan:
    """`plan` for a source that is already open."""
    family = opened.family
    target = resolve_target(family, opened.config, dims, target_config)
    pick = maps.stack if options.depth == "stack" else maps.interleave
    layer_maps = {
        stack: tuple(pick(*(family.size(c, key) for c in (opened.config, target))))
        for stack, key in family.stacks.items()
    }
    deeper = [key for key in family.stacks.values() if _grows(family, opened.config, target, key)]
    inserted: set[tuple[str, int]] = set()
    if options.depth == "identity":
        for stack, layers in layer_maps.items():
            repeats = pairwise(layers)
            inserted |= {(stack, i) for i, (a, b) in enumerate(repeats, start=1) if a == b}
    for refusal in family.refuse_depth if deeper else ():
        if getattr(opened.config, refusal.field, None) == refusal.value:
            raise GrowthError(f"config.{refusal.field}={refusal.value}: {refusal.why}")
    dtype = dtype or opened.dtype
    finish_target(family, opened.config, target, next(iter(layer_maps.values())), dtype)
    grown = GrowthPlan(opened, target, options, layer_maps, frozenset(inserted), dtype)
    # maps that cannot be built (lost query heads) must fail here, before any work
    for name in family.spaces:
        grown.layout.space(name, 0)
    return grown


def _grows(family: Family, source: Any, target: Any, key: str) -> bool:
    return family.size(source, key) != family.size(target, key)
