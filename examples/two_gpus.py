"""Checks two GPUs: grows, trains and saves on shards (FSDP2), and then the same in one process."""

# torchrun --nproc_per_node 2 examples/two_gpus.py
import os
import tempfile

import torch
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import growkern

if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    small = transformers.GPT2LMHeadModel(config).eval()
    whole = growkern.grow(small, n_embd=64, n_head=4, n_layer=4)
    large = transformers.GPT2LMHeadModel(whole.config)
    growkern.shard(large, growkern.DistributedOptions(sharding="fsdp"))
    growkern.grow_into(large, small)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    small, whole = small.to(large.device), whole.to(large.device)
    for model, parts in ((large, ranks), (whole, 1)):
        optimizer = torch.optim.SGD(model.eval().parameters(), lr=0.3)
        for step in range(20):
            rows = (torch.arange(16)[:, None] * 4 + torch.arange(16) + step) % 64
            tokens = rows.tensor_split(parts)[rank % parts].to(large.device)
            batch = {"input_ids": tokens, "labels": tokens}
            growkern.inherited_loss(model, small, batch, alpha=0.5).backward()
            optimizer.step()
            optimizer.zero_grad()
    saved = get_model_state_dict(large, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        whole.cpu().save_pretrained(folder := tempfile.mkdtemp(), state_dict=saved)
        read = dict(type(whole).from_pretrained(folder).named_parameters())
        off = max((read[name] - x).abs().max().item() for name, x in whole.named_parameters())
        print(f"{'right' if off < 1e-4 else 'WRONG'}: weights differ by {off:.0e}", flush=True)
    os._exit(0)
