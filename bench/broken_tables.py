"""Breaks shipped tables in random ways, and checks that `growkern family draft --table` notices.

    python -m bench.broken_tables --count 400 --seed 0

A case breaks one fact of a table that its model relies on: the order of a tensor's axes, the space
of an axis, the order of its pieces, which entries of a head turn together, or what norms compute.
It ends as

    refused    the table, or every growth of it, is refused with a message
    caught     the check finds a fault, or a growth that breaks its word
    harmless   the check passes, and models of other sizes grow as with the table as it was
    MISSED     the check passes, and such a model grows into another function

Families with one stack of layers that reads text. The command exits with 1 if any case is missed or
ends in another error. `--only 17` repeats case 17 of a seed alone.
"""

import argparse
import copy
import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import transformers

import growkern
from growkern.errors import GrowthError
from growkern.families import NORM_KINDS, Family, ModelSpec, load_family, own_family
from growkern.families.table_files import shipped_table
from growkern.growth.own_table import faults_of, growths_of
from testbed.families import FAMILIES
from testbed.growths import alone, at_once, grown_by, largest_error
from testbed.models import random_model
from testbed.relatives import RELATIVES

Table = dict[str, Any]
TEXT = ("ForCausalLM", "ForMaskedLM", "LMHeadModel")
MODELS: dict[str, tuple[str, Table]] = {
    name: (row[0], row[1])
    for name, row in sorted(({**FAMILIES, **RELATIVES}).items())
    if row[0].endswith(TEXT) and not load_family(name).under
}
# an error of outputs that rounding in float64 does not explain
WRONG = 1e-7

Break = Callable[[Table, random.Random], str | None]


def _rows(table: Table) -> list[tuple[str, dict[str, Any]]]:
    """All rows with axes, and their names."""
    rows = [item for part in table["tensors"].values() for item in part.items()]
    every = [(n, r) for n, rs in rows for r in (rs if isinstance(rs, list) else [rs])]
    return [(name, row) for name, row in every if row.get("axes")]


def swap_axes(table: Table, rng: random.Random) -> str | None:
    """Turn a matrix around."""
    name, row = rng.choice([(n, r) for n, r in _rows(table) if len(r["axes"]) > 1])
    row["axes"] = row["axes"][::-1]
    return f"{name} {row['axes']}"


def change_space(table: Table, rng: random.Random) -> str | None:
    """Give one piece of an axis another space."""
    name, row = rng.choice(_rows(table))
    index = rng.randrange(len(row["axes"]))
    word, colon, spaces = row["axes"][index].partition(":")
    if not colon:
        return None
    pieces = spaces.split("|")
    piece = rng.randrange(len(pieces))
    pieces[piece] = rng.choice(sorted(table["spaces"].keys() - {pieces[piece]}))
    row["axes"][index] = f"{word}:{'|'.join(pieces)}"
    return f"{name} {row['axes']}"


def turn_pieces(table: Table, rng: random.Random) -> str | None:
    """Turn the pieces of a fused axis around."""
    fused = [(n, r, i) for n, r in _rows(table) for i, a in enumerate(r["axes"]) if "|" in a]
    if not fused:
        return None
    name, row, index = rng.choice(fused)
    word, _, spaces = row["axes"][index].partition(":")
    first, *rest = spaces.split("|")
    row["axes"][index] = f"{word}:{'|'.join([*rest, first])}"
    return f"{name} {row['axes']}"


def turn_pairs(table: Table, rng: random.Random) -> str | None:
    """Let other entries of a head turn together."""
    attention = table["attention"]
    if attention["positions"] != "rotary":
        return None
    old = attention.get("pairs", "halves")
    attention["pairs"] = "halves" if old == "adjacent" else "adjacent"
    return f"pairs={attention['pairs']}"


def change_norm(table: Table, rng: random.Random) -> str | None:
    """Let norms compute something else."""
    norm = table["norm"]
    if rng.random() < 0.3:
        norm["plus_one"] = not norm.get("plus_one", False)
    else:
        norm["kind"] = rng.choice(sorted(NORM_KINDS.keys() - {norm["kind"]}))
    return f"norm {norm}"


BREAKS: tuple[Break, ...] = (
    *(swap_axes, change_space, change_space, turn_pieces, turn_pairs, change_norm),
)


def copied(name: str) -> Table:
    """A family's table, to be changed."""
    return copy.deepcopy(shipped_table(name))


@cache
def unused(name: str) -> set[str]:
    """The rows of a family's table that its model of small sizes does not have."""
    class_name, sizes = MODELS[name]
    config = getattr(transformers, class_name).config_class(**copy.deepcopy(sizes))
    tensors = ModelSpec.of(config, class_name, load_family(name)).tensors
    return {row for row, _ in _rows(shipped_table(name))} - {t.template for t in tensors}


def draw(seed: int, number: int, names: list[str]) -> tuple[str, str, Table]:
    """Case `number`: the family, what is broken, and the broken table."""
    rng, name = random.Random(f"{seed} {number}"), names[number % len(names)]
    while True:
        table = copied(name)
        what = rng.choice(BREAKS)(table, rng)
        if what and table != shipped_table(name) and what.partition(" ")[0] not in unused(name):
            return name, what, table


def outcome(name: str, table: Table) -> str:
    """How the case of a broken table ends."""
    class_name, sizes = MODELS[name]
    config = getattr(transformers, class_name).config_class(**copy.deepcopy(sizes))
    config.architectures = [class_name]
    try:
        family = own_family("broken", table)
        if faults_of(family, config):
            return "caught"
        verdicts = set()
        for growth in growths_of(family, config, class_name):
            verdicts.add(growth.verdict)
            if growth.verdict == "wrong":
                return "caught"
    except GrowthError:
        return "refused"
    if verdicts <= {"refused"}:
        return "refused"
    return "MISSED" if any(_wrong_growths(name, family)) else "harmless"


def _wrong_growths(name: str, broken: Family) -> Iterator[str]:
    """The growths of a model of other sizes that are worse than with the table as it was."""
    class_name, sizes = MODELS[name]
    model = random_model(class_name, copy.deepcopy(sizes))
    spec = ModelSpec.of(model.config, class_name, load_family(name))
    for what, new in {**alone(spec), "all": at_once(spec)}.items():
        errors, how = [], dict[str, Any](grown_by(spec, new))
        for family in (load_family(name), broken):
            try:
                grown = growkern.grow(model, **how, family=family)
                errors.append(largest_error(model, grown, grown.growth_plan))
            except GrowthError:
                # it makes no promise
                errors.append(0.0)
        if errors[1] > max(WRONG, 2 * errors[0]):
            yield what


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=40, help="number of cases")
    parser.add_argument("--tables", type=int, default=40, help="number of families")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of a single case")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = sorted(random.Random(given.seed).sample([*MODELS], min(given.tables, len(MODELS))))
    counts: Counter[str] = Counter()
    for number in range(given.count) if given.only is None else [given.only]:
        name, what, table = draw(given.seed, number, names)
        try:
            word = outcome(name, table)
        except Exception:
            word = "FAILED"
            traceback.print_exc(limit=-2)
        counts[word] += 1
        if word in ("MISSED", "FAILED") or given.only is not None:
            print(f"case {number} of seed {given.seed}: {name}: {what}: {word}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()))
    return 1 if counts["MISSED"] or counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
