"""Trains a small GPT-2, grows it, trains on in five ways and from scratch, and compares.

    python -m examples.demo.demo [--dir runs/demo] [--quick] [--seed 0]

It copies the run files of this folder, with the seed and the number of steps, and gives them to
`growkern train`. Started again, it resumes. The rate of all runs is constant, so that a short run
is the beginning of a longer one. Under a rate that falls to 0 most of the loss falls at the end,
and no run could end before the one from scratch. `bench/results/demo.json` is the `results.json`
that `make demo` wrote.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from examples.demo.corpus import make_text
from growkern.cli.commands import app, collect
from growkern.errors import GrowthError
from growkern.files import write_whole
from growkern.plot.curves import read_curve

# the others have to reach the final loss of the first one
RUNS = ("scratch", "direct_copy", "fpi", "aki", "aki_two_stage", "aki_two_stage_inheritance")
LARGE = ("--n-embd", "128", "--n-head", "8")
STEPS = ("steps", "warmup_steps", "stage1_steps", "end_step")


class Preset(NamedTuple):
    """How much is trained: `share` of the steps in the run files, on so much text."""

    share: float
    eval_every: int
    seeds: int
    vocabulary: int
    files: int | None
    validation_characters: int


FULL = Preset(1.0, 100, 2, 1024, None, 270_000)
QUICK = Preset(0.5, 25, 1, 512, 300, 40_000)


def prepare(folder: Path, preset: Preset, seed: int, tokenizer: Any) -> None:
    """Make the random models and the run files of one seed."""
    for size in ("small", "large"):
        config = GPT2Config.from_json_file(Path(__file__).with_name(f"{size}.json"))
        config.vocab_size = len(tokenizer)
        torch.manual_seed(seed)
        GPT2LMHeadModel(config).save_pretrained(folder / "models" / size)
        tokenizer.save_pretrained(folder / "models" / size)

    # a screen for each run: the picture shows what evaluations measure
    given = {"seed": seed, "log_every": 4 * preset.eval_every, "eval_every": preset.eval_every}

    def line(match: re.Match[str]) -> str:
        key, number = match[1], int(match[2])
        if key in STEPS:
            number = max(1, round(number * preset.share))
        return f"{key} = {given.get(key, number)}"

    for name in ("small", *RUNS):
        text = Path(__file__).with_name(f"{name}.toml").read_text()
        text = re.sub(r"^(\w+) = (\d+)$", line, text, flags=re.MULTILINE)
        (folder / f"{name}.toml").write_text(text)


def commands(folders: list[Path], picture: Path) -> Iterator[tuple[Any, ...]]:
    """The arguments of `growkern`, in the order in which it is called."""
    for folder in folders:
        yield "train", folder / "small.toml"
    small, grown = folders[0] / "small", folders[0] / "grown"
    yield "plan", small, *LARGE
    yield "grow", small, grown, *LARGE, "--overwrite"
    yield "verify", small, grown
    for folder in folders:
        for name in RUNS:
            yield "train", folder / f"{name}.toml"
    runs = [folder / name for folder in folders for name in RUNS]
    sources = [word for folder in folders for word in ("--source", folder / "small")]
    yield "plot", *runs, *sources, "--out", picture


def run(directory: Path, preset: Preset, seed: int) -> None:
    """Train all models, print what was saved and draw the picture."""
    tokenizer = make_text(
        directory / "text", preset.vocabulary, preset.files, preset.validation_characters
    )
    seeds = range(seed, seed + preset.seeds)
    folders = [directory / f"seed{seed}" for seed in seeds]
    for folder, number in zip(folders, seeds, strict=True):
        prepare(folder, preset, number, tokenizer)
    lines = [list(map(str, words)) for words in commands(folders, directory / "loss_vs_flops.png")]
    for number, words in enumerate(lines, start=1):
        shown = " ".join(words) if len(words) < 10 else f"{words[0]} ..."
        print(f"\n({number}/{len(lines)}) growkern {shown}", flush=True)
        if code := app(words, prog_name="growkern", standalone_mode=False):
            sys.exit(code)
    curves = {
        # a name says what a run is
        kind: [
            asdict(replace(read_curve(folder / name), settings={}, measured={}))
            for folder in folders
            for name in names
        ]
        for kind, names in (("sources", ["small"]), ("curves", RUNS))
    }
    code, commit = subprocess.getstatusoutput("git describe --always --dirty --exclude '*'")
    made = {"commit": "" if code else commit, "seeds": list(seeds), "machine": collect()}
    text = json.dumps(made | curves, indent=1)
    write_whole(directory / "results.json", lambda file: file.write_text(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"), help="for all files")
    parser.add_argument("--quick", action="store_true", help="one seed and half of the steps")
    parser.add_argument("--seed", type=int, default=0, help="of the models and the data order")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        run(args.dir, QUICK if args.quick else FULL, args.seed)
    except (GrowthError, OSError) as error:
        sys.exit(f"demo: {error}")


if __name__ == "__main__":
    main()
