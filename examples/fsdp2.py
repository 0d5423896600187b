"""Grows a model into shards (FSDP2) from a distributed checkpoint, and trains it in a plain loop.

`torchrun --nproc_per_node 2 examples/fsdp2.py`. No process ever holds the whole large model: it is
built without memory, sharded block by block, and each process computes its own part.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers

import growkern

SHARDED = growkern.DistributedOptions(sharding="fsdp")


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0, "architectures": ["GPT2LMHeadModel"]}
    config = transformers.GPT2Config(**sizes)
    small = growkern.shard(transformers.GPT2LMHeadModel(config), SHARDED)

    # a checkpoint as pretraining leaves it, in a folder that all processes see
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    source = f"{folder[0]}/small"
    if dist.get_rank() == 0:
        config.save_pretrained(source)
    dcp.save(small.state_dict(), checkpoint_id=source)

    target = growkern.plan(source, n_embd=64, n_head=4, n_layer=4).target_config
    with torch.device("meta"):
        large = transformers.GPT2LMHeadModel(target)
    growkern.shard(large, SHARDED)  # or fully_shard calls of your own
    growkern.grow_into(large, source)

    # with steps that fit the copies
    plan = growkern.growth_plan_of(large)
    optimizer = growkern.GrowthAdamW(large.named_parameters(), plan, lr=1e-2)
    stages = growkern.TwoStageConfig(layers_per_block=2, stage1_steps=10)
    schedule = growkern.InheritanceSchedule(alpha=0.5, end_step=20)
    ranks, losses = dist.get_world_size(), []
    for step in range(40):
        # text that counts upwards from a random number; each process has its own rows
        rows = torch.randint(64, (16, 1)).tensor_split(ranks)[dist.get_rank()]
        tokens = ((rows + torch.arange(16)) % 64).to(small.device)
        batch = {"input_ids": tokens, "labels": tokens}
        # 16 rows of 15 labels in all processes, and FSDP2 averages their gradients
        options = {"alpha": schedule.alpha_at(step), "num_items": 16 * 15}
        with stages.sub_model(large, step):
            loss = growkern.inherited_loss(large, small, batch, **options)
        (ranks * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(growkern.inherited_loss(large, None, batch).item())

    dcp.save(large.state_dict(), checkpoint_id=f"{folder[0]}/large")
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in 40 steps", flush=True)
    # gloo's threads now and then abort a process that leaves in the ordinary way
    os._exit(0)


if __name__ == "__main__":
    main()
