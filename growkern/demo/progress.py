"""Prints the progress of the demo: bars on a terminal, and one line per finished stage."""

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

# seconds between two lines of progress where no terminal can show a bar
QUIET_SECONDS = 15.0


class Narrator:
    """Prints the stages of a demo as they begin and end.

    Args:
        console: to print on.
        stages: number of stages in all.
    """

    def __init__(self, console: Console, stages: int) -> None:
        self.console, self.stages = console, stages
        self._number = 0

    def skip(self, title: str) -> None:
        """Print that an earlier run of the demo finished this stage."""
        self._number += 1
        self.console.print(f"[dim]{self._label(title)}: done before[/]")

    @contextmanager
    def stage(self, title: str) -> Iterator["Stage"]:
        """While active, shows the progress of a stage; then prints its time."""
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
    """Shows the progress of the stage that is running.

    `note` is printed when the stage ends.
    """

    def __init__(self, console: Console, progress: Progress, task: TaskID, label: str) -> None:
        self.console, self.progress, self.task, self.label = console, progress, task, label
        self.note = ""
        self._said = time.perf_counter()

    def report(self, step: int, steps: int, loss: float | None) -> None:
        """Show that a training step has ended.

        Args:
            step: number of the step, counted from 1.
            steps: of the whole run.
            loss: the last validation loss, None if there is none yet.
        """
        note = "" if loss is None else f"validation loss {loss:.3f}"
        self.progress.update(self.task, completed=step, total=steps, note=note)
        now = time.perf_counter()
        if not self.console.is_terminal and now - self._said > QUIET_SECONDS:
            self._said = now
            self.console.print(f"{self.label}: step {step}/{steps} {note}")
