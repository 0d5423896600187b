"""Sharded models on a group of one rank: what is the same on any number of ranks."""

import functools
import warnings
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import growkern
from growkern import DistributedOptions, GrowthError, TwoStageConfig, TwoStageTrainer, shard
from growkern.growth.models import local_tensor
from growkern.train.distributed.shard import (
    check_replicas,
    join_processes,
    leave_processes,
    make_mesh,
)
from growkern.train.distributed.shards import (
    all_finite,
    largest_entry,
    load_weights,
    weight_parts,
    write_parts,
)
from growkern.train.rules import ON_SHARDS
from testbed.parity import Case, differences, found_by, trainer_for, weights_of
from testbed.tiny import Batches, arguments, build
from tests.shared import walks


def sharded(mesh, model=None, **options):
    model = build("bert", layers=2, tied=True) if model is None else model
    return shard(model, DistributedOptions(**{"sharding": "fsdp", **options}), mesh)


def test_a_trainer_leaves_shards(mesh, tmp_path):
    """The probes at its start run the model, which gathers the root."""
    model = sharded(mesh)
    weights = weights_of(model)
    trainer = TwoStageTrainer(model, arguments(tmp_path, use_cpu=True))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    held = {id(p) for group in trainer.create_optimizer().param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    for name, weight in weights_of(model).items():
        assert torch.equal(weight, weights[name])


@pytest.mark.parametrize("part", ["root", "block"])
def test_parameters_that_stay_gathered_after_backward(mesh, tmp_path, part):
    """Norms, clipping and the optimizer see shards, also with accumulation and through stage 1."""
    runs = {}
    for name in ("freed", "kept"):
        model = sharded(mesh, build("llama", layers=2, tied=True).double())
        if name == "kept":
            holder = model if part == "root" else model.model.layers[0]
            holder.set_reshard_after_backward(False, recurse=part == "root")
        args = arguments(
            tmp_path, use_cpu=True, max_steps=4, gradient_accumulation_steps=2, max_grad_norm=0.1
        )
        trainer = TwoStageTrainer(
            model, args, two_stage=TwoStageConfig(1, 2, seed=2), train_dataset=Batches(16)
        )
        trainer.train()
        lines = [line for line in trainer.state.log_history if "grad_norm" in line]
        runs[name] = weights_of(model), [(line["loss"], line["grad_norm"]) for line in lines]
    assert runs["kept"][1] == runs["freed"][1]
    for name, weight in runs["freed"][0].items():
        assert torch.equal(weight, runs["kept"][0][name]), name


def test_a_model_that_grows_keeps_the_mesh_of_the_user(mesh, tmp_path):
    """Also when it is made again to resume."""
    own = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    args = arguments(
        tmp_path, use_cpu=True, max_steps=2, save_strategy="steps", save_steps=1,
        save_only_model=False,
    )  # fmt: skip

    def train(resume=None):
        trainer = TwoStageTrainer(
            sharded(own, build("llama", layers=1, tied=True)),
            args,
            growth=[growkern.GrowthStep(at_step=1, sizes={"num_hidden_layers": 2})],
            train_dataset=Batches(4),
        )
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.model.config.num_hidden_layers == 2
        assert {p.device_mesh for p in trainer.model.parameters()} == {own}

    train()
    train(str(tmp_path / "checkpoint-2"))


# one with two moments, and one with a state that is not zero at first
SOME = ("adamw_torch", "adagrad")


@pytest.mark.parametrize("optim", ON_SHARDS if walks.times > 1 else SOME)
def test_optimizers_train_shards_and_resume(mesh, tmp_path, optim):
    """As the whole model. The checkpoint of stage 1 lacks the state of blocks that did not run."""
    saving = {"save_strategy": "steps", "save_steps": 1, "save_only_model": False}

    def trainer(model, folder="run"):
        args = arguments(tmp_path / folder, use_cpu=True, max_steps=4, optim=optim, **saving)
        return TwoStageTrainer(
            model, args, two_stage=TwoStageConfig(1, 3, seed=2), train_dataset=Batches(8)
        )

    def model():
        return build("llama", layers=3, tied=True).double()

    whole, parts, resumed = model(), sharded(mesh, model()), sharded(mesh, model())
    trainer(whole, "whole").train()
    trainer(parts).train()
    trainer(resumed).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    for name, weight in weights_of(parts).items():
        torch.testing.assert_close(weight, whole.get_parameter(name), rtol=0, atol=1e-12)
        assert torch.equal(weight, resumed.get_parameter(name).full_tensor()), name


def test_optimizers_of_whole_parameters_are_refused(mesh, tmp_path):
    args = arguments(tmp_path, use_cpu=True, optim="adafactor")
    with pytest.raises(GrowthError, match="optim is 'adafactor', which needs whole parameters"):
        TwoStageTrainer(sharded(mesh), args)
    TwoStageTrainer(build("bert", layers=2), args)


@pytest.mark.parametrize("precision", ["fp32", "pure-bf16"])
def test_half_precision_becomes_float32(mesh, tmp_path, precision):
    model = sharded(mesh, build("bert", layers=2, tied=True).bfloat16())
    args = arguments(tmp_path, use_cpu=True, max_steps=2)
    trainer = TwoStageTrainer(model, args, train_dataset=Batches(4), precision=precision)
    trainer.train()
    expected = torch.bfloat16 if precision == "pure-bf16" else torch.float32
    assert {p.dtype for p in model.parameters()} == {expected}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    state = trainer.optimizer.state_dict()["state"]
    assert {s["exp_avg"].dtype for s in state.values()} == {expected}


def test_checkpointed_blocks_warn_of_nothing():
    """transformers warns of the name that its method once had."""
    model = build("llama", layers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard(model, DistributedOptions(activation_checkpointing=True))
    kept = [block._gradient_checkpointing_func.keywords for block in model.model.layers]
    assert kept == [{"use_reentrant": False}] * 2
    assert all(block.gradient_checkpointing for block in model.model.layers)


def gloo_threads():
    return {path for path in Path("/proc/self/task").glob("*/comm") if "gloo" in path.read_text()}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have names on Linux")
def test_no_thread_of_a_group_outlives_it():
    """One that frees a tensor while Python exits aborts the process."""
    before = gloo_threads()
    join_processes("cpu")
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.itself = [model]
    del model
    assert gloo_threads() - before
    leave_processes()
    assert not gloo_threads() - before


def test_numbers_of_all_ranks(mesh):
    model = sharded(mesh)
    assert largest_entry(model) == max(float(w.abs().max()) for w in weights_of(model).values())
    assert all_finite(model)
    local_tensor(next(model.parameters()))[0] = float("nan")
    assert not all_finite(model)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tensor_parallel": 2}, "tensor parallelism is not supported"),
        ({"replicas": 2}, 'replicas needs sharding = "fsdp"'),
        ({"sharding": "fsdp", "replicas": 0}, "must be positive"),
        ({"sharding": "zero"}, "allowed: ddp, fsdp"),
    ],
)
def test_options_that_are_refused(options, match):
    with pytest.raises(GrowthError, match=match):
        DistributedOptions(**options)


