"""A training run, and the sections of its run file in which systems differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.paper.settings import Setting
from growkern import GrowthStep, InheritanceSchedule, TwoStageConfig
from growkern.train.run.file import TeacherSection, TrainingSection
from growkern.train.sections import ModelSection, OptimizerOptions

SOURCE = "source"
# the seed on which learning rates are chosen; no other run has it
RATE_SEED = 100


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        seed: of the untrained models, the growth, the order of the data and the masks.
        needs: the jobs whose models it begins with or learns from.
        kept: tokens per row of a teacher that is run once, before; 0: it runs in every step.
    """

    setting: Setting
    system: str
    seed: int
    rate: float
    steps: int
    needs: tuple[Job, ...] = field(default=(), compare=False)
    kept: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        """The job's folder."""
        return f"{self.setting.name}/{self.system}-{self.steps}-{self.rate:g}-seed{self.seed}"


def all_needs(job: Job) -> set[Job]:
    """The jobs that a job needs, and those that these need."""
    return {other for need in job.needs for other in (need, *all_needs(need))}


def source_of(setting: Setting, seed: int) -> Job:
    """The run that trains the source."""
    setting = setting.for_source
    return Job(setting, SOURCE, seed, setting.source_rate, setting.source_steps)


def untrained_folder(setting: Setting, kind: str, seed: int) -> str:
    """The folder of an untrained model: "source", "target", or the target with fewer layers."""
    return f"untrained/{setting.name}-{kind}-seed{seed}"


def kept_folder(job: Job) -> str:
    """The folder of a teacher's kept predictions."""
    return f"{job.needs[0].name}-top{job.kept}"


def upcycled_folder(job: Job) -> str:
    """The folder of the mixture that a source becomes before a job."""
    return f"upcycled/{job.setting.name}-{job.system}-seed{job.seed}"


def layers_at_start(job: Job) -> int:
    """The layers of the untrained model that a job begins with."""
    whole = job.setting.target.layers
    return whole // 4 if job.system in ("stackbert", "mslt") else whole


def training_of(job: Job) -> TrainingSection:
    """How every job is trained."""
    setting = job.setting
    return TrainingSection(
        steps=job.steps,
        batch_size=setting.batch,
        learning_rate=job.rate,
        warmup_steps=round(setting.warmup * job.steps),
        schedule=setting.schedule,
        optimizer=setting.optimizer,
        precision=setting.precision,
        seed=job.seed,
        log_every=job.steps,
        eval_every=job.steps,
        save_minutes=1.0,
        keep_checkpoints=1,
    )


def decay_of(job: Job) -> dict[str, Any]:
    """Arguments of the schedule that stays at its peak: it falls in the last fifth of the steps."""
    if job.setting.schedule == "linear":
        return {}
    return {"lr_scheduler_kwargs": {"num_decay_steps": round(0.2 * job.steps)}}


# (job, source's folder) -> the sections of its run file that differ from the others'
Sections = Callable[[Job, str], dict[str, Any]]


def _untrained(job: Job) -> ModelSection:
    kind = f"{layers_at_start(job)}-layers"
    return ModelSection(path=untrained_folder(job.setting, kind, job.seed))


def _taught_by(job: Job, teachers: Sequence[str]) -> dict[str, Any]:
    """Teachers for the first part of the steps."""
    end = round(job.setting.inheritance_share * job.steps)
    return {
        "inheritance": InheritanceSchedule(alpha=1.0, end_step=end),
        "teacher": TeacherSection(paths=tuple(teachers)),
    }


def scratch(job: Job, source: str) -> dict[str, Any]:
    """The large model, from random weights."""
    return {"model": _untrained(job)}


def grown(method: str, depth: str = "stack", stream: str = "copies", **how: Any) -> Sections:
    """A model that begins as its source, grown; `how` are options of `GrowthStep`."""

    def sections(job: Job, source: str) -> dict[str, Any]:
        gets_layers = job.setting.target.layers > job.setting.source.layers
        growth = GrowthStep(
            source=source,
            sizes=job.setting.target_sizes(),
            method=method,
            stream=stream,
            seed=job.seed,
            **({"depth": depth} if gets_layers else {}),
            **how,
        )
        return {"model": ModelSection(), "growth": growth}

    return sections


