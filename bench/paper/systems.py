"""The systems of bert2BERT's Table 2, each as the run file that trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.paper.settings import Setting
from growkern import GrowthStep, InheritanceSchedule, TwoStageConfig
from growkern.train.config import ModelSection, OutputSection, Run, TeacherSection, TrainingSection
from growkern.train.dataset.options import DataSection

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


def source_of(setting: Setting, seed: int) -> Job:
    """The run that trains the source."""
    return Job(setting, SOURCE, seed, setting.source_rate, setting.source_steps)


def job_of(setting: Setting, system: str, seed: int, rate: float, steps: int) -> Job:
    """The run of a system."""
    needs = (source_of(setting, seed),) if SYSTEMS[system].grows else ()
    return Job(setting, system, seed, rate, steps, needs)


@dataclass(frozen=True)
class System:
    """A way to train the large model.

    Attributes:
        title: in tables.
        sections: (job, source's folder) -> the sections of its run file that differ.
        grows: whether it begins with the trained source.
    """

    title: str
    sections: Callable[[Job, str], dict[str, Any]]
    grows: bool = True


def run_of(job: Job) -> Run:
    """The run file of a job. Its paths are relative to the folder of all jobs."""
    setting = job.setting
    base = Run(
        model=ModelSection(path=untrained_folder(setting, SOURCE, job.seed)),
        data=DataSection(
            train=("corpus/train.txt",),
            validation=(f"corpus/validation-{setting.validation_passes}.txt",),
            sequence_length=setting.length,
        ),
        training=TrainingSection(
            steps=job.steps,
            batch_size=setting.batch,
            learning_rate=job.rate,
            warmup_steps=setting.warmup,
            seed=job.seed,
            log_every=setting.eval_every,
            eval_every=setting.eval_every,
            save_minutes=1.0,
            keep_checkpoints=1,
        ),
        output=OutputSection(directory=job.name, tensorboard=False),
        trainer={"eval_on_start": True},
    )
    if job.system == SOURCE:
        return base
    (source,) = job.needs or (None,)
    return replace(base, **SYSTEMS[job.system].sections(job, source.name if source else ""))


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
    return (whole,) if job.system == "scratch" else (whole // 4,)


def _untrained(job: Job) -> ModelSection:
    (layers,) = _untrained_layers(job)
    return ModelSection(path=untrained_folder(job.setting, f"{layers}-layers", job.seed))


def _scratch(job: Job, source: str) -> dict[str, Any]:
    return {"model": _untrained(job)}


def _grown(method: str) -> Callable[[Job, str], dict[str, Any]]:
    def sections(job: Job, source: str) -> dict[str, Any]:
        sizes, seed = job.setting.target_sizes(), job.seed
        growth = GrowthStep(source=source, sizes=sizes, method=method, depth="stack", seed=seed)
        return {"model": ModelSection(), "growth": growth}

    return sections


def _two_stage(method: str) -> Callable[[Job, str], dict[str, Any]]:
    def sections(job: Job, source: str) -> dict[str, Any]:
        setting = job.setting
        steps = round(setting.stage1_share * job.steps)
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
    "scratch": System("scratch", _scratch, grows=False),
    "direct_copy": System("DirectCopy", _grown("direct_copy")),
    "stackbert": System("StackBERT", _stacked, grows=False),
    "mslt": System("MSLT", _layerwise, grows=False),
    "fpi": System("FPI", _grown("fpi")),
    "aki": System("AKI", _grown("aki")),
    "aki_two_stage": System("AKI + two stages", _two_stage("aki")),
    "aki_two_stage_ki": System("AKI + two stages + inheritance", _inheriting),
    "fpi_two_stage": System("FPI + two stages", _two_stage("fpi")),
}


def write_run_file(job: Job, folder: Path) -> Path:
    """Write the run file of a job into the folder of all jobs."""
    file = folder / f"{job.name.replace('/', '-')}.toml"
    file.write_text(run_of(job).to_toml())
    return file
