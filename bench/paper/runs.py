"""Makes training runs, each once, and keeps what they found.

A job is done when its row is in `rows.jsonl`. A job that was killed resumes from its last
checkpoint.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM

from bench.paper.corpus import Facts
from bench.paper.jobs import SOURCE, Job, all_needs, kept_folder, upcycled_folder
from bench.paper.settings import Setting
from bench.paper.systems import SYSTEMS, run_of, untrained_models
from bench.shared.results import append_row, git_facts, machine, read_rows
from examples import finetune
from growkern import grow, run as train
from growkern.cli.app import silence_transformers
from growkern.cli.training import cache_teacher
from growkern.errors import GrowthError
from growkern.files import toml_lines, write_whole
from growkern.plot.curves import read_curve
from growkern.train.run import load_run
from growkern.train.topk_teacher.store import read_header

Call = Callable[[], float]

ROWS, ACCURACIES = "rows.jsonl", "accuracies.jsonl"
# the downstream task: folders of libraries that growkern needs, each with hundreds of passages
CLASSES = ("torch/nn/modules", "numpy/lib", "accelerate", "rich", "huggingface_hub")


class Workplace:
    """The folder of all jobs, and the rows of those that are done.

    Args:
        folder: for text, models, run files and rows.
        workers: runs at a time, each in a process of its own. They share the cores.
    """

    def __init__(
        self, folder: Path, facts: Facts, say: Callable[[str], None], workers: int = 1
    ) -> None:
        self.folder, self.facts, self.say, self.workers = folder, facts, say, workers
        self.rows = rows_of(folder)

    def make(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """The rows of jobs. Those that are not there yet are made, and what they need before."""
        by_name = {job.name: job for job in jobs}
        for job in by_name.values():
            self._check_unchanged(job)
        missing = [job for name, job in by_name.items() if name not in self.rows]
        self._train(missing)
        return [self.rows[job.name] for job in jobs]

    def _check_unchanged(self, job: Job) -> None:
        """Refuse a job that was trained in this folder with other settings."""
        file = run_file(job.name, self.folder)
        if file.is_file() and load_run(file) != run_of(job):
            raise GrowthError(
                f"{file}: the settings of this run have changed since "
                "it was trained here: give another --dir, or delete this file, the run's folder "
                "and its line in "
                f"{self.folder / ROWS}"
            )

    def classify(self, jobs: Sequence[Job]) -> None:
        """Fine-tune the models of finished jobs, and keep their accuracies.

        A row may come from another machine. Then the job's model is trained again first.
        """

        def prepared(job: Job) -> Call:
            return partial(accuracy_of, self.folder / job.name, job.setting.length, job.seed)

        missing = [job for job in jobs if "accuracy" not in self.rows[job.name]]
        self._train([job for job in missing if not self.has_model(job.name)])
        for done, (job, accuracy) in enumerate(self._called(missing, prepared), start=1):
            append_row(self.folder / ACCURACIES, {"name": job.name, "accuracy": accuracy})
            self.rows[job.name]["accuracy"] = accuracy
            self.say(f"{done}/{len(missing)} {job.name}: accuracy {accuracy:.3f}")

    def _train(self, jobs: Sequence[Job]) -> None:
        """Train jobs, and before each those that it needs and whose models are not there."""
        jobs = self._with_needs(jobs)

        def prepared(job: Job) -> Call:
            for name, (size, layers) in untrained_models(job).items():
                self._write_untrained(job.setting, name, size, job.seed, layers)
            if job.system != SOURCE and (becomes := SYSTEMS[job.system].becomes):
                self._upcycle(job, becomes)
            if job.kept:
                self._keep_teacher(job)
            file = write_run_file(job, self.folder)
            out, share = self.folder / job.name, _restart_of(job)
            return partial(seconds_of_training, file, out, round(share * job.steps))

        for done, (job, seconds) in enumerate(self._called(jobs, prepared), start=1):
            self._keep(job, seconds)
            loss = self.rows[job.name]["losses"][-1]
            self.say(f"{done}/{len(jobs)} {job.name}: loss {loss:.4f}")

    def _with_needs(self, jobs: Iterable[Job]) -> list[Job]:
        """`jobs`, and first those that they need and whose models are not there."""
        # rows may come from another machine, models do not
        needs = [need for job in jobs for need in job.needs if not self.has_model(need.name)]
        return list(dict.fromkeys([*(self._with_needs(needs) if needs else ()), *jobs]))

    def has_model(self, name: str) -> bool:
        """Whether a job was done in this folder, and its model is still there.

        A row alone may come from another machine. A run that was killed between its last step and
        its row has a model too.
        """
        return name in self.rows and (self.folder / name / "config.json").is_file()

    def _called(
        self, jobs: Sequence[Job], prepared: Callable[[Job], Call]
    ) -> Iterator[tuple[Job, float]]:
        """Call for each job what `prepared` makes, several at a time; yield results as they come.

        A job comes after those that it needs, and is prepared when these have been yielded.
        """
        at_once = min(self.workers, len(jobs))
        if jobs:
            self.say(f"{len(jobs)} runs, {at_once} at a time")
        if at_once <= 1:
            yield from ((job, prepared(job)()) for job in jobs)
            return
        threads = max(1, torch.get_num_threads() // at_once)
        # workers are forks of one Python, which imports everything once
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        waiting, running, undone = list(jobs), dict[Future[float], Job](), set(jobs)
        with ProcessPoolExecutor(at_once, context, _begin_worker, (threads,)) as pool:
            while undone:
                for job in [other for other in waiting if undone.isdisjoint(other.needs)]:
                    waiting.remove(job)
                    running[pool.submit(prepared(job))] = job
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job = running.pop(future)
                    yield job, future.result()
                    undone.remove(job)

    def _keep(self, job: Job, seconds: float) -> None:
        """Append the row of a job that has been trained, and delete what nobody needs.

        A row of another machine is replaced: rows tell of the models in the folder.
        """
        out = self.folder / job.name
        curve = read_curve(out)
        row = {
            "name": job.name,
            "setting": job.setting.name,
            "system": job.system,
            "seed": job.seed,
            "rate": job.rate,
            "source flops": self._flops_before(job),
            "needs": {need.name: self.rows[need.name]["losses"][-1] for need in job.needs},
            "steps": list(curve.steps),
            "flops": list(curve.flops),
            "losses": list(curve.losses),
            "seconds": None if math.isnan(seconds) else round(seconds, 1),
            "text": self.facts[job.setting.text],
            "machine": machine(),
            **git_facts(),
        }
        known = self.rows.get(job.name)
        if known is None or known["losses"] != row["losses"]:
            append_row(self.folder / ROWS, row)
            self.rows[job.name] = row
        if known is not None and known["losses"] != row["losses"]:
            away = abs(row["losses"][-1] - known["losses"][-1])
            self.say(
                f"{job.name}: another machine ended {away:.1g} away from this loss. So known runs "
                "that begin with this model began with other weights"
            )
        for left in out.glob("checkpoint-*"):
            # some systems go on with the moments of their source
            if job.system != SOURCE or left.name != f"checkpoint-{job.steps}":
                shutil.rmtree(left)

    def _flops_before(self, job: Job) -> float:
        """The FLOPs of the models that a job needs, and of predictions that were kept for it."""
        trained = {
            trained_job: float(self.rows[trained_job.name]["flops"][-1])
            for trained_job in all_needs(job)
        }
        before = sum(trained.values())
        if job.kept:
            teacher = job.needs[0]
            examples = read_header(self.folder / kept_folder(job)).examples
            # a step of training costs three forward passes
            steps = examples / teacher.setting.batch
            before += trained[teacher] / 3 * steps / teacher.steps
        return before

    def _keep_teacher(self, job: Job) -> None:
        """Run the teacher of a job once over the whole text, with the command for it."""
        target = self.folder / kept_folder(job)
        if target.exists():
            return
        teacher = str(self.folder / job.needs[0].name)
        file = write_run_file(job, self.folder)
        cache_teacher(teacher, run=file, out=target, k=job.kept)

    def _upcycle(self, job: Job, becomes: Mapping[str, Any]) -> None:
        """Make the mixture that a job's source becomes, with the auxiliary loss of its routers."""
        target, source = self.folder / upcycled_folder(job), self.folder / job.needs[0].name
        if (target / "tokenizer.json").is_file():
            return
        dense = AutoModelForCausalLM.from_pretrained(source)
        how = {**becomes, **job.setting.target_sizes(), "seed": job.seed}
        mixture = grow(dense, **how)
        wanted = job.setting.config(job.setting.target)
        for name in ("output_router_logits", "router_aux_loss_coef"):
            setattr(mixture.config, name, getattr(wanted, name))
        mixture.save_pretrained(target)
        self._copy_tokenizer(job.setting, target)

    def _write_untrained(
        self, setting: Setting, name: str, size: Any, seed: int, layers: int | None
    ) -> None:
        target = self.folder / name
        if (target / "tokenizer.json").is_file():
            return
        setting.untrained(size, seed, layers).save_pretrained(target)
        self._copy_tokenizer(setting, target)

    def _copy_tokenizer(self, setting: Setting, target: Path) -> None:
        for file in (self.folder / setting.tokenizer).iterdir():
            # a copy that was interrupted lacks this file, which is copied last
            if file.name != "tokenizer.json":
                shutil.copy(file, target)
        shutil.copy(self.folder / setting.tokenizer / "tokenizer.json", target)


