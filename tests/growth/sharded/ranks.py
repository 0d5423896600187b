"""The work of the ranks of test_grow_into: grow into sharded models and compare, case by case.

`testbed.forked_ranks` runs `main` with a directory for sources and results. Each rank writes a
file.
"""

import copy
import functools
import json
import math
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import growkern
from growkern.growth import sharded
from growkern.growth.models import persistent_buffers
from growkern.growth.plan.tensors import random_tensors
from growkern.growth.source.distributed import DistributedTensor
from testbed.families import PYTHIA
from testbed.models import BERT, GPT2, LLAMA, eager, random_model
from testbed.relatives import LOCAL, ONE_GROUP, RELATIVES, ROTARY
from tests.growth.optimizer import ranks
from tests.growth.watch import Watch

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
PARTS = {"intermediate_size": ROTARY["intermediate_size"] // 2}
UNEVEN = {"hidden_size": 20, "num_attention_heads": 10, "num_key_value_heads": 5}
DIRECT, FRESH = {"n_embd": 20, "method": "direct_copy"}, {"hidden_size": 24, "method": "fresh"}

# name: (class, sizes, source config, growth, mesh)
CASES = {
    "bert, fsdp": ("BertForMaskedLM", BERT, {}, {"hidden_size": 24}, "fsdp"),
    "bert uneven, fsdp": ("BertForMaskedLM", BERT, {}, {"hidden_size": 20}, "fsdp"),
    "bert uneven and deeper, hsdp": (
        "BertForPreTraining",
        BERT,
        {},
        {"hidden_size": 20, "num_hidden_layers": 3, "depth": "identity"},
        "hsdp",
    ),
    "gpt2 uneven aki, fsdp": ("GPT2LMHeadModel", GPT2, {}, {"n_embd": 20, "method": "aki"}, "fsdp"),
    "gpt2 fresh, fsdp": ("GPT2LMHeadModel", GPT2, {}, {"n_embd": 20, "method": "fresh"}, "fsdp"),
    "llama fresh, fsdp x tp": ("LlamaForCausalLM", LLAMA, UNTIED, FRESH, "fsdp x tp"),
    "gpt2 random, fsdp": ("GPT2LMHeadModel", GPT2, {}, {"n_embd": 20, "method": "random"}, "fsdp"),
    "gpt2 direct copy, fsdp": ("GPT2LMHeadModel", GPT2, {}, DIRECT, "fsdp"),
    "llama untied uneven, fsdp": ("LlamaForCausalLM", LLAMA, UNTIED, UNEVEN, "fsdp"),
    "llama, tp": ("LlamaForCausalLM", LLAMA, UNTIED, {"hidden_size": 24}, "tp"),
    # all of the model on every rank, buffers too, as DTensors
    "llama, copies": ("LlamaForCausalLM", LLAMA, UNTIED, {"hidden_size": 24}, "copies"),
    "llama tied, fsdp x tp": ("LlamaForCausalLM", LLAMA, TIED, {"hidden_size": 24}, "fsdp x tp"),
    "llama aki uneven, fsdp x tp": (
        "LlamaForCausalLM",
        LLAMA,
        UNTIED,
        # 17 rows for each half of the tensor-parallel pair, 9 and 8 of them for a rank
        {"hidden_size": 24, "intermediate_size": 34, "method": "aki"},
        "fsdp x tp",
    ),
    # a matrix for each expert; a rank has half of the experts
    "mixtral experts, fsdp": (
        "MixtralForCausalLM",
        LOCAL,
        UNTIED,
        {"num_local_experts": 8, "intermediate_size": 29, "method": "aki"},
        "fsdp",
    ),
    # three of them sleep; ranks have six and five
    "glm experts asleep, fsdp": (
        "Glm4MoeForCausalLM",
        RELATIVES["glm4_moe"][1],
        {**UNTIED, **ONE_GROUP},
        {"n_routed_experts": 11, "moe_intermediate_size": 9},
        "fsdp",
    ),
    # two halves of the FFN
    "mistral becomes mixtral, fsdp": (
        "MistralForCausalLM",
        ROTARY,
        UNTIED,
        {"to": "mixtral", **PARTS, "num_local_experts": 4, "num_experts_per_tok": 2},
        "fsdp",
    ),
    # 4 x 72 rows of 6 heads of 48, in three parts
    "neox larger heads aki, fsdp": (
        "GPTNeoXForCausalLM",
        PYTHIA,
        UNTIED,
        {"hidden_size": 96, "num_attention_heads": 6, "method": "aki"},
        "fsdp",
    ),
}
# four ranks have meshes of two dimensions, and more ranks than a tensor has rows
TWO_RANKS = (
    *("bert uneven, fsdp", "gpt2 uneven aki, fsdp", "gpt2 fresh, fsdp", "gpt2 random, fsdp"),
    *("gpt2 direct copy, fsdp", "llama untied uneven, fsdp", "llama, tp", "llama, copies"),
    *("mixtral experts, fsdp", "glm experts asleep, fsdp", "mistral becomes mixtral, fsdp"),
    "neox larger heads aki, fsdp",
)
OTHERS = tuple(name for name in CASES if name not in TWO_RANKS)
RANKS = {2: TWO_RANKS, 4: OTHERS}

# of these, optimizers too
OPTIMIZERS = {
    2: (
        *("bert uneven, fsdp", "gpt2 uneven aki, fsdp", "llama, tp", "mixtral experts, fsdp"),
        "mistral becomes mixtral, fsdp",
    ),
    4: ("bert uneven and deeper, hsdp", "llama aki uneven, fsdp x tp"),
}

GROWN_CHECKPOINT = {"hidden_size": 24, "intermediate_size": 34, "method": "aki"}

TENSOR_PARALLEL = {
    **{f"self_attn.{name}_proj": ColwiseParallel for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def meshes():
    size = dist.get_world_size()
    found = {"fsdp": init_device_mesh("cpu", (size,))}
    found["copies"] = found["fsdp"]
    if size == 2:
        found["tp"] = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    if size == 4:
        found["hsdp"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found["fsdp x tp"] = both
    return found


def shard(model, kind, mesh):
    if kind == "copies":
        return distribute_module(model, mesh)
    for module in list(model.modules()):
        if not isinstance(module, transformers.modeling_layers.GradientCheckpointingLayer):
            continue
        if "tp" in kind:
            styles = {name: style() for name, style in TENSOR_PARALLEL.items()}
            parallelize_module(module, mesh["tp"], styles)
        if kind != "tp":
            fully_shard(module, mesh=mesh["dp"] if "tp" in kind else mesh)
    if kind != "tp":
        fully_shard(model, mesh=mesh["dp"] if "tp" in kind else mesh)
    return model


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run(class_name, sizes, config, how, kind, mesh, directory):
    source = random_model(class_name, sizes, dtype=torch.float32, **config)
    if dist.get_rank() == 0:
        source.save_pretrained(directory)
    dist.barrier()
    whole = growkern.grow(directory, **how)
    model_class = type(whole)
    with torch.device("meta"):
        model = shard(model_class(whole.growth_plan.target_config), kind, mesh)
    options = {k: v for k, v in how.items() if k in ("method", "depth")}
    with Watch() as watch:
        report = growkern.grow_into(model, directory, **options)
    # PyTorch's own way from whole parameters to this rank's part is the truth
    expected = model_class(whole.config)
    expected.load_state_dict(whole.state_dict())
    expected = shard(expected, kind, mesh)
    named = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    truths = dict(expected.named_parameters(remove_duplicate=False))
    kept = dict(persistent_buffers(model)).values()
    result = {
        "wrong": [n for n, p in truths.items() if not torch.equal(local(p), local(named[n]))],
        "buffers": [
            n for n, b in expected.named_buffers() if not torch.equal(local(b), local(buffers[n]))
        ],
        "sharded": sum(isinstance(p, DTensor) for p in model.parameters()),
        "empty": sum(not local(p).numel() for p in model.parameters()),
        "collectives": watch.collectives,
        "largest": watch.largest,
        "held": max(local(p).nbytes for p in model.parameters()),
        "full": max(p.nbytes for p in model.parameters()),
        "source": max(p.nbytes for p in source.parameters()),
        "bytes": report.bytes_written,
        "all bytes": sum(local(x).nbytes for x in (*model.parameters(), *kept)),
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    }
    tokens = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    name = "prediction_logits" if class_name == "BertForPreTraining" else "logits"
    for m in (model, whole):
        # DTensors have no other attention on a CPU
        eager(m).set_attn_implementation("eager")
    # plain tokens meet parameters that are DTensors
    with torch.no_grad(), implicit_replication():
        logits, truth = (getattr(m.eval()(input_ids=tokens), name) for m in (model, whole))
    result["output error"] = ((local(logits) - truth).abs().max() / truth.abs().max()).item()
    return result


def run_checkpoint(kind, mesh, directory):
    """Two ranks save a sharded source; each then reads what its part of the target copies."""
    source = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    whole = growkern.grow(source, **GROWN_CHECKPOINT)
    sharded = shard(copy.deepcopy(source), "fsdp", mesh["fsdp"])
    state = {"model": sharded.state_dict(), "optim": {"lr": 0.1, "exp_avg": torch.ones(3)}}
    checkpoint.save(state, checkpoint_id=directory / "weights")
    source.config.architectures = ["LlamaForCausalLM"]
    if dist.get_rank() == 0:
        source.config.save_pretrained(directory)
    dist.barrier()
    with torch.device("meta"):
        model = shard(type(source)(whole.config), kind, mesh[kind])
    read = {}
    read_runs = DistributedTensor.read_runs

    def spy(self, runs):
        area = math.prod(sum(b - a for a, b in axis) for axis in runs)
        read[self.raw_name] = area / math.prod(self.shape)
        return read_runs(self, runs)

    DistributedTensor.read_runs = spy
    with Watch() as watch:
        growkern.grow_into(model, directory / "weights", method="aki")
    DistributedTensor.read_runs = read_runs
    expected = shard(copy.deepcopy(whole), kind, mesh[kind])
    pairs = zip(model.named_parameters(), expected.parameters(), strict=True)
    return {
        "wrong": [name for (name, p), q in pairs if not torch.equal(local(p), local(q))],
        "collectives": watch.collectives,
        "read": read,
    }


def run_optimizers(name, found, directory, moments="grow"):
    *case, kind = CASES[name]
    return ranks.run_state(
        case,
        lambda model: shard(model, "fsdp", found["fsdp"]),
        lambda model: shard(model, kind, found[kind]),
        directory,
        moments,
    )


def main(directory):
    # as small beside tiny tensors as it is beside large ones
    random_tensors.TILE = (3, 8)
    with Watch() as watch:
        dist.all_reduce(torch.ones(1))
    results = {"canary": watch.collectives}
    found = meshes()
    small_pieces = functools.partial(sharded.row_blocks, piece_bytes=1000)
    with mock.patch.object(sharded, "row_blocks", small_pieces):
        for number, name in enumerate(RANKS[dist.get_world_size()]):
            *case, kind = CASES[name]
            results[name] = run(*case, kind, found[kind], directory / f"source-{number}")
    if dist.get_world_size() == 2:
        for kind in ("fsdp", "tp"):
            name = f"checkpoint, {kind}"
            results[name] = run_checkpoint(kind, found, directory / kind)
        results["optimizer"] = ranks.run_steps(
            lambda model: shard(model, "fsdp", found["fsdp"]), directory
        )
        results["state, old slices"] = run_optimizers(
            "bert uneven, fsdp", found, directory, "old_slices"
        )
    for name in OPTIMIZERS[dist.get_world_size()]:
        results[f"state, {name}"] = run_optimizers(name, found, directory)
    file = directory / f"rank-{dist.get_rank()}.json"
    file.write_text(json.dumps(results))
