"""The curve of a training run: its losses, and the FLOPs at which they were measured.

The curve of a run comes from the log history in its training directory. It shows the validation
loss if that was measured, else the training loss. The FLOPs at which a loss is first reached are
interpolated linearly between the two nearest points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError
from growkern.files import read_json
from growkern.train.safety.checkpoints import checkpoints_in

STATE_FILE = "trainer_state.json"
# 300,000 lines of the log
MOST_BYTES = 100_000_000
# of FLOPs, and of anything else in a log
MOST = 1e40


@dataclass(frozen=True)
class Curve:
    """The losses of a run, with the steps and FLOPs at which they were measured.

    Attributes:
        name: in the picture.
        steps: optimizer steps, ascending.
        flops: FLOPs so far, one per step.
        losses: one per step.
        validation: whether the losses are validation losses.
    """

    name: str
    steps: tuple[int, ...]
    flops: tuple[float, ...]
    losses: tuple[float, ...]
    validation: bool = True

    def flops_at(self, loss: float) -> float | None:
        """The FLOPs at which the run first reaches a loss, None if it never does."""
        return first_crossing(self.flops, self.losses, loss)


def first_crossing(costs: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """The cost at which a loss is first reached.

    Args:
        costs: ascending, one per loss.
        losses: of a run.
        target: the loss to reach.

    Returns:
        The cost, interpolated linearly between two points; None if it is never reached.
    """
    for i, loss in enumerate(losses):
        if loss <= target:
            if i == 0:
                return costs[0]
            share = (losses[i - 1] - target) / (losses[i - 1] - loss)
            return costs[i - 1] + share * (costs[i] - costs[i - 1])
    return None


def read_curve(directory: str | Path, name: str | None = None) -> Curve:
    """Read the curve of a training directory, finished or not.

    Args:
        directory: of the run.
        name: in the picture; None takes the name of the directory.

    Raises:
        GrowthError: the directory has no log with FLOPs.
    """
    directory = Path(directory)
    # an unfinished run has its log in its checkpoints only
    places = (directory, *checkpoints_in(directory))
    holder = next((place for place in places if (place / STATE_FILE).is_file()), None)
    if holder is None:
        runs = ", ".join(map(str, sorted(directory.glob("generation-*"))))
        if runs:
            hint = f"give one of its runs, {runs}"
        elif (directory / "config.json").is_file():
            hint = "for a model, add --weights or --attention TEXT, and give the small model first"
        else:
            hint = "give the directory of a run"
        raise GrowthError(
            f"{directory} is not a training directory: it has no {STATE_FILE}: {hint}"
        )
    file = holder / STATE_FILE
    try:
        history = read_json(file, MOST_BYTES, "log")["log_history"]
        curve = curve_of(history, name or directory.resolve().name)
        for step, loss in zip(curve.steps, curve.losses, strict=True):
            if isinstance(loss, float) and not math.isfinite(loss):
                raise GrowthError(
                    f"{file}: the loss at step {step} is {loss}: the run diverged, and a curve "
                    "needs numbers"
                )
        for number in (*curve.steps, *curve.flops, *curve.losses):
            # integers of a file may be too large for a float
            if isinstance(number, str) or not abs(float(number)) <= MOST:
                raise ValueError(f"{str(number)[:20]} is no number of a log")
    except GrowthError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise GrowthError(f"{file}: not the log of a run: {repr(error)[:200]}") from error
    if not curve.steps:
        raise GrowthError(
            f"{file}: no line of the log has a loss and flops: lower log_every under [training]"
        )
    return curve


def curve_of(history: Sequence[dict[str, Any]], name: str) -> Curve:
    """Make a curve from a log history. A step that a resumed run logged twice counts once.

    Args:
        history: the lines of the log.
        name: in the picture.
    """
    validation = any("eval_loss" in line for line in history)
    # with a teacher, "loss" includes the KL term; only "mlm" can be compared with other runs
    keys = ("eval_loss",) if validation else ("mlm", "loss")
    lines: dict[int, tuple[float, dict[str, Any]]] = {}
    for line in history:
        key = next((key for key in keys if key in line), None)
        if key is not None and "flops" in line:
            lines[line["step"]] = (line[key], line)
    steps = tuple(sorted(lines))
    losses = tuple(lines[step][0] for step in steps)
    points = [lines[step][1] for step in steps]
    return Curve(
        name,
        steps,
        flops=tuple(line["flops"] for line in points),
        losses=losses,
        validation=validation,
    )
