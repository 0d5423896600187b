"""Measures the memory of a process that starts a sharded run by growing.

`python -m bench.distributed.start_memory N`: N CPU processes each build their part of a large
Llama, and then the optimizer. Peaks are those of the system (VmHWM), over the memory after the
imports.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from bench.shared.system import reset_peak, status_mb, warm_up
from growkern.growth.sharded.placement import local_tensor
from growkern.train.build import build_model
from growkern.train.config import (
    DataSection,
    GrowthSection,
    ModelSection,
    OutputSection,
    Run,
    TrainingSection,
)
from growkern.train.distributed.optimizer_state import create_optimizer_state
from growkern.train.distributed.options import DistributedOptions

SOURCE = {
    "vocab_size": 8_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
SIZES = {"hidden_size": 1024, "intermediate_size": 3072}


def measure(folder: Path) -> dict[str, Any]:
    """Build a model and an optimizer as a run does; the peaks of this process in MB."""
    source = folder / "source"
    warm_up(source, transformers.LlamaForCausalLM, **SIZES)
    run = Run(
        ModelSection(),
        DataSection(("none",)),
        TrainingSection(1),
        OutputSection("out"),
        growth=GrowthSection(source="source", sizes=SIZES),
        distributed=DistributedOptions(sharding="fsdp"),
    )
    dist.barrier()
    reset_peak()
    base = status_mb("VmRSS")
    model = build_model(run, folder, first_start=True)
    grown = status_mb("VmHWM") - base
    shard = sum(local_tensor(p).nbytes for p in model.parameters()) / 1e6
    reset_peak()
    create_optimizer_state(torch.optim.AdamW(model.parameters()))
    trained = status_mb("VmHWM") - base
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


def run_rank(rank: int, processes: int, folder: Path) -> None:
    """Measure in one of the processes; the first prints."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    found = measure(folder)
    gathered: list[Any] = [None] * processes
    dist.all_gather_object(gathered, found)
    if rank == 0:
        worst = {name: max(one[name] for one in gathered) for name in found}
        print(json.dumps(worst), flush=True)


def main() -> None:
    processes = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = transformers.LlamaConfig(**SOURCE)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / "source")
        children = []
        for rank in range(processes):
            child = os.fork()
            if not child:
                run_rank(rank, processes, folder)
                os._exit(0)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        sys.exit(f"a process ended with {codes}")


if __name__ == "__main__":
    main()
