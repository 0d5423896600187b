"""The settings that do not go together: one table for run files, Python and the documentation.

A rule names a record, such as section [data] or all that a trainer is given, and reads its fields.
Whoever makes such a record checks it once, with `check`. A new rule is an entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from growkern.errors import GrowthError


class Rule(NamedTuple):
    """Two settings that do not go together.

    Attributes:
        of: the record that has both.
        setting: the first one, for the documentation.
        other: what it does not go with.
        broken: what is wrong with a record, such as the name of a field; nothing if it is right.
        why: first half of the message, a format of x (the record) and of name (what is wrong).
        fix: second half, which may name the field too.
    """

    of: str
    setting: str
    other: str
    broken: Callable[[Any], Any]
    why: str
    fix: str


def check(of: str, record: Any = None, **facts: Any) -> None:
    """Raise a GrowthError for the first rule that a record breaks; `facts` replace a record."""
    x = SimpleNamespace(**facts) if record is None else record
    for rule in RULES:
        if rule.of == of and (name := rule.broken(x)):
            raise GrowthError(f"{rule.why}: {rule.fix}".format(x=x, name=name))


def refuse_first(refusals: dict[str, Any]) -> None:
    """Raise a GrowthError with the first message whose value is true."""
    for message, applies in refusals.items():
        if applies:
            raise GrowthError(message)


def table() -> str:
    """The rules as a table of Markdown."""
    rows = (f"| {x.setting} | {x.other} | {x.fix} |" for x in RULES)
    text = "\n".join(("| setting | does not go with | so |\n|---|---|---|", *rows))
    return text.replace("leave out data.{name}", "leave it out").replace("{x.positions}", "as many")


def _changed(record: Any, *names: str) -> str | None:
    """The first of some fields of a dataclass that has another value than its default."""
    return next((x for x in names if getattr(record, x) != getattr(type(record), x)), None)


# they put special tokens around and between the tokens of a row by themselves
OF_BARE_ROWS = ("mlm+nsp", "span_corruption", "denoising")
OWN_LABELS = (*OF_BARE_ROWS, "rtd")
# "auto" may stand for one of the others
WITH_SPANS = ("auto", "span_corruption", "denoising")
FSDP_ONLY = (
    *("replicas", "param_dtype", "reduce_dtype", "reshard_after_forward", "cpu_offload"),
    "async_checkpoints",
)
OF_DATASET = ("dataset_config", "revision", "split", "validation_split")
OF_GROWTH_ADAMW = ("rewarm_steps", "rewarm_peak")
OF_MUON = ("muon_lr", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")

RULES = (
    # ------------------------------------------------------------------ [data]
    Rule(
        *("data", "`data.dataset`", "`data.train`, `data.validation`"),
        lambda x: x.dataset is not None and (x.train or x.validation),
        "data.dataset is given beside files (data.train, data.validation)",
        "give one of them",
    ),
    Rule(
        *("data", "`dataset_config`, `revision`, `split`, `validation_split` of `[data]`"),
        "`data.train`",
        lambda x: x.dataset is None and _changed(x, *OF_DATASET),
        "data.{name} describes a data set",
        "give data.dataset too",
    ),
    Rule(
        *("data", "`data.labels_column`, `data.attention_mask_column`", "texts"),
        lambda x: (
            x.input_ids_column is None and _changed(x, "labels_column", "attention_mask_column")
        ),
        "data.{name} belongs to token ids",
        "give data.input_ids_column too",
    ),
    Rule(
        *("data", "`data.target_column`", "`data.input_ids_column`, `data.packing = true`"),
        lambda x: x.target_column is not None and (x.input_ids_column or x.packing),
        "data.target_column is the other text of each record",
        "it goes neither with token ids (data.input_ids_column) nor with data.packing = true",
    ),
    Rule(
        *("data", "names in `data.train`", '`data.streaming`, `data.objective = "mlm+nsp"`'),
        lambda x: x.train_names and (x.streaming or x.objective == "mlm+nsp"),
        "neither a stream nor pairs of passages have names of sources",
        'leave out the names in data.train, or data.streaming and data.objective = "mlm+nsp"',
    ),
    Rule(
        *("data", "`data.shuffle_window`", "data on disk"),
        lambda x: not x.streaming and _changed(x, "shuffle_window"),
        "data.shuffle_window describes a stream",
        "give data.streaming = true too",
    ),
    Rule(
        *("data", "`data.labels_column`, `data.target_column`"),
        '`data.objective` "mlm+nsp", "span_corruption", "denoising" or "rtd"',
        lambda x: x.objective in OWN_LABELS and _changed(x, "labels_column", "target_column"),
        "data.objective = {x.objective!r} makes the labels itself",
        "leave out data.{name}",
    ),
    Rule(
        *("data", "`data.packing = false`"),
        '`data.objective` "mlm+nsp", "span_corruption" or "denoising"',
        lambda x: x.objective in OF_BARE_ROWS and not x.pack,
        "data.objective = {x.objective!r} needs full rows",
        "leave out data.packing = false",
    ),
    Rule(
        *("data", "`data.mean_span_length`", "an objective without spans"),
        lambda x: x.objective not in WITH_SPANS and _changed(x, "mean_span_length"),
        "data.objective = {x.objective!r} masks no spans",
        "leave out data.mean_span_length",
    ),
    Rule(
        *("data", '`data.objective = "mlm+nsp"`', "`data.streaming`"),
        lambda x: x.objective == "mlm+nsp" and x.streaming,
        "data.objective = {x.objective!r} takes random passages from all rows",
        "set data.streaming to false",
    ),
    Rule(
        *("sides", "`data.target_column`", "a model of one stack"),
        lambda x: not x.pairs and x.data.target_column is not None,
        "data.target_column is for models of an encoder and a decoder",
        "leave it out",
    ),
    Rule(
        *("sides", '`data.objective = "pairs"`', "data of one side"),
        lambda x: x.pairs and x.data.target_column is None and x.data.labels_column is None,
        "a model of an encoder and a decoder needs what it reads and what it writes",
        "give data.text_column and data.target_column, or data.input_ids_column and "
        "data.labels_column",
    ),
    Rule(
        *("sides", '`data.objective = "pairs"`', "`data.packing = true`"),
        lambda x: x.pairs and x.data.pack,
        "data.packing = true would join the pairs of an encoder and a decoder",
        "leave it out",
    ),
    Rule(
        *("weights", "`loss.row_weights`"),
        '`data.objective` "mlm+nsp", "span_corruption", "denoising" or "rtd"',
        lambda x: x.weights and x.objective in OWN_LABELS,
        "loss.row_weights has one weight per label, which data.objective = {x.objective!r} makes "
        "itself",
        "leave it out",
    ),
    Rule(
        *("checkpoint", "`data.sequence_length`", "a model with fewer positions"),
        lambda x: x.positions is not None and x.length > x.positions,
        "the sequence length (data.sequence_length, --sequence-length) is {x.length}, but "
        "{x.directory} has {x.positions} positions",
        "give {x.positions} or less",
    ),
    Rule(
        *("checkpoint", "a tokenizer", "a model with a smaller vocabulary"),
        lambda x: x.ids > x.vocabulary,
        "the tokenizer has {x.ids} ids, but {x.directory} has a vocabulary of {x.vocabulary}",
        "give the tokenizer of the model",
    ),
    # ---------------------------------------------------------- other sections
    Rule(
        *("output", "`output.tensorboard = false`", '"tensorboard" or "all" in `report_to`'),
        lambda x: x.tensorboard is False and {"tensorboard", "all"} & set(x.reports),
        "report_to names TensorBoard, but tensorboard is false",
        "give one",
    ),
    Rule(
        *("output", '"none" or "all" in `output.report_to`', "other names"),
        lambda x: len(x.reports) > 1 and {"none", "all"} & set(x.reports),
        'report_to is a list of names, or "none" or "all" alone',
        "leave the others out",
    ),
    Rule(
        *("model", "`model.shared_embeddings`", "a model without `model.generator`"),
        lambda x: x.shared_embeddings and x.generator is None,
        "shared_embeddings is given without generator",
        "give both",
    ),
    Rule(
        *("teacher", "`paths`, `cache` or `url` of `[teacher]`", "another of the three"),
        lambda x: sum(map(bool, (x.paths, x.cache, x.url))) != 1,
        "[teacher] names one kind of teacher",
        "give one of paths (teachers that run during training), cache (of one that ran before) and "
        "url (of a server that runs one)",
    ),
    Rule(
        *("teacher", "`teacher.k`, `teacher.vocab_size`", "a teacher without `teacher.url`"),
        lambda x: (x.k is None) != (x.url is None) or (x.vocab_size is not None and not x.url),
        "a teacher's url and k (tokens per row) belong together, and vocab_size to them",
        "give url and k, or none of the three",
    ),
    Rule(
        *("growth", "`source`, `revision`, `optimizer` of `[[growth]]`", "`at_step`"),
        lambda x: x.at_step and _changed(x, "source", "revision", "optimizer"),
        "{name} is for a growth at the start of a run; at step {x.at_step} the model in training "
        "grows",
        "leave it out",
    ),
    Rule(
        *("growth", "`[growth]` without `at_step`", "no `growth.source`"),
        lambda x: not x.at_step and x.source is None,
        "a growth at the start of a run needs its source, the directory of a checkpoint; a growth "
        "inside a run needs at_step",
        "give one of them",
    ),
    Rule(
        *("growth", "`growth.moments`", "a start without `growth.optimizer`"),
        lambda x: not x.at_step and (x.optimizer is None) != (x.moments == "reset"),
        "moments and optimizer belong together",
        'give the optimizer state of the source and moments = "grow" or "old_slices", or neither',
    ),
    Rule(
        *("growth", "`rewarm_steps`, `new_layers_steps` of `[growth]`", "no `at_step`"),
        lambda x: not x.at_step and _changed(x, "rewarm_steps", "new_layers_steps"),
        "{name} is for growth inside a run",
        "give at_step too",
    ),
    Rule(
        *("growth in stage 1", "`growth.new_layers_steps`", "stage 1 of `[two_stage]`"),
        lambda x: x.growth.new_layers_steps and x.growth.at_step < x.stage1_steps,
        "the growth at step {x.growth.at_step} lets only its new layers train, for "
        "new_layers_steps={x.growth.new_layers_steps}, while stage 1 draws what trains up to step "
        "{x.stage1_steps}",
        "grow after stage 1, or leave one of the two out",
    ),
    Rule(
        *("distributed", f"{', '.join(f'`{x}`' for x in FSDP_ONLY)}", '`sharding = "ddp"`'),
        lambda x: x.sharding == "ddp" and _changed(x, *FSDP_ONLY),
        'distributed.{name} needs sharding = "fsdp"',
        "give both or neither",
    ),
    Rule(
        *("optimizer", "`rewarm_steps`, `rewarm_peak` of `[optimizer]`", '"adamw", "muon"'),
        lambda x: x.choice not in ("auto", "growth-adamw") and _changed(x.own, *OF_GROWTH_ADAMW),
        "optimizer.{name} is an option of GrowthAdamW, but training.optimizer is {x.choice!r}",
        "leave it out",
    ),
    Rule(
        *("optimizer", "other keys of `[optimizer]`", 'an optimizer that is not "muon"'),
        lambda x: x.choice != "muon" and _changed(x.own, *OF_MUON),
        "optimizer.{name} is an option of Muon, but training.optimizer is {x.choice!r}",
        "set it to 'muon', or leave the option out",
    ),
    Rule(
        *("optimizer", "`optimizer.rewarm_peak`", "no `optimizer.rewarm_steps`"),
        lambda x: not x.own.rewarm_steps and _changed(x.own, *OF_GROWTH_ADAMW),
        "optimizer.rewarm_peak has no effect without optimizer.rewarm_steps",
        "give both or neither",
    ),
    # ------------------------------------------------------------ several ones
    Rule(
        *("run", "`training.eval_every`", "a run without validation data"),
        lambda x: x.training.eval_every and not (x.data.validation or x.data.validation_split),
        "training.eval_every needs data to evaluate",
        "give data.validation (files) or data.validation_split (of a data set)",
    ),
    Rule(
        *("run", "`model.path`", "`[growth]` at the start"),
        lambda x: (x.model.path is None) != (x.first_growth is not None),
        "a run begins with one model",
        "give either model.path (a checkpoint to train) or [growth] (one to grow first)",
    ),
    Rule(
        *("run", "`teacher.cache`", "`data.streaming`"),
        lambda x: x.data.streaming and x.teacher is not None and x.teacher.cache,
        "a teacher cache needs rows that repeat, which those of a stream do not",
        "set data.streaming to false, or give the paths of teachers",
    ),
    Rule(
        *("run", "names in `teacher.paths`", "other names in `data.train`"),
        lambda x: x.teacher and x.teacher.names and set(x.teacher.names) != set(x.data.train_names),
        "teacher.paths has the names {x.teacher.names}, and data.train {x.data.train_names}",
        "give one teacher to each source, under the same name",
    ),
    Rule(
        *("run", "names in `teacher.paths`", "`inheritance.teacher_weights`"),
        lambda x: x.teacher and x.teacher.names and x.inheritance and x.inheritance.teacher_weights,
        "teachers of one source each share no rows",
        "leave out inheritance.teacher_weights",
    ),
    Rule(
        *("run", "`[inheritance]`", "a run without `[teacher]`, and the reverse"),
        lambda x: (x.inheritance is None) != (x.teacher is None),
        "[inheritance] and [teacher] belong together",
        "give both or neither",
    ),
    Rule(
        *("stages", "`two_stage.stage1_epochs`", "`data.streaming`"),
        lambda x: x.two_stage and x.two_stage.stage1_epochs is not None and not x.has_length,
        "stage1_epochs needs training data with a length, and a stream has none",
        "give stage1_steps",
    ),
    Rule(
        *("pair", "`model.generator`", "a model that is no ElectraForPreTraining"),
        lambda x: x.generator and x.objective != "rtd",
        "{x.name} is trained with {x.objective!r}, and model.generator belongs to an "
        "ElectraForPreTraining",
        "leave it out",
    ),
    Rule(
        *("pair", "an ElectraForPreTraining", "no `model.generator`"),
        lambda x: x.objective == "rtd" and not x.generator,
        "{x.name} is a discriminator",
        "give the directory of an ElectraForMaskedLM as model.generator",
    ),
    Rule(
        *("pair", "`model.generator`", '`sharding = "fsdp"`'),
        lambda x: x.generator and x.sharded,
        "replaced-token detection is not sharded",
        "set distributed.sharding to 'ddp'",
    ),
    Rule(
        *("training", '`data.objective = "rtd"`', "`[two_stage]`"),
        lambda x: x.side == "rtd" and x.two_stage,
        "replaced-token detection trains two models, which does not fit two stages",
        "leave out [two_stage]",
    ),
    Rule(
        *("training", '`data.objective = "rtd"`', "`[inheritance]`"),
        lambda x: x.side == "rtd" and x.teacher,
        "replaced-token detection trains two models, which does not fit a teacher",
        "leave out [inheritance] and [teacher]",
    ),
    Rule(
        *("training", '`data.objective = "rtd"`', "`[growth]`"),
        lambda x: x.side == "rtd" and x.grows,
        "replaced-token detection trains two models, which does not fit growth in a run",
        "leave out [growth], and grow both with growkern grow",
    ),
    Rule(
        *("training", '`data.objective = "mlm+nsp"`', "`teacher.cache`, `teacher.url`"),
        lambda x: x.side and x.cached,
        "a teacher cache holds predictions for masked rows, not for pairs of passages",
        "give the paths of teachers",
    ),
    Rule(
        *("training", "a model of an encoder and a decoder", "`teacher.cache`, `teacher.url`"),
        lambda x: x.two_stacks and x.cached,
        "a teacher known by its likeliest tokens has no decoder's predictions, which a model of an "
        "encoder and a decoder needs",
        "give the paths of teachers",
    ),
)
