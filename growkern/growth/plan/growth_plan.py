"""`growkern.plan`: sizes, cost, exactness and advice of a growth, without doing it.

Making a plan reads configs and file headers, no weights. The same plan is then carried out by
`growth.grow` and `growth.sharded.grow_into`.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers.utils import CONFIG_NAME

from growkern.arguments import check_kind
from growkern.errors import GrowthError, a_kind
from growkern.families import ModelSpec, holds, read_family
from growkern.growth.history import TABLE_SUM_KEY
from growkern.growth.models import cpu_by_default
from growkern.growth.options import ROUTERS, GrowthOptions
from growkern.growth.plan.advice import (
    divides,
    portability,
    refuse_idle_options,
    warnings_of,
)
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.exactness import WEIGHT_ERROR, Finding, findings
from growkern.growth.plan.fitting import check_structure, made_to_fit
from growkern.growth.plan.measured import measurements, verdict
from growkern.growth.plan.pieces import estimate
from growkern.growth.plan.table import as_text, plan_table
from growkern.growth.plan.target import (
    check_given,
    finish_target,
    follow_heads,
    in_given_names,
    unread_in,
)
from growkern.growth.plan.tensors.random_tensors import MARK, check_centroids, with_checksum
from growkern.growth.source import Source, located, open_source
from growkern.growth.space import (
    check_layer_kinds,
    layers_of,
    mixture_config,
    mixture_of,
    refuse_unportable,
    upcycled,
    way_of,
)
from growkern.ops.expand import DTYPES
from growkern.package import version

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from typing_extensions import Unpack

    from growkern.growth.options import GrowthKeywords


@dataclass(frozen=True, repr=False)
class GrowthPlan(Blueprint):
    """How a source becomes a target; made by `growkern.plan`. `print(plan)` prints its tables.

    Attributes:
        source: the opened source.
        target_config: the target's Hugging Face config.
        options: the `GrowthOptions`.
        layer_maps: per stack, the source layer of every target layer.
        inserted: (stack, target layer) of the layers that add nothing yet, or begin untrained.
        dtype: of the grown weights.
        findings: for each part of the model, whether it is exact, and why.
        exact: whether every part is exact.
        condition: what findings rest on: "", or that a table of your own is right.
    """

    def __repr__(self) -> str:
        sizes = self.size_changes().items()
        changes = [f"{field} {old} -> {new}" for field, (old, new) in sizes if old != new]
        return f"<GrowthPlan of {self.small.class_name}: {', '.join(changes) or 'the same sizes'}>"

    def __str__(self) -> str:
        # a plan from a record cannot make findings: it has no weights
        return as_text(self.table()) if "findings" in vars(self) else repr(self)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Which parts of the source's function stay exact, approximate, or change, and why."""
        return findings(self)

    @property
    def exact(self) -> bool:
        """True if the target computes the source's outputs up to rounding."""
        return all(finding.level == "exact" for finding in self.findings)

    @property
    def needs(self) -> str:
        """What growing needs instead of this source, as where its weights are quantised.

        "" if nothing: the source can be grown.
        """
        return self.source.stored.needs

    @property
    def rounds_weights(self) -> bool:
        """True if weights are rounded to another dtype, or as they are scaled in 16 bits."""
        return any(finding.measure == WEIGHT_ERROR for finding in self.findings)

    def estimate(
        self, ranks: int = 1, tokens: float | None = None, source_tokens: float | None = None
    ) -> dict[str, Any]:
        """Memory, disk and FLOPs; see `growkern.growth.plan.pieces.estimate`."""
        return estimate(self, ranks, tokens, source_tokens)

    def measurements(self) -> tuple[dict[str, Any], ...]:
        """What growth along these axes saved where it was measured, in papers and by us.

        Each has shares of the FLOPs of training from scratch that were saved to the same loss: of
        both models ("family"), or of the large one, with the small one as a cost ("size") or
        without ("existing"). "tokens" are per parameter. What is not known is None.
        """
        return measurements(self)

    def verdict(self, tokens: float) -> tuple[dict[str, str], ...]:
        """What is "wanted", what to "do", and what was "measured" nearest to these tokens."""
        return verdict(self, tokens)

    def advice(self) -> tuple[str, ...]:
        """What papers say against its method; see `growkern.growth.plan.advice`."""
        return tuple(warnings_of(self))

    def portability(self) -> tuple[str, ...]:
        """What other software, and generation, make of the target (`plan.advice`)."""
        return tuple(portability(self))

    def divides(self) -> dict[str, tuple[int, int]]:
        """What the sizes of source and target divide by, for each use (`plan.advice.divides`)."""
        return divides(self)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable summary. Together with the source it can repeat the growth.

        `lineage.json` and the resume journal store it: changing a key changes those formats.
        """
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        condition = {"condition": self.condition} if self.condition else {}
        return {**self.summary(), "exact": self.exact, **condition, "findings": findings}

    def without_second(self) -> GrowthPlan:
        """The same growth of what transformers reads: no layers that predict a second token."""
        if not self.small.second:
            return self
        source, config = self.source.without_second(), copy.deepcopy(self.target_config)
        for name in unread_in(source.spec):
            setattr(self.small.family.text(config), name, 0)
        made = replace(self, source=source, target_config=config)
        _ = made.findings
        return made

    def summary(self) -> dict[str, Any]:
        """`to_dict` without the findings, for which weights may be read."""
        family, both = self.small.family, ("source", "target")
        active = {"active_parameters": [self.parameters(which, active=True) for which in both]}
        return {
            "growkern": version(),
            "family": family.model_type,
            **({} if family.table is None else {TABLE_SUM_KEY: family.checksum}),
            "model_class": self.small.class_name,
            "options": self.options.to_dict(),
            "sizes": {name: list(pair) for name, pair in self.size_changes().items()},
            "maps": self.maps(),
            "layer_maps": {stack: list(layers) for stack, layers in self.layer_maps.items()},
            "identity_layers": sorted(self.inserted),
            "parameters": [*map(self.parameters, both)],
            # those that a token uses
            **(active if family.mixtures else {}),
            "flops_per_token": [*map(self.flops_per_token, both)],
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def table(
        self,
        ranks: int = 1,
        source_tokens: float | None = None,
        tokens: float | None = None,
        *,
        verbose: bool = False,
    ) -> Any:
        """The plan as a rich renderable; arguments and errors as in `estimate`.

        Args:
            verbose: also show maps, the source of each layer, and the nearest measurements.
        """
        check = self.condition and "growkern family draft SRC --table TABLE checks the given table"
        return plan_table(
            self,
            self.findings,
            self.estimate(ranks, tokens, source_tokens),
            ranks,
            tokens,
            (*filter(None, [self.needs, check]), *self.portability(), *self.advice()),
            verbose,
            self.source.stored.way,
        )


def with_source(plan: GrowthPlan, opened: Source, dtype: torch.dtype) -> GrowthPlan:
    """The same growth of a source of the same sizes, which has come into being since.

    Its config decides about what growth leaves alone. `dtype` is that of the grown weights.
    """
    if plan.upcycling:
        opened, _ = as_mixture(opened, plan.options, {}, plan.target_config)
    config = copy.deepcopy(opened.config)
    _take_changes(config, plan.small.config, plan.target_config)
    return replace(plan, source=opened, target_config=config, dtype=dtype)


def _take_changes(config: Any, before: Any, after: Any) -> None:
    """Make those changes in a config that lead from one to another."""
    for name, value in vars(after).items():
        old = getattr(before, name, None)
        if hasattr(value, "to_dict") and hasattr(old, "to_dict"):
            _take_changes(getattr(config, name), old, value)
        elif value != old:
            setattr(config, name, copy.deepcopy(value))


# the plan that a grown model carries. Type checkers take `model.growth_plan` for a tensor or a
# module, as every attribute that the class of the model does not name
PlanOfModel: TypeAlias = GrowthPlan | Any


@dataclass(frozen=True)
class GrowthReport:
    """Result of `grow_checkpoint` or `grow_into`.

    Attributes:
        directory: the new checkpoint; for `grow_into` the source's directory.
        plan: the plan that was carried out.
        bytes_written: size of the weights, bytes; for `grow_into` those of this process.
        seconds: wall time of building and writing.
        bytes_kept: how many of these bytes were reused from an interrupted run.
        skipped: how many tensors of the plan were left out, by `grow_into(..., missing="skip")`.
    """

    directory: Path
    plan: GrowthPlan
    bytes_written: int
    seconds: float
    bytes_kept: int = 0
    skipped: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        numbers = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        more = {"directory": str(self.directory), "plan": self.plan.to_dict()}
        return {**numbers, **more, "portability": list(self.plan.portability())}


def check_plan(plan: Any) -> None:
    """Refuse an argument in a plan's place that is none, such as the model itself."""
    check_kind(
        "plan",
        plan,
        GrowthPlan,
        "the plan of the growth, growkern.growth_plan_of(model): it is None if the model was not "
        "grown, and torch.optim then trains it",
    )


