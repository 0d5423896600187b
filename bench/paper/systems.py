"""The systems of the papers and ours, each as the run file that trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.paper.settings import Setting
from growkern import GrowthStep, InheritanceSchedule, TwoStageConfig
from growkern.train.config import ModelSection, OutputSection, Run, TeacherSection, TrainingSection
from growkern.train.dataset.options import DataSection
from growkern.train.optimizer.options import OptimizerOptions

SOURCE = "source"
# the seed on which learning rates are chosen; no other run has it
RATE_SEED = 100


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        setting: of its table.
        system: a key of `SYSTEMS`, or `SOURCE`.
        seed: of the untrained models, the growth, the order of the data and the masks.
        rate: peak of the learning rate.
        steps: optimizer steps.
        needs: the jobs whose models it begins with or learns from.
    """

    setting: Setting
    system: str
    seed: int
    rate: float
    steps: int
    needs: tuple[Job, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """The job's folder."""
        return f"{self.setting.name}/{self.system}-{self.steps}-{self.rate:g}-seed{self.seed}"

    @property
    def kept(self) -> int:
        """Tokens per row of a teacher that is run once, before; 0: it runs in every step."""
        return 0 if self.system == SOURCE else SYSTEMS[self.system].kept


def all_needs(job: Job) -> set[Job]:
    """The jobs that a job needs, and those that these need."""
    return {one for need in job.needs for one in (need, *all_needs(need))}


def source_of(setting: Setting, seed: int) -> Job:
    """The run that trains the source."""
    setting = setting.for_source
    return Job(setting, SOURCE, seed, setting.source_rate, setting.source_steps)


def job_of(setting: Setting, system: str, seed: int, rate: float, steps: int) -> Job:
    """The run of a system."""
    needs = SYSTEMS[system].needs(setting, seed)
    return Job(setting if needs else setting.for_scratch, system, seed, rate, steps, needs)


Needs = Callable[[Setting, int], tuple[Job, ...]]
Sections = Callable[[Job, str], dict[str, Any]]


def _no_source(setting: Setting, seed: int) -> tuple[Job, ...]:
    return ()


def _one_source(setting: Setting, seed: int) -> tuple[Job, ...]:
    return (source_of(setting, seed),)


def _two_sources(setting: Setting, seed: int) -> tuple[Job, ...]:
    # other sources of the same table have seeds far from those of the runs
    return tuple(source_of(setting, one) for one in (seed, seed + 1000))


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
        title: in tables.
        sections: (job, source's folder) -> the sections of its run file that differ.
        needs: (setting, seed) -> the jobs whose models it begins with or learns from.
        grows: whether it begins with the weights of another model.
        kept: `Job.kept`.
    """

    title: str
    sections: Sections
    needs: Needs = _one_source
    grows: bool = True
    kept: int = 0


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
        training=TrainingSection(
            steps=job.steps,
            batch_size=setting.batch,
            learning_rate=job.rate,
            warmup_steps=round(setting.warmup * job.steps),
            schedule="linear",
            precision=setting.precision,
            seed=job.seed,
            log_every=job.steps,
            eval_every=job.steps,
            save_minutes=1.0,
            keep_checkpoints=1,
        ),
        output=OutputSection(directory=job.name, tensorboard=False),
        # the start is the same at every length; runs that choose a rate are compared at their ends
        trainer={"eval_on_start": job.seed != RATE_SEED and job.steps < setting.steps // 2},
    )
    if job.system == SOURCE:
        return base
    source = job.needs[0].name if job.needs else ""
    return replace(base, **SYSTEMS[job.system].sections(job, source))


def untrained_folder(setting: Setting, kind: str, seed: int) -> str:
    """The folder of an untrained model: "source", "target", or the target with fewer layers."""
    return f"untrained/{setting.name}-{kind}-seed{seed}"


def untrained_models(job: Job) -> dict[str, tuple[Any, int | None]]:
    """The untrained models that a job begins with: folder -> (size, layers)."""
    setting = job.setting
    if job.system == SOURCE:
        return {untrained_folder(setting, SOURCE, job.seed): (setting.source, None)}
    found = {}
    for layers in _untrained_layers(job):
        folder = untrained_folder(setting, f"{layers}-layers", job.seed)
        found[folder] = (setting.target, layers)
    return found


def _untrained_layers(job: Job) -> tuple[int, ...]:
    if SYSTEMS[job.system].grows:
        return ()
    whole = job.setting.target.layers
    return (whole // 4,) if job.system in ("stackbert", "mslt") else (whole,)


def _untrained(job: Job) -> ModelSection:
    (layers,) = _untrained_layers(job)
    return ModelSection(path=untrained_folder(job.setting, f"{layers}-layers", job.seed))


def _scratch(job: Job, source: str) -> dict[str, Any]:
    return {"model": _untrained(job)}


def _grown(method: str, depth: str = "stack", stream: str = "copies", **how: Any) -> Sections:
    def sections(job: Job, source: str) -> dict[str, Any]:
        growth = GrowthStep(
            source=source,
            sizes=job.setting.target_sizes(),
            method=method,
            depth=depth,
            stream=stream,
            seed=job.seed,
            **how,
        )
        return {"model": ModelSection(), "growth": growth}

    return sections


def _with_adamw(sections: Sections) -> Sections:
    """The same with AdamW, where a grown model's own default is `GrowthAdamW`."""

    def changed(job: Job, source: str) -> dict[str, Any]:
        plain = run_of(replace(job, system="scratch", needs=())).training
        return {**sections(job, source), "training": replace(plain, optimizer="adamw")}

    return changed


def _with_moments(job: Job, source: str) -> dict[str, Any]:
    """The optimizer goes on where the source's stopped."""
    state = f"{source}/checkpoint-{job.setting.source_steps}"
    how = {"optimizer": state, "moments": "grow"}
    return _grown("fpi", stream="padded", **how)(job, source)


def _rewarmed(job: Job, source: str) -> dict[str, Any]:
    """The same, and new entries begin at a low rate, for as long as the schedule's warm-up."""
    rewarm = OptimizerOptions(rewarm_steps=round(job.setting.warmup * job.steps))
    return {**_with_moments(job, source), "optimizer": rewarm}


def _taught(job: Job, source: str) -> dict[str, Any]:
    """An untrained model that learns from its sources (Knowledge Inheritance)."""
    end = round(job.setting.inheritance_share * job.steps)
    teachers = TeacherSection(paths=tuple(one.name for one in job.needs))
    if job.kept:
        teachers = TeacherSection(cache=kept_folder(job))
    return {
        "model": _untrained(job),
        "inheritance": InheritanceSchedule(end_step=end),
        "teacher": teachers,
    }


def _going_on(job: Job, source: str) -> dict[str, Any]:
    """The model of the job that is needed first, trained on. Others teach it."""
    end = round(job.setting.inheritance_share * job.steps)
    sections: dict[str, Any] = {"model": ModelSection(path=source)}
    teachers = tuple(one.name for one in job.needs[1:])
    if not teachers:
        return sections
    taught = {"inheritance": InheritanceSchedule(end_step=end)}
    return {**sections, **taught, "teacher": TeacherSection(paths=teachers)}


def kept_folder(job: Job) -> str:
    """The folder of a teacher's kept predictions."""
    return f"{job.needs[0].name}-top{job.kept}"


def _two_stage(method: str, share: float | None = None) -> Sections:
    """Two stages; `share` of the steps are stage 1, or that of the setting."""

    def sections(job: Job, source: str) -> dict[str, Any]:
        setting = job.setting
        steps = round((setting.stage1_share if share is None else share) * job.steps)
        stages = TwoStageConfig(setting.layers_per_block, stage1_steps=steps, seed=job.seed)
        return {**_grown(method)(job, source), "two_stage": stages}

    return sections


def _inheriting(job: Job, source: str) -> dict[str, Any]:
    end = round(job.setting.inheritance_share * job.steps)
    return {
        **_two_stage("aki")(job, source),
        "inheritance": InheritanceSchedule(end_step=end),
        "teacher": TeacherSection(paths=(source,)),
    }


def _stacked(job: Job, source: str) -> dict[str, Any]:
    """A quarter of the layers for 5 of 40 parts of the steps, half of them for 7, then all."""
    name, layers = job.setting.layers_name, job.setting.target.layers
    growth = tuple(
        GrowthStep(at_step=job.steps * parts // 40, sizes={name: count}, depth="stack")
        for parts, count in ((5, layers // 2), (12, layers))
    )
    return {"model": _untrained(job), "growth": growth}


def _layerwise(job: Job, source: str) -> dict[str, Any]:
    """A quarter of the layers more every 5 of 40 parts; new ones train alone up to the last."""
    name, layers, part = job.setting.layers_name, job.setting.target.layers, job.steps // 8
    growth = tuple(
        GrowthStep(
            at_step=number * part,
            sizes={name: (number + 1) * layers // 4},
            new_layers_steps=part,
        )
        for number in (1, 2, 3)
    )
    return {"model": _untrained(job), "growth": growth}


SYSTEMS = {
    "scratch": System("scratch", _scratch, needs=_no_source, grows=False),
    "direct_copy": System("DirectCopy", _grown("direct_copy")),
    "stackbert": System("StackBERT", _stacked, needs=_no_source, grows=False),
    "mslt": System("MSLT", _layerwise, needs=_no_source, grows=False),
    "fpi": System("FPI", _grown("fpi")),
    "aki": System("AKI", _grown("aki")),
    "aki_two_stage": System("AKI + two stages", _two_stage("aki")),
    "aki_two_stage_ki": System("AKI + two stages + inheritance", _inheriting),
    "fpi_two_stage": System("FPI + two stages", _two_stage("fpi")),
    # stage 1 as a run of its own; what goes on from a run is trained with AdamW
    "stage1": System("stage 1 alone", _two_stage("aki", share=1.0)),
    "aki_adamw": System("AKI, AdamW", _with_adamw(_grown("aki"))),
    "aki_after_stage1": System("AKI, AdamW, after stage 1", _going_on, _first_stage),
    # how copies are told apart, and which optimizer trains them
    "fpi_none": System("FPI, equal copies", _grown("fpi", symmetry="none")),
    "fpi_noise": System("FPI, noise 0.5", _grown("fpi", symmetry="noise")),
    "fpi_split": System("FPI, unequal shares", _grown("fpi", symmetry="split")),
    # a stream of old entries and empty ones, in place of copies
    "fpi_padded": System("FPI, padded stream", _grown("fpi", stream="padded")),
    "aki_padded": System("AKI, padded stream", _grown("aki", stream="padded")),
    "padded_adamw": System(
        "FPI, padded stream, AdamW", _with_adamw(_grown("fpi", stream="padded"))
    ),
    "padded_moments": System("FPI, padded stream, grown moments", _with_moments),
    "padded_rewarmed": System("FPI, padded stream, grown moments, re-warm-up", _rewarmed),
    # where new layers come from
    "fpi_identity": System("FPI, identity", _grown("fpi", "identity")),
    "padded_identity": System(
        "FPI, padded stream, identity", _grown("fpi", "identity", stream="padded")
    ),
    "fpi_interleave": System("FPI, interleave", _grown("fpi", "interleave")),
    # Knowledge Inheritance: a small model teaches an untrained one
    "taught": System("taught by the source", _taught, grows=False),
    "taught_by_two": System("taught by two sources", _taught, _two_sources, grows=False),
    "taught_by_generations": System(
        "taught by a middle size, that by the source", _taught, _middle, grows=False
    ),
    **{
        f"taught_top{k}": System(f"taught, {k} tokens kept", _taught, grows=False, kept=k)
        for k in (1, 4, 16, 64)
    },
    # a trained model goes on with text of another kind
    "adapted": System("alone", _going_on, _general),
    "source_adapted": System("the source, alone", _going_on, _general_source),
    "adapted_taught": System("taught by an adapted source", _going_on, _general_and_expert),
}


def run_file(job: Job, folder: Path) -> Path:
    """The run file of a job in the folder of all jobs."""
    return folder / f"{job.name.replace('/', '-')}.toml"


def write_run_file(job: Job, folder: Path) -> Path:
    """Write the run file of a job into the folder of all jobs."""
    file = run_file(job, folder)
    file.write_text(run_of(job).to_toml())
    return file
