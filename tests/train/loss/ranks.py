"""One of two processes: `python -m testbed.forked_ranks 2 tests.train.loss.ranks FOLDER`.

Each process has one half of the rows. Loss and gradients must be those of plain logits on all rows.
"""

import copy
import sys

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from examples import pytorch_loop
from growkern import ExpertBalancing, InheritanceSchedule, count_labels, inherited_loss
from growkern.train.model.sub_model import ModelPart, layer_stacks, sub_model
from testbed.tiny import VOCAB, batch, build, randomise
from tests.train.loss.plain import plain_loss


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


TEXTS = [
    [[7, 6, 5, 9, 11], [3, 8, 2]],
    [[12, 4, 4, 6, 10, 9, 3], [5, 2]],
    [[8, 8, 1, 2], [9, 4, 6]],
]


def packed(rows):
    """Rows of several documents each, as long as the longest."""
    length = max(sum(map(len, row)) for row in rows)
    found = {"input_ids": [], "position_ids": [], "labels": []}
    for row in rows:
        last = row[-1] + [1] * (length - sum(map(len, row)))
        for text, n in zip((*row[:-1], last), map(len, row), strict=True):
            labels = [-100] + text[1:n] + [-100] * (len(text) - n)
            for name, x in zip(found, (text, range(len(text)), labels), strict=True):
                found[name].extend(x)
    return {name: torch.tensor(x).view(len(rows), length) for name, x in found.items()}


def check_packed(family, how):
    """The first process has two packed rows and the second has one; the truth has documents alone.

    A layer of the student adds nothing yet. Before, both processes have had two rows, so that the
    second one alone sees a new kind of batch: it must not run a sharded model by itself.
    """
    student = build(family, layers=2).double()
    with torch.no_grad():
        for name, p in student.named_parameters():
            if name.endswith(("layers.1.self_attn.o_proj.weight", "h.1.attn.c_proj.weight")):
                p.zero_()
    teacher, twin = build(family, layers=1, seed=3).double(), copy.deepcopy(student)
    labels = sum(len(text) - 1 for row in TEXTS for text in row)
    for row in TEXTS:
        for text in row:
            ids = torch.tensor([text])
            alone = {"input_ids": ids, "labels": ids}
            inherited_loss(twin, teacher, alone, num_items=labels).backward()
    wrapped = wrap(student, how)
    teacher = sharded(teacher) if how == "fsdp2" else teacher
    inherited_loss(wrapped, teacher, packed(TEXTS[:2]), num_items=labels)
    mine = packed(TEXTS[:2] if dist.get_rank() == 0 else TEXTS[2:])
    loss = inherited_loss(wrapped, teacher, mine, num_items=labels)
    (loss * dist.get_world_size()).backward()
    for (name, p), q in zip(student.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q[1].grad, rtol=1e-7, atol=1e-11, msg=name)


def llama(seed, layers):
    """With heads, and a vocabulary of an odd number of tokens, for two processes."""
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 24, "num_hidden_layers": layers, "vocab_size": VOCAB + 1}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=32, use_cache=False)
    return randomise(transformers.LlamaForCausalLM(config), seed).double()


def tensor_parallel(model, directory):
    if dist.get_rank() == 0:
        model.save_pretrained(directory)
    dist.barrier()
    how = {"tp_plan": "auto", "dtype": torch.float64}
    return transformers.LlamaForCausalLM.from_pretrained(directory, **how)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_tensor_parallel(folder):
    """The loop of the examples, and sub-models, on the same batches in both processes."""
    twin, teacher = llama(0, 4), llama(3, 2)
    student = tensor_parallel(twin, folder / "student")
    parallel_teacher = tensor_parallel(teacher, folder / "teacher")
    assert isinstance(student.lm_head.weight, DTensor)
    for depth in (2, 4):
        losses = []
        for model, beside in ((student, parallel_teacher), (twin, teacher)):
            with sub_model(layer_stacks(model), ModelPart(depth, 1)):
                losses.append(inherited_loss(model, beside, batch(seed=depth)))
            losses[-1].backward()
        torch.testing.assert_close(whole(losses[0].detach()), losses[1].detach())
        for (name, p), q in zip(student.named_parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-7, atol=1e-11, msg=name)
        student.zero_grad(), twin.zero_grad()
    schedule, steps = InheritanceSchedule(alpha=0.8, end_step=3), []
    steps = [[batch(seed=2 * i), batch(seed=2 * i + 1)] for i in range(4)]
    losses = pytorch_loop.train(student, parallel_teacher, steps, schedule, 1e-2)
    expected = pytorch_loop.train(twin, teacher, steps, schedule, 1e-2)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    for (name, p), q in zip(student.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, rtol=1e-7, atol=1e-9, msg=name)


def check_expert_parallel(folder):
    """Each process holds half of the experts, and both have the same batch."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"output_router_logits": True, "router_aux_loss_coef": 0.3, "use_cache": False}
    config = transformers.Qwen3MoeConfig(**sizes, num_hidden_layers=2, vocab_size=VOCAB)
    twin = randomise(transformers.Qwen3MoeForCausalLM(config), 1)
    teacher = build("llama", layers=2, seed=3)
    if dist.get_rank() == 0:
        twin.save_pretrained(folder / "mixture")
    dist.barrier()
    how = DistributedConfig(tp_size=2, ep_size=2)
    cls = transformers.Qwen3MoeForCausalLM
    student = cls.from_pretrained(folder / "mixture", distributed_config=how)
    experts = student.model.layers[0].mlp.experts.down_proj
    assert len(experts.to_local()) == 2 and len(experts) == 4
    losses = [
        inherited_loss(model.train(), teacher, batch(), vocab_size=VOCAB)
        for model in (student, twin)
    ]
    sum(losses).backward()
    torch.testing.assert_close(*losses)
    for (name, p), q in zip(student.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-3, atol=1e-6, msg=name)


def check_balancing():
    """Every process moves the biases by the tokens of all of them."""
    whole, found = batch(6), []
    mine = {name: x[3 * dist.get_rank() :][:3] for name, x in whole.items()}
    for rows in (mine, whole):
        model, balancing = build("deepseek", layers=2), ExpertBalancing()
        balancing.watch(model)
        model.train()(input_ids=rows["input_ids"])
        balancing.update()
        found.append(model.model.layers[1].mlp.gate.e_score_correction_bias)
    assert found[0].any() and torch.equal(*found)


def main(folder):
    print("balancing", file=sys.stderr)
    check_balancing()
    print("tensor parallel", file=sys.stderr)
    check_tensor_parallel(folder)
    print("expert parallel", file=sys.stderr)
    check_expert_parallel(folder)
    for how in ("ddp", "fsdp2", "accelerate"):
        for family in ("bert", "gpt2"):
            # shown if the check fails
            print(how, family, file=sys.stderr)
            check(family, how)
        for family in ("llama", "gpt2"):
            print("packed rows", how, family, file=sys.stderr)
            check_packed(family, how)