def plan(
    source: str | Path | PreTrainedModel,
    *,
    target_config: PretrainedConfig | None = None,
    dtype: torch.dtype | None = None,
    allow_nonfinite: bool = False,
    revision: str | None = None,
    family: str | Path | None = None,
    **how: Unpack[GrowthKeywords],
) -> GrowthPlan:
    """Plan a growth without doing it: sizes, maps, cost, and which outputs stay exact.

    Args:
        source: a `transformers.PreTrainedModel`, a checkpoint directory (the config and the
            safetensors headers are read, and norm weights where a bound needs them), a config.json
            without weights, or a model on the Hub, `ORGANISATION/NAME`, of which only parts of the
            weights are downloaded. Of quantised weights that growth does not read, the config is
            enough; `needs` of the plan says what growing takes.
        target_config: the target's config; or give its sizes by the config's own names
            (`hidden_size=1024`, `n_embd=...`, `num_hidden_layers=...`).
        dtype: dtype of the grown weights; default the source's.
        allow_nonfinite: accept NaN and Inf in the source and grow them like other values.
        revision: branch, tag or commit of a model on the Hub.
        family: the TOML file of a table of your own, for a model that growkern has none for.
        **how: the fields of `GrowthOptions`, the target sizes, and `pad_vocab_to_multiple_of`.

    Raises:
        GrowthError: the source is not supported, a file is damaged or missing, or sizes do not fit
            together.
    """
    options, dims = GrowthOptions.split_off({**how})
    place = located(source, revision, weights=False)
    if isinstance(place, Path) and place.name == CONFIG_NAME and place.is_file():
        place = place.parent
    opened = open_source(
        place,
        allow_nonfinite=allow_nonfinite,
        weights=False,
        family=None if family is None else read_family(family),
        dequantize=options.dequantize,
        second=True,
    )
    made = plan_growth(opened, options, dims, target_config, dtype)
    refuse_idle_options(made)
    if target_config is not None:
        check_given(made.small, target_config, made.large)
    return made


