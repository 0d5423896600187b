"""Runs the demo: trains a small GPT-2, grows it, trains the large one in six ways, and compares.

Every stage is stored when it is done. An interrupted demo resumes with the first unfinished stage.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

from growkern.demo.config import (
    CONTESTANTS,
    FULL,
    QUICK,
    Contestant,
    DemoConfig,
    Size,
)
from growkern.demo.corpus import library_files, read_corpus, train_tokenizer
from growkern.demo.progress import Narrator
from growkern.demo.report import draw_results, result_table, summarize
from growkern.demo.stages import Stages, write_json
from growkern.demo.training import Data, curve_from, curve_record, train_model
from growkern.errors import FunctionChangedWarning, GrowthError
from growkern.growth.grow import grow_checkpoint
from growkern.growth.plan.growth_plan import plan
from growkern.growth.record.verify import verify
from growkern.info import collect
from growkern.package import version
from growkern.plot.curve import Curve
from growkern.publish.lock import locked
from growkern.train.dataset.text import TokenBlocks, pack_text
from growkern.train.loop.two_stage import TwoStageConfig
from growkern.train.loss.inheritance import InheritanceSchedule
from growkern.train.model.load import load_language_model, load_tokenizer

RESULT_FILE = "results.json"
PICTURE_FILE = "loss_vs_flops.png"


def run_demo(
    directory: str | Path,
    *,
    quick: bool = False,
    seed: int = 0,
    console: Console | None = None,
    config: DemoConfig | None = None,
) -> dict[str, Any]:
    """Train a small GPT-2, grow it, and train the large one in six ways to the same loss.

    The methods are those of bert2BERT (Chen et al. 2022) and Knowledge Inheritance (Qin et al.
    2022).

    Args:
        directory: for all files. A second call with the same settings resumes the demo.
        quick: train for fewer steps, with one seed.
        seed: of models, growth and data order. A demo with several seeds takes the next ones too.
        console: to print on.
        config: settings to use instead of a preset.

    Returns:
        The contents of `results.json` in the directory.

    Raises:
        GrowthError: the directory holds something else, this Python lacks the sources of its
            standard library, or a grown model fails its verification.
    """
    config = config or (QUICK if quick else FULL)
    if Path(directory).is_file():
        raise GrowthError(f"{directory} is a file: give another directory (--dir)")
    with locked(Path(directory), "running a demo in"), _quiet_transformers():
        return _Demo(Path(directory), config, seed, console or Console()).run()


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """While active, transformers prints no progress bars and no warnings."""
    log = transformers.utils.logging
    verbosity = log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        log.enable_progress_bar()


class _Demo:
    """The stages of the demo, and the directory they work in."""

    def __init__(self, directory: Path, config: DemoConfig, seed: int, console: Console) -> None:
        identity = {
            "config": asdict(config),
            "contestants": [asdict(contestant) for contestant in CONTESTANTS],
            "seed": seed,
            "version": version(),
        }
        self.directory, self.config, self.seed, self.console = directory, config, seed, console
        self.stages = Stages(directory, identity)
        self.grown = {c.growth["method"]: c.growth for c in CONTESTANTS if c.growth}
        self.seeds = range(seed, seed + config.seeds)
        # corpus and plan, and for each seed a source, the growths and the runs
        each = 1 + len(self.grown) + len(CONTESTANTS)
        self.narrator = Narrator(console, 2 + config.seeds * each)

    def run(self) -> dict[str, Any]:
        corpus = self._once(
            "corpus", "read the standard library, train a tokenizer", self._make_corpus
        )
        self.console.print(
            f"  {corpus['characters'] / 1e6:.1f} million characters, {corpus['train_tokens']} "
            f"tokens for training, {corpus['validation_tokens']} for validation"
        )
        data = self._load_data()
        sources = [
            self._stage(seed, "source", "train the small model", partial(self._train_source, data))
            for seed in self.seeds
        ]
        plan_record = self._once("plan", "plan the growth", lambda s: self._plan())
        checks = [
            {
                method: self._stage(
                    seed,
                    f"grow_{method}",
                    f"grow and verify: {method}",
                    partial(self._grow, method),
                )
                for method in self.grown
            }
            for seed in self.seeds
        ]
        curves = self._train_all(data)
        return self._conclude(corpus, list(map(curve_from, sources)), plan_record, checks, curves)

    def _stage(self, seed: int, name: str, title: str, work: Any) -> Any:
        """A stage of one seed. `work` takes the seed and the stage."""
        label = f"seed {seed}: {title}" if self.config.seeds > 1 else title
        return self._once(f"{name}_seed{seed}", label, lambda stage: work(seed, stage))

    def _folder(self, seed: int) -> Path:
        return self.directory / f"seed{seed}"

    def _once(self, name: str, title: str, work: Any) -> Any:
        if self.stages.is_done(name):
            self.narrator.skip(title)
            return self.stages.once(name, lambda: None)
        with self.narrator.stage(title) as stage:
            return self.stages.once(name, lambda: work(stage))

    # ------------------------------------------------------------------- data

    def _make_corpus(self, _stage: Any) -> dict[str, Any]:
        config = self.config
        corpus = read_corpus(library_files(), config.max_files)
        tokenizer = train_tokenizer(corpus.train, config.vocab_size)
        tokenizer.save_pretrained(self.directory / "tokenizer")
        train, held_out = (pack_text(t, tokenizer, config.sequence_length) for t in corpus)
        # evenly spaced over the whole text, and the same in every evaluation
        rows = np.linspace(0, len(held_out) - 1, min(config.eval_blocks, len(held_out)))
        validation_NS = held_out.tokens_NS[rows.astype(np.int64)]
        np.save(self.directory / "train.npy", train.tokens_NS)
        np.save(self.directory / "validation.npy", validation_NS)
        return {
            "files": len(corpus.train) + len(corpus.validation),
            "characters": sum(len(text) for texts in corpus for text in texts),
            "train_tokens": train.tokens_NS.size,
            "validation_tokens": validation_NS.size,
        }

    def _load_data(self) -> Data:
        train, validation = (
            TokenBlocks(np.load(self.directory / f"{name}.npy", mmap_mode="r"))
            for name in ("train", "validation")
        )
        return Data(load_tokenizer(self.directory / "tokenizer"), train, validation)

    # ----------------------------------------------------------------- models

    def _train_source(self, data: Data, seed: int, stage: Any) -> dict[str, Any]:
        curve = train_model(
            self._new_model(self.config.source, len(data.tokenizer), seed),
            self._folder(seed) / "source",
            data,
            self.config,
            title="source",
            seed=seed,
            report=stage.report,
        )
        return self._trained(curve, stage)

    def _new_model(self, size: Size, vocab_size: int, seed: int) -> GPT2LMHeadModel:
        config = GPT2Config(
            **asdict(size),
            vocab_size=vocab_size,
            n_positions=self.config.sequence_length,
            # 0.02 is the usual value at a width of 768; at a small one it is nearly 0
            initializer_range=0.02 * (768 / size.n_embd) ** 0.5,
            bos_token_id=None,
            eos_token_id=None,
            # a short run sees each text about once, so dropout would only slow it down
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)

    def _growth(self, method: str, seed: int) -> dict[str, Any]:
        return {**self.grown[method], **asdict(self.config.target), "seed": seed}

    def _plan(self) -> dict[str, Any]:
        seed = self.seeds[0]
        made = plan(self._folder(seed) / "source", **self._growth("fpi", seed))
        self.console.print(made.table())
        return made.to_dict()

    def _check(self, method: str, seed: int) -> dict[str, Any]:
        work = partial(self._grow, method)
        found = self._stage(seed, f"grow_{method}", f"grow and verify: {method}", work)
        return cast(dict[str, Any], found)

    def _grow(self, method: str, seed: int, _stage: Any) -> dict[str, Any]:
        source = self._folder(seed) / "source"
        target = self._folder(seed) / "grown" / method
        with warnings.catch_warnings():
            # the verification says so
            warnings.simplefilter("ignore", FunctionChangedWarning)
            grow_checkpoint(
                source,
                target,
                overwrite=True,
                resume=False,
                progress=False,
                **self._growth(method, seed),
            )
        tokens = torch.from_numpy(np.load(self.directory / "validation.npy")[:64].astype(np.int64))
        report = verify(source, target, tokens=tokens)
        if not report.ok or (method == "fpi" and seed == self.seeds[0]):
            self.console.print(report.table())
        if not report.ok:
            raise GrowthError(f"{target} failed its verification: {report.failure}")
        return {"level": report.level, "outputs": dict(report.outputs)}

    # ------------------------------------------------------------------- runs

    def _train_all(self, data: Data) -> list[list[Curve]]:
        """The curves of all runs, a list for each seed in the order of `CONTESTANTS`.

        All runs from scratch come first. The others end at the final loss of their own seed's.
        """
        scratch, *others = CONTESTANTS
        curves = [[self._train_one(scratch, data, None, seed)] for seed in self.seeds]
        for seed, of_seed in zip(self.seeds, curves, strict=True):
            target_loss = of_seed[0].losses[-1]
            of_seed += [self._train_one(one, data, target_loss, seed) for one in others]
        return curves

    def _train_one(
        self, contestant: Contestant, data: Data, target_loss: float | None, seed: int
    ) -> Curve:
        work = partial(self._compete, contestant, data, target_loss)
        return curve_from(
            self._stage(seed, f"run_{contestant.name}", f"train: {contestant.title}", work)
        )

    def _compete(
        self, contestant: Contestant, data: Data, target_loss: float | None, seed: int, stage: Any
    ) -> dict[str, Any]:
        config, folder = self.config, self._folder(seed)
        if contestant.growth is None:
            model = self._new_model(config.target, len(data.tokenizer), seed)
        else:
            model = load_language_model(folder / "grown" / contestant.growth["method"])
        options: dict[str, Any] = {}
        if contestant.two_stage:
            stage1 = max(1, round(config.training.steps * config.stage1_share))
            options["two_stage"] = TwoStageConfig(config.layers_per_block, stage1, seed)
        if contestant.inheritance:
            end = max(1, round(config.training.steps * config.inheritance_share))
            # the paper's rate: a student of AKI does not begin with the teacher's predictions
            options["inheritance"] = InheritanceSchedule(rate=1.0, end_step=end)
            options["teacher"] = load_language_model(folder / "source")
        curve = train_model(
            model,
            folder / contestant.name,
            data,
            config,
            title=contestant.title,
            seed=seed,
            report=stage.report,
            target_loss=target_loss,
            **options,
        )
        return self._trained(curve, stage)

    @staticmethod
    def _trained(curve: Curve, stage: Any) -> dict[str, Any]:
        stage.note = f"validation loss {curve.losses[0]:.3f} to {curve.losses[-1]:.3f}"
        return curve_record(curve)

    # ---------------------------------------------------------------- results

    def _conclude(
        self,
        corpus: dict[str, Any],
        sources: list[Curve],
        plan_record: dict[str, Any],
        checks: list[dict[str, Any]],
        curves: list[list[Curve]],
    ) -> dict[str, Any]:
        rows = [
            {"seed": seed, **row}
            for seed, source, of_seed in zip(self.seeds, sources, curves, strict=True)
            for row in summarize(source, of_seed)
        ]
        results = {
            "config": asdict(self.config),
            "seeds": list(self.seeds),
            "machine": collect().to_dict(),
            "corpus": corpus,
            "plan": plan_record,
            "growth": checks,
            "rows": rows,
            "sources": list(map(curve_record, sources)),
            "curves": [curve_record(curve) for of_seed in curves for curve in of_seed],
        }
        write_json(self.directory / RESULT_FILE, results)
        draw_results(results, self.directory / PICTURE_FILE)
        self.console.print(result_table(rows, sources))
        for name in (PICTURE_FILE, RESULT_FILE):
            self.console.print(f"{self.directory / name}", highlight=False)
        return results
