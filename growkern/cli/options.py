"""Makes the growth options of the commands from the dataclasses and families that define them."""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from growkern.families.family import growable_fields
from growkern.families.load import load_family, read_family, supported_families
from growkern.growth.options import CHOICES, PAD_VOCAB, GrowthOptions

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
    "router": "random | zero | FILE, which `growkern centroids` wrote.",
    "drop": "Share of the units of every new expert that is drawn again. Outputs change.",
    "seed": "Seed of all random choices.",
    "dequantize": "Read weights in fp8 or mxfp4 as the numbers in bfloat16 that they stand for.",
    "portable": "Keep what other runtimes compute: head_dim, periods of layers, rope_theta.",
}


def completing(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """A function that completes the beginning of a value in a shell."""
    return lambda incomplete: [one for one in choices if one.startswith(incomplete)]


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
        text = " | ".join(choices) or OTHER_OPTIONS[field.name]
        # a switch has no form that turns it off
        names = (f"--{field.name}",) if isinstance(field.default, bool) else ()
        option = typer.Option(
            *names,
            help=text if names else f"{text}  \\[{field.default}]",
            rich_help_panel="Growth",
            autocompletion=completing(choices) if choices else None,
        )
        options.append((field.name, type(field.default), option))
    families_with: dict[str, list[str]] = {}
    tables = {kind: load_family(kind) for kind in supported_families()}
    # the parser must know the sizes of a table of one's own before it reads the arguments
    given = [word.partition("=")[2] for word in sys.argv if word.startswith("--family=")]
    given += [after for word, after in pairwise(sys.argv) if word == "--family"]
    tables |= {path: read_family(path) for path in given}
    for model_type, family in tables.items():
        for name in growable_fields(family):
            families_with.setdefault(name, []).append(model_type)
    for name, families in families_with.items():
        option = typer.Option(help=", ".join(families), rich_help_panel="Target sizes")
        options.append((name, int, option))
    choosing: dict[str, dict[str, str]] = {}
    for model_type, family in tables.items():
        for name, word in family.sparse_fields.items() if family.dense else ():
            choosing.setdefault(name, {})[model_type] = word
    for name, words in choosing.items():
        is_list = "in" in words.values()
        option = typer.Option(
            help=f"Which layers become mixtures: {', '.join(words)}",
            rich_help_panel="Growth",
            parser=layer_numbers if is_list else None,
            metavar="0,3" if is_list else None,
        )
        options.append((name, str if is_list else int, option))
    text = "Round the vocabulary up to a multiple of this."
    options.append((PAD_VOCAB, int, typer.Option(help=text, rich_help_panel="Target sizes")))
    text = "TOML file of a table of your own, for a model that growkern has none for."
    options.append(("family", Path, typer.Option(help=text)))
    return options


def takes_growth(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command so that it accepts all growth options and target sizes.

    Args:
        command: has a parameter `growth`, which gets the options that were given as a dict.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "growth"]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, option],
        )
        for name, kind, option in growth_options()
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        values = {p.name: given.pop(p.name) for p in own}
        command(**values, growth={k: v for k, v in given.items() if v is not None})

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
