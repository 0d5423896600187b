"""The settings that do not go together: one table for run files and Python.

A rule names a record, such as section [data] or all that a trainer is given, and reads its fields.
Whoever makes such a record checks it once, with `check`. A new rule is an entry here, or in
`file_rules.py` if all of its settings stand in a run file.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from growkern.errors import GrowthError
from growkern.train.file_rules import OF_FILES, Rule


def check(of: str, record: Any = None, **facts: Any) -> None:
    """Raise a GrowthError for the first rule that a record breaks; `facts` replace a record."""
    x = SimpleNamespace(**facts) if record is None else record
    for rule in RULES:
        if rule.of == of and (name := rule.broken(x)):
            raise GrowthError(f"{rule.why}: {rule.fix}".format(x=x, name=name))


NOT_SHARDED = "sharded training by accelerate (FSDP, DeepSpeed, Megatron) is not supported"
SHARD = (
    "shard the model with growkern.shard or fully_shard before, or give [distributed] in a run file"
)
# arguments that read logits
OF_LOGITS = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")
# they treat every number on its own, so they train a part of a tensor as they train the whole
ON_SHARDS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
ADAMW = ON_SHARDS[:2]  # of PyTorch
ORDERS = ("random", "sequential")

RULES = (
    *OF_FILES,
    Rule(
        "checkpoint",
        lambda x: x.positions is not None and x.length > x.positions,
        "the sequence length (data.sequence_length, --sequence-length) is {x.length}, but "
        "{x.directory} has {x.positions} positions",
        "give {x.positions} or less",
    ),
    Rule(
        "checkpoint",
        lambda x: x.ids > x.vocabulary,
        "the tokenizer has {x.ids} ids, but {x.directory} has a vocabulary of {x.vocabulary}",
        "give the tokenizer of the model",
    ),
    Rule(
        "trained model",
        lambda x: x.two_stacks and x.cached,
        "a teacher known by its likeliest tokens has no decoder's predictions, which a model of an "
        "encoder and a decoder needs",
        "give the paths of teachers",
    ),
    Rule(
        "block",
        lambda x: x.two_stage is not None and x.two_stage.layers_per_block > x.layers,
        "layers_per_block is {x.two_stage.layers_per_block}, but the model has {x.layers} layers",
        "give {x.layers} or less",
    ),
    Rule(
        "arguments' optimizer",
        lambda x: x.sharded and x.optim not in ON_SHARDS,
        "optim is {x.optim!r}, which needs whole parameters or was not tested with parts of them",
        f"use {', '.join(ON_SHARDS)}, or sharding = 'ddp'",
    ),
    Rule(
        "arguments' optimizer",
        lambda x: x.other and x.choice in ("growth-adamw", "muon"),
        "optimizer is {x.choice!r}, but {x.other}",
        "give one of them",
    ),
    Rule(
        "model's optimizer",
        lambda x: x.choice == "muon" and not x.stacks,
        "optimizer is 'muon', but {x.model} has no list of transformer blocks, whose matrices Muon "
        "would train",
        "use 'auto'",
    ),
    Rule(
        "model's optimizer",
        lambda x: x.choice == "growth-adamw" and not x.known and x.in_parts,
        "optimizer is 'growth-adamw', whose factors belong to one growth, but the parts of "
        "{x.model} were grown one by one",
        "set optimizer to 'adamw' or 'muon'",
    ),
    Rule(
        "model's optimizer",
        lambda x: x.choice == "growth-adamw" and not x.known,
        "optimizer is 'growth-adamw', but the model was not grown",
        "load it from the directory that growkern wrote, with its lineage.json, or set optimizer "
        "to 'adamw'",
    ),
    Rule(
        "model's optimizer",
        lambda x: x.rewarms and not x.grown,
        "optimizer.rewarm_steps is for a model that was grown, and trains with GrowthAdamW",
        "leave it out",
    ),
    Rule(
        "stage 1",
        lambda x: x.stages.stage1_steps > x.steps,
        "two_stage.stage1_epochs is {x.epochs}, which makes {x.stages.stage1_steps} steps of "
        "{x.per_epoch} per epoch",
        "it must not be more than the {x.steps} steps of the run",
    ),
    # --------------------------------------------------------------- teachers
    Rule(
        "cached",
        lambda x: x.rows.facts.misfit(x.schedule),
        "{x.rows.name} was made with {name}",
        "change the inheritance, or {x.rows.remedy}",
    ),
    Rule(
        "kinds",
        lambda x: x.stacks[0] != x.stacks[1],
        "the teacher ({x.teacher}) and the model ({x.model}) differ, as one of them has an encoder "
        "beside its decoder",
        "choose a teacher with the model's objective",
    ),
    Rule(
        "starts",
        lambda x: x.ids[0] != x.ids[1],
        "the teacher ({x.teacher}) starts a decoder's text and fills gaps with the tokens "
        "{x.ids[0]}, the model with {x.ids[1]}",
        "use a loop of your own with inherited_loss",
    ),
    # -------------------------------------------------- arguments of a trainer
    Rule(
        "arguments",
        lambda x: x.args.torch_compile,
        "torch_compile=True is not supported, as it compiles one graph per depth and fails on the "
        "fused loss",
        "compile the blocks instead, with `for block in stack: block.compile()` for each stack of "
        "growkern.train.model.sub_model.layer_stacks(model)",
    ),
    Rule(
        "arguments",
        lambda x: x.args.n_gpu > 1,
        "one process can use one device only",
        "start one process per device with torchrun --nproc_per_node=N",
    ),
    Rule(
        "arguments",
        lambda x: x.args.fsdp or x.args.deepspeed,
        NOT_SHARDED,
        f"leave fsdp and deepspeed unset, and {SHARD}",
    ),
    Rule(
        "arguments",
        lambda x: x.started > x.args.world_size,
        "{x.started} processes were started, but each would train alone",
        "on machines without an accelerator set use_cpu=True",
    ),
    Rule(
        "arguments",
        lambda x: x.args.world_size > 1 and not x.args.average_tokens_across_devices,
        "average_tokens_across_devices=False gives the labels of small batches more weight",
        "set it to True",
    ),
    Rule(
        "arguments",
        lambda x: x.args.world_size > 1 and x.args.ddp_find_unused_parameters is False,
        "ddp_find_unused_parameters=False would wait for ever for layers that do not run in "
        "stage 1",
        "leave it unset",
    ),
    Rule(
        "checkpointing",
        lambda x: x.reentrant,
        "{x.where}gradient checkpointing with use_reentrant=True, which loses the gradients of the "
        "lowest trained layer",
        "set gradient_checkpointing_kwargs={{'use_reentrant': False}}",
    ),
    Rule(
        "arguments",
        lambda x: x.args.bf16_full_eval or x.args.fp16_full_eval,
        "bf16_full_eval and fp16_full_eval round the weights in training to half precision",
        "unset them, and set precision='bf16' for a faster evaluation",
    ),
    Rule(
        "arguments",
        lambda x: x.options.get("model_init"),
        "model_init cannot be used, because the teacher and the FLOPs belong to one model",
        "pass model=model_init() instead",
    ),
    Rule(
        "arguments",
        lambda x: x.args.world_size > 1 and not x.args.accelerator_config.even_batches,
        "accelerator_config even_batches=False gives some processes a batch more, for which the "
        "others would wait for ever",
        "leave it True. Rows that fill up the last batch do not count",
    ),
    Rule(
        "arguments",
        lambda x: x.args.train_sampling_strategy not in ORDERS,
        "train_sampling_strategy={x.args.train_sampling_strategy!r} draws another order in each "
        "process and after a restart, so rows would be repeated and left out",
        'use "random" or "sequential"',
    ),
    Rule(
        "arguments",
        lambda x: not x.args.accelerator_config.use_seedable_sampler,
        "accelerator_config use_seedable_sampler=False draws another order after a restart, so "
        "rows would be repeated and left out",
        "leave it True",
    ),
    Rule(
        "arguments",
        lambda x: next((name for name in OF_LOGITS if x.options.get(name) is not None), None),
        "{name} cannot be used, as the loss is fused with the output projection and there are no "
        "logits",
        "give it to a plain transformers.Trainer, with the trained model",
    ),
    Rule(
        "sources",
        lambda x: x.sent,
        "the first process sends its batches to the others, which cannot carry the sources of "
        "teachers",
        "set dispatch_batches=False in accelerator_config",
    ),
    Rule(
        "accelerator",
        lambda x: x.kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"),
        f"accelerate was set to {{x.kind}}, and {NOT_SHARDED}",
        SHARD,
    ),
    Rule(
        "accelerator",
        lambda x: x.precision == "fp8",
        "accelerate was set to fp8, which the fused loss does not use",
        "use bf16",
    ),
    Rule(
        "accelerator",
        lambda x: x.compiler not in (None, "NO", "no"),
        "accelerate was set to compile the whole model, which fails on the fused loss",
        "set dynamo_backend to 'no'",
    ),
    Rule(
        "precision",
        lambda x: x.wanted is not None and x.of_args not in (None, x.wanted),
        "precision is {x.wanted!r}{x.default}, but the training arguments set {x.of_args}=True",
        "give one of the two",
    ),
    Rule(
        "precision",
        lambda x: x.wanted is not None and x.of_launcher not in (None, x.wanted),
        "precision is {x.wanted!r}{x.default}, but the environment variable {x.variable} is "
        "{x.of_launcher!r}",
        "unset it{x.instead}",
    ),
    # -------------------------------------------------------- growth in a run
    Rule(
        "growth in a run",
        lambda x: x.args.max_steps <= 0,
        "growth inside a run needs the number of steps",
        "give max_steps",
    ),
    Rule(
        "growth in a run",
        lambda x: not x.growth[0].at_step,
        "a growth at step 0 is not one inside a run",
        "grow the model with growkern.grow first, or use a run file",
    ),
    Rule(
        "growth in a run",
        lambda x: x.frozen,
        "{x.frozen} is frozen, and all parameters of the larger model train",
        "leave it trainable, or grow the model between two trainings",
    ),
    Rule(
        "growth in a run",
        lambda x: any(part is not None for part in x.options.get("optimizers") or ()),
        "the optimizer that was passed holds the small model's parameters",
        "set args.optim",
    ),
    Rule(
        "growth in a run",
        lambda x: x.args.load_best_model_at_end,
        "load_best_model_at_end may find a checkpoint of another size",
        "leave it out",
    ),
    Rule(
        "growth in a run",
        lambda x: x.args.save_strategy == "no",
        "growth continues from a checkpoint",
        'set save_strategy to "steps"',
    ),
    Rule(
        "growth in a run",
        lambda x: x.args.save_only_model,
        "growth continues from the optimizer's state",
        "leave out save_only_model",
    ),
    Rule(
        "growth in a run",
        lambda x: x.foreign,
        "the model was sharded by fully_shard, and the larger model must be sharded alike",
        "use growkern.shard",
    ),
    Rule(
        "growth in a run",
        lambda x: x.optim not in ADAMW and any(step.grows_moments for step in x.growth),
        "the state of {x.optim} cannot be grown",
        'set moments to "reset" in all growths',
    ),
    Rule(
        "new layers",
        lambda x: x.step.new_layers_steps and not x.added,
        "new_layers_steps needs new layers above the old ones, but {x.before} layers become "
        "{x.after} with depth={x.step.depth!r}",
        "leave it out, or grow num_hidden_layers with depth='stack'",
    ),
    Rule(
        "schedule",
        lambda x: not x.by_step,
        "rewarm_steps and rate_factor need a schedule that depends on the step alone, and {x.kind} "
        "does not",
        "use linear, cosine or constant",
    ),
)
