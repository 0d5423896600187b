"""Collects the numbers of a log line: means over rows and steps, and tokens per second."""

import math
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from growkern.ops.loss.rows.inputs import LossParts


class Meter:
    """Adds up values on the device and reads them back once per log line."""

    def __init__(self, add_up: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self._add_up = add_up
        self._reset()

    def _reset(self) -> None:
        self._sums: defaultdict[str, Tensor | float] = defaultdict(float)
        self._weights: defaultdict[str, Tensor | float] = defaultdict(float)
        self._tokens, self._seconds, self._since = 0, 0.0, time.perf_counter()

    def add(self, name: str, value: Tensor | float, weight: Tensor | float = 1) -> None:
        """Add a value to a mean.

        Args:
            value: itself a mean.
            weight: the number of rows or steps that `value` is the mean of.
        """
        self._sums[name] += value * weight
        self._weights[name] += weight

    def add_parts(self, parts: LossParts, labelled_rows: Tensor, kl_rows: Tensor) -> None:
        """Add the parts of the loss of one batch."""
        self.add("mlm", parts.mlm, labelled_rows)
        if parts.kl is not None and parts.top1_agreement is not None:
            self.add("kl", parts.kl, kl_rows)
            self.add("top1_agreement", parts.top1_agreement, kl_rows)

    def add_tokens(self, tokens: int) -> None:
        """Add to the tokens that were trained on."""
        self._tokens += tokens

    def start_step(self) -> None:
        """Start the clock of a training step."""
        self._since = time.perf_counter()

    def end_step(self) -> None:
        """Stop the clock. Time between steps (evaluation, saving) does not count."""
        self._seconds += time.perf_counter() - self._since

    def drain(self) -> dict[str, float]:
        """The means since the last call, over all processes; NaN over no rows. It is emptied."""
        rows = [(self._sums[name], self._weights[name]) for name in self._sums]
        # seconds, and 1 per process: their quotient is the mean over processes
        rows += [(self._tokens, 0), (self._seconds, 1)]
        sums_N2 = self._add_up(torch.tensor(rows, dtype=torch.float64)).tolist()
        logs = {
            name: x / n if n else math.nan
            for name, (x, n) in zip(self._sums, sums_N2, strict=False)
        }
        (tokens, _), (seconds, processes) = sums_N2[-2:]
        if seconds > 0:
            logs["tokens_per_second"] = tokens / (seconds / processes)
        self._reset()
        return logs
