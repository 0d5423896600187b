"""The rules among the settings of a run file, a part of the table `RULES` in `rules.py`.

Within a section the record of a rule is the section's dataclass, which checks itself when it is
made. Rules between sections are checked when a run is made of them, and when it is resolved.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """Two settings that do not go together.

    Attributes:
        of: the record that has both.
        broken: what is wrong with a record, such as the name of a field; nothing if it is right.
        why: first half of the message, a format of x (the record) and of name (what is wrong).
        fix: second half, a format too.
    """

    of: str
    broken: Callable[[Any], Any]
    why: str
    fix: str


def changed(record: Any, *names: str) -> str | None:
    """The first of some fields of a dataclass that has another value than its default."""
    return next((x for x in names if getattr(record, x) != getattr(type(record), x)), None)


def _wrong_weights(weights: tuple[float, ...] | None, teachers: int | None) -> str | None:
    if weights is None or teachers is None or len(weights) == teachers:
        return None
    return f"{len(weights)} teacher_weights for {teachers} teacher{'s' * (teachers != 1)}"


# they put special tokens around and between the tokens of a row by themselves
OF_BARE_ROWS = ("span_corruption", "denoising")
# "auto" may stand for one of the others
WITHOUT_MASKS = ("clm", "pairs")
WITH_SPANS = ("auto", "span_corruption", "denoising")
FSDP_ONLY = (
    *("replicas", "param_dtype", "reduce_dtype", "reshard_after_forward", "cpu_offload"),
    "async_checkpoints",
)
OF_DATASET = ("dataset_config", "revision", "split", "validation_split")
# keys of a growth that have no use at the start of a run
INSIDE = ("rewarm_steps", "rate_factor", "new_layers_steps")
OF_GROWTH_ADAMW = ("rewarm_steps", "rewarm_peak")
ALONE = ("inheritance is given without teacher", "teacher is given without inheritance")
OF_MUON = ("muon_lr", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")

OF_FILES = (
    Rule(
        "data",
        lambda x: x.dataset is not None and (x.train or x.validation),
        "data.dataset is given beside files (data.train, data.validation)",
        "give one of them",
    ),
    Rule(
        "data",
        lambda x: x.dataset is None and changed(x, *OF_DATASET),
        "data.{name} describes a data set",
        "give data.dataset too",
    ),
    Rule(
        "data",
        lambda x: (
            x.input_ids_column is None and changed(x, "labels_column", "attention_mask_column")
        ),
        "data.{name} belongs to token ids",
        "give data.input_ids_column too",
    ),
    Rule(
        "data",
        lambda x: x.target_column is not None and (x.input_ids_column or x.packing),
        "data.target_column is the other text of each record",
        "it goes neither with token ids (data.input_ids_column) nor with data.packing = true",
    ),
    Rule(
        "data",
        lambda x: x.train_names and x.streaming,
        "a stream has no names of sources",
        "leave out the names in data.train, or data.streaming",
    ),
    Rule(
        "data",
        lambda x: not x.streaming and changed(x, "shuffle_window"),
        "data.shuffle_window describes a stream",
        "give data.streaming = true too",
    ),
    Rule(
        "data",
        lambda x: x.objective in OF_BARE_ROWS and changed(x, "labels_column", "target_column"),
        "data.objective = {x.objective!r} makes the labels itself",
        "leave out data.{name}",
    ),
    Rule(
        "data",
        lambda x: x.objective in OF_BARE_ROWS and not x.pack,
        "data.objective = {x.objective!r} needs full rows",
        "leave out data.packing = false",
    ),
    Rule(
        "data",
        lambda x: (
            (x.objective in WITHOUT_MASKS or x.labels_column) and changed(x, "masking_probability")
        ),
        "data.masking_probability is given, but no tokens are masked with the objective "
        "{x.objective!r}, or with data.labels_column",
        "leave it out",
    ),
    Rule(
        "data",
        lambda x: x.objective not in WITH_SPANS and changed(x, "mean_span_length"),
        "data.objective = {x.objective!r} masks no spans",
        "leave out data.mean_span_length",
    ),
    Rule(
        "output",
        lambda x: x.tensorboard is False and {"tensorboard", "all"} & set(x.reports),
        "report_to names TensorBoard, but tensorboard is false",
        "give one",
    ),
    Rule(
        "output",
        lambda x: len(x.reports) > 1 and {"none", "all"} & set(x.reports),
        'report_to is a list of names, or "none" or "all" alone',
        "leave the others out",
    ),
    Rule(
        "teacher",
        lambda x: sum(map(bool, (x.paths, x.cache, x.url))) != 1,
        "[teacher] names one kind of teacher",
        "give one of paths (teachers that run during training), cache (of one that ran before) and "
        "url (of a server that runs one)",
    ),
    Rule(
        "teacher",
        lambda x: (x.k is None) != (x.url is None) or (x.vocab_size is not None and not x.url),
        "a teacher's url and k (tokens per row) belong together, and vocab_size to them",
        "give url and k, or none of the three",
    ),
    Rule(
        "growth",
        lambda x: x.at_step and changed(x, "source", "revision", "optimizer"),
        "{name} is for a growth at the start of a run; at step {x.at_step} the model in training "
        "grows",
        "leave it out",
    ),
    Rule(
        "growth",
        lambda x: not x.at_step and x.source is None,
        "a growth at the start of a run needs its source, the directory of a checkpoint; a growth "
        "inside a run needs at_step",
        "give one of them",
    ),
    Rule(
        "growth",
        lambda x: not x.at_step and (x.optimizer is None) != (x.moments == "reset"),
        "moments and optimizer belong together",
        'give the optimizer state of the source and moments = "grow" or "old_slices", or neither',
    ),
    Rule(
        "growth",
        lambda x: not x.at_step and changed(x, *INSIDE),
        "{name} is for growth inside a run",
        "give at_step too",
    ),
    Rule(
        "distributed",
        lambda x: x.sharding == "ddp" and changed(x, *FSDP_ONLY),
        'distributed.{name} needs sharding = "fsdp"',
        "give both or neither",
    ),
    Rule(
        "two_stage",
        lambda x: (x.stage1_steps is None) == (x.stage1_epochs is None),
        "stage 1 has one length",
        "give either stage1_steps or stage1_epochs",
    ),
    Rule(
        "inheritance",
        lambda x: x.decay == "constant" and x.end_step is not None,
        "inheritance end_step is given, but a constant alpha has no end",
        "leave it out, or set decay to 'switch'",
    ),
    Rule(
        "inheritance",
        lambda x: x.beta is not None and x.divergence != "jsd",
        "beta is {x.beta} with divergence {x.divergence!r}",
        "beta belongs to 'jsd'",
    ),
    Rule(
        "inheritance",
        lambda x: x.tail == "renormalise" and x.divergence == "reverse",
        "divergence 'reverse' is infinite with tail 'renormalise', which gives probability 0 to "
        "all but the k tokens",
        "set tail to 'bucket'",
    ),
    Rule(
        "sides",
        lambda x: not x.pairs and x.data.target_column is not None,
        "data.target_column is for models of an encoder and a decoder",
        "leave it out",
    ),
    Rule(
        "sides",
        lambda x: x.pairs and x.data.target_column is None and x.data.labels_column is None,
        "a model of an encoder and a decoder needs what it reads and what it writes",
        "give data.text_column and data.target_column, or data.input_ids_column and "
        "data.labels_column",
    ),
    Rule(
        "sides",
        lambda x: x.pairs and x.data.pack,
        "data.packing = true would join the pairs of an encoder and a decoder",
        "leave it out",
    ),
    Rule(
        "source",
        lambda x: x.source.is_text and x.column,
        "{x.source.name} is plain text, which has no column {x.column!r}",
        "give files of records or data.dataset",
    ),
    Rule(
        "weights",
        lambda x: x.weights and x.objective in OF_BARE_ROWS,
        "loss.row_weights has one weight per label, which data.objective = {x.objective!r} makes "
        "itself",
        "leave it out",
    ),
    Rule(
        "run",
        lambda x: x.training.eval_every and not (x.data.validation or x.data.validation_split),
        "training.eval_every needs data to evaluate",
        "give data.validation (files) or data.validation_split (of a data set)",
    ),
    Rule(
        "run",
        lambda x: (x.model.path is None) != (x.first_growth is not None),
        "a run begins with one model",
        "give either model.path (a checkpoint to train) or [growth] (one to grow first)",
    ),
    Rule(
        "run",
        lambda x: x.data.streaming and x.teacher is not None and x.teacher.cache,
        "a teacher cache needs rows that repeat, which those of a stream do not",
        "set data.streaming to false, or give the paths of teachers",
    ),
    Rule(
        "run",
        lambda x: x.teacher and x.teacher.names and set(x.teacher.names) != set(x.data.train_names),
        "teacher.paths has the names {x.teacher.names}, and data.train {x.data.train_names}",
        "give one teacher to each source, under the same name",
    ),
    Rule(
        "processes",
        lambda x: x.batch % x.processes,
        "training.batch_size is {x.batch}",
        "it must be a multiple of the {x.processes} processes",
    ),
    Rule(
        "arguments of a run",
        lambda x: x.world_size > 1 and x.accelerator_config.split_batches,
        "trainer.accelerator_config split_batches=True divides the batch of a process among the "
        "processes again",
        "leave it out. training.batch_size is that of all of them",
    ),
    Rule(
        "stages",
        lambda x: x.two_stage and x.two_stage.stage1_epochs is not None and not x.has_length,
        "stage1_epochs needs training data with a length, and a stream has none",
        "give stage1_steps",
    ),
    Rule(
        "growth in stage 1",
        lambda x: next(
            (g for g in x.growth if g.new_layers_steps and g.at_step < (x.stage1_steps or 0)), None
        ),
        "the growth at step {name.at_step} lets only its new layers train, for "
        "new_layers_steps={name.new_layers_steps}, while stage 1 draws what trains up to step "
        "{x.stage1_steps}",
        "grow after stage 1, or leave one of the two out",
    ),
    Rule(
        "optimizer",
        lambda x: x.choice not in ("auto", "growth-adamw") and changed(x.own, *OF_GROWTH_ADAMW),
        "optimizer.{name} is an option of GrowthAdamW, but training.optimizer is {x.choice!r}",
        "leave it out",
    ),
    Rule(
        "optimizer",
        lambda x: x.choice != "muon" and changed(x.own, *OF_MUON),
        "optimizer.{name} is an option of Muon, but training.optimizer is {x.choice!r}",
        "set it to 'muon', or leave the option out",
    ),
    Rule(
        "optimizer",
        lambda x: not x.own.rewarm_steps and changed(x.own, *OF_GROWTH_ADAMW),
        "optimizer.rewarm_peak has no effect without optimizer.rewarm_steps",
        "give both or neither",
    ),
    Rule(
        "teachers",
        lambda x: (x.inheritance is None) == x.given and ALONE[x.given],
        "{name}, but [inheritance] and [teacher] belong together",
        'give both, as [teacher] with paths = ["DIRECTORY"], or neither',
    ),
    Rule(
        "teachers",
        lambda x: x.given and x.number is not None and x.inheritance.tail is not None,
        "inheritance tail is {x.inheritance.tail!r}, but a model gives every token its probability",
        "leave it out",
    ),
    Rule(
        "teachers",
        lambda x: x.given and x.by_source and x.inheritance.teacher_weights is not None,
        "teachers of one source each share no rows",
        "leave teacher_weights out",
    ),
    Rule(
        "teachers",
        lambda x: (
            x.given and x.number is None and len(x.inheritance.teacher_weights or (1.0,)) != 1
        ),
        "several teacher_weights are given, and rows of the likeliest tokens come from one teacher",
        "leave teacher_weights out",
    ),
    Rule(
        "teachers",
        lambda x: x.given and _wrong_weights(x.inheritance.teacher_weights, x.number),
        "{name}",
        "give one weight per teacher",
    ),
)
