"""Collects the numbers of a log line: means over rows and steps, times, and FLOPs.

FLOPs are counted by real tokens. The padding of a batch depends on the rows that one process gets;
the FLOPs of the real tokens are the same on any number of processes. For mixtures, the tokens that
each expert gets are counted.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from growkern.files import check_format, read_json
from growkern.ops.loss import LossParts
from growkern.package import version
from growkern.train.loss import DECODER_MASK, ROW_COUNTS, TAUGHT_BY, examples_of
from growkern.train.model import IGNORE_INDEX, ModelPart, TokenCounts, inside_ddp, is_experts

try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]

# FLOP/s of dense products in 16 bits, for names of devices with these words; the first one counts.
# As in `get_peak_flops` of torchtitan 0.3.0 (torchtitan/tools/utils.py), which names the page of
# NVIDIA for each. 0: the H200 NVL is slower than the H200, and is not there
PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200 NVL": 0.0,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}


# of a checkpoint: the numbers of the log line that it interrupts, of one process
FILE, FORMAT, MOST_BYTES = "log_line_{}.json", 1, 64_000_000
# a tensor of one process -> of all
Across = Callable[[Tensor], Tensor]


class Meter:
    """Adds up values on the device and reads them back once per log line.

    `add_up` and `largest` are those of a tensor over all processes.
    """

    def __init__(self, add_up: Across = lambda x: x, largest: Across = lambda x: x) -> None:
        self._add_up, self._largest = add_up, largest
        self.flops, self.experts, self.skipped = 0.0, ExpertCounts(), 0
        self.reset()

    def reset(self) -> None:
        """Begin a log line."""
        self._sums: defaultdict[str, Any] = defaultdict(float)
        self._weights: defaultdict[str, Any] = defaultdict(float)
        # seconds, the tokens that were trained on, and steps
        self._times: defaultdict[str, float] = defaultdict(float)
        self._labelled: Tensor | bool = True  # this step
        self._since = time.perf_counter()
        self.experts.reset()

    def save(self, directory: Path, process: int) -> None:
        """Write this process's numbers of the line so far, but for clocks: files stay the same."""
        mine = {"sums": self._sums, "weights": self._weights, "steps": self._times["steps"]}
        mine |= {"experts": [n_E for _, n_E in self.experts.layers], "skipped": self.skipped}
        mine = pytree.tree_map_only(Tensor, Tensor.tolist, mine)
        record = {"format": FORMAT, "growkern": version(), **mine}
        file = directory / FILE.format(process)
        file.write_text(json.dumps(record), encoding="utf-8")

    def load(self, directory: Path, process: int, processes: int) -> None:
        """Continue the line of a checkpoint; other processes than it had take the mean of all."""
        files = sorted(directory.glob(FILE.format("*")))
        if not files:
            return
        if len(files) == processes:
            files = [directory / FILE.format(process)]
        found = [read_json(file, MOST_BYTES, "log line") for file in files]
        for file, record in zip(files, found, strict=True):
            check_format(file, record, FORMAT, ())
        names = ("sums", "weights", "steps", "experts", "skipped")
        records = [{name: record[name] for name in names} for record in found]
        mine = pytree.tree_map(lambda *x: sum(x) / len(x), *records)
        self.skipped = int(mine["skipped"])
        if not mine["steps"]:
            # a line ended there. A model that has grown may have other experts
            return
        for table, saved in ((self._sums, mine["sums"]), (self._weights, mine["weights"])):
            for name, x in saved.items():
                table[name] += x
        for (_, counts_E), tokens in zip(self.experts.layers, mine["experts"], strict=False):
            counts_E += torch.tensor(tokens).to(counts_E)

    def add(self, name: str, value: Tensor | float, weight: Tensor | float = 1) -> None:
        """Add a value, itself the mean of `weight` rows or steps, to the mean of a name."""
        self._sums[name] += value * weight
        self._weights[name] += weight

    def add_parts(self, parts: LossParts, labelled_rows: Tensor, kl_rows: Tensor) -> None:
        """Add the parts of the loss of one batch."""
        self.add("label_loss", parts.mlm, labelled_rows)
        if parts.kl is not None and parts.top1_agreement is not None:
            self.add("kl", parts.kl, kl_rows)
            self.add("top1_agreement", parts.top1_agreement, kl_rows)

    def add_tokens(self, tokens: int) -> None:
        """Add to the tokens that were trained on."""
        self._times["tokens"] += tokens

    def count_step(self, items: Any) -> None:
        """Count a step with so many labels in all processes; None: nobody counted them."""
        labelled = True if items is None else items != 0
        # a bool makes no small operations on the loss
        on_cpu = isinstance(labelled, Tensor) and labelled.is_cpu
        self._labelled = bool(labelled) if on_cpu else labelled
        self.add("loss", 0.0, self._labelled)

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a batch of the step; without a label it is 0 or the teacher's alone."""
        if self._labelled is not True:
            loss = torch.where(torch.as_tensor(self._labelled, device=loss.device), loss, 0.0)
        self._sums["loss"] += loss.float()

    def start_step(self) -> None:
        """Start the clock of a training step."""
        self._since = time.perf_counter()

    def end_step(self) -> None:
        """Stop the clock. Time between steps (evaluation, saving) does not count."""
        self._times["step"] += time.perf_counter() - self._since
        self._times["steps"] += 1

    @contextlib.contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Add the time inside to that of the batches, "data", or of the checkpoints."""
        since = time.perf_counter()
        yield
        self._times[name] += time.perf_counter() - since

    def drain(
        self, flops: float, peak: float = 0.0, memory: tuple[str, float] = ("", 0.0)
    ) -> dict[str, float]:
        """The means since the last call, over all processes; NaN over no rows. It is emptied.

        The time of a step and the memory are those of the process with most.

        Args:
            flops: those of all processes so far; `self.flops` are those at the last call.
            peak: FLOP/s of a device; 0: they are not known.
            memory: its name, and bytes of this process; 0: they are not known.
        """
        rows = [(self._sums[name], self._weights[name]) for name in self._sums]
        # seconds, and 1 per process: their quotient is the mean over processes
        rows += [(self._times[name], 1) for name in ("data", "checkpoint", "tokens", "step")]
        sums_N2 = self._add_up(torch.tensor(rows, dtype=torch.float64)).tolist()
        logs = {
            name: x / n if n else math.nan
            for name, (x, n) in zip(self._sums, sums_N2, strict=False)
        }
        (data, _), (saving, _), (tokens, _), (seconds, processes) = sums_N2[-4:]
        own = (self._times["step"] + self._times["data"]) / max(self._times["steps"], 1)
        most = self._largest(torch.tensor([own, memory[1]], dtype=torch.float64)).tolist()
        if most[1]:
            logs[memory[0]] = most[1]
        if seconds > 0:
            whole = seconds + data
            logs["tokens_per_second"] = tokens / (whole / processes)
            logs["step_time"], logs["data_time_share"] = most[0], data / whole
            if peak:
                logs["mfu"] = (flops - self.flops) / (whole * peak)
        if saving:
            logs["checkpoint_time"] = saving / processes
        logs |= self.experts.drain(self._add_up)
        if self.skipped:
            logs["skipped_steps"] = self.skipped
        self.flops = flops
        self.reset()
        return logs


def memory_and_peak(device: torch.device) -> tuple[tuple[str, float], float]:
    """The largest memory of this process so far, its name and bytes, and FLOP/s; 0: not known.

    The memory is that on the GPU, or else that of the whole process.
    """
    if device.type != "cuda":
        # not on Windows; in KiB, and on macOS in bytes
        unit = 1 if sys.platform == "darwin" else 1024
        known = resource is not None and device.type == "cpu"
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit if known else 0
        return ("maxrss", used), 0.0
    name = torch.cuda.get_device_name(device)
    peak = next((flops for words, flops in PEAKS.items() if words in name), 0.0)
    return ("max_memory_allocated", torch.cuda.max_memory_allocated(device)), peak


class FlopCounter:
    """Adds up batches, and counts their FLOPs when these are asked for.

    The sizes stay on the device of the batch until then: the CPU must not wait for them.

    Args:
        teachers: the costs of the teachers that run.
        decoder: whether the labels belong to a decoder beside an encoder.
    """

    def __init__(
        self,
        cost: Any,
        teachers: Sequence[Any] = (),
        tokens: str = "input_ids",
        *,
        decoder: bool = False,
    ) -> None:
        self.cost, self.teachers, self.tokens, self.decoder = cost, teachers, tokens, decoder
        self._waiting: list[tuple[Callable[[TokenCounts], float], Tensor, int | None]] = []
        self._of_rows: Tensor | float = 0.0

    def add(
        self, inputs: Mapping[str, Any], part: ModelPart | None, meter: Meter, *, taught: bool
    ) -> None:
        """Add a batch that was trained on, unless it only filled up; `taught`: the teachers ran."""
        counts = inputs.get(ROW_COUNTS)
        if counts is not None and counts.is_filler:
            return
        cost, teachers = self.cost, self.teachers if taught else ()
        apart = TAUGHT_BY in inputs

        def flops(sizes: TokenCounts) -> float:
            every = () if apart else teachers
            return cost.train(sizes, part) + sum(teacher.forward(sizes) for teacher in every)

        meter.add_tokens(inputs[self.tokens].numel())
        self._waiting.append((flops, self._sizes(inputs), None if counts is None else counts.pairs))
        for number, teacher in enumerate(teachers if apart else ()):
            sizes = self._sizes(examples_of(inputs, number))
            self._waiting.append((teacher.forward, sizes, None))

    def _sizes(self, inputs: Mapping[str, Any]) -> Tensor:
        return real_sizes(inputs, self.tokens, decoder=self.decoder)

    def add_rows(self, rows_B: Tensor, by: Sequence[int] | None, *, taught: bool) -> None:
        """Add rows that reached the output projection.

        Args:
            rows_B: their number in each example, (B,).
            by: the number of the teacher of each example; None: all teach it.
        """
        self._of_rows += rows_B.sum() * self.cost.head_row(train=True)
        for number, teacher in enumerate(self.teachers if taught else ()):
            own = (
                slice(None)
                if by is None
                else [i for i, taught_by in enumerate(by) if taught_by == number]
            )
            self._of_rows += rows_B[own].sum() * teacher.head_row(train=False)

    def drain(self) -> float:
        """The FLOPs since the last call."""
        total, self._of_rows = float(self._of_rows), 0.0
        if not self._waiting:
            return total
        device = self._waiting[0][1].device
        rows = torch.stack([sizes.to(device) for _, sizes, _ in self._waiting]).tolist()
        total += sum(
            flops(TokenCounts(*row)._replace(apart=apart))
            for (flops, _, apart), row in zip(self._waiting, rows, strict=True)
        )
        self._waiting.clear()
        return total


def real_sizes(batch: Mapping[str, Any], name: str, *, decoder: bool) -> Tensor:
    """The sizes of a batch without its padding: all of `TokenCounts` but the last, (6,) int64.

    A row without a mask counts whole. A decoder's row without a mask ends with its last label.
    """
    tokens_BS = batch[name]
    if not decoder and "attention_mask" not in batch:
        rows, length = tokens_BS.shape[:2]
        squares = rows * length**2
        return torch.tensor([rows, rows * length, rows * length, squares, squares, squares])
    lengths_B = others_B = _lengths(batch.get("attention_mask"), torch.ones_like(tokens_BS))
    if decoder:
        others_B = _lengths(batch.get(DECODER_MASK), batch["labels"] != IGNORE_INDEX)
    return torch.stack(
        [
            torch.tensor(len(tokens_BS), device=tokens_BS.device),
            lengths_B.sum(),
            others_B.sum(),
            lengths_B.square().sum(),
            others_B.square().sum(),
            (lengths_B * others_B).sum(),
        ]
    )


def _lengths(mask_BS: Any, marked_BS: Tensor) -> Tensor:
    """The real tokens of each row by its mask. Without a mask a row ends with its last mark."""
    if isinstance(mask_BS, Tensor) and mask_BS.shape == marked_BS.shape:
        return mask_BS.ne(0).sum(1)
    ends_S = torch.arange(1, marked_BS.shape[1] + 1, device=marked_BS.device)
    return (marked_BS.ne(0) * ends_S).amax(1)


class ExpertCounts:
    """Tokens of each expert since the last reset, without padding.

    Attributes:
        layers: for each mixture its block, and the tokens of its experts, (E,) int64.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[nn.Module, Tensor]] = []
        self._hooks: list[Any] = []
        self._real_N: Tensor | None = None

    def watch(self, model: Any) -> None:
        """Count the tokens of a model's experts from now on, and no longer those of another one."""
        self.stop()
        model = inside_ddp(model)
        for block in model.modules():
            for experts in filter(is_experts, block.children()):
                weight = next(p for p in experts.parameters(recurse=False) if p.ndim == 3)
                counts_E = torch.zeros(weight.shape[0], dtype=torch.int64, device=weight.device)
                self.layers.append((block, counts_E))
                count = partial(self._count, counts_E)
                self._hooks.append(experts.register_forward_pre_hook(count))
        if self.layers:
            self._hooks.append(model.register_forward_pre_hook(self._take_mask, with_kwargs=True))

    def _take_mask(self, _model: Any, _args: Any, inputs: dict[str, Any]) -> None:
        mask_BS = inputs.get("attention_mask")
        self._real_N = None if mask_BS is None or mask_BS.ndim != 2 else mask_BS.reshape(-1)

    def _count(self, counts_E: Tensor, experts: nn.Module, args: Any) -> None:
        # within a backward pass, activations are computed again
        if not experts.training or torch._C._current_graph_task_id() != -1:
            return
        # hidden states, then the numbers of the experts of each token; some mixtures pass others
        if len(args) < 2 or args[1] is None or args[1].is_floating_point():
            return
        chosen_NK = args[1]
        ones_NK = torch.ones_like(chosen_NK, dtype=counts_E.dtype)
        if self._real_N is not None:
            ones_NK = ones_NK * self._real_N.to(ones_NK)[:, None]
        counts_E.scatter_add_(0, chosen_NK.reshape(-1), ones_NK.reshape(-1))

    def reset(self) -> None:
        """Count from 0 again."""
        for _, counts_E in self.layers:
            counts_E.zero_()

    def stop(self) -> None:
        """Count no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.layers.clear()

    def drain(self, add_up: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The load of the experts since the last call, over all processes; empty without mixtures.

        Returns:
            expert_entropy: of the shares of the tokens, a mean over layers. 1: all are equal.
            expert_largest_share: of the tokens of a layer, in the layer where it is largest.
            expert_equal_share: that share if the experts of this layer had equal loads.
        """
        if not self.layers:
            return {}
        sizes = [len(counts_E) for _, counts_E in self.layers]
        flat = torch.cat([counts_E.cpu() for _, counts_E in self.layers]).double()
        # layers that a stage leaves out got nothing
        layers = [x for x in add_up(flat).split(sizes) if x.any()]
        self.reset()
        if not layers:
            return {}
        shares = [counts_E / counts_E.sum() for counts_E in layers]
        entropies = [-torch.special.xlogy(x, x).sum().item() / math.log(len(x)) for x in shares]
        largest = max(shares, key=lambda x: x.max().item())
        return {
            "expert_entropy": sum(entropies) / len(entropies),
            "expert_largest_share": largest.max().item(),
            "expert_equal_share": 1 / len(largest),
        }
