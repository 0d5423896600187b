"""Optimizer cases for the ranks of test_grow_into: grow the state in parts, and compare."""

import copy

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import growkern
from testbed.models import GPT2, random_model
from tests.growth.watch import Watch

STEPS = 2
# where state comes from; how a file is read does not depend on the mesh, so two ranks are enough
KINDS = {
    2: ("in memory", "distributed checkpoint", "file"),
    4: ("in memory", "distributed checkpoint"),
}


def loss_of(model, step):
    rng = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, 50, (2, 9), generator=rng)
    result = model(input_ids=tokens)
    return next(v for v in result.values() if v.ndim == 3).log_softmax(-1).square().mean()


def train(model, optimizer):
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clipped_steps(model, optimizer):
    """The norms before clipping, of as many steps as `train` takes."""
    norms = []
    for step in range(STEPS):
        loss_of(model, step).backward()
        norms.append(growkern.growth_clip_norm_(model, 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def sharded_truth(whole, state, key, shard):
    """One moment of all parameters as PyTorch shards it: name -> this rank's part."""
    model = copy.deepcopy(whole)
    for name, p in model.named_parameters():
        # the loss of this test sees no pooler: it has no state
        p.data = state[name][key].clone() if name in state else torch.zeros_like(p)
    return {name: local(p) for name, p in shard(model).named_parameters()}


def run_state(case, shard_source, shard, directory, moments):
    """State that ranks saved or hold, grown into a sharded model's optimizer.

    `shard_source` and `shard` shard a model.
    """
    class_name, sizes, config, how = case
    source = random_model(class_name, sizes, dtype=torch.float32, **config)
    whole = growkern.grow(source, **how)
    plan = whole.growth_plan
    small = shard_source(copy.deepcopy(source))
    trained = torch.optim.AdamW(small.parameters(), lr=1e-3, amsgrad=True)
    train(small, trained)
    sharded = get_optimizer_state_dict(small, trained)
    options = StateDictOptions(full_state_dict=True)
    full = get_optimizer_state_dict(small, trained, options=options)
    expected = growkern.grow_optimizer(full, plan, moments=moments)["state"]
    gathered = growkern.grow_optimizer(sharded, plan, moments=moments)["state"]
    files = directory / f"{class_name}-{moments}"
    checkpoint.save({"model": small.state_dict(), "optim": sharded}, checkpoint_id=files)
    if dist.get_rank() == 0:
        torch.save(full, files / "optimizer.pt")
    dist.barrier()
    with torch.device("meta"):
        target = shard(type(whole)(plan.target_config))
    growkern.grow_into(target, source, **{k: how[k] for k in ("method", "depth") if k in how})
    held = max(local(p).nbytes for p in target.parameters())
    found = {"held": held}
    truths = {
        key: sharded_truth(whole, expected, key, shard)
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    }
    places = (sharded, files, files / "optimizer.pt")
    for kind, given in zip(KINDS[dist.get_world_size()], places, strict=False):
        optimizer = torch.optim.AdamW(target.parameters(), lr=0.5, amsgrad=True)
        with Watch() as watch:
            growkern.grow_optimizer_into(target, optimizer, given, moments=moments)
        wrong = []
        for key, truth in truths.items():
            for name, p in target.named_parameters():
                entry = optimizer.state.get(p, {})
                same = bool(entry) == (name in expected)
                if entry and same:
                    same = torch.equal(local(entry[key]), truth[name])
                    same &= entry["step"] == expected[name]["step"]
                    same &= torch.equal(expected[name][key], gathered[name][key])
                    same &= type(entry[key]) is type(p.data)
                if not same:
                    wrong.append(f"{name} {key}")
        found[kind] = {
            "wrong": wrong,
            "moving": sum(bool(local(e["exp_avg"]).any()) for e in optimizer.state.values()),
            "collectives": watch.collectives,
            "largest": watch.largest,
            "lr": optimizer.param_groups[0]["lr"],
        }
    return found


def run_steps(shard, directory):
    """GrowthAdamW with grown state, on parts of parameters and on whole ones: the same steps."""
    source = random_model("GPT2LMHeadModel", GPT2, dtype=torch.float32)
    trained = torch.optim.AdamW(source.named_parameters(), lr=1e-3)
    train(source, trained)
    whole = growkern.grow(source, n_embd=20, n_layer=3)
    plan = whole.growth_plan
    sharded, norms = shard(copy.deepcopy(whole)), []
    for model in (whole, sharded):
        optimizer = growkern.GrowthAdamW(
            model.named_parameters(), plan, lr=1e-3, eps=1e-3, rewarm_steps=4
        )
        if model is whole:
            state = growkern.grow_optimizer(trained.state_dict(), plan)
            state["param_groups"] = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict(state)
        else:
            growkern.grow_optimizer_into(model, optimizer, trained.state_dict(), plan=plan)
        norms.append(clipped_steps(model, optimizer))
    expected = shard(whole)
    sharded.reshard()
    pairs = zip(expected.parameters(), sharded.parameters(), strict=True)
    differences = [(local(p) - local(q)).abs() for p, q in pairs]
    return {"difference": max(d.max().item() for d in differences if d.numel()), "norms": norms}
