"""TP x FSDP2 x EP with the fused loss: `torchrun --nproc_per_node 4 mesh_2d.py SMALL LARGE`.

SMALL is a Qwen3, and LARGE a Qwen3-MoE grown from it. No process holds all experts or logits.
"""

import os
import sys

import torch
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import growkern


class Taught(Qwen3MoeForCausalLM):
    """A model whose forward is the loss of its rows, so that FSDP2 gathers the head for it."""

    def forward(self, tokens, teacher, items):
        hidden, known = (x.model(tokens).last_hidden_state[:, :-1] for x in (self, teacher))
        inputs = hidden, self.lm_head.weight, known, teacher.lm_head.weight
        return growkern.linear_kl_mlm_loss(*inputs, labels=tokens[:, 1:], num_items=items)


if __name__ == "__main__":
    # of 4 processes, 2 share the rows, and 2 share a copy of the experts
    mesh = DistributedConfig(tp_size=2, fsdp_size=2, ep_size=2, tp_plan={"lm_head": "colwise"})
    large = Taught.from_pretrained(sys.argv[2], distributed_config=mesh)
    small = Qwen3ForCausalLM.from_pretrained(sys.argv[1]).requires_grad_(False).to(large.device)
    optimizer, rank = torch.optim.AdamW(large.parameters(), lr=1e-2), int(os.environ["RANK"])
    for step in range(20):
        # text that counts upwards; FSDP2 averages gradients over the 2 halves of the rows
        rows = torch.arange(step, 64 + step, 4).chunk(2)[rank // 2][:, None] + torch.arange(16)
        loss = 2 * large(rows.to(large.device) % 64, small, items=16 * 15)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.2f}", flush=True)
    os._exit(0)  # gloo's threads now and then abort a process that leaves in the ordinary way
