"""One of two processes: `python -m tests.forked_ranks 2 tests.train.loss.ranks FOLDER`.

Each process has one half of the rows. Loss and gradients must be those of plain logits on all rows.
"""

import copy
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from growkern import count_labels, inherited_loss
from growkern.train.sub_model import layer_stacks
from tests.train.loss.plain import plain_loss
from tests.train.tiny import batch, build


def sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.config.use_cache = False
    for block in layer_stacks(model)[0]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap(model, how):
    if how == "ddp":
        return DistributedDataParallel(model)
    return Accelerator(cpu=True).prepare(model) if how == "accelerate" else sharded(model)


def check(family, how):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    student, teacher = build(family, tied=True).double(), build(family, seed=3).double()
    whole = batch(6)
    twin = copy.deepcopy(student)
    expected = plain_loss(twin, [teacher], whole, causal=family == "gpt2")
    expected.backward()

    mine = {name: x[3 * rank : 3 * rank + 3] for name, x in whole.items()}
    wrapped = wrap(student, how)
    teacher = sharded(teacher) if how == "fsdp2" else teacher
    items = count_labels([mine], wrapped)
    dist.all_reduce(items)
    for _ in range(2):
        wrapped.zero_grad()
        loss = inherited_loss(wrapped, teacher, mine, num_items=items)
        (loss * ranks).backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach())
    if how == "fsdp2":
        assert any(isinstance(p, DTensor) for p in student.parameters())
    for (name, p), q in zip(student.named_parameters(), twin.parameters(), strict=True):
        gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(gradient, q.grad, rtol=1e-7, atol=1e-11, msg=name)


def main(folder):
    for how in ("ddp", "fsdp2", "accelerate"):
        for family in ("bert", "gpt2"):
            # shown if the check fails
            print(how, family, file=sys.stderr)
            check(family, how)
