"""Grows a model in place on shards (FSDP2), and trains it beside the model that it grew from.

`torchrun --nproc_per_node 2 examples/fsdp2.py`. No process ever holds the whole large model: it is
built without memory, sharded block by block, and each process computes its own part.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import transformers

import growkern


def main() -> None:
    # the same source in all processes; usually it is a checkpoint directory
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    small = transformers.GPT2LMHeadModel(config)

    target = growkern.plan(small, n_embd=64, n_head=4, n_layer=4).target_config
    with torch.device("meta"):
        large = transformers.GPT2LMHeadModel(target)
    growkern.shard(large, growkern.DistributedOptions(sharding="fsdp"))
    growkern.grow_into(large, small)

    # text that counts upwards from a random number
    tokens = (torch.randint(64, (640, 1)) + torch.arange(16)) % 64
    rows = [{"input_ids": x, "labels": x} for x in tokens]
    where = {"use_cpu": not torch.accelerator.is_available(), "save_strategy": "no"}
    trainer = growkern.TwoStageTrainer(
        large,
        transformers.TrainingArguments(
            tempfile.mkdtemp(),
            max_steps=40,
            per_device_train_batch_size=16 // dist.get_world_size(),
            learning_rate=1e-2,
            **where,
        ),
        two_stage=growkern.TwoStageConfig(layers_per_block=2, stage1_steps=10),
        inheritance=growkern.InheritanceSchedule(rate=0.5, end_step=20),
        teacher=growkern.shard(small, growkern.DistributedOptions(sharding="fsdp")),
        train_dataset=rows,
        eval_dataset=rows[:64],
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"loss {before:.2f} -> {after:.2f} in {trainer.state.global_step} steps", flush=True)
    # gloo's threads now and then abort a process that leaves in the ordinary way
    os._exit(0)


if __name__ == "__main__":
    main()
