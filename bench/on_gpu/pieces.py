"""Lists the pieces of `bench.gpu`, most valuable first. To add a piece, add an entry to PIECES.

The first nine minutes show where the time goes, whether the newest kernels are right, and how fast
the main ones are.

A piece is a module with ``run(recorder)``, or a benchmark with ``main()``. A benchmark must save
its rows with `harness.measure_all`, accept --no-test, and keep its sizes in module constants.
"""

import gc
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.shared import harness
from bench.shared.recorder import Recorder


@dataclass(frozen=True)
class Piece:
    """One piece of `bench.gpu`, which runs in a process of its own.

    Attributes:
        module: its module, without "bench.".
        toy: constants of the benchmark's module at toy sizes.
    """

    name: str
    about: str
    limit_s: int
    module: str
    args: Sequence[str] = ()
    toy_args: Sequence[str] = ("--repeats", "1")
    toy: dict[str, Any] = field(default_factory=dict)

    def run(self, recorder: Recorder) -> None:
        module = importlib.import_module(f"bench.{self.module}")
        # Each sample collects garbage. What the imports made is none, and takes longer than a step.
        gc.freeze()
        if hasattr(module, "run"):
            module.run(recorder)
            return
        for name, value in self.toy.items() if recorder.toy else ():
            # If a constant was renamed, the real sizes would stay.
            if not hasattr(module, name):
                raise AttributeError(
                    f"bench.{self.module} has no {name}: update its entry in pieces.py"
                )
            setattr(module, name, value)

        harness.collector = recorder.add
        harness.observer = recorder.unfinished
        harness.compiler = recorder.pick("inductor", "eager")
        args = self.toy_args if recorder.toy else self.args
        sys.argv = [f"bench.{self.module}", "--no-test", *args]
        module.main()


def _both(sizes: Any) -> dict[str, Any]:
    return {"cpu": sizes, "cuda": sizes}


# benchmarks of disks and CPUs are run by `make bench`
PIECES = (
    # nine minutes, if each takes all its time: where the time goes; the kernels that no GPU has run
    Piece("versions", "versions of all that figures depend on", 20, "launches.versions"),
    Piece("timeline", "where the time of the headline's step goes", 60, "speed.timeline"),
    Piece("check_lines", "hashes of lines in one launch", 20, "on_gpu.new_kernels"),
    Piece("check_gathers", "columns gathered in shared memory", 20, "on_gpu.new_kernels"),
    Piece("check_once", "rows read once, against float64", 20, "on_gpu.new_kernels"),
    Piece("rows", "the row kernel alone, rows read twice and once", 25, "on_gpu.new_kernels"),
    Piece("gathers", "expand, gathered in shared memory and not", 40, "on_gpu.new_kernels"),
    Piece(
        "headline_alone",
        "the loss at its largest shape, in a CUDA graph and not, without peers",
        60,
        "speed.linear_kl_mlm_loss",
        args=("--repeats", "5", "--vocabulary", "128256", "--first", "--alone"),
        toy_args=("--repeats", "1", "--first", "--alone"),
        toy={"SHAPES": _both([(8, 100, 16, 8)])},
    ),
    Piece(
        "check_loss",
        "both losses against float64: V up to 262144, more than 2^31 logits",
        65,
        "on_gpu.check_loss",
    ),
    Piece(
        "bench_expand",
        "expand of one matrix, 4096 to 8192, beside eager and torch.compile",
        55,
        "speed.expand",
        args=("--repeats", "15", "--compile", "--growth"),
        toy_args=("--repeats", "1", "--growth"),
        toy={"SOURCE": 96, "TARGET": 192},
    ),
    Piece(
        "train_llama", "a training step of a Llama of 1B with a teacher", 75, "on_gpu.train_step"
    ),
    # the second command: all else that training and growth launch, and the peers
    Piece("launches", "compiles every launch, with one process per core", 90, "launches.fill"),
    Piece("smoke", "every launch once, beside float64", 80, "launches.smoke"),
    Piece("check_cuda", "expand in CUDA C++ against its reference", 45, "on_gpu.check_expand"),
    Piece(
        "headline",
        "the loss from hidden states at its largest shape in bfloat16, beside its GEMMs",
        140,
        "speed.linear_kl_mlm_loss",
        args=("--repeats", "5", "--vocabulary", "128256", "--first"),
        toy_args=("--repeats", "1", "--no-compile", "--first"),
        toy={"SHAPES": _both([(8, 100, 16, 8)])},
    ),
    Piece("train_bert", "a training step of BERT-base with a teacher", 55, "on_gpu.train_step"),
    # if there is time left
    Piece(
        "check_expand",
        "expand against float64: large sizes, strides, NaN around the output",
        240,
        "on_gpu.check_expand",
    ),
    Piece(
        "check_options",
        "every option of the losses, the top-k loss and tiles against float64",
        420,
        "on_gpu.check_loss",
    ),
    # commands of their own, each for ten minutes: the same with three seeds
    *(
        Piece(
            f"gpt_110m_{seed}",
            f"early saving: GPT-2 grown to 110 million parameters, seed {seed}",
            580,
            "gpt_110m.seed",
        )
        for seed in (1, 2, 3)
    ),
    Piece(
        "family",
        "GPT-2 of 12 x 256 and 12 x 384, alone, grown, in one run, and one never grown",
        580,
        "gpt_110m.family",
    ),
    # for those who have hours
    Piece(
        "bench_linear_bert",
        "the loss from hidden states with the head of BERT-base",
        470,
        "speed.linear_kl_mlm_loss",
        args=("--repeats", "5", "--vocabulary", "30522"),
        toy_args=("--repeats", "1", "--no-compile", "--first"),
        toy={"SHAPES": _both([(4, 60, 8, 8)])},
    ),
    Piece(
        "bench_linear_kl_mlm_loss",
        "the loss from hidden states, V 128256, beside its GEMMs, torch.compile, Liger",
        470,
        "speed.linear_kl_mlm_loss",
        args=("--repeats", "5", "--vocabulary", "128256"),
        toy_args=("--repeats", "1", "--no-compile"),
        toy={"SHAPES": _both([(4, 60, 8, 8)]), "DTYPES": (torch.bfloat16,)},
    ),
    Piece(
        "bench_kl_mlm_loss",
        "the loss on ready logits",
        420,
        "speed.kl_mlm_loss",
        args=("--repeats", "11"),
        toy_args=("--repeats", "1", "--no-compile"),
        toy={"SHAPES": _both([(4, 100)])},
    ),
)


def chosen(names: Sequence[str]) -> list[Piece]:
    """The pieces with these names, in this order; all of them if none is named."""
    known = {piece.name: piece for piece in PIECES}
    return [known[name] for name in names or known]