def _restart_of(job: Job) -> float:
    return 0.0 if job.system == SOURCE else SYSTEMS[job.system].restart


def seconds_of_training(file: Path, out: Path, restart: int = 0) -> float:
    """Train a run file to its end, or resume it.

    Args:
        restart: the step after which the optimizer begins anew; 0: none.

    Returns:
        The seconds that it took; NaN if an earlier call had begun it.
    """
    is_resumed, start = any(out.glob("checkpoint-*")), time.perf_counter()
    if is_resumed and restart:
        raise GrowthError(f"{out}: a run whose optimizer begins anew cannot be resumed: delete it")
    # lines of several runs at a time would mix; each run has them in its folder
    with redirect_stdout(StringIO()), restarted(restart):
        train(file, progress=False)
    return math.nan if is_resumed else time.perf_counter() - start


@contextmanager
def restarted(after: int) -> Iterator[None]:
    """Delete the state of any optimizer after so many of its steps; 0: never."""
    steps = itertools.count(1)

    def step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if next(steps) == after:
            optimizer.state.clear()

    hook = register_optimizer_step_post_hook(step)
    try:
        yield
    finally:
        hook.remove()


def accuracy_of(model: Path, length: int, seed: int) -> float:
    """How often a fine-tuned model says from which library a passage of Python code is."""
    packages = Path(torch.__file__).parents[1]
    text = [f"{packages / folder}/**/*.py" for folder in CLASSES]
    return finetune.accuracy(model, text, seed, length=length, learning_rate=1e-3)


