"""Measures `grow_into` of a model sharded by FSDP2: its time, and how much memory a rank needs.

There is one rank, in a process of its own. It uses NCCL on a GPU and gloo elsewhere, and grows from
a checkpoint on disk. The least possible memory is the rank's shard. "whole, then spread" is the way
without `grow_into`: grow the whole model in the host's memory, then spread its state dict over the
mesh.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.shared import system
from bench.shared.harness import now
from bench.shared.llama_growth import SIZES
from bench.shared.recorder import Recorder
from bench.shared.results import ROOT

WAYS = ("grow_into", "whole, then spread")
# the goal: a rank needs at most its shard and this much more memory
ALLOWED_MB = 256


def run(recorder: Recorder) -> None:
    size = recorder.pick("1B to 3B", "tiny")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        _make_source(size, source)
        for way in WAYS:
            figures = _in_child(way, size, source, Path(scratch))
            wrong = figures.pop("wrong tensors")
            grown = max(figures["host MB"], 0) + figures["device MB"]
            facts = {"growth": size, **figures, "over the shard MB": grown - figures["shard MB"]}
            recorder.check(way, wrong, 0, **facts, **{"allowed MB": ALLOWED_MB})
        if recorder.document["rows"][0]["collectives"]:
            recorder.fail("grow_into communicates between ranks, which it should not need")


def _make_source(size: str, directory: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(**SIZES[size][0], tie_word_embeddings=True)
    config.architectures = ["LlamaForCausalLM"]
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)


def _in_child(way: str, size: str, source: Path, scratch: Path) -> dict[str, Any]:
    store, out = (scratch / f"{name}-{WAYS.index(way)}" for name in ("store", "out"))
    command = [sys.executable, "-m", "bench.on_gpu.fsdp_growth", way, size]
    command += [str(path) for path in (source, store, out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if not out.exists():
        raise RuntimeError(f"exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(out.read_text())


# ---------------------------------------------------------------------- child


def _sharded(config: Any, mesh: Any) -> Any:
    import transformers
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _spread(model: Any, device: str, source: str, target: dict[str, int]) -> None:
    """Grow the whole model first, then give each rank its shard."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    import growkern

    whole = growkern.grow(source, **target)
    model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, whole.state_dict(), options=options)
    model.tie_weights()


def child(way: str, size: str, source: str, store: str) -> dict[str, Any]:
    """Grow in one of WAYS: time and memory, and how many parameters differ from `grow`'s."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    import growkern.growth.sharded

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    mesh, target = init_device_mesh(device, (1,)), SIZES[size][1]
    model = _sharded(growkern.plan(source, **target).target_config, mesh)
    # load all contexts and libraries before anything is measured
    dist.all_reduce(torch.ones(1, device=device))
    now()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    with system.metered() as figures, CommDebugMode() as talk:
        if way == "grow_into":
            growkern.grow_into(model, source)
        else:
            _spread(model, device, source, target)
        now()
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    held = {name: p.to_local() for name, p in model.named_parameters()}
    truth = dict(growkern.grow(source, **target).named_parameters())
    return {
        "s": figures["seconds"],
        "host MB": figures["peak over base MB"],
        "device MB": peak / 1e6,
        "shard MB": sum(x.nbytes for x in held.values()) / 1e6,
        "collectives": talk.get_total_counts(),
        "wrong tensors": sum(not torch.equal(x.cpu(), truth[name]) for name, x in held.items()),
    }


if __name__ == "__main__":
    *arguments, out_path = sys.argv[1:]
    Path(out_path).write_text(json.dumps(child(*arguments)))
    sys.stdout.flush()
    # gloo may abort while it shuts down
    os._exit(0)
