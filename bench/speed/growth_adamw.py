"""Measures a step of GrowthAdamW beside AdamW(fused=True) on the parameters of a small grown GPT-2.

    python -m bench.speed.growth_adamw

The ways take turns, one step each. The ratio is the median over the turns of a way's time divided
by that of the fused AdamW in the same turn, so that other load on the machine cancels. With 15
repeats a ratio is good to about 5 % on a quiet machine. "extra MiB" is the peak memory of a step
above what the weights, gradients and moments take.
"""

import statistics
from collections.abc import Iterator
from typing import Any

import torch
import transformers

import growkern
from bench.paper.models import FAMILIES, Size
from bench.shared.harness import benchmark_parser, measure_all, name_of, options_of, turns_ms
from bench.shared.loss_measure import measure
from bench.shared.peers import DEVICE

LAYERS, VOCABULARY = 2, 8192
# name -> width of the source and of the target
GROWTHS = {"even, 384 -> 768": (384, 768), "uneven, 512 -> 768": (512, 768)}
BASE = "AdamW(fused=True)"


def grown_model(widths: tuple[int, int], dtype: torch.dtype) -> Any:
    """A grown model with a gradient everywhere."""
    source, target = widths
    config = FAMILIES["gpt2"].config(Size(LAYERS, source, source // 64), VOCABULARY, 1024, 0.1)
    model = growkern.grow(transformers.GPT2LMHeadModel(config), n_embd=target, symmetry="none")
    model.to(DEVICE, dtype)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def optimizers_for(model: Any) -> dict[str, torch.optim.Optimizer]:
    """All over the same parameters, so that none has memory that lies better."""
    plan, named = model.growth_plan, list(model.named_parameters())
    return {
        BASE: torch.optim.AdamW(named, fused=True),
        "GrowthAdamW": growkern.GrowthAdamW(named, plan),
        "GrowthAdamW, re-warm-up": growkern.GrowthAdamW(named, plan, rewarm_steps=10_000),
    }


def rows_of(growth: str, dtype: torch.dtype, repeats: int) -> Iterator[dict[str, Any]]:
    """One row per optimizer."""
    torch.manual_seed(0)
    model = grown_model(GROWTHS[growth], dtype)
    optimizers = optimizers_for(model)
    taken = turns_ms({name: o.step for name, o in optimizers.items()}, repeats, wall=True)
    for name, times in taken.items():
        ratios = [a / b for a, b in zip(times, taken[BASE], strict=True)]
        yield {
            "growth": growth,
            "dtype": name_of(dtype),
            "optimizer": name,
            "ms": statistics.median(times),
            "times fused AdamW": statistics.median(ratios),
            "extra MiB": measure(optimizers[name].step, 3)["extra MiB"],
            "weights MiB": sum(p.nbytes for p in model.parameters()) / 2**20,
            "repeats": repeats,
        }


def main() -> None:
    parser = benchmark_parser(__doc__, repeats=15, threads=True)
    args = options_of(parser, "tests/growth/optimizer/test_steps.py")
    rows = (
        row
        for growth in GROWTHS
        for dtype in (torch.float32, torch.bfloat16)
        for row in rows_of(growth, dtype, args.repeats)
    )
    measure_all("growth_adamw", rows)


if __name__ == "__main__":
    main()
