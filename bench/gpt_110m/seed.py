"""A saving at 110 million parameters in minutes: GPT-2 of 12 x 512, grown to 12 x 768.

`python -m bench.gpu --only gpt_110m_1` runs it with seed 1. A small model (source), the large one
from random weights (scratch) and the large one grown from the source train on the Python files of
this machine's packages, in MAIN_S seconds. With time left, growth of layers inside a run and
DirectCopy follow. The runs are so short that the saving is an early one: the plan, which is the
first row, has the tokens per parameter. All have one learning rate, which nobody searched for.
"""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpt_110m.training import EVALUATIONS, FALL, Place, Row, Text, Training, head_loss
from bench.paper.compare import is_early, saved
from bench.paper.models import SEPARATOR, Size
from bench.paper.settings import GPT_110M, Setting
from bench.shared.harness import now
from bench.shared.recorder import Recorder
from examples.demo.corpus import library_files, read_corpus, train_tokenizer

TOY = GPT_110M.variant(
    "toy", source=Size(4, 16, 2), target=Size(4, 24, 3), vocab=300, length=16, batch=4
)
# source, scratch and grown end in so many seconds after the start
MAIN_S, TOY_S = 300.0, 1.0
# share of the time that is planned for, and seconds that no extra run is begun in
PLANNED, RESERVE_S = 0.9, 20.0
# the tokenizer learns from one file in so many
LEARNED = 10
# batches; 262,144 tokens
VALIDATION = 8
# lengths of runs, as shares of the steps; the unit of the steps, of which shares are whole
ENDS, UNIT = (0.25, 0.5, 0.75, 1.0), 40
# growth inside a run: the layers at first, the share of the steps before, and the steps over those
# of the other runs. It costs about as many FLOPs as these.
FIRST_LAYERS, GROWS_AT, LONGER = 2, 0.5, 1.4


def steps_for(seconds: float, source_s: float, target_s: float, evaluation_s: float) -> int:
    """The steps of source, scratch and grown that fit into a time."""
    evaluations = 3 * (EVALUATIONS + 1) + len(ENDS)
    left = PLANNED * seconds - evaluations * evaluation_s
    # of a trunk with branches, over those of its longest run
    branched = 1 + FALL * sum(ENDS[:-1])
    return max(1, int(left / (source_s + target_s * (1 + branched)) / UNIT)) * UNIT


