"""Measures the memory of a process that starts a sharded run by growing.

`python -m bench.distributed.start_memory N KIND`: N CPU processes each build their part of a large
Llama, and then the optimizer. Peaks are those of the system (VmHWM), over the memory after the
imports.

KIND is "AdamW", "GrowthAdamW", or "GrowthAdamW with grown moments". The last one starts as a run
with `moments = "grow"` does: with the moments of the source, from its `optimizer.pt`. With
", plain PyTorch" behind it, growth does without the compiled library.
"""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from bench.shared.system import reset_peak, status_mb, warm_up
from growkern.growth.models import local_tensor
from growkern.growth.optimizer import GrowthAdamW, grow_optimizer_into
from growkern.growth.optimizer.adamw import decay_groups
from growkern.growth.options import GrowthOptions
from growkern.growth.plan import plan_growth
from growkern.growth.source import open_source
from growkern.ops.backend import native
from growkern.train.distributed import create_optimizer_state
from growkern.train.loop import TwoStageTrainer, grown_model
from growkern.train.sections import DistributedOptions

SOURCE = {
    "vocab_size": 8_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
SIZES = {"hidden_size": 1024, "intermediate_size": 3072}
GROWN = "GrowthAdamW with grown moments"
PLAIN = ", plain PyTorch"
KINDS = ("AdamW", "GrowthAdamW", GROWN, GROWN + PLAIN)


def make_optimizer(model: Any, kind: str, folder: Path) -> torch.optim.Optimizer:
    """An optimizer with a state for every parameter, as a run has it before its first step."""
    if kind == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters())
        create_optimizer_state(optimizer)
        return optimizer
    optimizer = GrowthAdamW(decay_groups(model, 0.01), model.growth_plan)
    if not kind.startswith(GROWN):
        create_optimizer_state(optimizer)
    else:
        grow_optimizer_into(model, optimizer, folder / "optimizer.pt")
    return optimizer


def save_source(folder: Path, config: dict[str, Any] = SOURCE) -> None:
    """A small Llama, and the state of its optimizer after a step."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.save_pretrained(folder / "source")
    optimizer = torch.optim.AdamW(decay_groups(model, 0.01))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def measure(folder: Path, kind: str) -> dict[str, Any]:
    """Build a model and an optimizer as a run does; the peaks of this process in MB."""
    if kind.endswith(PLAIN):
        native.loaded = lambda: None
    source = folder / "source"
    warm_up(source, transformers.LlamaForCausalLM, **SIZES)
    # a run has imported all that the trainer imports
    assert TwoStageTrainer
    options = DistributedOptions(sharding="fsdp")
    dist.barrier()
    reset_peak()
    base = status_mb("VmRSS")
    opened = open_source(source)
    planned = plan_growth(opened, GrowthOptions(), SIZES, dtype=torch.float32, judged=False)
    model = grown_model(planned, options, torch.float32)
    grown = status_mb("VmHWM") - base
    shard = sum(local_tensor(p).nbytes for p in model.parameters()) / 1e6
    reset_peak()
    kept = make_optimizer(model, kind, folder)
    trained = status_mb("VmHWM") - base
    assert len(kept.state) == len(list(model.parameters()))
    whole = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
    return {
        "model_mb": whole,
        "shard_mb": shard,
        "growing_mb": grown,
        "growing_beyond_shard_mb": grown - shard,
        # weights and two moments
        "optimizer_mb": trained,
        "optimizer_beyond_shard_mb": trained - 3 * shard,
    }


def run_rank(rank: int, processes: int, folder: Path, kind: str) -> None:
    """Measure in one of the processes; the first prints."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    figures = measure(folder, kind)
    gathered: list[Any] = [None] * processes
    dist.all_gather_object(gathered, figures)
    if rank == 0:
        worst = {name: max(rank[name] for rank in gathered) for name in figures}
        print(json.dumps(worst), flush=True)


def in_child(work: Callable[..., None], *arguments: Any) -> int:
    """Start a fork that does some work, and return its process id."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return child


def wait_for(children: list[int]) -> None:
    """Wait for forks, and end with an error if one of them failed."""
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        sys.exit(f"a process ended with {codes}")


def main() -> None:
    processes, kind = int(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # in a process of its own: memory that it frees would be used again by those measured
        wait_for([in_child(save_source, folder)])
        ranks = range(processes)
        wait_for([in_child(run_rank, rank, processes, folder, kind) for rank in ranks])


if __name__ == "__main__":
    main()
