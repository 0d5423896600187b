"""TP x FSDP2 x EP with the fused loss: `torchrun --nproc_per_node 4 mesh_2d.py NEW_DIRECTORY`.

Each process holds a part of the experts and of the vocabulary, and never all logits.
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import growkern


class Taught(Qwen3MoeForCausalLM):
    """A causal model whose forward is the loss, so that FSDP2 gathers the head for it."""

    def forward(self, tokens, teacher, items):
        """The part of the loss of these rows in a batch with so many labels."""
        hidden, known = (x.model(tokens).last_hidden_state[:, :-1] for x in (self, teacher))
        heads, labels = (self.lm_head.weight, teacher.lm_head.weight), tokens[:, 1:]
        return growkern.linear_kl_mlm_loss(
            hidden, heads[0], known, heads[1], labels, num_items=items
        )


def main():
    dist.init_process_group()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    config = Qwen3Config(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)
    small = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    if dist.get_rank() == 0:
        experts = {"num_experts": 4, "num_experts_per_tok": 2}
        growkern.grow(small, to="qwen3_moe", **experts).save_pretrained(sys.argv[1])
    dist.barrier()
    # of 4 processes, 2 share the rows, and 2 share a copy of the experts
    how = DistributedConfig(tp_size=2, fsdp_size=2, ep_size=2, tp_plan={"lm_head": "colwise"})
    large = Taught.from_pretrained(sys.argv[1], distributed_config=how)
    optimizer, losses = torch.optim.AdamW(large.parameters(), lr=1e-2), []
    for _ in range(20):
        # text that counts upwards; FSDP2 averages gradients over the 2 halves of the rows
        rows = torch.randint(64, (16, 1)).chunk(2)[dist.get_rank() // 2] + torch.arange(16)
        losses.append(2 * large(rows % 64, small, items=16 * 15))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {losses[0].item():.2f} -> {losses[-1].item():.2f} in 20 steps", flush=True)
    # gloo's threads now and then abort a process that leaves in the ordinary way
    os._exit(0)


if __name__ == "__main__":
    main()