def test_models_that_are_refused(mesh):
    with pytest.raises(GrowthError, match="sharded already"):
        sharded(mesh, sharded(mesh))
    with pytest.raises(GrowthError, match=r"replicas is 3, .* is 4: .* one of 1, 2, 4,"):
        check_replicas(3, 4)
    with pytest.raises(GrowthError, match="the number of processes is 1:"):
        make_mesh("cpu", 2)
    model = build("bert", layers=1)
    model.peft_config = {}
    with pytest.raises(GrowthError, match=r"adapters of PEFT.* merge_and_unload"):
        sharded(mesh, model)


@pytest.mark.parametrize("part", ["the model", "bert.encoder.layer.1"])
def test_gradients_that_are_not_averaged_are_refused(mesh, tmp_path, part):
    """The trainer scales the loss by the number of processes, and FSDP2 divides by it."""
    model = sharded(mesh)
    holder = model if part == "the model" else model.get_submodule(part)
    holder.set_gradient_divide_factor(4.0)
    with pytest.raises(GrowthError, match=rf"divide_factor\(4.0\) was called on {part}.*leave the"):
        TwoStageTrainer(model, arguments(tmp_path, use_cpu=True))
    holder.set_gradient_divide_factor(1.0)  # the mean over the one process
    TwoStageTrainer(model, arguments(tmp_path, use_cpu=True))


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"cpu_offload": True}, 1e-12),
        ({"compile_blocks": True}, 1e-6),
        ({"compile_blocks": True, "sharding": "ddp"}, 1e-6),
    ],
)
def test_options_that_change_no_number(mesh, tmp_path, options, tolerance, monkeypatch):
    """Through both stages. Blocks are compiled into graphs, but not into machine code."""
    eager = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", eager)
    case, before = Case("llama", teacher="whole"), compiled_frames()
    expected = found_by(trainer_for(tmp_path, case))
    trainer = trainer_for(tmp_path, case)
    model = build("llama", layers=4, tied=True).double()
    twin = TwoStageTrainer(
        sharded(mesh, model, **options), trainer.args, two_stage=trainer.two_stage,
        inheritance=trainer.objective.inheritance, teacher=trainer.objective.teachers.models[0],
        train_dataset=trainer.train_dataset, eval_dataset=trainer.eval_dataset,
    )  # fmt: skip
    apart = differences(found_by(twin), expected)
    assert apart.pop("Trainer's loss") <= 1e-6
    assert max(apart.values()) <= tolerance
    depths = {line["depth"] for line in twin.state.log_history if "depth" in line}
    assert len(depths) > 1
    assert (compiled_frames() > before) == options.get("compile_blocks", False)


def compiled_frames():
    """How often Dynamo has compiled something."""
    return sum(counters["frames"].values())


# ----------------------------------------------------------------- checkpoints


def test_another_model_is_refused(mesh, tmp_path):
    write_parts(weight_parts(sharded(mesh)), tmp_path)
    wider = sharded(mesh, build("bert", layers=2, width=32, tied=True))
    with pytest.raises(GrowthError, match="cannot be loaded"):
        load_weights(wider, tmp_path)
    with pytest.raises(GrowthError, match="not the checkpoint of a sharded model"):
        load_weights(wider, tmp_path / "elsewhere")
