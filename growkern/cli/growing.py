"""The commands `growkern plan` and `growkern grow`.

Their options for sizes and methods are made from the dataclasses and families that define them.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, make_dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import typer
from typer.core import TyperCommand
from typer.main import get_command

from growkern.cli.app import (
    DTYPES,
    AsJson,
    MemoryLimit,
    NoResume,
    Overwrite,
    Revision,
    ShardSize,
    SourcePath,
    Target,
    app,
    known_dtype,
    print_json,
    show,
    silence_transformers,
)
from growkern.errors import GrowthError, human, print_table, say
from growkern.families import growable_fields, read_family
from growkern.growth.disk import free_target
from growkern.growth.options import (
    CHOICES,
    PAD_VOCAB,
    GrowthKeywords,
    GrowthOptions,
    check_moments,
    check_tokens,
    parse_size,
    refuse_by_config,
)
from growkern.growth.source import config_of, located, refuse_bare

# help texts of the growth options that are numbers; the others list their choices
OTHER_OPTIONS = {
    "noise": "Size of the noise that makes copies differ, relative to each weight.",
    "routing": "Amplitude of the routing; 1 gives every weight whole to one copy. "
    "Above 1 outputs are not exact.",
    "carry": "How strongly extra coordinates carry the mean past LayerNorm (uneven widths). "
    "Smaller is more exact; 0 turns it off.",
    "identity_gain": "Scale inside inserted identity blocks (post-norm models). "
    "Smaller is more exact.",
    "to": "Family of mixtures that a dense model becomes, such as qwen3_moe.",
    "router": "random | zero | FILE, a matrix of rows for each layer.",
    "drop": "Share of the units of every new expert that is drawn again. Outputs change.",
    "seed": "Seed of all random choices.",
    "dequantize": "Read weights in fp8 or mxfp4 as the numbers in bfloat16 that they stand for.",
    "portable": "Keep what other runtimes compute: head_dim, periods of layers, rope_theta.",
}


# The sizes that help lists. The others are accepted and completed too: reading the tables of all
# families would take longer than all else that a wrong path needs
MOST_HAVE, MIXTURES, WHICH = (
    "Most families.",
    "Mixtures.",
    "Which layers become mixtures, with --to.",
)
LISTED = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads"), MOST_HAVE),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "num_hidden_layers"), MOST_HAVE),
    "vocab_size": MOST_HAVE,
    PAD_VOCAB: "Round the vocabulary up to a multiple of this.",
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), MIXTURES),
    **dict.fromkeys(("mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace"), WHICH),
}
RARE = "rare"


def completing(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """A function that completes the beginning of a value in a shell."""
    return lambda incomplete: [name for name in choices if name.startswith(incomplete)]


def layer_numbers(text: str) -> list[int]:
    """Numbers of layers, separated by commas."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r}: give numbers of layers, such as 0,3") from None


def growth_options() -> list[tuple[str, type, Any]]:
    """The name, type and typer option of every growth option and every target size."""
    options = []
    for field in fields(GrowthOptions):
        choices = CHOICES.get(field.name, ())
        listed = ("0,1,0,1",) if field.name == "depth" else ()
        text = " | ".join((*choices, *listed)) or OTHER_OPTIONS[field.name]
        # a switch has no form that turns it off
        names = (f"--{field.name}",) if isinstance(field.default, bool) else ()
        option = typer.Option(
            *names,
            help=text if names else f"{text}  \\[{field.default}]",
            rich_help_panel="Growth",
            autocompletion=completing(choices) if choices else None,
        )
        options.append((field.name, type(field.default), option))
    # the parser must know the sizes of a table of one's own before it reads the arguments
    given = [word.partition("=")[2] for word in sys.argv if word.startswith("--family=")]
    given += [after for word, after in pairwise(sys.argv) if word == "--family"]
    own = {size: path for path in given for size in growable_fields(read_family(Path(path)))}
    known = {**dict.fromkeys(own, int), **get_type_hints(GrowthKeywords)}
    taken = {name for name, *_ in options}
    for name in dict.fromkeys([*LISTED, *own, *known]):
        # a switch has one right value, which the mixture's config has
        if name in taken or known[name] is bool:
            continue
        text = LISTED.get(name, own.get(name, RARE))
        is_list = known[name] is not int
        how: dict[str, Any] = {"parser": layer_numbers, "metavar": "0,3"} if is_list else {}
        panel = "Growth" if text == WHICH else "Target sizes"
        option = typer.Option(help=text, rich_help_panel=panel, **how)
        options.append((name, str if is_list else int, option))
    text = "TOML file of a table of your own, for a model that growkern has none for."
    options.append(("family", Path, typer.Option(help=text)))
    return options