def plan_growth(
    opened: Source,
    options: GrowthOptions,
    dims: dict[str, Any],
    target_config: Any | None = None,
    dtype: torch.dtype | None = None,
    *,
    judged: bool = True,
) -> GrowthPlan:
    """`plan` for a source that is already open; unless it is `judged`, no weights are read."""
    with in_given_names(opened.spec.text, options.to, dims):
        dtype = dtype or opened.dtype
        if dtype not in DTYPES:
            allowed = ", ".join(map(str, DTYPES))
            raise GrowthError(
                f"dtype={dtype}, but growth writes {allowed}: convert the result afterwards"
            )
        if target_config is not None and not hasattr(target_config, "model_type"):
            raise GrowthError(
                f"target_config is {a_kind(target_config)}, but must be a config of "
                "transformers: give one, or the sizes alone by name"
            )

        dims = {**dims}
        count, fields = way_of(options.depth).count(), opened.spec.family.stacks.values()
        if count is not None and target_config is None and len(fields) == 1:
            dims.setdefault(opened.spec.family.config_field(*fields), count)
        has_file, is_known = options.router not in ROUTERS, MARK in options.router
        if has_file and not is_known:
            options = with_checksum(options)
        opened, options = as_mixture(opened, options, dims, target_config)

        def make(large: ModelSpec) -> GrowthPlan:
            if target_config is None:
                large = follow_heads(opened.spec, large, dtype, always=options.portable)
            return _plan_for(opened, options, large, dtype)

        made = made_to_fit(opened.spec, dims, target_config, make)
        if made.upcycling:
            made.upcycling.check_sizes(made.large)
        if has_file and (judged or not is_known):
            check_centroids(made)
        if judged:
            # findings may read norm weights, and the source may be gone when someone asks for them
            with cpu_by_default():
                _ = made.findings
        return made


