"""TP x FSDP2 x EP with the fused loss: `torchrun --nproc_per_node 4 mesh_2d.py SMALL LARGE`.

SMALL is a Qwen3, and LARGE a Qwen3-MoE grown from it. No process holds all experts or logits.
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import growkern


class Taught(Qwen3MoeForCausalLM):
    """A causal model whose forward is the loss, so that FSDP2 gathers the head for it."""

    def forward(self, tokens, teacher, items):
        """The part of the loss of these rows in a batch with so many labels."""
        hidden, known = (x.model(tokens).last_hidden_state[:, :-1] for x in (self, teacher))
        head, known_head = self.lm_head.weight, teacher.lm_head.weight
        labels = tokens[:, 1:]
        return growkern.linear_kl_mlm_loss(hidden, head, known, known_head, labels, num_items=items)


if __name__ == "__main__":
    # of 4 processes, 2 share the rows, and 2 share a copy of the experts
    mesh = DistributedConfig(tp_size=2, fsdp_size=2, ep_size=2, tp_plan={"lm_head": "colwise"})
    large = Taught.from_pretrained(sys.argv[2], distributed_config=mesh)
    small = Qwen3ForCausalLM.from_pretrained(sys.argv[1]).requires_grad_(False).to(large.device)
    optimizer = torch.optim.AdamW(large.parameters(), lr=1e-2)
    torch.manual_seed(0)
    for step in range(20):
        # text that counts upwards; FSDP2 averages gradients over the 2 halves of the rows
        rows = torch.randint(64, (16, 1)).chunk(2)[dist.get_rank() // 2] + torch.arange(16)
        loss = 2 * large(rows.to(large.device) % 64, small, items=16 * 15)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.2f}", flush=True)
    # gloo's threads now and then abort a process that leaves in the ordinary way
    os._exit(0)
