"""The systems of the papers and ours, each as the run file that trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.paper.jobs import (
    RATE_SEED,
    SOURCE,
    Job,
    Sections,
    decay_of,
    going_on,
    grown,
    inheriting,
    layers_at_start,
    layerwise,
    rewarmed,
    scratch,
    source_of,
    stacked,
    starting_small,
    taught,
    training_of,
    two_stage,
    untrained_folder,
    upcycled,
    upcycled_taught,
    with_moments,
    with_training,
)
from bench.paper.settings import Setting
from growkern.train.run.file import OutputSection, Run
from growkern.train.sections import DataSection, ModelSection


def job_of(setting: Setting, system: str, seed: int, rate: float, steps: int) -> Job:
    """The run of a system."""
    needs = SYSTEMS[system].needs(setting, seed)
    setting = setting if needs or SYSTEMS[system].starts_small else setting.for_scratch
    return Job(setting, system, seed, rate, steps, needs, SYSTEMS[system].kept)


Needs = Callable[[Setting, int], tuple[Job, ...]]


def _no_source(setting: Setting, seed: int) -> tuple[Job, ...]:
    return ()


# of a system that begins with no other model's weights
UNTRAINED: Any = {"needs": _no_source, "grows": False}


def _one_source(setting: Setting, seed: int) -> tuple[Job, ...]:
    return (source_of(setting, seed),)


def _two_sources(setting: Setting, seed: int) -> tuple[Job, ...]:
    # other sources of the same table have seeds far from those of the runs
    return tuple(source_of(setting, source_seed) for source_seed in (seed, seed + 1000))


def _middle(setting: Setting, seed: int) -> tuple[Job, ...]:
    """A model between source and target, which the source has taught."""
    small, large = setting.source, setting.target
    size = replace(
        large, width=(small.width + large.width) // 2, heads=(small.heads + large.heads) // 2
    )
    middle = setting.variant("middle", target=size)
    return (job_of(middle, "taught", seed, setting.source_rate, setting.source_steps),)


def _first_stage(setting: Setting, seed: int) -> tuple[Job, ...]:
    """A stage 1 whose learning rate falls to 0, as long as that of the longest run."""
    steps = round(setting.stage1_share * setting.steps)
    rate = setting.rates[len(setting.rates) // 2]
    return (job_of(setting, "stage1", seed, rate, steps),)


def _chain(system: str) -> Needs:
    """The size before, which grew by the same system; or a source, where the chain begins."""

    def needs(setting: Setting, seed: int) -> tuple[Job, ...]:
        before = setting.origin
        if before is None or before.target != setting.source:
            return _one_source(setting, seed)
        return (job_of(before, system, seed, setting.source_rate, setting.source_steps),)

    return needs


def _general(setting: Setting, seed: int) -> tuple[Job, ...]:
    """The target, trained on the text of the origin."""
    origin = setting.origin or setting
    return (job_of(origin, "scratch", seed, origin.source_rate, origin.steps),)


def _general_source(setting: Setting, seed: int) -> tuple[Job, ...]:
    return (source_of(setting.origin or setting, seed),)


def _general_and_expert(setting: Setting, seed: int) -> tuple[Job, ...]:
    """The same, and the source that has gone on with the text of this setting."""
    expert = job_of(setting, "source_adapted", seed, setting.source_rate, setting.steps)
    return (*_general(setting, seed), expert)


@dataclass(frozen=True)
class System:
    """A way to train the large model.

    Attributes:
        about: what it does, in a sentence without its end.
        sections: (job, source's folder) -> the sections of its run file that differ.
        needs: (setting, seed) -> the jobs whose models it begins with or learns from.
        grows: whether it begins with the weights of another model.
        starts_small: whether it begins with an untrained source, and grows in the run.
        becomes: options of `growkern.grow` that make its source a mixture; None: it stays dense.
        restart: the share of the steps after which the optimizer begins anew.
    """

    title: str
    about: str
    sections: Sections
    needs: Needs = _one_source
    grows: bool = True
    starts_small: bool = False
    kept: int = 0
    becomes: Mapping[str, Any] | None = None
    restart: float = 0.0


def run_of(job: Job) -> Run:
    """The run file of a job. Its paths are relative to the folder of all jobs."""
    setting = job.setting
    base = Run(
        model=ModelSection(path=untrained_folder(setting, SOURCE, job.seed)),
        data=DataSection(
            train=(f"{setting.text}/train.txt",),
            validation=(setting.validation,),
            sequence_length=setting.length,
        ),
        training=training_of(job),
        output=OutputSection(directory=job.name, tensorboard=False),
        # the start is the same at every length; runs that choose a rate are compared at their ends
        trainer={"eval_on_start": job.seed != RATE_SEED and job.steps < setting.steps // 2}
        | decay_of(job),
    )
    if job.system == SOURCE:
        return base
    source = job.needs[0].name if job.needs else ""
    return replace(base, **SYSTEMS[job.system].sections(job, source))


def untrained_models(job: Job) -> dict[str, tuple[Any, int | None]]:
    """The untrained models that a job begins with: folder -> (size, layers)."""
    setting = job.setting
    if job.system == SOURCE or SYSTEMS[job.system].starts_small:
        return {untrained_folder(setting, SOURCE, job.seed): (setting.source, None)}
    if SYSTEMS[job.system].grows:
        return {}
    layers = layers_at_start(job)
    return {untrained_folder(setting, f"{layers}-layers", job.seed): (setting.target, layers)}


SYSTEMS = {
    "scratch": System("scratch", "the large model, from random weights", scratch, **UNTRAINED),
    "direct_copy": System(
        "DirectCopy",
        "the small model's weights are copied once, new ones are random, layers are stacked",
        grown("direct_copy"),
    ),
    "stackbert": System(
        "StackBERT",
        "a quarter of the layers from random weights, doubled twice during training",
        stacked,
        **UNTRAINED,
    ),
    "mslt": System(
        "MSLT",
        "a quarter of the layers, then a quarter more three times; new ones train alone at first",
        layerwise,
        **UNTRAINED,
    ),
    "fpi": System(
        "FPI", "width grows by copies and keeps the function, layers are stacked", grown("fpi")
    ),
    "aki": System(
        "AKI", "the same, but new heads and units come from the next layer", grown("aki")
    ),
    "aki_two_stage": System(
        "AKI + two stages",
        "AKI; for an eighth of the steps sub-models of fewer layers are trained",
        two_stage("aki"),
    ),
    "aki_two_stage_ki": System(
        "AKI + two stages + inheritance",
        "the same; the small model teaches for 44 % of the steps",
        inheriting,
    ),
    "fpi_two_stage": System(
        "FPI + two stages", "FPI; the same stages as for AKI", two_stage("fpi")
    ),
    # stage 1 as a run of its own; what goes on from a run is trained with AdamW
    "stage1": System("stage 1 alone", "sub-models in all steps", two_stage("aki", share=1.0)),
    "aki_adamw": System(
        "AKI, AdamW",
        "AKI, trained with AdamW in place of GrowthAdamW",
        with_training(grown("aki"), optimizer="adamw"),
    ),
    "aki_after_stage1": System(
        "AKI, AdamW, after stage 1",
        "the same, after stage 1 as a run of its own",
        going_on,
        _first_stage,
    ),
    # how copies are told apart, and which optimizer trains them
    "fpi_none": System(
        "FPI, equal copies", "FPI whose copies stay equal", grown("fpi", symmetry="none")
    ),
    "fpi_noise": System(
        "FPI, noise 0.5", "FPI whose copies differ by noise", grown("fpi", symmetry="noise")
    ),
    "fpi_split": System(
        "FPI, unequal shares",
        "FPI whose copies have unequal shares",
        grown("fpi", symmetry="split"),
    ),
    # a stream of old entries and empty ones, in place of copies
    "fpi_padded": System(
        "FPI, padded stream",
        "FPI; new entries of the hidden state begin empty, in place of copies",
        grown("fpi", stream="padded"),
    ),
    # new heads and FFN units are no copies either
    "fresh": System(
        "fresh, padded stream",
        "the same, and new heads and FFN units begin untrained and unread, in place of copies",
        grown("fresh", stream="padded"),
    ),
    "aki_padded": System(
        "AKI, padded stream", "AKI with such a hidden state", grown("aki", stream="padded")
    ),
    "padded_adamw": System(
        "FPI, padded stream, AdamW",
        "the same as FPI, padded stream, trained with AdamW in place of GrowthAdamW",
        with_training(grown("fpi", stream="padded"), optimizer="adamw"),
    ),
    "fpi_adamw": System(
        "FPI, AdamW",
        "FPI, trained with AdamW in place of GrowthAdamW",
        with_training(grown("fpi"), optimizer="adamw"),
    ),
    "padded_muon": System(
        "FPI, padded stream, Muon",
        "the same, trained with GrowthMuon",
        with_training(grown("fpi", stream="padded"), optimizer="muon"),
    ),
    "noise_muon": System(
        "FPI, noise 0.5, Muon",
        "FPI whose copies differ by noise, trained with GrowthMuon",
        with_training(grown("fpi", symmetry="noise"), optimizer="muon"),
    ),
    "scratch_muon": System(
        "scratch, Muon",
        "the large model, from random weights, trained with Muon",
        with_training(scratch, optimizer="muon"),
        **UNTRAINED,
    ),
    "padded_moments": System(
        "FPI, padded stream, grown moments",
        "the same; the optimizer goes on with the source's moments, grown with the weights",
        with_moments,
    ),
    "padded_rewarmed": System(
        "FPI, padded stream, grown moments, re-warm-up",
        "the same; new entries begin at a low learning rate",
        rewarmed,
    ),
    # where new layers come from
    "fpi_identity": System(
        "FPI, identity", "FPI; new layers add nothing at first", grown("fpi", "identity")
    ),
    "padded_identity": System(
        "FPI, padded stream, identity",
        "FPI with a padded hidden state; new layers add nothing at first",
        grown("fpi", "identity", stream="padded"),
    ),
    "fpi_interleave": System(
        "FPI, interleave", "FPI; each layer's copy stands beside it", grown("fpi", "interleave")
    ),
    # Knowledge Inheritance: a small model teaches an untrained one
    "taught": System(
        "taught by the source",
        "the large model from random weights; the small one teaches for 44 % of the steps",
        taught,
        grows=False,
    ),
    "taught_by_two": System(
        "taught by two sources",
        "the same with two small models, of different seeds",
        taught,
        _two_sources,
        grows=False,
    ),
    "taught_by_generations": System(
        "taught by a middle size, that by the source",
        "the small model teaches a middle size, and this one the large model",
        taught,
        _middle,
        grows=False,
    ),
    **{
        f"taught_top{k}": System(
            f"taught, {k} tokens kept" if k > 1 else "taught, 1 token kept",
            "the small model's predictions are computed once, and only the likeliest are kept",
            taught,
            grows=False,
            kept=k,
        )
        for k in (1, 4, 16, 64)
    },
    # a trained model goes on with text of another kind
    "adapted": System(
        "alone", "a trained large model goes on with another kind of text", going_on, _general
    ),
    "source_adapted": System(
        "the source, alone", "the same for the small model", going_on, _general_source
    ),
    "adapted_taught": System(
        "taught by an adapted source",
        "the same large model; a small one that went on with that text teaches it",
        going_on,
        _general_and_expert,
    ),
    # one run that starts small
    **{
        f"{depth}_at_{percent}{end}": System(
            f"{depth} at {percent} %{title}",
            f"the small model, untrained; it grows after {percent} % of the steps by {depth!r}"
            + about,
            starting_small(depth, percent / 100, moments=moments),
            needs=_no_source,
            grows=False,
            starts_small=True,
        )
        for depth in ("stack", "random", "identity", "interleave")
        for percent in (30, 50, 70, 80)
        for moments, end, title, about in (
            ("grow", "", "", ""),
            ("reset", "_reset", ", moments reset", ", and the optimizer begins anew"),
        )
    },
    "fresh_at_50_reset": System(
        "fresh at 50 %, moments reset",
        "the same in width, by 'fresh'",
        starting_small("stack", 0.5, moments="reset", method="fresh", stream="padded"),
        needs=_no_source,
        grows=False,
        starts_small=True,
    ),
    # the same, and one thing more is changed
    **{
        f"stack_at_30_{name}": System(
            f"stack at 30 %, {title}",
            f"the same; {about}",
            sections,
            needs=_no_source,
            grows=False,
            starts_small=True,
        )
        for name, title, about, sections in (
            (
                "rewarm",
                "re-warm-up",
                "the rate rises from 0 again for 5 % of the steps",
                starting_small("stack", 0.3, rewarm=0.05),
            ),
            (
                "growth_adamw",
                "GrowthAdamW",
                "trained with GrowthAdamW",
                with_training(starting_small("stack", 0.3), optimizer="auto"),
            ),
            (
                "growth_adamw_reset",
                "GrowthAdamW, moments reset",
                "trained with GrowthAdamW, which begins anew",
                with_training(starting_small("stack", 0.3, moments="reset"), optimizer="auto"),
            ),
        )
    },
    # what a growth that resets the moments does to the optimizer, without the growth
    "scratch_restarted": System(
        "scratch, moments reset at 30 %",
        "random weights; the optimizer begins anew after 30 % of the steps",
        scratch,
        restart=0.3,
        **UNTRAINED,
    ),
    # a family: each size is grown from the grown one before it
    "chained": System(
        "chain",
        "each size of a family is grown from the one before it, with the defaults of growkern",
        with_training(grown("fpi", stream="padded"), optimizer="auto"),
        needs=_chain("chained"),
    ),
    "chained_copy": System(
        "chain, DirectCopy",
        "the same with DirectCopy",
        with_training(grown("direct_copy"), optimizer="auto"),
        needs=_chain("chained_copy"),
    ),
    "chained_fresh": System(
        "chain, fresh",
        "the same with new heads and FFN units that begin untrained and unread",
        with_training(grown("fresh", stream="padded"), optimizer="auto"),
        needs=_chain("chained_fresh"),
    ),
    # a dense model goes on, or becomes a mixture of experts
    "continued": System("dense, continued", "the source is trained on", going_on),
    "upcycled": System(
        "whole copies",
        "the source becomes a mixture of 8 experts, of which 2 are used for a token; each is a "
        "copy of its FFN",
        upcycled,
        becomes={"to": "qwen3_moe"},
    ),
    "upcycled_drop": System(
        "drop 0.5",
        "the same; half of the units of each expert are drawn again",
        upcycled,
        becomes={"to": "qwen3_moe", "drop": 0.5},
    ),
    "upcycled_halves": System(
        "experts of half the width",
        "the source becomes a mixture of 16 experts of half the width, 2 used for a token",
        upcycled,
        becomes={"to": "qwen3_moe"},
    ),
    "upcycled_taught": System(
        "whole copies, taught",
        "whole copies, which the dense source teaches for 44 % of the steps",
        upcycled_taught,
        becomes={"to": "qwen3_moe"},
    ),
}