def as_mixture(
    opened: Source, options: GrowthOptions, dims: dict[str, Any], target_config: Any | None
) -> tuple[Source, GrowthOptions]:
    """A source as a mixture, if the growth makes one of it.

    Of `dims` the fields are taken out that decide which layers become mixtures.
    """
    if opened.upcycling:
        return opened, options
    if not options.to and target_config is not None:
        options = replace(options, to=mixture_of(opened.spec, target_config))
    if options.to:
        opened = opened.without_second()
        config = mixture_config(opened.spec, options, dims, target_config)
        opened = upcycled(opened, config, options)
    return opened, options


def with_stream(options: GrowthOptions, small: ModelSpec, large: ModelSpec) -> GrowthOptions:
    """The options with the meaning of stream="auto" in a growth."""
    if options.stream != "auto":
        return options
    grows = small.size("stream") != large.size("stream")
    is_exact = options.scheme == "exact" and not options.is_baseline
    is_padded = grows and is_exact and small.family.pads_exactly
    return replace(options, stream="padded" if is_padded else "copies")


def _plan_for(
    opened: Source, options: GrowthOptions, large: ModelSpec, dtype: torch.dtype
) -> GrowthPlan:
    """The plan for a target whose sizes are decided."""
    small, family = opened.spec, opened.spec.family
    options = with_stream(options, small, large)
    refuse_unportable(small, large, options)
    layer_maps = {
        stack: tuple(layers_of(small, large, key, options)) for stack, key in family.stacks.items()
    }
    inserted: set[tuple[str, int]] = set()
    way = way_of(options.depth)
    for stack, layers in layer_maps.items():
        # a source without layers keeps none
        has_layers = bool(small.size(family.stacks[stack])) or not way.is_untrained
        ahead = family.depth.ahead is not None and holds(family.depth.ahead, small.fields)
        new = way.inserted(layers, ahead=ahead) if has_layers else range(len(layers))
        inserted |= {(stack, layer) for layer in new}
    tiny, is_copied = torch.finfo(dtype).tiny, not options.is_baseline
    if inserted and is_copied and family.norm.placement == "post" and options.identity_gain < tiny:
        raise GrowthError(
            f"identity_gain={options.identity_gain:g} is below {tiny:.2g}, the smallest normal "
            f"number of {str(dtype).removeprefix('torch.')}: give a larger one, or another dtype"
        )
    if any(small.size(key) != large.size(key) for key in family.stacks.values()):
        for refusal in family.depth.refuse:
            refusal.check(small.fields)
    for stack, layers in layer_maps.items():
        if small.size(family.stacks[stack]):
            check_layer_kinds(small, stack, layers, options)
    layers = next(iter(layer_maps.values()))
    large = finish_target(small, large, layers, dtype)
    grown = GrowthPlan(opened, large.config, options, layer_maps, frozenset(inserted), dtype)
    # maps hold numbers also where a caller makes models on the meta device
    with cpu_by_default():
        # build the maps now, so that impossible ones (lost query heads) fail before any work
        for name in family.spaces:
            grown.layout.space(name, 0)
        check_structure(grown)
    return grown
