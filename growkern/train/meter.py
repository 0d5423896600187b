"""What happened between two log lines: means over rows and steps, tokens per second."""

import time
from collections import defaultdict

import torch
from torch import Tensor

from growkern.ops.kl_mlm_loss import LossParts


class Meter:
    """Sums on the device, read once per log line."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._sums: defaultdict[str, Tensor | float] = defaultdict(float)
        self._weights: defaultdict[str, Tensor | float] = defaultdict(float)
        self._tokens, self._seconds, self._since = 0, 0.0, time.perf_counter()

    def add(self, name: str, value: Tensor | float, weight: Tensor | float = 1) -> None:
        """One value of a mean, with the number of rows or steps it stands for."""
        self._sums[name] += value * weight
        self._weights[name] += weight

    def add_parts(self, parts: LossParts, labelled_rows: Tensor, kl_rows: Tensor) -> None:
        """The parts of one batch's loss."""
        self.add("mlm", parts.mlm, labelled_rows)
        if parts.kl is not None and parts.top1_agreement is not None:
            self.add("kl", parts.kl, kl_rows)
            self.add("top1_agreement", parts.top1_agreement, kl_rows)

    def add_tokens(self, tokens: int) -> None:
        self._tokens += tokens

    def start_step(self) -> None:
        self._since = time.perf_counter()

    def end_step(self) -> None:
        """Time outside of steps (evaluation, saving) is nobody's throughput."""
        self._seconds += time.perf_counter() - self._since

    def drain(self) -> dict[str, float]:
        """The means since the last call; the meter starts anew."""
        logs = {
            name: float(torch.as_tensor(total) / torch.as_tensor(self._weights[name]).clamp(min=1))
            for name, total in self._sums.items()
        }
        if self._seconds > 0:
            logs["tokens_per_second"] = self._tokens / self._seconds
        self._reset()
        return logs
