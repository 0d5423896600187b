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
from growkern.growth import maps
from growkern.growth.initialisation import Initial, initial_tensors
from growkern.growth.kept import Kept
from growkern.growth.layout import Layout
from growkern.growth.options import GrowthOptions
from growkern.growth.source import Source, open_source
from growkern.growth.target import (
    check_given,
    finish_target,
    growable_fields,
    resolve_target,
)
from growkern.growth.tasks import Task, make_tasks
from growkern.ops._expand_checks import DTYPES


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

    def line(self) -> str:
        return f"{self.level}: {self.what} ({self.why})"


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
        return tuple(make_tasks(self))

    @cached_property
    def initial_tensors(self) -> dict[str, Initial]:
        """How the target's class starts each of its tensors."""
        return initial_tensors(self.source.class_name, self.target_config)

    @cached_property
    def kept(self) -> Kept:
        """What the pieces of a tensor share while it is built."""
        return Kept()

    @property
    def narrowed(self) -> tuple[str, ...]:
        """Source tensors that hold numbers which the target's dtype has not."""
        dtypes = self.source.dtypes.items()
        return tuple(n for n, d in dtypes if torch.promote_types(d, self.dtype) != self.dtype)

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

    def estimate(self, ranks: int = 1) -> dict[str, Any]:
        """What carrying it out costs; see `growkern.growth.advice.estimate`."""
        from growkern.growth.advice import estimate

        return estimate(self, ranks)

    def advice(self, tokens: float | None = None) -> tuple[str, ...]:
        """What published evidence says of it; see `growkern.growth.advice.advice`."""
        from growkern.growth.advice import advice

        return advice(self, tokens)

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
            "exact": self.exact,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }

    def table(self, ranks: int = 1, tokens: float | None = None) -> Any:
        """The plan as a rich renderable; arguments as in `estimate` and `advice`."""
        from growkern.growth.show import plan_table

        return plan_table(self, ranks, tokens)


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
        **how: the fields of `GrowthOptions`, the target sizes, and `pad_vocab_to_multiple_of`.

    Raises:
        GrowthError: an unsupported source, a bad or missing file, sizes that do not fit.
    """
    options, dims = GrowthOptions.split_off(how)
    opened = open_source(source, allow_nonfinite=allow_nonfinite)
    made = plan_growth(opened, options, dims, target_config, dtype)
    if target_config is not None:
        check_given(opened.family, opened.config, target_config, made.target_config)
    return made


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
    if dtype not in DTYPES:
        allowed = ", ".join(map(str, DTYPES))
        raise GrowthError(f"dtype={dtype}: growth writes {allowed}; convert the result yourself")
    layers = next(iter(layer_maps.values()))
    finish_target(family, opened.class_name, opened.config, target, layers, dtype)
    grown = GrowthPlan(opened, target, options, layer_maps, frozenset(inserted), dtype)
    # maps that cannot be built (lost query heads) must fail here, before any work
    for name in family.spaces:
        grown.layout.space(name, 0)
    return grown


def _grows(family: Family, source: Any, target: Any, key: str) -> bool:
    return family.size(source, key) != family.size(target, key)
