"""On several processes, with shards or copies of the model, training is that of one process."""

import dataclasses
import json
import math
import re
from itertools import product

import pytest
import torch

from testbed import parity
from testbed.forked_ranks import on_ranks
from testbed.parity import Case, differences, found_in, moved_apart
from tests.shared import walks

FAMILIES = ("bert", "gpt2", "llama", "t5")
# of many cases, most are for `--walks 2`
SOME = FAMILIES if walks.times > 1 else FAMILIES[-1:]
OPTIONS = ({"accumulation": 2}, {"checkpointing": True}, {"teacher": "sharded"})
TOGETHER = {name: value for option in OPTIONS for name, value in option.items()}
EACH = (*OPTIONS, TOGETHER)
PAIRS = product(FAMILIES, OPTIONS) if walks.times > 1 else [*zip(FAMILIES, EACH, strict=True)]
# Adam divides by the size of a gradient, so its steps do not tell how large an error was
NARROW = {"dtype": "bf16", "optim": "sgd", "accumulation": 2}


# each rank has a whole copy, as in DDP; two passes through the data
COPIES = {"sharded": False, "teacher": "whole", "steps": 6}


def small(family, **options):
    return Case(family, **{"layers": 2, "steps": 4} | options)


# grown; its router has a loss of its own
MIXTURE = small("mixtral", optim="muon", **TOGETHER)
CASES = {
    2: [
        MIXTURE,
        *(small(family, **option) for family, option in PAIRS),
        *(small(family, dtype="float32", **TOGETHER) for family in SOME),
        *(small(family, **NARROW) for family in FAMILIES),
        small("bert", teacher="sharded", by_hand=True),
        small("gpt2", accumulation=2, teacher="whole", by_hand=True),
        small("bert", dtype="bf16", optim="sgd", by_hand=True),
        *(small(family, **COPIES) for family in SOME),
        small("bert", dtype="float32", accumulation=2, **COPIES),
        small("llama", optim="adagrad"),
        small("llama", optim="rmsprop"),
        small("llama", optim="muon"),
    ],
    4: [
        *(small(family, **TOGETHER) for family in ("bert", *SOME)),
        *(small(family, **NARROW) for family in SOME),
        small("bert", accumulation=2, replicas=2),
        small("gpt2", optim="muon", replicas=2),
        *(small(family, **COPIES) for family in SOME),
        *([MIXTURE] if walks.times > 1 else []),
    ],
}
TOLERANCES = {"float64": 1e-12, "float32": 1e-6}
# Results that are rounded to bfloat16 on the way through two layers and back, with the head: about
# 10 in each layer and direction. Each is off by 2**-9 / sqrt(3) of its value on average. The errors
# of two runs add up like random numbers. Logits are below 1 here, so losses are off by no more
ROUNDED = 50
BF16 = math.sqrt(2 * ROUNDED) * 2**-9 / math.sqrt(3)
ALL = [(number, i) for number, cases in CASES.items() for i in range(len(cases))]
IDS = [f"{number}: {CASES[number][i].name}" for number, i in ALL]


def run_on(number, cases, folder):
    (folder / "cases.json").write_text(json.dumps([dataclasses.asdict(c) for c in cases]))
    on_ranks(number, parity.__name__, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    results = {}
    for number, cases in CASES.items():
        folder = tmp_path_factory.mktemp(f"ranks{number}")
        run_on(number, cases, folder)
        for i in range(len(cases)):
            results[number, i] = torch.load(folder / f"{i}.pt", weights_only=True)
    return results


@pytest.mark.parametrize(("number", "i"), ALL, ids=IDS)
def test_several_ranks_are_one(found, number, i, tmp_path):
    case = CASES[number][i]
    expected = found_in(tmp_path, case)
    apart = differences(found[number, i], expected)
    if case.dtype == "bf16":
        assert moved_apart(found[number, i], expected) <= BF16
        assert max(apart["losses"], apart["Trainer's loss"]) <= BF16
        return
    tolerance = TOLERANCES[case.dtype]
    assert apart.pop("Trainer's loss") <= max(tolerance, TOLERANCES["float32"])
    assert max(apart.values()) <= tolerance, apart


def test_a_single_process_of_torchrun_is_one(tmp_path):
    """accelerate wraps its model, whose layers do not all run."""
    case = Case("bert", checkpointing=True)
    run_on(1, [case], tmp_path)
    apart = differences(torch.load(tmp_path / "0.pt"), found_in(tmp_path, case))
    assert max(apart.values()) <= TOLERANCES[case.dtype], apart


@pytest.mark.parametrize(("number", "i"), ALL, ids=IDS)
def test_every_parameter_moves_and_is_sharded_or_copied(found, number, i):
    result = found[number, i]
    assert result["sharded"] == len(result["weights"]) * CASES[number][i].sharded
    # attention does not depend on the bias of the keys: its gradient is 0 but for rounding
    assert not [name for name in result["still"] if not name.endswith("key.bias")]


@pytest.mark.parametrize(
    ("number", "i"),
    [(number, i) for number, i in ALL if CASES[number][i].sharded],
    ids=[x for x in IDS if "copies" not in x],
)
def test_blocks_that_do_not_run_cost_nothing(found, number, i):
    """Gathers and reductions of every block, counted, against the steps in which it runs."""
    case, result = CASES[number][i], found[number, i]
    depths = [round(line["depth"]) for line in result["log"]]
    blocks = {name: n for (kind, name), n in result["counts"].items() if kind == "reduce"}
    stages = case.stages
    assert min(depths) < case.layers
    for block in range(case.layers):
        names = [name for name in blocks if re.match(rf"\D*\.{block}\.", name)]
        assert len(names) == 1 + (case.family == "t5")
        gathers = trained = 0
        for step, depth in enumerate(depths):
            lowest = depth - stages.layers_per_block if step < stages.stage1_steps else 0
            # an epoch of three micro-batches ends with a step of one
            batches = 1 if step % 2 else case.accumulation
            trained += lowest <= block < depth
            # in the backward pass FSDP2 gathers one block ahead, here a frozen one
            gathers += batches * ((block < depth) + (lowest - 1 <= block < depth))
        for name in names:
            assert blocks[name] == trained
            assert result["counts"]["gather", name] == gathers
