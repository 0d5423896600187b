"""Grows random models in random ways and checks that the plan's words hold.

    python -m bench.fuzz_exactness --count 2000 --seed 0

Every case draws a family, a model class, sizes, config options, the size and dtype of the weights,
and options of the growth. Both models then run in float64 on the same inputs: padded on the right
and on the left, and generating with a cache. A part of them is grown from files to files and loaded
again.

    exact        the outputs differ by rounding only, in float32 by that of the source itself
    approximate  they differ by no more than the plan's bound
    changed      they are finite. If the change was asked for, `verify` accepts it

Weights must be finite, and those of the class. New tokens and generation are checked in all cases.

In families whose files have layers that predict a second token, those are grown and compared too.

`--only 17` repeats case 17 of a seed alone. `--save` keeps the counts of each family. The last line
is a hash of all grown weights: two commits that grow to the same bytes print the same. The command
exits with 1 if any case failed.
"""

import argparse
import hashlib
import sys
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import torch

from bench.fuzz_exactness.cases import Case, draw
from bench.fuzz_exactness.check import Weights, check
from bench.shared.harness import measure_all
from bench.shared.results import machine


def outcomes(
    seed: int, numbers: Iterable[int], weights: Weights | None = None
) -> Iterator[tuple[int, Case, str, str]]:
    """Each case, its word, and the reason of "FAILED"."""
    for number in numbers:
        case, why = draw(seed, number), ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                word = check(case, weights)
            except Exception:
                word, why = "FAILED", traceback.format_exc(limit=-2)
        yield number, case, word, why


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="number of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of a single case")
    parser.add_argument("--save", action="store_true", help="keep the counts in bench/results")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    numbers = range(given.count) if given.only is None else range(given.only, given.only + 1)
    facts, counts = machine() | {"seed": given.seed}, defaultdict[str, Counter[str]](Counter)
    weights = hashlib.sha256()
    for number, case, word, why in outcomes(given.seed, numbers, weights):
        counts[case.family][word] += 1
        if why:
            print(f"case {number} of seed {given.seed}: {case}\n{why}", flush=True)
    total = sum(counts.values(), Counter())
    print(", ".join(f"{count} {word}" for word, count in total.most_common()))
    print(f"weights {weights.hexdigest()}")
    if given.save:
        rows = ({"family": name} | {w: own[w] for w in total} for name, own in counts.items())
        measure_all("fuzz_exactness", sorted(rows, key=lambda row: row["family"]), facts)
    return 1 if total["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
