"""Makes training runs, each once, and keeps what they found.

A job is done when its row is in `rows.jsonl`. A job that was killed resumes from its last
checkpoint.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.paper.settings import Setting
from bench.paper.systems import SOURCE, SYSTEMS, Job, kept_folder, untrained_models, write_run_file
from bench.shared.results import append_row, git_facts, machine, read_rows
from growkern.cli.teacher import cache_teacher
from growkern.plot.curve import read_curve
from growkern.train.run import train

ROWS = "rows.jsonl"


class Workplace:
    """The folder of all jobs, and the rows of those that are done.

    Args:
        folder: for text, models, run files and rows.
        text: facts about the text.
        say: shows a line of progress.
    """

    def __init__(self, folder: Path, text: dict[str, Any], say: Callable[[str], None]) -> None:
        self.folder, self.text, self.say = folder, text, say
        self.rows = rows_of(folder)

    def row(self, job: Job) -> dict[str, Any]:
        """The row of a job, which is made if it is not there yet."""
        if job.name not in self.rows:
            for needed in job.needs:
                self.row(needed)
            self._make(job)
        return self.rows[job.name]

    def _make(self, job: Job) -> None:
        for name, (size, layers) in untrained_models(job).items():
            self._write_untrained(job.setting, name, size, job.seed, layers)
        start = time.perf_counter()
        file = write_run_file(job, self.folder)
        if job.system != SOURCE and SYSTEMS[job.system].kept:
            self._keep_teacher(job, file)
        train(file, progress=False)
        out = self.folder / job.name
        curve = read_curve(out)
        row = {
            "name": job.name,
            "setting": job.setting.name,
            "system": job.system,
            "seed": job.seed,
            "rate": job.rate,
            "source flops": sum(self.rows[one.name]["flops"][-1] for one in job.needs),
            "steps": list(curve.steps),
            "flops": list(curve.flops),
            "losses": list(curve.losses),
            "seconds": round(time.perf_counter() - start, 1),
            "text": self.text,
            "machine": machine(),
            **git_facts(),
        }
        append_row(self.folder / ROWS, row)
        self.rows[job.name] = row
        for left in out.glob("checkpoint-*"):
            # some systems go on with the moments of their source
            if job.system != SOURCE or left.name != f"checkpoint-{job.steps}":
                shutil.rmtree(left)
        self.say(f"{job.name}: loss {row['losses'][-1]:.4f}, {row['seconds']:.0f} s")

    def _keep_teacher(self, job: Job, file: Path) -> None:
        """Run the teacher of a job once, with the command for it."""
        target = self.folder / kept_folder(job)
        if target.exists():
            return
        teacher = str(self.folder / job.needs[0].name)
        cache_teacher(teacher, run=file, out=target, k=SYSTEMS[job.system].kept)

    def _write_untrained(
        self, setting: Setting, name: str, size: Any, seed: int, layers: int | None
    ) -> None:
        target = self.folder / name
        if (target / "tokenizer.json").is_file():
            return
        setting.untrained(size, seed, layers).save_pretrained(target)
        for file in (self.folder / setting.tokenizer).iterdir():
            # a copy that was interrupted lacks this file, which is copied last
            if file.name != "tokenizer.json":
                shutil.copy(file, target)
        shutil.copy(self.folder / setting.tokenizer / "tokenizer.json", target)


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The rows so far by the names of their jobs."""
    return read_rows(folder / ROWS, lambda row: str(row["name"]))


def best_rate(rows: Iterable[dict[str, Any]]) -> float:
    """The learning rate of the run with the lowest final loss."""
    return float(min(rows, key=lambda row: row["losses"][-1])["rate"])
