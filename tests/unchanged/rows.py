"""A call of every public function, and of what stands behind every command.

A row makes the arguments of a call and says what else is handed in. Models are in odd states: in
training mode with a part in evaluation mode, one parameter frozen, one with a gradient.
"""

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import growkern
from growkern.cli.commands import collect
from growkern.growth.own_table import check_table
from growkern.plot.losses import plot_runs
from growkern.publish.manifest import write_manifest
from growkern.train.dataset.training_data import pack_text
from growkern.train.objectives.language_modeling import MaskedLMCollator
from growkern.train.safety.export import export
from testbed.families import FAMILIES
from testbed.models import random_model
from testbed.tiny import VOCAB, Batches, arguments, batch, build
from tests.plot.runs import HISTORY, write_run
from tests.train.dataset.data import texts, tokenizer
from tests.train.run.test_run import RUN, save_tokenizer
from tests.train.topk_teacher.server import serving
from tests.train.topk_teacher.test_twice import collate

WIDER = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass
class Row:
    """A call, and what is handed in beside its arguments."""

    call: partial
    beside: dict[str, Any] = field(default_factory=dict)
    close: Callable[[], Any] = field(default=lambda: None)

    def given(self) -> dict[str, Any]:
        names = {f"argument {i}": value for i, value in enumerate(self.call.args)}
        return names | self.call.keywords | self.beside


# name of a public function or class, or of what stands behind a command -> calls of it
ROWS: dict[str, dict[str, Any]] = {}


def row(name):
    def add(make):
        ROWS.setdefault(name, {})[make.__name__] = make
        return make

    return add


def llama(**options):
    return odd(build("llama", layers=2, seed=1, **options))


def bert(**options):
    return odd(build("bert", layers=2, **options))


def odd(model):
    """A model in an odd state, which no default would restore."""
    model.train()
    list(model.modules())[3].eval()
    parameters = list(model.parameters())
    parameters[1].requires_grad_(False)
    parameters[2].grad = torch.ones_like(parameters[2])
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = model.config.model_type != "bert"
    if model.can_generate():
        model.generation_config.max_new_tokens = 7
    return model


def hooked(model):
    model.register_forward_hook(lambda *_: None)
    return model


