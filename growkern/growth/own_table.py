"""`growkern family check`: compares a table of one's own with its model, and grows a tiny one.

The names, shapes and ties of every class are those of the class in transformers, on the meta
device. The tiny model has random parameters, of norms and biases too. It grows in each size alone,
evenly and unevenly, and in all of them at once, and its outputs are compared in float64.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Group
from rich.table import Table
from rich.text import Text

from growkern.errors import GrowthError, GrowthWarning, nearest, reason
from growkern.families.family import Family, field_faults, growable_fields
from growkern.families.load import read_family
from growkern.families.model import ModelSpec
from growkern.growth.grow import grow
from growkern.growth.models import tie, untrained_model
from growkern.growth.plan.finding import OUTPUT_ERROR
from growkern.growth.record.compare import compare_outputs
from growkern.growth.record.verdict import measured_level
from growkern.growth.source.config import read_config
from growkern.growth.source.loading import Float64, random_inputs
from growkern.growth.source.source import Source, open_source
from growkern.growth.space.rules import period_of

# of the tiny model: layers, heads and groups of them, their entries, units, ids of tokens
LAYERS, HEADS, KEY_HEADS, HEAD_DIM, UNITS, TOKENS = 2, 4, 2, 8, 24, 64
# standard deviations of weights, and of what norms multiply by
SPREAD, GAIN = 0.3, 0.4


@dataclass(frozen=True)
class SizeCheck:
    """One growth of the tiny model."""

    sizes: str  # that grew, such as "hidden_size 32 -> 64"
    # "exact", "approximate" or "changed" as planned and measured; "wrong" if the plan is
    # contradicted; "refused"
    verdict: str
    # largest difference of outputs over the largest output
    error: float | None = None
    why: str = ""


@dataclass(frozen=True)
class TableReport:
    """Result of `check_table`."""

    # where the table differs from the model, one line each; nothing grows then
    faults: tuple[str, ...]
    growths: tuple[SizeCheck, ...]

    @property
    def ok(self) -> bool:
        """True if the table describes the model and no plan was wrong."""
        return not self.faults and all(growth.verdict != "wrong" for growth in self.growths)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        growths = [asdict(growth) for growth in self.growths]
        return {"ok": self.ok, "faults": list(self.faults), "growths": growths}

    def table(self) -> Any:
        """The report as a rich renderable."""
        if self.faults:
            return Group(*(Text(fault, "red") for fault in self.faults))
        table = Table(title="a tiny model, grown", title_justify="left")
        for name in ("growth", "verdict", "error of outputs"):
            table.add_column(name, justify="right" if name.startswith("error") else "left")
        colors = {"exact": "green", "wrong": "red", "refused": ""}
        for check in self.growths:
            error = "" if check.error is None else f"{check.error:.1e}"
            verdict = Text(check.verdict, colors.get(check.verdict, "yellow"))
            table.add_row(check.sizes, verdict, error)
        notes = [f"{check.sizes}: {check.why}" for check in self.growths if check.why]
        return Group(table, *(Text(note) for note in notes))


def check_table(path: str | Path | Family, directory: Path) -> TableReport:
    """Compare a table with the model, or config.json alone, of a directory, and grow a tiny one.

    Raises:
        TableError: the table has faults by itself.
        GrowthError: the model cannot be read.
    """
    family = read_family(path)
    config = read_config(directory, family=family)
    if faults := [*field_faults(family, config)]:
        return TableReport(tuple(faults), ())
    name = (config.architectures or [next(iter(family.classes))])[0]
    for class_name in family.classes:
        faults += _class_faults(ModelSpec.of(config, class_name, family))
    if not faults:
        try:
            open_source(directory, allow_nonfinite=True, weights=False, family=family)
        except GrowthError as error:
            faults.append(str(error))
    if faults:
        return TableReport(tuple(faults), ())
    return TableReport((), tuple(_growths(_tiny(ModelSpec.of(config, name, family)), family)))


def _class_faults(spec: ModelSpec) -> Iterator[str]:
    """Tensors of a class that have no row, rows without a tensor, other shapes and other ties."""
    if not hasattr(transformers, spec.class_name):
        yield f"classes.{spec.class_name}: transformers has no such class"
        return
    with torch.device("meta"):
        model = untrained_model(spec)
    # some classes change a field
    spec = spec.with_config(model.config)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    rows = {tensor.name: tensor for tensor in spec.tensors}
    seen: set[str] = set()
    for name, tensor in rows.items():
        row, axes = f"row {tensor.row.name!r}", ", ".join(tensor.axes)
        if tensor.template in seen or shapes.get(name) == spec.shapes[name]:
            continue
        seen.add(tensor.template)
        if name not in shapes:
            yield f"{spec.class_name}: {row} gives {name}, which it lacks{nearest(name, shapes)}"
        else:
            yield (
                f"{spec.class_name}: {row}, axes [{axes}], gives {list(spec.shapes[name])}, but "
                f"{name} has {list(shapes[name])}"
            )
    for name in shapes.keys() - rows.keys():
        like = ".".join("{l}" if part.isdigit() else part for part in name.split("."))
        if like not in seen:
            seen.add(like)
            yield f"{spec.class_name}: no row for {name} {list(shapes[name])}: add {like!r}"
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    for name in {*ties} ^ {*spec.ties} if spec.shares else ():
        owner = ties.get(name)
        fix = f'add tied = "{owner}"' if owner else "remove `tied` from its row"
        yield f"{spec.class_name}: {name} is {'' if owner else 'not '}tied: {fix}"


def _tiny(spec: ModelSpec) -> Any:
    """A model of the same kind with few units, every parameter random, float64."""
    config, family = copy.deepcopy(spec.config), spec.family
    grouped = "kv_heads" in family.config and spec.size("kv_heads") < spec.size("q_heads")
    layers = max(LAYERS, period_of(spec))
    sizes = {key: min(spec.size(key), UNITS) for key in family.unit_sizes}
    sizes |= dict.fromkeys(family.query_heads, HEADS)
    sizes |= {"stream": HEADS * HEAD_DIM, "vocab": TOKENS, "head_dim": HEAD_DIM}
    sizes |= {"kv_heads": KEY_HEADS if grouped else HEADS}
    sizes |= {key: min(spec.size(key), layers) for key in family.stacks.values()}
    for key, value in sizes.items():
        if key in family.config and family.config[key].field:
            setattr(config, family.config_field(key), value - family.config[key].plus)
    for name, value in vars(config).items():
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(config, name, value % TOKENS)
        if name == "max_position_embeddings":
            # rounding of rotary positions counts at the last one
            setattr(config, name, min(value, TOKENS))
    small = spec.with_config(config)
    for name in family.per_layer:
        if values := getattr(config, name, None):
            setattr(config, name, values[: small.size(next(iter(family.stacks.values())))])
    for name, key in family.classes[spec.class_name].repeats.items():
        setattr(config, name, small.size(key))
    model = untrained_model(small, torch.float64)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_gain = parameter.ndim == 1 and name.endswith("weight")
        parameter.data = 1 + GAIN * noise if is_gain else SPREAD * noise
    tie(model, small)
    return model.eval()


def _growths(model: Any, family: Family) -> Iterator[SizeCheck]:
    """Every size alone, evenly and unevenly, and all that may grow at once."""
    source = open_source(model, family=family)
    spec, together = source.spec, dict[str, int]()
    for field, key in growable_fields(spec.family).items():
        if key in spec.family.query_heads and spec.family.forces_head_dim:
            # they follow the hidden size
            continue
        size, is_depth = spec.size(key), key in spec.family.stacks.values()
        for new in (size + 1,) if is_depth else (2 * size, size + size // 2):
            check = _growth(model, source, family, {field: new})
            if check.verdict in ("exact", "approximate"):
                together.setdefault(field, new)
            yield check
    if len(together) > 1:
        yield _growth(model, source, family, together)


def _growth(model: Any, source: Source, family: Family, sizes: dict[str, int]) -> SizeCheck:
    old = {field: source.spec.size(growable_fields(source.spec.family)[field]) for field in sizes}
    each = [f"{field} {old[field]} -> {new}" for field, new in sizes.items()]
    named = each[0] if len(each) == 1 else f"{len(each)} sizes at once"
    try:
        with warnings.catch_warnings():
            # the verdict says it
            warnings.simplefilter("ignore", GrowthWarning)
            how: Any = {"family": family, **sizes}
            grown: Any = grow(model, **how)
    except GrowthError as error:
        return SizeCheck(named, "refused", why=str(error))
    except Exception as error:
        return SizeCheck(named, "wrong", why=f"growth fails: {reason(error)}")
    try:
        with Float64():
            plan, tokens = grown.growth_plan, random_inputs(source)
            outputs = compare_outputs(plan, model, grown, tokens, generates=False)
    except Exception as error:
        # a wrong table makes models that transformers cannot run, with errors of any type
        return SizeCheck(named, "wrong", why=f"the grown model does not run: {reason(error)}")
    level, contradiction = measured_level(plan, outputs, torch.float64)
    # a change that the plan names is none
    changes = [f.why for f in plan.findings if f.level == "changed"]
    verdict = "wrong" if contradiction and not changes else level
    return SizeCheck(named, verdict, outputs[OUTPUT_ERROR], "; ".join(changes) or contradiction)
