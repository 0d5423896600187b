"""The lines of each table: systems in settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.paper.models import Size
from bench.paper.settings import Setting

# and of lines that grow layers, and reach the loss of the baseline in less than a quarter
SHORTER = (1 / 32, 1 / 16, 1 / 8)


@dataclass(frozen=True)
class Line:
    """A line of a table.

    Attributes:
        system: a key of `SYSTEMS`.
        label: says how the setting differs from the others of the table; empty if it does not.
        like: another line of the same method, whose learning rate this one takes.
        rate: its learning rate, where that is not the best one of short runs; else None.
        parts: lengths of its runs beside `PARTS`, which no column of the table shows. The FLOPs
            that are saved are interpolated between all lengths.
        lengths: those of its runs in place of all these. The table is then one of its own.
    """

    setting: Setting
    system: str
    label: str = ""
    like: Line | None = None
    rate: float | None = None
    parts: tuple[float, ...] = ()
    lengths: tuple[float, ...] = ()


COMPARED = (
    *("scratch", "direct_copy", "stackbert", "mslt", "fpi", "aki"),
    *("aki_two_stage", "aki_two_stage_ki", "fpi_two_stage", "fpi_padded"),
)


def systems(*names: str) -> Callable[[Setting], list[Line]]:
    return lambda setting: [Line(setting, name) for name in names]


def _variants_of_sources(setting: Setting) -> dict[str, Setting]:
    """By label: the setting; with sources of a half and a quarter of the width, half the layers."""
    own = setting.source
    sizes = (
        own,
        replace(own, width=own.width // 2, heads=own.heads // 2),
        replace(own, width=own.width // 4, heads=own.heads // 4),
        replace(own, layers=own.layers // 2),
    )
    return {f"source {s.name}": setting.variant(f"from{s.name}", source=s) for s in sizes}


def smaller_sources(setting: Setting) -> list[Line]:
    """What the paper has: DirectCopy and AKI from smaller sources."""
    variants = _variants_of_sources(setting).items()
    grown = [Line(own, name, label) for label, own in variants for name in ("direct_copy", "aki")]
    return [Line(setting, "scratch"), *grown]


def _half_as_wide(setting: Setting) -> dict[int, tuple[Setting, str]]:
    """By times: the setting with a source half as wide that is trained so often, and its label."""
    _, (label, half), *_ = _variants_of_sources(setting).items()
    made = {1: (half, label)}
    for times, name in ((3, "three-times"), (4, "longer")):
        steps = times * setting.source_steps
        variant = half.variant(name, source_steps=steps)
        made[times] = (variant, f"{label} of {steps:,} steps")
    return made


def narrow_sources(setting: Setting) -> list[Line]:
    """Why narrow sources save less here.

    A padded hidden state has no copies, and the source of the last line is trained for four times
    as long.
    """
    variants = _variants_of_sources(setting)
    lines = [Line(variant, "fpi_padded", label) for label, variant in variants.items()]
    halves = _half_as_wide(setting)
    grown = [Line(halves[times][0], "aki", halves[times][1]) for times in (1, 4)]
    return [Line(setting, "scratch"), *lines, *grown]


def ages(setting: Setting) -> list[Line]:
    """StackBERT, which has no source, beside growth from sources of three ages."""
    lines = [Line(setting, name) for name in ("scratch", "stackbert")]
    for name in ("direct_copy", "aki"):
        lines += [Line(variant, name, label) for variant, label in _half_as_wide(setting).values()]
    return lines


def stages(setting: Setting) -> list[Line]:
    """Stage 1 for 0, 2, 5, 10 and 20 of 40 parts of the steps; bert2BERT counts epochs.

    More lines ask why two stages save less here than in the paper. One has sub-models that are
    twice as deep. In the last ones stage 1 takes no steps from the rest: it is a run before, whose
    FLOPs only the column "source counted" counts.
    """
    whole, method = Line(setting, "aki"), Line(setting, "aki_two_stage")
    lines = [Line(setting, "scratch"), replace(whole, label="E_b = 0")]
    for parts in (2, 5, 10, 20):
        variant = setting.variant(f"eb{parts}", stage1_share=parts / 40)
        lines.append(Line(variant, method.system, f"E_b = {parts}", method))
    layers = 2 * setting.layers_per_block
    deeper = setting.variant(f"lb{layers}", layers_per_block=layers)
    label = f"sub-models from {layers} layers"
    return [
        *lines,
        Line(deeper, method.system, f"E_b = 5, {label}", method),
        Line(setting, "aki_adamw", "E_b = 0", whole),
        Line(setting, "aki_after_stage1", "E_b = 5", whole),
        Line(deeper, "aki_after_stage1", f"E_b = 5, {label}", whole),
    ]


def stage_before(setting: Setting) -> list[Line]:
    """Stage 1 inside a run, and as a run before it."""
    whole = Line(setting, "aki")
    return [
        Line(setting, "scratch"),
        whole,
        Line(setting, "aki_two_stage"),
        Line(setting, "aki_adamw", like=whole),
        Line(setting, "aki_after_stage1", like=whole),
    ]


def progressive(setting: Setting) -> list[Line]:
    """Methods that train fewer layers first, and MSLT with as many FLOPs as from scratch.

    MSLT saves FLOPs in every step, so that it ends with 0.69 of those of as many steps.
    """
    longer = setting.variant("longer", steps=round(setting.steps * 1.45))
    scratch, stackbert, mslt = (Line(setting, name) for name in ("scratch", "stackbert", "mslt"))
    label = "as many FLOPs as scratch"
    return [scratch, stackbert, mslt, Line(longer, mslt.system, label, mslt)]


def more_layers(setting: Setting) -> list[Line]:
    """Four times the layers and half of the widths.

    StackBERT and MSLT then begin with four layers. In the papers they begin with three of twelve.
    """
    source, target = (
        replace(size, layers=4 * size.layers, width=size.width // 2, heads=size.heads // 2)
        for size in (setting.source, setting.target)
    )
    deep = setting.variant(target.name, target=target)
    grown = deep.variant(f"from{source.name}", source=source)
    untrained = [Line(deep, name) for name in ("scratch", "stackbert", "mslt")]
    return [*untrained, *(Line(grown, name) for name in ("direct_copy", "fpi_padded"))]


def rates(setting: Setting) -> list[Line]:
    """DirectCopy at the best rate of its short runs, and at the middle one, which is higher."""
    method, higher = Line(setting, "direct_copy"), setting.rates[len(setting.rates) // 2]
    other = replace(method, label=f"at {higher:g}", rate=higher)
    return [Line(setting, "scratch"), method, other]


def rates_of_scratch(setting: Setting) -> list[Line]:
    """Training from scratch at the rate that short runs chose, and at the lowest and highest."""
    scratch = Line(setting, "scratch")
    ends = setting.rates[0], setting.rates[-1]
    return [scratch, *(replace(scratch, label=f"at {rate:g}", rate=rate) for rate in ends)]


def optimizers(setting: Setting) -> list[Line]:
    """AdamW and `GrowthAdamW` with a padded hidden state and with copies, grown moments, Muon."""
    padded = ("fpi_padded", "padded_adamw", "padded_moments", "padded_rewarmed", "padded_muon")
    muon = ("scratch_muon", "fpi_noise", "noise_muon")
    fpi, aki = Line(setting, "fpi"), Line(setting, "aki")
    copied = [
        *(fpi, Line(setting, "fpi_adamw", like=fpi)),
        *(aki, Line(setting, "aki_adamw", like=aki)),
    ]
    return [*(Line(setting, name) for name in ("scratch", *padded, *muon)), *copied]


def depth(setting: Setting) -> list[Line]:
    """Twice the layers, of a source after a tenth of its steps and after all of them."""
    target = replace(setting.source, layers=2 * setting.source.layers)
    deep = setting.variant("deep", target=target)
    young = deep.variant("young", source_steps=max(1, setting.source_steps // 10))
    lines = [Line(deep, "scratch")]
    for variant, parts in ((young, ()), (deep, SHORTER)):
        label = f"source of {variant.source_steps:,} steps"
        lines += [
            Line(variant, "fpi_identity", label, parts=parts),
            Line(variant, "fpi", f"stack, {label}", parts=parts),
            Line(variant, "fpi_interleave", label, parts=parts),
        ]
    return lines


def directions(setting: Setting) -> list[Line]:
    """Width, depth or both, to about as many FLOPs in a step."""
    source, heads = setting.source, setting.source.heads
    wide = Size(source.layers, 2 * source.width, 2 * heads)
    deep = Size(4 * source.layers, source.width, heads)
    more = round(heads * 2**0.5)
    both = Size(2 * source.layers, source.width // heads * more, more)
    lines = []
    # each at the defaults of growth, which differ from the first system where both axes grow
    for label, target, system, parts in (
        ("width", wide, "fpi_padded", ()),
        ("depth", deep, "fpi_identity", SHORTER),
        ("both", both, "padded_identity", ()),
    ):
        variant = setting.variant(target.name, target=target)
        lines += [Line(variant, "scratch", label), Line(variant, system, label, parts=parts)]
    return lines


def moment(setting: Setting) -> list[Line]:
    """Growth of sources that were trained for 10, 30, 100 and 400 % of the usual steps.

    Each is a run of its own, whose rate falls to 0. The last one is the case of a lab whose small
    model has seen far more text than the large one is to see. DirectCopy, which loses the function,
    shows from which age on it is worth keeping.
    """
    ages = []
    for share in (10, 30, 100, 400):
        steps = max(1, setting.source_steps * share // 100)
        ages.append(setting.variant(f"at{share}", source_steps=steps))
    grown = [
        Line(variant, name, f"source of {variant.source_steps:,} steps")
        for name in ("fpi_padded", "direct_copy")
        for variant in ages
    ]
    return [Line(setting, "scratch"), *grown]


def inheritance(setting: Setting) -> list[Line]:
    """A source that teaches in every step, others that teach with it, and kept predictions."""
    taught = Line(setting, "taught")
    others = systems("taught_by_two", "taught_by_generations")(setting)
    kept = [Line(setting, f"taught_top{k}", like=taught) for k in (1, 4, 16, 64)]
    return [Line(setting, "scratch"), taught, *others, *kept]


def domain(setting: Setting) -> list[Line]:
    """The trained target goes on with another kind of text, for a quarter of its steps."""
    other = setting.variant(
        "domain", text="domain", steps=setting.steps // 4, rate_steps=setting.rate_steps // 2
    )
    return [Line(other, "adapted"), Line(other, "adapted_taught")]
