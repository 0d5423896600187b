"""Tensor parallelism x FSDP2, with the fused loss: `torchrun --nproc_per_node 4 mesh_2d.py`.

Each process holds a part of the vocabulary, and never all logits.
"""

import os

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import growkern

PLAN = {f"self_attn.{name}_proj": ColwiseParallel for name in "qkv"}
PLAN |= {"mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel}
PLAN |= {"self_attn.o_proj": RowwiseParallel, "mlp.down_proj": RowwiseParallel}


class Taught(nn.Module):
    """A causal model whose forward is the loss, so that FSDP2 gathers the head for it."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, backend: str | None = None) -> None:
        super().__init__()
        self.model, self.tensor = model, mesh["tensor"]
        # the embedding stays whole: with a split one, compiled blocks fail in PyTorch 2.13
        parallelize_module(model, self.tensor, {"lm_head": ColwiseParallel()})
        for layer in model.model.layers:
            parallelize_module(layer, self.tensor, {name: how() for name, how in PLAN.items()})
            if backend:
                layer.compile(backend=backend)
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(self, mesh=mesh["data"])

    def forward(self, tokens: torch.Tensor, teacher: nn.Module, items: int) -> torch.Tensor:
        """The part of the loss of these rows in a batch with so many labels."""
        hidden = self.model.model(input_ids=tokens).last_hidden_state
        with torch.no_grad():
            known = teacher.model(input_ids=tokens).last_hidden_state
        head = self.model.lm_head.weight.to_local()
        start = self.tensor.get_local_rank() * len(head)
        return growkern.linear_kl_mlm_loss(
            *(hidden[:, :-1].flatten(0, 1), head, known[:, :-1].flatten(0, 1)),
            *(teacher.lm_head.weight[start : start + len(head)], tokens[:, 1:].flatten()),
            **{"group": self.tensor.get_group(), "vocab_start": start, "num_items": items},
            vocab_size=len(teacher.lm_head.weight),
        )


def main() -> None:
    dist.init_process_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    small = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    small.eval().requires_grad_(False)
    large = Taught(growkern.grow(small, hidden_size=64, num_hidden_layers=4), mesh)
    optimizer, losses = torch.optim.AdamW(large.parameters(), lr=1e-2), []
    for _ in range(20):
        # text that counts upwards; the processes of a tensor group have the same rows
        rows = torch.randint(64, (16, 1)).chunk(2)[mesh["data"].get_local_rank()]
        tokens = (rows + torch.arange(16)) % 64
        # FSDP2 averages gradients over the data axis
        loss = 2 * large(tokens, small, items=16 * 15)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in 20 steps", flush=True)
    # gloo's threads now and then abort a process that leaves in the ordinary way
    os._exit(0)


if __name__ == "__main__":
    main()
