"""What the demo says while it works: bars on a terminal, a line per stage anywhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# where there is no terminal to draw a bar on: a line about this often, in seconds
QUIET_SECONDS = 15.0


class Narrator:
    """Prints the stages of a demo; `stage` is entered for the one at work."""

    def __init__(self, console: Console, stages: int) -> None:
        self.console, self.stages = console, stages
        self._number = 0

    def skip(self, title: str) -> None:
        """A stage that an earlier start has done."""
        self._number += 1
        self.console.print(f"[dim]{self._label(title)}: done before[/]")

    @contextmanager
    def stage(self, title: str) -> Iterator["Stage"]:
        self._number += 1
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        start = time.perf_counter()
        with progress:
            task = progress.add_task(self._label(title), total=None, note="")
            stage = Stage(self.console, progress, task, self._label(title))
            yield stage
        seconds = time.perf_counter() - start
        self.console.print(f"{self._label(title)}: {stage.note or 'done'} ({seconds:.0f} s)")

    def _label(self, title: str) -> str:
        # square brackets would be markup
        return f"({self._number}/{self.stages}) {title}"


class Stage:
    """The stage at work."""

    def __init__(self, console: Console, progress: Progress, task: TaskID, label: str) -> None:
        self.console, self.progress, self.task, self.label = console, progress, task, label
        self.note = ""
        self._said = time.perf_counter()

    def report(self, step: int, steps: int, loss: float | None) -> None:
        """A training step is over."""
        note = "" if loss is None else f"validation loss {loss:.3f}"
        self.progress.update(self.task, completed=step, total=steps, note=note)
        now = time.perf_counter()
        if not self.console.is_terminal and now - self._said > QUIET_SECONDS:
            self._said = now
            self.console.print(f"{self.label}: step {step}/{steps} {note}")