class GrowthCommand(TyperCommand):
    """A command with all growth options, whose function finds those that were given in `obj`.

    The options are made when they are asked for, because a table of the user's own adds to them.
    """

    @cached_property
    def growth(self) -> TyperCommand:
        """The options as a command of their own, which puts them into a record."""
        fields_of = [(name, Annotated[kind | None, x], None) for name, kind, x in growth_options()]
        # typer reads the fields of a record as it reads the parameters of a function
        record = typer.Typer(add_completion=False)
        record.command()(make_dataclass("Growth", fields_of, kw_only=True))
        return cast(TyperCommand, get_command(record))

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters of the function, then the growth options, then --help."""
        return [*self.params, *self.growth.params, *super().get_params(ctx)[len(self.params) :]]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the options, but not the sizes that few families have: a hundred lines."""
        for option in self.growth.params:
            # hidden here only: a shell completes no hidden option
            cast(Any, option).hidden = cast(Any, option).help == RARE
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Run the function, which knows nothing of the growth options."""
        given = {x.name: ctx.params.pop(x.name) for x in self.growth.params}
        made = cast(Any, self.growth.callback)(**given)
        ctx.obj = {name: value for name, value in vars(made).items() if value is not None}
        # wrong options are told before PyTorch is imported
        given = {name: value for name, value in ctx.obj.items() if name != "family"}
        options, sizes = GrowthOptions.split_off(given)
        refuse_by_config(config_of(ctx.params["source"]), options, sizes, ctx.obj.get("family"))
        return super().invoke(ctx)


Dtype = Annotated[
    str | None,
    typer.Option(
        help=f"{' | '.join(DTYPES)}; default: as in SRC.",
        autocompletion=completing(DTYPES),
        callback=known_dtype,
    ),
]


def token_count(text: str | float) -> float:
    """A number of tokens from the command line."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number: write 100 billion as 1e11") from None


@app.command(cls=GrowthCommand)
def plan(
    context: typer.Context,
    source: SourcePath,
    revision: Revision = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also show maps, layers and the nearest measurements.")
    ] = False,
    ranks: Annotated[
        int, typer.Option(min=1, help="Processes (GPUs) that will share the model, with FSDP2.")
    ] = 1,
    source_tokens: Annotated[
        float | None,
        typer.Option(
            help="Tokens that SRC was trained on, such as 2e10, with --tokens.",
            parser=token_count,
            metavar="FLOAT",
        ),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            help="Tokens to train the target on, such as 1e11: shows what that costs, and what "
            "growth saved elsewhere.",
            parser=token_count,
            metavar="FLOAT",
        ),
    ] = None,
) -> None:
    """Show what growing would do. Reads the config and the file headers.

    Where a dense model becomes a mixture that computes something else, it also runs SRC on random
    texts, and reads its weights. Any other size in the config of SRC is an option too, such as
    --n-embd of GPT-2: docs/families.md lists them.
    """
    # before PyTorch is imported: a wrong name costs no more than the question to the Hub
    check_tokens(tokens, source_tokens)
    place = located(source, revision, weights=False)
    from growkern.growth.plan import plan as make_plan

    made = make_plan(place, dtype=torch_dtype(dtype), **context.obj)
    if as_json:
        more = {
            "estimate": made.estimate(ranks, tokens, source_tokens),
            "measurements": made.measurements(),
            "advice": made.advice(),
            "verdict": made.verdict(tokens) if tokens else (),
            "divides": made.divides(),
            "portability": made.portability(),
            "needs": made.needs,
        }
        print_json({**made.to_dict(), **more})
    else:
        print_table(made.table(ranks, source_tokens, tokens, verbose=verbose))


