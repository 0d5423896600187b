"""The plan of a growth, and everything that can be said about it before any work.

Reads configs and file headers only, no weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from growkern.errors import GrowthError
from growkern.growth.options import GrowthOptions
from growkern.growth.plan.advice import advice, estimate
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.exactness import Finding, findings
from growkern.growth.plan.table import plan_table
from growkern.growth.plan.target import check_given, finish_target, resolve_target
from growkern.growth.source.source import Source, open_source
from growkern.growth.space import maps
from growkern.ops.expand.checks import DTYPES
from growkern.package import version


@dataclass(frozen=True)
class GrowthPlan(Blueprint):
    """How a source becomes a target; made by `growkern.plan`, printed with `print(plan.table())`.

    A `Blueprint`, and what can be said about it: what stays exact, what it costs, and what
    published evidence advises. Its attributes are those of `Blueprint`.
    """

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What the growth keeps exactly, what nearly, and what it changes."""
        return findings(self)

    @property
    def exact(self) -> bool:
        """True when the target computes the source's outputs to rounding."""
        return all(finding.level == "exact" for finding in self.findings)

    def estimate(self, ranks: int = 1) -> dict[str, Any]:
        """What carrying it out costs; see `growkern.growth.plan.advice.estimate`."""
        return estimate(self, ranks)

    def advice(self, tokens: float | None = None) -> tuple[str, ...]:
        """What published evidence says of it; see `growkern.growth.plan.advice.advice`."""
        return advice(self, tokens)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable summary; with the source it is enough to repeat the growth."""
        return {
            "growkern": version(),
            "family": self.small.family.model_type,
            "model_class": self.small.class_name,
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
        return plan_table(self, self.findings, self.estimate(ranks), self.advice(tokens), ranks)


@dataclass(frozen=True)
class GrowthReport:
    """What `grow_checkpoint` or `grow_into` did.

    Attributes:
        directory: the new checkpoint; of `grow_into` the source's directory.
        plan: the plan that was carried out.
        bytes_written: size of the weights, bytes.
        seconds: wall time of building and writing.
        bytes_kept: how many of these bytes an interrupted run had written already.
    """

    directory: Path
    plan: GrowthPlan
    bytes_written: int
    seconds: float
    bytes_kept: int = 0


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
        check_given(opened.spec, target_config, made.large)
    return made


def plan_growth(
    opened: Source,
    options: GrowthOptions,
    dims: dict[str, int],
    target_config: Any | None = None,
    dtype: torch.dtype | None = None,
) -> GrowthPlan:
    """`plan` for a source that is already open."""
    small, family = opened.spec, opened.spec.family
    large = resolve_target(small, dims, target_config)
    pick = maps.stack if options.depth == "stack" else maps.interleave
    layer_maps = {
        stack: tuple(pick(small.size(key), large.size(key))) for stack, key in family.stacks.items()
    }
    inserted: set[tuple[str, int]] = set()
    if options.depth == "identity":
        for stack, layers in layer_maps.items():
            repeats = pairwise(layers)
            inserted |= {(stack, i) for i, (a, b) in enumerate(repeats, start=1) if a == b}
    if any(small.size(key) != large.size(key) for key in family.stacks.values()):
        for refusal in family.refuse_depth:
            refusal.check(small.config)
    dtype = dtype or opened.dtype
    if dtype not in DTYPES:
        allowed = ", ".join(map(str, DTYPES))
        raise GrowthError(f"dtype={dtype}: growth writes {allowed}; convert the result yourself")
    layers = next(iter(layer_maps.values()))
    large = finish_target(small, large, layers, dtype)
    grown = GrowthPlan(opened, large, options, layer_maps, frozenset(inserted), dtype)
    # maps that cannot be built (lost query heads) must fail here, before any work
    for name in family.spaces:
        grown.layout.space(name, 0)
    return grown