def with_training(sections: Sections, **changes: Any) -> Sections:
    """The same, trained otherwise. The optimizer "auto" is `GrowthAdamW` for a grown model."""

    def changed(job: Job, source: str) -> dict[str, Any]:
        return {**sections(job, source), "training": replace(training_of(job), **changes)}

    return changed


def upcycled(job: Job, source: str) -> dict[str, Any]:
    """The mixture that its source became. All of them are trained with AdamW."""
    plain = replace(training_of(job), optimizer="adamw")
    return {"model": ModelSection(path=upcycled_folder(job)), "training": plain}


def upcycled_taught(job: Job, source: str) -> dict[str, Any]:
    """The same, and the dense source teaches it."""
    return {**upcycled(job, source), **_taught_by(job, (source,))}


def with_moments(job: Job, source: str) -> dict[str, Any]:
    """The optimizer goes on where the source's stopped."""
    state = f"{source}/checkpoint-{job.setting.source_steps}"
    how = {"optimizer": state, "moments": "grow"}
    return grown("fpi", stream="padded", **how)(job, source)


def rewarmed(job: Job, source: str) -> dict[str, Any]:
    """The same, and new entries begin at a low rate, for as long as the schedule's warm-up."""
    rewarm = OptimizerOptions(rewarm_steps=round(job.setting.warmup * job.steps))
    return {**with_moments(job, source), "optimizer": rewarm}


def taught(job: Job, source: str) -> dict[str, Any]:
    """An untrained model that learns from its sources (Knowledge Inheritance)."""
    sections = {"model": _untrained(job), **_taught_by(job, [need.name for need in job.needs])}
    return sections | ({"teacher": TeacherSection(cache=kept_folder(job))} if job.kept else {})


def going_on(job: Job, source: str) -> dict[str, Any]:
    """The model of the job that is needed first, trained on. Others teach it."""
    teachers = [need.name for need in job.needs[1:]]
    return {"model": ModelSection(path=source), **(_taught_by(job, teachers) if teachers else {})}


def two_stage(method: str, share: float | None = None) -> Sections:
    """Two stages; `share` of the steps are stage 1, or that of the setting."""

    def sections(job: Job, source: str) -> dict[str, Any]:
        setting = job.setting
        steps = round((setting.stage1_share if share is None else share) * job.steps)
        stages = TwoStageConfig(setting.layers_per_block, stage1_steps=steps, seed=job.seed)
        return {**grown(method)(job, source), "two_stage": stages}

    return sections


def inheriting(job: Job, source: str) -> dict[str, Any]:
    """Two stages of AKI, which the source teaches too."""
    return {**two_stage("aki")(job, source), **_taught_by(job, (source,))}


def stacked(job: Job, source: str) -> dict[str, Any]:
    """A quarter of the layers for 5 of 40 parts of the steps, half of them for 7, then all."""
    name, layers = job.setting.layers_name, job.setting.target.layers
    growth = tuple(
        GrowthStep(at_step=job.steps * parts // 40, sizes={name: count}, depth="stack")
        for parts, count in ((5, layers // 2), (12, layers))
    )
    return {"model": _untrained(job), "growth": growth}


def layerwise(job: Job, source: str) -> dict[str, Any]:
    """A quarter of the layers more every 5 of 40 parts; new ones train alone up to the last."""
    name, layers, part = job.setting.layers_name, job.setting.target.layers, job.steps // 8
    growth = tuple(
        GrowthStep(
            at_step=number * part, sizes={name: (number + 1) * layers // 4}, new_layers_steps=part
        )
        for number in (1, 2, 3)
    )
    return {"model": _untrained(job), "growth": growth}


def starting_small(depth: str, share: float, *, rewarm: float = 0.0, **how: Any) -> Sections:
    """An untrained source that grows to the target once, after `share` of the steps.

    Args:
        rewarm: share of the steps in which the rate then rises again.
        how: options of `GrowthStep`. Its moments are grown, unless this says otherwise.
    """

    def sections(job: Job, source: str) -> dict[str, Any]:
        growth = GrowthStep(
            at_step=round(share * job.steps),
            sizes=job.setting.target_sizes(),
            seed=job.seed,
            rewarm_steps=round(rewarm * job.steps),
            **({"depth": depth} if job.setting.target.layers > job.setting.source.layers else {}),
            **({"moments": "grow"} | how),
        )
        path = untrained_folder(job.setting, SOURCE, job.seed)
        return {"model": ModelSection(path=path), "growth": (growth,)}

    return sections
