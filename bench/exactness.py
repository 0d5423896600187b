"""Measures how exact BERT with `carry` and the losses are. The pages quote these figures.

    python -m bench.exactness

Models: random weights on a CPU, with no norm or bias at its default. The error is the largest
difference of the outputs over the largest output.

Losses: the error of the KL gradient (alpha 1, temperature 1) against float64, on 64 rows of a
student that has drifted from its teacher.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import growkern
from bench.shared import loss_measure
from bench.shared.harness import measure_all, name_of
from testbed.models import BERT, random_model, relative_error

# hidden size and heads of the source, hidden size of the target, feed-forward sizes of both
WIDTHS = ((384, 6, 512), (96, 6, 144), (12, 3, 20))
DRIFTS = (0.01, 0.05, 0.2)
# vocabulary, widths of student and teacher; rows of a step whose memory is measured
LOSS_SIZES, LOSS_ROWS = (30_522, 768, 512), 2048


def carried() -> Iterator[dict[str, Any]]:
    """BERT encoders grown to widths that are not whole multiples, in float64."""
    for width, heads, wide in WIDTHS:
        sizes = BERT | {"hidden_size": width, "num_attention_heads": heads}
        sizes |= {"intermediate_size": 2 * width}
        source = random_model("BertModel", sizes, std=min(0.3, 1 / width**0.5))
        for carry in (1.0, 0.01):
            how = {"hidden_size": wide, "intermediate_size": 2 * wide, "carry": carry}
            error = relative_error(source, growkern.grow(source, **how))
            row = {"what": "BERT's encoder", "sizes": f"{width} -> {wide}", "carry": carry}
            yield row | {"dtype": "float64", "error": error}


def losses() -> Iterator[dict[str, Any]]:
    """The gradient errors of the linear loss and of plain PyTorch at several drifts.

    In bfloat16 plain PyTorch rounds the logits, and widens them before the softmax. Beside it
    stands one whose logits are made in float32. "extra MiB" is the peak of a step on `LOSS_ROWS`.
    """
    for drift in DRIFTS:
        for dtype in (torch.float32, torch.bfloat16):
            wide = ("plain_float32",) if dtype == torch.bfloat16 else ()
            for name in ("growkern", "plain", *wide):
                fn, sizes = getattr(loss_measure, name), (*LOSS_SIZES, dtype)
                error = loss_measure.error_of(fn, 1.0, *sizes, drift=drift)
                row = {"what": f"linear loss, {name}", "drift": drift, "dtype": name_of(dtype)}
                if drift == loss_measure.DRIFT and dtype == torch.bfloat16:
                    given = loss_measure.make_inputs(LOSS_ROWS, *sizes, drift)
                    step = partial(loss_measure.run_step, fn, *given, 0.5)
                    row["extra MiB"] = loss_measure.measure(step, 1)["extra MiB"]
                yield row | {"error": error}


def main() -> int:
    parts = (carried, losses)
    measure_all("exactness", (row for part in parts for row in part()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
