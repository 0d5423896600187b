"""Runs the demo: trains a small model, grows it, trains the large one in six ways, and compares.

Every stage is stored when it is done. An interrupted demo resumes with the first unfinished stage.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from transformers import BertConfig, BertForMaskedLM

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
from growkern.train.config import TwoStageConfig
from growkern.train.data import TokenBlocks, pack_text
from growkern.train.inheritance import InheritanceSchedule
from growkern.train.load import load_language_model, load_tokenizer

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
    """Train a small BERT, grow it, and train the large one in six ways to the same loss.

    The methods are those of bert2BERT (Chen et al. 2022) and Knowledge Inheritance (Qin et al.
    2022).

    Args:
        directory: for all files. A second call with the same settings resumes the demo.
        quick: use smaller models.
        seed: of models, growth, masks and data order.
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
        # three stages before the growths: corpus, source and plan
        self.narrator = Narrator(console, 3 + len(self.grown) + len(CONTESTANTS))

    def run(self) -> dict[str, Any]:
        corpus = self._once(
            "corpus", "read the standard library, train a tokenizer", self._make_corpus
        )
        self.console.print(
            f"  {corpus['characters'] / 1e6:.1f} million characters, {corpus['train_tokens']} "
            f"tokens for training, {corpus['validation_tokens']} for validation"
        )
        data = self._load_data()
        source = curve_from(
            self._once("source", "train the small model", lambda s: self._train_source(data, s))
        )
        plan_record = self._once("plan", "plan the growth", lambda s: self._plan())
        checks = {
            method: self._once(
                f"grow_{method}", f"grow and verify: {method}", lambda s, m=method: self._grow(m)
            )
            for method in self.grown
        }
        curves = self._race(data)
        return self._conclude(corpus, source, plan_record, checks, curves)

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

    def _train_source(self, data: Data, stage: Any) -> dict[str, Any]:
        curve = train_model(
            self._new_model(self.config.source, len(data.tokenizer)),
            self.directory / "source",
            data,
            self.config,
            self.config.source_training,
            title="source",
            seed=self.seed,
            report=stage.report,
        )
        return self._trained(curve, stage)

    def _new_model(self, size: Size, vocab_size: int) -> BertForMaskedLM:
        config = BertConfig(
            **asdict(size),
            vocab_size=vocab_size,
            max_position_embeddings=self.config.sequence_length,
            type_vocab_size=1,
            pad_token_id=0,
            # a short run sees each text about once, so dropout would only slow it down
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        torch.manual_seed(self.seed)
        return BertForMaskedLM(config)

    def _growth(self, method: str) -> dict[str, Any]:
        # layers as in bert2BERT
        sizes = asdict(self.config.target)
        return {"depth": "stack", **self.grown[method], **sizes, "seed": self.seed}

    def _plan(self) -> dict[str, Any]:
        made = plan(self.directory / "source", **self._growth("fpi"))
        self.console.print(made.table())
        return made.to_dict()

    def _grow(self, method: str) -> dict[str, Any]:
        target = self.directory / "grown" / method
        with warnings.catch_warnings():
            # the plan has said so
            warnings.simplefilter("ignore", FunctionChangedWarning)
            grow_checkpoint(
                self.directory / "source",
                target,
                overwrite=True,
                resume=False,
                progress=False,
                **self._growth(method),
            )
        tokens = torch.from_numpy(np.load(self.directory / "validation.npy")[:64].astype(np.int64))
        report = verify(self.directory / "source", target, tokens=tokens)
        wrong = [group.worst for group in report.groups if not group.ok]
        if method == "fpi" or wrong:
            self.console.print(report.table())
        # outputs may differ: at an uneven width the plan says so of BERT's MLM head
        if wrong or report.contradictions:
            raise GrowthError(f"{target} failed its verification: {report.failure}")
        return {"level": report.level, "outputs": dict(report.outputs)}

    # ------------------------------------------------------------------- runs

    def _race(self, data: Data) -> list[Curve]:
        curves: list[Curve] = []
        for contestant in CONTESTANTS:
            target_loss = curves[0].losses[-1] if curves else None
            record = self._once(
                f"run_{contestant.name}",
                f"train: {contestant.title}",
                lambda stage, c=contestant, t=target_loss: self._compete(c, data, t, stage),
            )
            curves.append(curve_from(record))
        return curves

    def _compete(
        self, contestant: Contestant, data: Data, target_loss: float | None, stage: Any
    ) -> dict[str, Any]:
        config, steps = self.config, self.config.target_training.steps
        if contestant.growth is None:
            model = self._new_model(config.target, len(data.tokenizer))
        else:
            method = contestant.growth["method"]
            model = load_language_model(self.directory / "grown" / method)
        options: dict[str, Any] = {}
        if contestant.two_stage:
            stage1 = max(1, round(steps * config.stage1_share))
            options["two_stage"] = TwoStageConfig(config.layers_per_block, stage1, self.seed)
        if contestant.inheritance:
            end = max(1, round(steps * config.inheritance_share))
            options["inheritance"] = InheritanceSchedule(end_step=end)
            options["teacher"] = load_language_model(self.directory / "source")
        curve = train_model(
            model,
            self.directory / contestant.name,
            data,
            config,
            config.target_training,
            title=contestant.title,
            seed=self.seed,
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
        source: Curve,
        plan_record: dict[str, Any],
        checks: dict[str, Any],
        curves: list[Curve],
    ) -> dict[str, Any]:
        rows = summarize(source, curves)
        machine = collect()
        results = {
            "config": asdict(self.config),
            "seed": self.seed,
            "machine": machine.to_dict(),
            "corpus": corpus,
            "plan": plan_record,
            "growth": checks,
            "rows": rows,
            "source": curve_record(source),
            "curves": [curve_record(curve) for curve in curves],
        }
        write_json(self.directory / RESULT_FILE, results)
        draw_results(results, self.directory / PICTURE_FILE)
        self.console.print(result_table(rows, source))
        for name in (PICTURE_FILE, RESULT_FILE):
            self.console.print(f"{self.directory / name}", highlight=False)
        return results
