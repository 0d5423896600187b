"""Two sizes of a family in minutes: GPT-2 of 12 x 256, and 12 x 384 alone and grown from it.

`python -m bench.gpu --only family` runs it with one seed. Beside the three systems of the family
stand one run that begins with one layer, and 6 x 256, which is never grown and trains for as many
FLOPs as 12 x 384. So each of three questions has its control: both sizes, the larger size, and the
loss of the larger size by any model. The steps are those for which there is time: the plan, which
is the first row, has the tokens per parameter and the passes over the text. Each size gets as many
tokens per parameter. All have one learning rate, which nobody searched for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.gpt_110m import seed as one_seed
from bench.gpt_110m.seed import LONGER, PLANNED, RESERVE_S, TOY, TOY_S, UNIT, curve, place_of
from bench.gpt_110m.training import EVALUATIONS, FALL, Place, Row, Training
from bench.paper.compare import is_early, saved
from bench.paper.models import Size
from bench.paper.settings import GPT_110M
from bench.shared.harness import now
from bench.shared.recorder import Recorder

FAMILY = replace(
    GPT_110M,
    name="gpt-family",
    source=Size(12, 256, 4),
    target=Size(12, 384, 6),
    rates=(2e-3,),
    source_rate=2e-3,
    batch=128,
    vocab=8192,
)
SEED = 1
# tokens per parameter beyond which no run is longer
MOST_TOKENS = 20
# layers of the model that is never grown, over those of the others; and of one run at first
FIXED, FIRST_LAYERS = 0.5, 1
SMALL, LARGE, GROWN, INSIDE, NEVER = "small", "large", "grown", "one run", "never grown"
# of each system the ends of its runs, as shares of its steps
ENDS = {
    SMALL: (1.0,),
    LARGE: (0.5, 0.75, 1.0),
    GROWN: (0.25, 0.5, 0.75, 1.0),
    INSIDE: (0.75, 1.0),
    NEVER: (0.25, 0.5, 1.0),
}


@dataclass
class Sizes:
    """Of the systems the seconds and FLOPs of a step, and the steps over those of `LARGE`."""

    seconds: dict[str, float]
    flops: dict[str, float]
    steps: dict[str, float]

    def seconds_of_all(self) -> float:
        """Of one step of `LARGE` and as many of the others as belong to it."""
        return sum(
            self.steps[name] * self.seconds[name] * (1 + FALL * sum(ends[:-1]))
            for name, ends in ENDS.items()
        )


def measured(place: Place) -> tuple[Sizes, float, int]:
    """`Sizes`, the seconds of an evaluation, and the parameters of `LARGE`.

    It compiles all that the trainings will call.
    """
    setting, least_s = place.setting, place.recorder.pick(3.0, 0.1)
    small, layers = place.untrained(setting.source), setting.source.layers
    models = {
        SMALL: small,
        LARGE: place.untrained(setting.target),
        GROWN: place.grown(small, **setting.target_sizes()),
        INSIDE: place.untrained(setting.target, FIRST_LAYERS),
        NEVER: place.untrained(setting.source, round(FIXED * layers)),
    }
    counts = {name: model.num_parameters() for name, model in models.items()}
    seconds, flops = {}, {}
    for name, model in models.items():
        training = Training(place, "probe", model, UNIT)
        seconds[name] = one_seed.seconds_of_step(training, least_s)
        flops[name] = training.step_flops
    start = now()
    training.validate()
    # one run has the small number of layers in the first half of its steps
    seconds[INSIDE] = (seconds[INSIDE] + seconds[GROWN]) / 2
    steps = {
        SMALL: counts[SMALL] / counts[LARGE],
        **{LARGE: 1.0, GROWN: 1.0, INSIDE: LONGER},
        NEVER: flops[LARGE] / flops[NEVER],
    }
    return Sizes(seconds, flops, steps), now() - start, counts[LARGE]


def steps_for(left_s: float, sizes: Sizes, evaluation_s: float, most: float) -> int:
    """The steps of `LARGE`: as many as there is time for, and at most `most`."""
    evaluations = sum(EVALUATIONS + 1 + len(ends) for ends in ENDS.values())
    fitting = (PLANNED * left_s - evaluations * evaluation_s) / sizes.seconds_of_all()
    return max(1, int(min(fitting, most) / UNIT)) * UNIT


def answers(rows: dict[str, Sequence[Row]]) -> Row:
    """What is saved at the loss of `LARGE`, by question; None where the loss was not reached."""
    base, small = curve(rows[LARGE]), rows[SMALL][-1]["flops"]
    large = base[-1]["flops"][-1]

    def share(name: str, before: float = 0.0) -> float | None:
        found = saved(curve(rows[name], before), base, with_source=True)
        return None if math.isnan(found) else found

    grown = share(GROWN)
    return {
        "family": None if grown is None else grown * large / (small + large),
        "given size, source counted": share(GROWN, small),
        "given size, one run": share(INSIDE),
        "given loss, never grown": share(NEVER),
        "at least": is_early(curve(rows[GROWN]), base),
    }


def run(recorder: Recorder) -> None:
    setting = recorder.pick(FAMILY, TOY)
    place = place_of(recorder, setting, SEED)
    text = place.text
    sizes, evaluation_s, parameters = measured(place)
    begins_s, batch = now() - recorder.started, setting.batch * setting.length
    end_s = recorder.pick(recorder.limit_s - RESERVE_S, TOY_S)
    most = MOST_TOKENS * parameters / batch
    steps = steps_for(end_s - begins_s, sizes, evaluation_s, most)
    lengths = {name: max(UNIT, round(share * steps)) for name, share in sizes.steps.items()}
    place.add(
        what="plan", **text.facts, seed=SEED, steps=lengths, parameters=parameters,
        **{"tokens per parameter": steps * batch / parameters, "rate": setting.source_rate},
        **{"passes over the text": steps * batch / text.train.numel(), "begins s": begins_s},
        **{"step ms": {name: 1e3 * s for name, s in sizes.seconds.items()}},
    )  # fmt: skip
    rows: dict[str, Sequence[Row]] = {}
    half, layers = lengths[INSIDE] // 2, setting.target.layers
    deeper = {setting.layers_name: layers}
    at: dict[str, Sequence[tuple[int, Any]]] = {INSIDE: ((half, deeper),)}
    small = None
    for name, ends in ENDS.items():
        # each is made when its turn comes: no other model is in the memory then
        if name == SMALL:
            model = small = place.untrained(setting.source)
        elif name == GROWN:
            model = place.grown(small, **setting.target_sizes())
        elif name == NEVER:
            model = place.untrained(setting.source, round(FIXED * setting.source.layers))
        else:
            model = place.untrained(setting.target, FIRST_LAYERS if name == INSIDE else None)
        training = Training(place, name, model, lengths[name], backwards=name == SMALL)
        training.run(ends, at.get(name, ()))
        rows[name] = training.rows
    place.add(what="saving by question", seed=SEED, **answers(rows))