def read_text(recorder: Recorder, setting: Setting) -> Text:
    """The Python files beside PyTorch, in tokens. Files are held out by a hash."""
    # bench.gpu turns it off for the pieces that fork
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    # the files of a linked package are beside the package
    folder = Path(torch.__file__).resolve().parents[1]
    files = [path for path in library_files(folder) if path.suffix == ".py"]
    texts = read_corpus(files[:: recorder.pick(1, 400)])
    tokenizer = train_tokenizer(texts.train[::LEARNED], setting.vocab).backend_tokenizer

    def rows_of(texts: Sequence[str]) -> Tensor:
        ids = []
        # whole files at a time: all encodings together would fill the memory
        for i in range(0, len(texts), 256):
            for encoding in tokenizer.encode_batch_fast(texts[i : i + 256]):
                ids += [np.array([*encoding.ids, SEPARATOR], dtype=np.int64)]
        joined = torch.from_numpy(np.concatenate(ids)).to(recorder.device)
        return joined[: len(joined) // setting.length * setting.length].view(-1, setting.length)

    train, validation = rows_of(texts.train), rows_of(texts.validation)
    facts = {
        "files": len(texts.train) + len(texts.validation),
        "bytes": sum(len(x.encode(errors="replace")) for part in texts for x in part),
        "tokens": train.numel(),
    }
    rows = recorder.pick(VALIDATION, 2) * setting.batch
    validation = validation[:: max(1, len(validation) // rows)][:rows]
    # with other strides than in training the head would be compiled again
    return Text(train, validation.contiguous(), facts)


def place_of(recorder: Recorder, setting: Setting, seed: int) -> Place:
    """The text in an order of the seed's, and a loss that will be compiled."""
    text, backend = read_text(recorder, setting), recorder.pick("inductor", "eager")
    losses = torch.compile(head_loss, backend=backend, dynamic=False)
    order = torch.randperm(len(text.train), generator=torch.Generator().manual_seed(seed))
    return Place(recorder, setting, seed, text, losses, backend, order.to(recorder.device))


def curve(rows: Sequence[Row], source_flops: float = 0.0) -> list[Row]:
    """The ends of a system's runs as `bench.paper.compare.saved` wants them."""
    return [
        {
            "steps": [row["steps"]],
            "flops": [row["flops"]],
            "losses": [row["loss"]],
            "source flops": source_flops,
        }
        for row in rows
        if row["ends a run"]
    ]


def saving(rows: Sequence[Row], scratch: Sequence[Row], source_flops: float) -> Row:
    """The share of scratch's FLOPs that a system saves at scratch's last loss, also in words.

    It is None where the loss was not reached.
    """
    runs, base = curve(rows, source_flops), curve(scratch)
    own, counted = (saved(runs, base, with_source=counts) for counts in (False, True))
    if math.isnan(own):
        return {"saved": None, "source counted": None, "words": "scratch's loss not reached"}
    least = "at least " if is_early(runs, base) else ""
    words = f"{least}{own:.1%} of the FLOPs saved, {counted:.1%} with the source's FLOPs counted"
    return {"saved": own, "source counted": counted, "words": words}


def seconds_of_step(training: Training, least_s: float) -> float:
    """The seconds of a step, measured over this time. The first steps compile."""
    for number in range(3):
        training.step(number)
    start, number = now(), 0
    while (took := now() - start) < least_s:
        training.step(number)
        number += 1
    return took / number


def probe(place: Place) -> tuple[float, float, float]:
    """The seconds of a step of the source, of one of the grown target, and of an evaluation.

    It compiles all that the trainings will call.
    """
    source, seconds = place.untrained(place.setting.source), []
    for model in (source, place.grown(source, **place.setting.target_sizes())):
        training = Training(place, "probe", model, UNIT)
        seconds.append(seconds_of_step(training, place.recorder.pick(5.0, 0.2)))
    start = now()
    training.validate()
    return seconds[0], seconds[1], now() - start


def prepared(recorder: Recorder, seed: int) -> tuple[Place, Row]:
    """The text, the compiled code, and the plan: the steps for which there is time."""
    setting = recorder.pick(GPT_110M, TOY)
    place = place_of(recorder, setting, seed)
    text, read_s = place.text, now() - recorder.started
    source_s, target_s, evaluation_s = probe(place)
    begins_s = now() - recorder.started
    end_s = min(recorder.pick(MAIN_S, TOY_S), recorder.limit_s - RESERVE_S)
    steps = steps_for(end_s - begins_s, source_s, target_s, evaluation_s)
    tokens = steps * setting.batch * setting.length
    parameters = place.untrained(setting.target).num_parameters()
    plan = {
        "what": "plan",
        **text.facts,
        **{"seed": seed, "steps": steps, "tokens of a run": tokens},
        **{"parameters": parameters, "tokens per parameter": tokens / parameters},
        **{"rate": setting.source_rate, "source ms": 1e3 * source_s, "target ms": 1e3 * target_s},
        **{"text read s": read_s, "begins s": begins_s, "evaluation s": evaluation_s},
    }
    place.add(**plan)
    return place, plan


def run(recorder: Recorder) -> None:
    place, plan = prepared(recorder, int(recorder.document["piece"].rpartition("_")[2]))
    setting, sizes, steps = place.setting, place.setting.target_sizes(), plan["steps"]
    source = Training(place, "source", place.untrained(setting.source), steps, backwards=True)
    source.run()
    scratch = Training(place, "scratch", place.untrained(setting.target), steps)
    scratch.run()
    deeper = {setting.layers_name: setting.target.layers, "depth": "stack"}
    longer = round(LONGER * steps)
    # name, model, FLOPs before, steps, ends of its runs, growth inside the run
    systems: tuple[tuple[str, Callable[[], Any], float, int, Sequence[float], Any], ...] = (
        ("grown", lambda: place.grown(source.model, **sizes), source.flops, steps, ENDS, ()),
        (
            f"{FIRST_LAYERS} to {setting.target.layers} layers",
            lambda: place.untrained(setting.target, FIRST_LAYERS),
            *(0.0, longer, ENDS[2:], ((round(GROWS_AT * longer), deeper),)),
        ),
        (
            "DirectCopy",
            lambda: place.grown(source.model, method="direct_copy", **sizes),
            *(source.flops, steps, ENDS, ()),
        ),
    )
    took = 0.0
    for name, make, flops, length, ends, at in systems:
        left = recorder.limit_s - (now() - recorder.started)
        # the first one has its time in the plan
        if took and left < took / PLANNED + RESERVE_S:
            place.add(what="left out", system=name, why=f"only {left:.0f} s are left")
            continue
        training = Training(place, name, make(), length)
        took = training.run(ends, at)
        row = saving(training.rows, scratch.rows, flops)
        row["words"] += f" (early: {plan['tokens per parameter']:.2f} tokens per parameter)"
        place.add(what="early saving", system=name, seed=place.seed, **row)
