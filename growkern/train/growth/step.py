"""`[growth]` and `[[growth]]` of a run file: at which steps the model grows, and how.

The same class is an argument of `growkern.TwoStageTrainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from growkern.arguments import NOT_NEGATIVE, Limit, check_steps
from growkern.errors import GrowthError
from growkern.growth.optimizer.checks import Moments
from growkern.growth.options import ROUTERS, GrowthKeywords, GrowthOptions
from growkern.train.rules import check


@dataclass(frozen=True, kw_only=True)
class GrowthStep(GrowthOptions):
    """A growth at the start of a run or inside it, without a detour over the disk.

    Inside a run the weights, the optimizer's state, the learning-rate schedule, the order of the
    data and all counts go on. StackBERT (Gong et al. 2019) is a list of these with depth="stack".
    With `new_layers_steps` the list is MSLT (Yang et al. 2020).

    The other fields are those of `growkern.growth.options.GrowthOptions`.

    Args:
        sizes: the sizes of the large model by the names of its config. In a run file they may also
            stand beside the other keys, as in `num_hidden_layers = 12`. `mlp_only_layers` is a
            list.
        at_step: optimizer steps that come before this growth; 0 is the start of the run.
        source: directory of the checkpoint that is grown, at the start only; or a model on the Hub,
            ORGANISATION/NAME.
        revision: branch, tag or commit of a source on the Hub.
        moments: "grow" and "old_slices" grow the optimizer's state, see
            `growkern.grow_optimizer_into`. "reset" starts it at zero. None is "grow" inside a run,
            and at its start "reset".
        optimizer: the state of the source's optimizer, at the start only: the `optimizer.pt` of a
            Trainer or a directory with one, or a directory of `torch.distributed.checkpoint`.
        rewarm_steps: inside a run, optimizer steps after the growth in which the learning rate
            rises from near 0 to that of its schedule again.
        new_layers_steps: inside a run, optimizer steps after the growth in which only the layers
            above those of the smaller model train, together with the head. The depth "auto" is
            then "stack", which puts the new layers there.

    Raises:
        GrowthError: a value is unknown or out of range, or the values contradict each other.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {
        **GrowthOptions.LIMITS,
        **dict.fromkeys(("at_step", "rewarm_steps", "new_layers_steps"), NOT_NEGATIVE),
    }

    sizes: dict[str, int | tuple[int, ...]]
    at_step: int = 0
    source: str | None = None
    revision: str | None = None
    moments: Moments | None = None
    optimizer: str | None = None
    rewarm_steps: int = 0
    new_layers_steps: int = 0

    def __post_init__(self) -> None:
        if self.new_layers_steps and self.depth == "auto":
            object.__setattr__(self, "depth", "stack")
        super().__post_init__()
        if not self.sizes:
            raise GrowthError("a growth needs sizes, such as num_hidden_layers = 12")
        if self.moments is None:
            object.__setattr__(self, "moments", "grow" if self.at_step else "reset")
        check("growth", self)

    @property
    def grows_moments(self) -> bool:
        """Whether the optimizer's state grows too."""
        return self.moments != "reset"

    def inside(self, base: Path) -> GrowthStep:
        """The same growth; the file of a new router lies in a folder."""
        return self if self.router in ROUTERS else replace(self, router=str(base / self.router))

    def options(self) -> dict[str, Any]:
        """The fields of `GrowthOptions`."""
        return {field.name: getattr(self, field.name) for field in fields(GrowthOptions)}


def check_order(growth: Sequence[GrowthStep], steps: int) -> None:
    """Check the growths of a run against each other.

    Args:
        growth: in the order in which they are given.
        steps: optimizer steps of the run.

    Raises:
        GrowthError: they are not in the order of their steps, one comes after the run, or what
            follows one does not end before the run or the next growth.
    """
    places = [one.at_step for one in growth]
    for before, after in pairwise(places):
        if after <= before:
            raise GrowthError(
                f"a growth at step {after} follows one at step {before}: give them in the order of "
                "their steps"
            )
    if places and places[-1] >= steps:
        raise GrowthError(
            f"the growth at step {places[-1]} would come after the run, which has {steps} steps"
        )
    for one, end in zip(growth, [*places[1:], steps], strict=False):
        at = f"the growth at step {one.at_step}:"
        rest = steps - one.at_step
        check_steps(rest, {f"{at} rewarm_steps": one.rewarm_steps}, "steps that the run has left")
        alone = {f"{at} new_layers_steps": one.new_layers_steps}
        check_steps(end - one.at_step, alone, "steps to the next growth or the end of the run")


def check_new_layers(growth: Sequence[GrowthStep], stage1_steps: int) -> None:
    """Check that not both stage 1 and a growth say which layers train.

    Args:
        growth: inside the run.
        stage1_steps: of the first stage; 0 if there is none.

    Raises:
        GrowthError: they do at some step.
    """
    for one in growth:
        check("growth in stage 1", growth=one, stage1_steps=stage1_steps)


def rewarmed(step: int, rate: Callable[[int], float], growth: Sequence[GrowthStep]) -> float:
    """The learning rate at an optimizer step, which rises again after each growth.

    After a growth at step g with R `rewarm_steps`, the rate of the schedule is multiplied by
    (t - g + 1) / (R + 1) at the steps t = g ... g + R - 1.

    Args:
        step: counted from 0.
        rate: of the schedule, as a factor of the peak rate.
        growth: inside the run.
    """
    factor = rate(step)
    for one in growth:
        since = step - one.at_step
        if 0 <= since < one.rewarm_steps:
            factor *= (since + 1) / (one.rewarm_steps + 1)
    return factor


def from_table(table: dict[str, Any]) -> dict[str, Any]:
    """A table of a run file with the sizes that stand beside its other keys put into `sizes`."""
    names = {field.name for field in fields(GrowthStep)}
    # a size of a wrong type is still one; other unknown keys are typing errors
    known = GrowthKeywords.__annotations__.keys() - names
    sizes = {k: v for k, v in table.items() if k in known or (k not in names and type(v) is int)}
    if not isinstance(table.get("sizes", {}), dict):
        return table
    rest = {k: v for k, v in table.items() if k not in sizes}
    return {**rest, "sizes": {**rest.get("sizes", {}), **sizes}}