def saved(model, path):
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def grown(**sizes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return odd(growkern.grow(build("llama", layers=2, seed=1), **(sizes or WIDER)))


def show(report):
    report.to_dict()
    report.table()
    str(report)


# ------------------------------------------------------------------- growth


@row("plan")
def plan_of_a_model(_folder):
    return Row(partial(growkern.plan, llama(), **WIDER))


@row("plan")
def plan_of_files(folder):
    config = build("llama", layers=3, width=32).config
    return Row(partial(growkern.plan, saved(llama(), folder / "small"), target_config=config))


@row("GrowthPlan")
def a_plan_is_shown(_folder):
    model = llama()
    return Row(partial(show, growkern.plan(model, **WIDER)), {"model": model})


@row("grow")
def grow_a_model(_folder):
    model = llama()
    return Row(partial(growkern.grow, model, num_hidden_layers=3, **WIDER))


@row("grow")
def grow_files(folder):
    return Row(partial(growkern.grow, saved(bert(), folder / "small"), hidden_size=32))


@row("grow_checkpoint")
def grow_from_files_to_files(folder):
    small = saved(llama(), folder / "small")
    return Row(partial(growkern.grow_checkpoint, small, folder / "large", progress=False, **WIDER))


@row("verify")
def verify_models(_folder):
    small = llama()
    large = odd(growkern.grow(small, **WIDER))
    ids = torch.randint(5, 40, (2, 6))
    return Row(partial(growkern.verify, small, large, tokens=ids, labels=ids.clone()))


@row("verify")
def verify_files(folder):
    small, large = saved(llama(), folder / "small"), folder / "large"
    growkern.grow_checkpoint(small, large, progress=False, **WIDER)
    return Row(partial(growkern.verify, small, large))


@row("VerifyReport")
def a_check_is_shown(_folder):
    small = build("llama", layers=2)
    report = growkern.verify(small, growkern.grow(small, **WIDER))
    return Row(partial(show, report), {"small": small})


@row("grow_into")
def grow_into_a_model(_folder):
    small = llama()
    large = odd(type(small)(growkern.plan(small, **WIDER).target_config))
    large.generation_config.max_new_tokens = 9
    return Row(partial(growkern.grow_into, large, small))


@row("growth_plan_of")
def the_plan_of_files(folder):
    small = build("llama", layers=2)
    growkern.grow(small, **WIDER).save_pretrained(folder / "large")
    large = type(small).from_pretrained(folder / "large")
    return Row(partial(growkern.growth_plan_of, odd(large)))


@row("freeze_old")
def freeze(_folder):
    return Row(partial(growkern.freeze_old, grown(num_hidden_layers=4)))


@row("draft_family")
def draft(_folder):
    return Row(partial(growkern.draft_family, llama().config))


@row("check_table")
def a_table_is_checked(folder):
    saved(build("llama", layers=2), folder / "small")
    (folder / "mine.toml").write_text('extends = "llama"\nmodel_type = "llama"\n')
    return Row(partial(check_table, folder / "mine.toml", folder / "small"))


@row("widen")
def widen_a_module(_folder):
    small, large = (
        nn.Sequential(nn.Linear(4, n), nn.BatchNorm1d(n), nn.Dropout(), nn.Linear(n, 3))
        for n in (6, 12)
    )
    large[1].eval()
    return Row(partial(growkern.widen, small, large, inputs=(torch.randn(5, 4),)))


@row("widening")
def widen_a_shape(_folder):
    return Row(partial(growkern.widening, (4, 6), (8, 6), reads=False))


# --------------------------------------------------------- ops and optimizers


@row("expand")
def expand_a_matrix(_folder):
    rows, out = torch.tensor([0, 1, 2, 0]), torch.zeros(4, 3)
    return Row(partial(growkern.expand, torch.randn(3, 3), rows=rows, out=out))


@row("Routing")
def routing(_folder):
    # the copies of each old column in the new rows
    given = growkern.Routing(1, torch.tensor([[0, 2], [0, 1], [1, 2]]))
    call = partial(growkern.expand, torch.randn(2, 2), cols=torch.tensor([0, 1, 0]))
    return Row(partial(call, routing=given))


def backward(loss, *args, **options):
    loss(*args, **options).backward()


def heads():
    hidden, weight = torch.randn(6, 8), torch.randn(40, 8)
    return hidden.requires_grad_(), weight.requires_grad_()


@row("kl_mlm_loss")
def loss_of_logits(_folder):
    labels = torch.randint(40, (6,))
    call = partial(backward, growkern.kl_mlm_loss, torch.randn(6, 40, requires_grad=True))
    return Row(partial(call, torch.randn(6, 40), labels, row_weights=torch.rand(6)))


@row("linear_kl_mlm_loss")
def loss_of_heads(_folder):
    teacher = [x.detach() for x in heads()]
    given = (*heads(), *teacher, torch.randint(40, (6,)))
    return Row(partial(backward, growkern.linear_kl_mlm_loss, *given, alpha=torch.tensor(0.3)))


@row("topk_kl_mlm_loss")
def loss_of_likeliest(_folder):
    log_p, ids = torch.randn(6, 40).log_softmax(-1).topk(5)
    given = (*heads(), ids, log_p, torch.randint(40, (6,)))
    return Row(partial(backward, growkern.topk_kl_mlm_loss, *given))


@row("GrowthAdamW")
def a_step_of_adamw(_folder):
    model = grown()
    groups = growkern.decay_groups(model, 0.1)
    optimizer = growkern.GrowthAdamW(groups, growkern.growth_plan_of(model))
    return Row(partial(optimizer.step), {"model": model, "optimizer": optimizer})


@row("GrowthAdamW")
def adamw(_folder):
    model = grown()
    groups = growkern.decay_groups(model, 0.1)
    plan = growkern.growth_plan_of(model)
    return Row(partial(growkern.GrowthAdamW, groups, plan), {"model": model})


@row("GrowthMuon")
def muon(_folder):
    model = grown()
    matrices = [(n, p) for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2]
    plan = growkern.growth_plan_of(model)
    return Row(partial(growkern.GrowthMuon, [{"params": matrices}], plan), {"model": model})


@row("decay_groups")
def groups(_folder):
    return Row(partial(growkern.decay_groups, llama(), 0.1))


@row("growth_clip_norm_")
def clip(_folder):
    return Row(partial(growkern.growth_clip_norm_, grown(), 0.1))


@row("growth_lr_multipliers")
def multipliers(_folder):
    return Row(partial(growkern.growth_lr_multipliers, growkern.plan(llama(), **WIDER)))


@row("moment_findings")
def findings(_folder):
    return Row(partial(growkern.moment_findings, growkern.plan(llama(), **WIDER)))


def trained():
    """A model after a step, and its optimizer."""
    model = build("llama", layers=2, seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(**batch()).loss.backward()
    optimizer.step()
    return model, optimizer


@row("grow_optimizer")
def moments(_folder):
    model, optimizer = trained()
    plan = growkern.plan(model, **WIDER)
    return Row(partial(growkern.grow_optimizer, optimizer.state_dict(), plan), {"model": model})


@row("grow_optimizer_into")
def moments_into(_folder):
    model, optimizer = trained()
    large = odd(growkern.grow(model, **WIDER))
    new = torch.optim.AdamW(large.parameters(), lr=0.5)
    return Row(partial(growkern.grow_optimizer_into, large, new, optimizer.state_dict()))


# ----------------------------------------------------------------- training


@row("load_data")
def data(folder):
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("\n".join(texts(40)))
    tokens = tokenizer()
    tokens.truncation_side = "left"
    tokens(["w1 w2", "w3"], padding="max_length", truncation=True, max_length=7)
    cache = {"cache": str(folder / "cache"), "sequence_length": 16}
    section = growkern.DataSection(train=(str(folder / "text" / "*.txt"),), **cache)
    call = partial(growkern.load_data, section, tokens, base=folder / "text", progress=False)
    return Row(call)


@row("evaluate")
def a_measurement(folder):
    (folder / "a.txt").write_text("\n".join(texts(40)))
    options = {"cache": str(folder / "cache"), "sequence_length": 16, "progress": False}
    call = partial(growkern.evaluate, hooked(llama()), text=folder / "a.txt")
    return Row(partial(call, tokenizer=tokenizer(), **options))


@row("shard")
def compiled_blocks(_folder):
    options = growkern.DistributedOptions(compile_blocks=True, activation_checkpointing=True)
    return Row(partial(growkern.shard, hooked(llama()), options))


@row("shard")
def shards(_folder):
    return Row(partial(growkern.shard, hooked(bert(tied=True))))


@row("ExpertBalancing")
def balancing(_folder):
    return Row(partial(growkern.ExpertBalancing, 0.1))


def trainer_of(folder, **options):
    teacher = {"teacher": hooked(odd(build("llama", layers=1, width=8, seed=3)))}
    given = {
        "args": arguments(folder / "out", max_steps=2, use_cpu=True),
        "inheritance": growkern.InheritanceSchedule(end_step=2),
        "two_stage": growkern.TwoStageConfig(layers_per_block=1, stage1_steps=1),
        "train_dataset": Batches(8),
        "eval_dataset": Batches(2),
        "loss": growkern.LossOptions(label_smoothing=0.1),
    }
    return partial(growkern.TwoStageTrainer, hooked(llama()), **given | teacher | options)


@row("TwoStageTrainer")
def a_trainer(folder):
    return Row(trainer_of(folder))


@row("TwoStageTrainer")
def a_trainer_of_an_encoder(folder):
    """Its config has no `use_cache`, which Trainer sets."""
    name, sizes = FAMILIES["modernbert"]
    sizes = {**sizes, "vocab_size": VOCAB}
    student, teacher = (odd(random_model(name, sizes, dtype=torch.float32)) for _ in "st")
    assert not hasattr(student.config, "use_cache")
    made = trainer_of(folder, teacher=teacher, two_stage=None)
    return Row(partial(made.func, student, **made.keywords))


@row("TwoStageTrainer")
def training(folder):
    made = trainer_of(folder)
    trainer = made()
    return Row(partial(trainer.train), {"model": made.args[0], **made.keywords})


@row("TwoStageTrainer")
def evaluation(folder):
    made = trainer_of(folder)
    trainer = made()
    return Row(partial(trainer.evaluate), {"model": made.args[0], **made.keywords})


@row("count_labels")
def counts(_folder):
    return Row(partial(growkern.count_labels, [batch(), batch(seed=1)], llama()))


@row("inherited_loss")
def loss_of_models(_folder):
    teachers = [hooked(odd(build("llama", layers=1, seed=s))) for s in (3, 4)]
    given = partial(growkern.inherited_loss, hooked(llama()), teachers)
    return Row(partial(given, batch(), row_weights=torch.rand(3, 10)))


@row("inherited_loss")
def loss_of_masked_models(_folder):
    given = {**batch(), "attention_mask": torch.ones(3, 10, dtype=torch.long)}
    return Row(partial(growkern.inherited_loss, hooked(bert()), hooked(bert(seed=3)), given))


@row("TwoStageConfig")
def a_part_of_a_model(_folder):
    model, stages = hooked(llama()), growkern.TwoStageConfig(layers_per_block=1, stage1_steps=9)

    def run_a_part(model):
        with stages.sub_model(model, 2):
            model(**batch())

    return Row(partial(run_a_part, model))


@row("run")
def a_run(folder):
    for name, layers, width in (("model", 2, 16), ("teacher", 1, 8)):
        saved(build("llama", layers=layers, width=width), folder / name)
    (folder / "text").mkdir()
    for name in "ab":
        (folder / "text" / f"{name}.txt").write_text("\n".join(texts(40)))
    shorter = RUN.replace("steps = 6", "steps = 3").replace("stage1_steps = 3", "stage1_steps = 2")
    shorter = shorter.replace("end_step = 4", "end_step = 2").replace("_every = 3", "_every = 2")
    file = folder / "run.toml"
    file.write_text(shorter.replace("tensorboard = true", "tensorboard = false"))
    inputs = {name: folder / name for name in ("model", "teacher", "text")}
    return Row(partial(growkern.run, file, progress=False), inputs)


@row("export")
def an_export(folder):
    checkpoint = saved(build("llama", layers=1), folder / "run" / "checkpoint-2")
    (checkpoint / "trainer_state.json").write_bytes(b"{}")
    write_manifest(checkpoint)
    return Row(partial(export, folder / "run", folder / "model"))


@row("cache_teacher")
def a_cache(folder):
    (folder / "a.txt").write_text("\n".join(texts(20)))
    tokens = tokenizer()
    rows = pack_text([folder / "a.txt"], tokens, 16)
    how = {"k": 4, "temperature": 2.0, "tokenizer": tokens, "progress": False}
    call = partial(growkern.cache_teacher, hooked(bert()), rows, folder / "kept")
    return Row(partial(call, collator=MaskedLMCollator(tokens, 0.3), **how))


@row("TeacherCache")
def a_cache_is_read(folder):
    ids = torch.randint(5, 40, (4, 6))
    rows = [{"input_ids": x, "labels": x} for x in ids]
    how = {"k": 4, "temperature": 1.0, "collator": collate, "progress": False}
    growkern.cache_teacher(build("llama", layers=1), rows, folder / "kept", **how)
    return Row(partial(growkern.TeacherCache, folder / "kept"))


@row("ServedTeacher")
def a_server(_folder):
    server = contextlib.ExitStack()
    _, url = server.enter_context(serving(build("llama", layers=1)))
    call = partial(growkern.ServedTeacher, url, 4, vocab_size=VOCAB, tokenizer=tokenizer())
    return Row(call, close=server.close)


@row("plot_runs")
def a_picture(folder):
    runs = [write_run(folder / name, HISTORY) for name in ("a", "b")]
    return Row(partial(plot_runs, runs, folder / "loss.svg"))


@row("collect")
def this_machine(_folder):
    return Row(partial(collect))