def _begin_worker(threads: int) -> None:
    """Prepare a process that trains: it prints nothing, and ends with its parent."""
    silence_transformers()
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None
    # else it would go on in a folder that the next call uses too
    Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def take_over(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to those of a folder, but not of jobs that are done there."""
    there = rows_of(folder)
    for row in rows:
        if row["name"] not in there:
            append_row(folder / ROWS, row)


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The rows so far by the names of their jobs."""
    rows = read_rows(folder / ROWS, lambda row: str(row["name"]))
    for name, fine_tuned in read_rows(folder / ACCURACIES, lambda row: str(row["name"])).items():
        if name in rows:
            rows[name]["accuracy"] = fine_tuned["accuracy"]
    return rows


def run_file(name: str, folder: Path) -> Path:
    """The run file of the job with this name in the folder of all jobs."""
    return folder / f"{name.replace('/', '-')}.toml"


def write_run_file(job: Job, folder: Path) -> Path:
    """Write the run file of a job into the folder of all jobs."""
    file = run_file(job.name, folder)
    text = to_toml(run_of(job))
    # whole or not at all: a later call refuses a file that differs
    write_whole(file, lambda partial: partial.write_text(text))
    return file


def to_toml(run: Any) -> str:
    """The settings of a run as a run file. Fields that are None are left out."""
    lines = []
    for section in dataclasses.fields(run):
        table = getattr(run, section.name)
        if table is None:
            continue
        if isinstance(table, tuple):
            for item in table:
                lines += [f"[[{section.name}]]", *_toml_lines(item), ""]
        else:
            lines += [f"[{section.name}]", *_toml_lines(table), ""]
    return "\n".join(lines)


def _toml_lines(table: Any) -> list[str]:
    """The keys and values of a dataclass or a dict, without those that are None."""
    if dataclasses.is_dataclass(table):
        table = {x.name: getattr(table, x.name) for x in dataclasses.fields(table)}
    return toml_lines(table)
