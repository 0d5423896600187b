"""One of four processes: `python -m testbed.forked_ranks 4 tests.train.distributed.meshes FOLDER`.

`inherited_loss` on meshes of other people's loops, against one process with all rows, in float64.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from examples.mesh_2d import Taught
from growkern import GrowthError, grow, inherited_loss
from testbed.tiny import VOCAB, batch, build, randomise
from tests.train.loss.plain import plain_loss


def over(model, data, tensor=None, head=None):
    """FSDP2 over one axis of a mesh, and the products of the FFN and the head over another."""
    if head is not None:
        parallelize_module(model, tensor, {"lm_head": head})
    if tensor is not None:
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel()}
        plan |= {"down_proj": RowwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer.mlp, tensor, plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=data)
    return fully_shard(model, mesh=data)


def split(model, tensor):
    """Tensor parallelism of the FFN and of the head, by its columns."""
    plan = {
        f"model.layers.{i}.mlp.up_proj": ColwiseParallel() for i in range(len(model.model.layers))
    }
    plan |= {name.replace("up", "gate"): ColwiseParallel() for name in plan}
    plan |= {name.replace("up", "down"): RowwiseParallel() for name in plan if "up" in name}
    return parallelize_module(model, tensor, plan | {"lm_head": ColwiseParallel()})


def whole_of(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def check(name, data, tensor=None, head=None, of_teacher=None):
    """The rows are shared out over the data axis; all of its ranks' losses add up."""
    parts, part = data.size(), data.get_local_rank()
    student, teacher = build("llama", layers=2).double(), build("llama", seed=3).double()
    twin, whole = copy.deepcopy(student), batch(2 * parts)
    expected = plain_loss(twin, [teacher], whole, causal=True)
    expected.backward()
    mine = {key: x[2 * part : 2 * part + 2] for key, x in whole.items()}
    items = int((whole["labels"][:, 1:] != -100).sum())
    over(student, data, tensor, head)
    if of_teacher is not None:
        teacher = split(teacher, of_teacher)
    loss = inherited_loss(student, teacher, mine, num_items=items)
    (loss * parts).backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=data.get_group())
    torch.testing.assert_close(total, expected.detach(), msg=name)
    for (key, p), q in zip(student.named_parameters(), twin.parameters(), strict=True):
        found = whole_of(p.grad)
        torch.testing.assert_close(found, q.grad, rtol=1e-8, atol=1e-11, msg=f"{name} {key}")


def check_example(folder, cls, config, experts=1, backend=None, dtype=torch.float64):
    """The loss of the example, with a teacher, against whole logits in one process."""
    cls = type("Taught", (cls,), {"forward": Taught.forward})
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = cls.__base__(config(**sizes)).to(dtype)
    # the grouped products of the experts refuse float64
    model.set_experts_implementation("eager")
    twin, teacher = (randomise(copy.deepcopy(model), seed) for seed in (0, 3))
    if dist.get_rank() == 0:
        twin.save_pretrained(folder)
    dist.barrier()
    tokens = batch(4)["input_ids"]
    whole = {"input_ids": tokens, "labels": tokens}
    plain_loss(twin, [teacher], whole, causal=True).backward()
    how = {"tp_size": 2, "fsdp_size": 2, "ep_size": experts, "tp_plan": {"lm_head": "colwise"}}
    student = cls.from_pretrained(
        *(folder,), dtype=dtype, experts_implementation="eager",
        distributed_config=DistributedConfig(**how),
    )  # fmt: skip
    assert student.lm_head.weight.to_local().numel() == student.lm_head.weight.numel() / 4
    for layer in student.model.layers if backend else ():
        layer.compile(backend=backend)
    mine = tokens.chunk(2)[dist.get_rank() // 2]
    (2 * student(mine, teacher.requires_grad_(False), items=tokens[:, 1:].numel())).backward()
    for (key, p), q in zip(student.named_parameters(), twin.parameters(), strict=True):
        near = {} if dtype == torch.float32 else {"rtol": 1e-8, "atol": 1e-11}
        torch.testing.assert_close(whole_of(p.grad), q.grad, **near, msg=key)


def mixture(**sizes):
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    return Qwen3MoeConfig(**sizes, **more)


def main(folder):
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    check("FSDP2 x TP", both["data"], both["tensor"])
    for split in (
        ColwiseParallel(use_local_output=False),
        ColwiseParallel(output_layouts=Replicate()),
    ):
        check("FSDP2 x TP, columns of the head", both["data"], both["tensor"], split)
    with pytest.raises(GrowthError, match="linear_kl_mlm_loss"):
        by_rows = RowwiseParallel(input_layouts=Replicate())
        check("FSDP2 x TP, rows of the head", both["data"], both["tensor"], by_rows)
    # the processes of the tensor axis have the same rows, those of the data axis do not
    check("a split teacher beside a whole head", both["data"], of_teacher=both["tensor"])
    with pytest.raises(GrowthError, match="teacher is split over processes"):
        check("a teacher split over other rows", both["data"], of_teacher=both["data"])
    check_example(folder / "2", Qwen3MoeForCausalLM, mixture, experts=2)
    # with whole experts, FSDP2 of PyTorch 2.13 divides gradients of float64 and float16 twice
    check_example(folder / "4", Qwen3MoeForCausalLM, mixture, experts=4, dtype=torch.float32)
    check_example(folder / "dense", LlamaForCausalLM, LlamaConfig, backend="aot_eager")
    # every process may call it, as for any model of transformers; the first one writes
    grow(build("llama", layers=2), num_hidden_layers=3).save_pretrained(folder / "grown")
    # as beside the stages of a pipeline: half of the processes share the rows, twice
    check("FSDP2 over a part", both["data"])