@app.command(cls=GrowthCommand)
def grow(
    context: typer.Context,
    source: SourcePath,
    target: Target,
    revision: Revision = None,
    overwrite: Overwrite = False,
    dtype: Dtype = None,
    max_shard_size: ShardSize = "5GB",
    memory_limit: MemoryLimit = "1GiB",
    no_resume: NoResume = False,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Accept NaN and Inf in SRC.")
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(exists=True, help="Text file to compare the losses of SRC and DST on."),
    ] = None,
    optimizer: Annotated[
        Path | None,
        typer.Option(exists=True, help="optimizer.pt of transformers' Trainer, to be grown too."),
    ] = None,
    moments: Annotated[
        str | None,
        typer.Option(help="Moments of --optimizer: grow | old_slices | reset.  \\[grow]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Grow the checkpoint SRC into the new checkpoint DST.

    Any other size in the config of SRC is an option too, such as --n-embd of GPT-2:
    docs/families.md lists them.
    """
    if moments is not None and optimizer is None:
        raise GrowthError("--moments has no effect without an optimizer: give --optimizer as well")
    check_moments(moments or "grow")
    for name, size in (("max_shard_size", max_shard_size), ("memory_limit", memory_limit)):
        parse_size(name, size)
    # before PyTorch is imported
    free_target(source, target.resolve(), overwrite)
    place = located(source, revision)
    refuse_bare(place)
    from growkern.growth.grow import grow_checkpoint

    silence_transformers()
    compared = {} if text is None else tokens_of(place, text)
    report = grow_checkpoint(
        place,
        target,
        overwrite=overwrite,
        dtype=torch_dtype(dtype),
        max_shard_size=max_shard_size,
        memory_limit=memory_limit,
        resume=not no_resume,
        allow_nonfinite=allow_nonfinite,
        progress=sys.stderr.isatty(),
        optimizer=optimizer,
        moments=cast(Any, moments or "grow"),
        **context.obj,
    )
    with_moments = optimizer is not None and moments in (None, "grow")
    tell_growth(report, source, revision, compared, with_moments, as_json)


def tell_growth(
    report: Any,
    source: Path,
    revision: str | None,
    compared: dict[str, Any],
    with_moments: bool,
    as_json: bool,
) -> None:
    """Print a growth, and verify it where there is a text to compare on; exit 1 if that fails.

    Args:
        compared: tokens and labels from `tokens_of`; empty without a text.
        with_moments: whether the optimizer's moments were grown.
    """
    from growkern.growth.optimizer import moment_findings
    from growkern.growth.record.verify import verify as check

    findings = moment_findings(report.plan) if with_moments else ()
    if not as_json:
        speed = (report.bytes_written - report.bytes_kept) / max(report.seconds, 1e-9)
        kept = f", {human(report.bytes_kept)}B of it by an earlier run" if report.bytes_kept else ""
        lines = [finding.line() for finding in report.plan.findings]
        lines += [f"note: {line}" for line in report.plan.portability()]
        lines.append(f"{report.directory}: {human(report.bytes_written)}B{kept}, {human(speed)}B/s")
        for line in [*lines, *(finding.line() for finding in findings)]:
            say(line)
    place, checked = report.plan.source.directory or source, None
    if compared:
        checked = check(place, report.directory, **compared)
    if as_json:
        more = {"moments": [asdict(finding) for finding in findings]}
        print_json({**report.to_dict(), **more, "verified": checked and checked.to_dict()})
    elif checked:
        show(checked)
    else:
        at = [] if revision is None else ["--revision", revision]
        words = ["growkern", "verify", str(source), str(report.directory), *at]
        say(f"check the result with: {shlex.join(words)}")
    if checked and not checked.ok:
        raise typer.Exit(1)


def torch_dtype(name: str | None) -> Any:
    """The torch dtype of a name in DTYPES, or None for None."""
    import torch

    return None if name is None else getattr(torch, name)


def tokens_of(source: Path, text: Path, length: int = 128, most: int = 4096) -> dict[str, Any]:
    """The start of a text as tokens and labels for the source model.

    Args:
        length: tokens per row, if the model has as many positions.

    Returns:
        "tokens" and "labels", (rows, length) int64 each.
    """
    from growkern.growth.outputs import longest_of
    from growkern.growth.source import open_source
    from growkern.train.dataset import pack_text, read_text
    from growkern.train.model import align_labels, load_tokenizer
    from growkern.train.objectives import CausalLMCollator, MaskedLMCollator

    opened = open_source(source, allow_nonfinite=True, dequantize=True)
    tokenizer = load_tokenizer(source)
    length = min(length, longest_of(opened.spec))
    # 16 characters per token are more than enough for any tokenizer
    blocks = pack_text([read_text(text, 16 * most)], tokenizer, length)
    rows = [blocks[i] for i in range(min(len(blocks), most // length))]
    if not rows:
        raise GrowthError(f"{text} has fewer than {length} tokens: give more text")
    masked = opened.class_name.endswith("ForMaskedLM")
    collate = MaskedLMCollator(tokenizer) if masked else CausalLMCollator(tokenizer)
    batch = collate(rows)
    labels = align_labels(batch["labels"], causal=not masked)
    return {"tokens": batch["input_ids"], "labels": labels}
