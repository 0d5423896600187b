"""The pieces of `bench.gpu`, most valuable first. A new one is one entry of ALL.

A piece is a module with ``run(recorder)``, or a benchmark with ``main()``: that one saves its rows
with `report.show_and_save`, takes --no-test, and has its sizes in module constants.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.on_gpu.recorder import Recorder, needs
from bench.shared import harness
from bench.shared.results import ROOT


@dataclass(frozen=True)
class Piece:
    """One process of `bench.gpu`.

    Attributes:
        name: of the piece and of its result file.
        about: one line for --list.
        limit_s: seconds after which it is stopped; what it has recorded is kept.
        module: under bench.
        args: command line of a benchmark's ``main()``; ``toy_args`` at toy sizes.
        toy: constants of the benchmark's module at toy sizes.
        own_python: also in a dry run, which forks the others from one.
        needs: packages that PyTorch, Triton and transformers do not bring; skipped without.
    """

    name: str
    about: str
    limit_s: int
    module: str
    args: Sequence[str] = ()
    toy_args: Sequence[str] = ("--repeats", "1")
    toy: dict[str, Any] = field(default_factory=dict)
    own_python: bool = False
    needs: Sequence[str] = ()

    @property
    def file(self) -> Path:
        return ROOT / "bench" / f"{self.module.replace('.', '/')}.py"

    def run(self, recorder: Recorder) -> None:
        needs(*self.needs)
        module = importlib.import_module(f"bench.{self.module}")
        if hasattr(module, "run"):
            module.run(recorder)
            return
        for name, value in self.toy.items() if recorder.toy else ():
            # a constant that has another name by now must not leave the real sizes in force
            if not hasattr(module, name):
                raise AttributeError(f"bench.{self.module} has no {name}: mend its piece")
            setattr(module, name, value)

        harness.collector = recorder.add
        harness.compiler = recorder.pick("inductor", "eager")
        args = self.toy_args if recorder.toy else self.args
        sys.argv = [f"bench.{self.module}", "--no-test", *args]
        module.main()


def _both(sizes: Any) -> dict[str, Any]:
    return {"cpu": sizes, "cuda": sizes}


ALL = (
    Piece("ceilings", "the machine, and the rates no kernel can pass", 150, "on_gpu.ceilings"),
    Piece(
        "check_expand",
        "expand against float64: large, strided, NaN-filled",
        240,
        "on_gpu.check_expand",
    ),
    Piece(
        "check_loss",
        "both losses against float64: V to 262144, past 2^31",
        300,
        "on_gpu.check_loss",
    ),
    Piece(
        "check_options",
        "every option, the top-k loss, tiles against float64",
        420,
        "on_gpu.check_options",
    ),
    Piece("check_cuda", "the CUDA C++ kernels against float64", 300, "on_gpu.check_cuda"),
    Piece("check_suite", "the ops' own tests, on this device", 470, "on_gpu.check_suite"),
    Piece(
        "bench_expand",
        "one matrix, 4096 to 8192, beside eager and torch.compile",
        240,
        "bench_expand",
        args=("--repeats", "15", "--compile"),
        toy={"SOURCE": 96, "TARGET": 192},
    ),
    Piece(
        "bench_expand_model",
        "every tensor of a Llama of 1B grown to 3B, FPI and AKI",
        450,
        "bench_expand_model",
        args=("--repeats", "7"),
        toy={"SIZES": _both("tiny"), "METHODS": ("fpi",), "BACKEND": "triton", "SAMPLE": 2},
    ),
    Piece(
        "bench_kl_mlm_loss",
        "the rows of the loss on ready logits",
        420,
        "bench_kl_mlm_loss",
        args=("--repeats", "11"),
        toy_args=("--repeats", "1", "--no-compile"),
        toy={"SHAPES": _both([(4, 100)])},
    ),
    Piece(
        "bench_linear_kl_mlm_loss",
        "the loss from hidden states, V 128256, beside its GEMMs, torch.compile, Liger",
        470,
        "bench_linear_kl_mlm_loss",
        args=("--repeats", "5", "--vocabulary", "128256"),
        toy_args=("--repeats", "1", "--no-compile"),
        toy={"SHAPES": _both([(8, 100, 16, 8)])},
    ),
    Piece(
        "bench_linear_bert",
        "the same with the head of BERT-base",
        470,
        "bench_linear_kl_mlm_loss",
        args=("--repeats", "5", "--vocabulary", "30522"),
        toy_args=("--repeats", "1", "--no-compile"),
        toy={"SHAPES": _both([(4, 60, 8, 8)]), "DTYPES": (torch.bfloat16,)},
    ),
    Piece(
        "bench_topk_kl_mlm_loss",
        "the loss from a kept teacher's top k",
        420,
        "bench_topk_kl_mlm_loss",
        args=("--repeats", "7"),
        toy={"SHAPES": _both([(8, 100, 16, 8)]), "KS": (4,)},
    ),
    Piece("scaling", "time and memory over three decades of work", 240, "on_gpu.scaling"),
    Piece("train_bert", "a training step of BERT-base with a teacher", 240, "on_gpu.train_step"),
    Piece(
        "train_llama", "a training step of a Llama of 1B with a teacher", 420, "on_gpu.train_step"
    ),
    Piece(
        "trainer_step",
        "TwoStageTrainer beside the layers alone and a plain Trainer",
        300,
        "on_gpu.trainer_step",
        needs=("accelerate",),
    ),
    Piece(
        "fsdp_growth", "grow_into of a Llama of 3B under FSDP2, one rank", 420, "on_gpu.fsdp_growth"
    ),
    Piece(
        "bench_grow_checkpoint",
        "a small checkpoint grown onto this machine's disk, beside cp",
        300,
        "bench_grow_checkpoint",
        args=("--sizes", "small", "--repeats", "3"),
        toy_args=("--sizes", "small", "--repeats", "1", "--no-cold"),
        toy={"SIZES": {"small": (64, 128, 1, 50)}},
        needs=("xxhash",),
    ),
    Piece("sanitize", "compute-sanitizer over the checks at toy sizes", 470, "on_gpu.sanitize"),
    Piece("tune_expand", "block sizes and warps of expand", 300, "tune"),
    Piece("tune_kl_mlm_rows", "block size and warps of the loss's rows", 400, "tune"),
    Piece("tune_topk_kl_mlm_rows", "the same of the top-k loss's", 300, "tune"),
    Piece("aot", "registers, spills and load widths with this Triton", 200, "aot", own_python=True),
)
# a benchmark takes part from the day it is there; those of disks and CPUs are for `make bench`
PIECES = tuple(piece for piece in ALL if piece.file.is_file())


def chosen(names: Sequence[str]) -> list[Piece]:
    """The pieces of these names in their order; all of them where none is named."""
    known = [piece.name for piece in PIECES]
    if wrong := [name for name in names if name not in known]:
        raise SystemExit(f"no piece {wrong[0]!r}: there are {', '.join(known)}")
    return [piece for piece in PIECES if not names or piece.name in names]
