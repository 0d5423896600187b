"""The kinds of files that are fuzzed: how they are changed, used, and compared with the truth.

The truth is never computed by the code under test: transformers compares what two checkpoints
predict, safetensors and plain integers read a cache, and an unattacked growth gives bytes.
"""

import json
import random
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from safetensors.numpy import load_file

import growkern
from growkern.train.model.language_model import load_language_model
from growkern.train.objectives.language_modeling import CausalLMCollator
from growkern.train.run.file import load_run
from testbed.tiny import VOCAB, TinyTokenizer
from tests.faults.walk import tree
from tests.faults.work import save_source, tiny
from tests.fuzz import mutate, readers
from tests.train.run.test_config import COMPLETE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HOW = {"hidden_size": 8, "symmetry": "split", "progress": False}
# copies that are split lose their moments and start again at step 0; here none may
PLAIN = HOW | {"symmetry": "none"}
TOKENS = torch.tensor([[0, 1, 2, 3, 4]])


class Wrong(Exception):
    """Accepted, and the result differs from the truth."""


def require(same: bool, what: str) -> None:
    if not same:
        raise Wrong(what)


def logits(directory: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def same_function(source: Path, target: Path) -> bool:
    wanted, found = logits(source), logits(target)
    found = found[..., : wanted.shape[-1]]
    # of weights that overflow, the source's outputs are no numbers either
    finite = wanted.isfinite()
    wanted, found = (torch.where(finite, x, 0) for x in (wanted, found))
    scale = wanted.abs().max().clamp(min=1e-6)
    # weights are float32, with 24 bits: room for 400 roundings
    return bool((wanted - found).abs().max() <= 400 * 2.0**-24 * scale)


class Kind:
    """One kind of files; `prepare` is done once, the rest in a fork for each case."""

    def prepare(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        save_source(folder, optimizer=True)
        self.source, self.new = folder / "source", folder / "new"
        self.make()

    def make(self) -> None:
        """Whatever else is needed, and the truth. Imports everything that the work needs."""

    def change(self, draw: random.Random) -> None:
        """Change the files."""
        raise NotImplementedError

    def use(self) -> object:
        """Do the work. A GrowthError is a refusal."""
        raise NotImplementedError

    def check(self, result: object) -> None:
        """Raise Wrong unless the result of `use` is true."""
        raise NotImplementedError


class Sources(Kind):
    def make(self):
        self.check(self.use())
        shutil.rmtree(self.new)

    def change(self, draw):
        file = self.source / "config.json"
        if draw.random() < 0.5:
            file.write_bytes(mutate.of_json(file.read_bytes(), draw))
            return
        file = self.source / "model.safetensors"
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        head = mutate.of_json(raw[8 : 8 + length], draw) if draw.random() < 0.6 else None
        changed = mutate.of_bytes(raw, draw) if head is None else None
        file.write_bytes(changed or struct.pack("<Q", len(head or b"")) + head + raw[8 + length :])

    def use(self):
        return growkern.grow_checkpoint(self.source, self.new, **HOW)

    def check(self, report):
        if report.plan.exact:
            require(same_function(self.source, self.new), "the grown model computes another thing")
        else:
            logits(self.new)


class Models(Sources):
    """Sources as training, `cache-teacher` and `export` load them."""

    def make(self):
        self.check(self.use())

    def use(self):
        return load_language_model(self.source, torch.float64)

    def check(self, model):
        with torch.no_grad():
            found = model.eval()(input_ids=TOKENS).logits
        require(torch.equal(found, logits(self.source)), "the model computes another thing")


class Optimizers(Kind):
    def make(self):
        self.file = self.source / "optimizer.pt"
        growkern.grow_checkpoint(self.source, self.new, optimizer=self.file, **PLAIN)
        self.truth = tree(self.new)
        shutil.rmtree(self.new)

    def change(self, draw):
        if draw.random() < 0.5:
            self.file.write_bytes(mutate.of_bytes(self.file.read_bytes(), draw))
            return
        state = torch.load(self.file, weights_only=True)
        holder = draw.choice(
            [state, *state["param_groups"], state["state"], *state["state"].values()]
        )
        key = draw.choice(list(holder))
        value = holder[key]
        if isinstance(value, torch.Tensor) and draw.random() < 0.6:
            changes = (
                *(value.double(), value.bfloat16(), value.int(), value.flatten(), value[None]),
                *(value.to("meta"), value.to_sparse(), value * float("nan"), -value),
                *(value * torch.tensor(1j), value.expand(3, *value.shape), value.flatten()[:0]),
            )
            holder[key] = draw.choice(changes)
        elif draw.random() < 0.3:
            del holder[key]
        else:
            holder[key] = mutate.hostile(draw)
        torch.save(state, self.file)

    def use(self):
        growkern.grow_checkpoint(self.source, self.new, optimizer=self.file, **PLAIN)

    def check(self, result):
        found = tree(self.new)
        if found["optimizer.pt"] == self.truth["optimizer.pt"]:
            return
        # the file says something else: what a clean copy of that gives
        state = torch.load(self.file, weights_only=True)
        torch.save(state, self.folder / "again.pt")
        growkern.grow_checkpoint(
            self.source, self.folder / "again", optimizer=self.folder / "again.pt", **PLAIN
        )
        again = (self.folder / "again" / "optimizer.pt").read_bytes()
        require(found["optimizer.pt"][1] == again, "a clean copy of the file gives other bytes")
        grown = torch.load(self.new / "optimizer.pt", weights_only=True)
        # an empty state is none, for PyTorch too
        small = {key: entry for key, entry in state["state"].items() if entry}
        large = grown["state"]
        require(small.keys() == large.keys(), "other parameters")
        for one, other in zip(small.values(), large.values(), strict=True):
            require(float(one["step"]) == float(other["step"]), "another step count")


class Lineages(Kind):
    def make(self):
        self.grown = self.folder / "grown"
        growkern.grow_checkpoint(self.source, self.grown, **HOW)
        self.truth = tree(self.grown)

    def change(self, draw):
        name = draw.choice(("lineage.json", "lineage.json", "lineage.json", "checksums.json"))
        self.is_lineage, file = name == "lineage.json", self.grown / name
        file.write_bytes(mutate.of_json(file.read_bytes(), draw))

    def use(self):
        if self.is_lineage:
            return growkern.verify(self.source, self.grown)
        from growkern.growth.disk.checksums import verify_checksums

        return verify_checksums(self.grown, self.source)

    def check(self, result):
        if not self.is_lineage:
            before = json.loads(self.truth["checksums.json"][1])
            after = json.loads((self.grown / "checksums.json").read_bytes())
            # a record that lacks something is true of what it names
            parts = ("files", "source", "target")
            is_true = all(after[part].items() <= before[part].items() for part in parts)
            require(is_true or not result.ok, "a wrong record is said to be right")
        elif result.ok:
            # the weights were not touched, so a record that passes is true of them
            require(same_function(self.source, self.grown), "a wrong record is said to be right")


class Caches(Kind):
    def make(self):
        self.cache = self.folder / "cache"
        self.examples = [{"input_ids": [n + 1, 2, 3, n][: 2 + n % 3]} for n in range(5)]
        self.collator = CausalLMCollator(TinyTokenizer())
        growkern.cache_teacher(
            tiny(vocab_size=VOCAB),
            self.examples,
            self.cache,
            collator=self.collator,
            **{"k": 3, "temperature": 1.0, "progress": False, "batch_size": 2, "shard_bytes": 60},
        )
        self.truth = self._read()

    def _read(self):
        """Ids and log-probs of every row, by safetensors and Python's integers."""
        header = json.loads((self.cache / "cache.json").read_text())
        bits = (header["vocab_size"] - 1).bit_length()
        ids, logprobs = [], []
        for file in sorted(self.cache.glob("rows-*")):
            arrays = load_file(file)
            for row in arrays["ids"]:
                number = int.from_bytes(row.tobytes(), "little")
                ids.append([number >> (bits * i) & ((1 << bits) - 1) for i in range(header["k"])])
            logprobs.append(arrays["logprobs"])
        return ids, np.concatenate(logprobs)

    def change(self, draw):
        if draw.random() < 0.5:
            # without checksums, what the other checks are worth
            (self.cache / "manifest.json").unlink()
        file = draw.choice(sorted(self.cache.iterdir()))
        raw = file.read_bytes()
        if file.suffix == ".json":
            file.write_bytes(mutate.of_json(raw, draw))
        elif draw.random() < 0.5:
            file.write_bytes(mutate.of_bytes(raw, draw))
        else:
            (length,) = struct.unpack("<Q", raw[:8])
            head = mutate.of_json(raw[8 : 8 + length], draw)
            file.write_bytes(struct.pack("<Q", len(head)) + head + raw[8 + length :])

    def use(self):
        cache = growkern.TeacherCache(self.cache)
        batches = [self.collator([example]) for example in self.examples]
        return [cache.batch(batch) for batch in batches], batches

    def check(self, result):
        try:
            ids, logprobs = self._read()
        except SafetensorError:
            # the library does not read, say, a number of 400 digits where nobody needs one
            ids, logprobs = self.truth
        row = 0
        for (found_ids, found_logprobs), batch in zip(*result, strict=True):
            # a causal model predicts every token but the first
            rows = batch["input_ids"].shape[1] - 1
            require(found_ids[0, :rows].tolist() == ids[row : row + rows], "other ids")
            raw = found_logprobs[0, :rows].view(torch.uint16).numpy()
            require(np.array_equal(raw, logprobs[row : row + rows]), "other log-probs")
            row += rows
        require(row == len(ids), "other rows")


class Toml(Kind):
    def make(self):
        self.file = self.folder / "run.toml"

    def change(self, draw):
        text = COMPLETE.encode()
        if draw.random() < 0.4:
            self.file.write_bytes(mutate.of_bytes(text, draw))
            return
        lines = COMPLETE.splitlines()
        at = draw.choice([i for i, line in enumerate(lines) if " = " in line])
        key = lines[at].partition(" = ")[0]
        value = draw.choice(
            (
                *("-1", "0", "1e400", "nan", "inf", "true", '""', "[]", "{}", "1979-05-27", "'x'"),
                *("9" * draw.choice((10, 18, 31, 100_000)), "[" * draw.choice((5, 5000)), '"""'),
                *("{a = 1}", "[1, 2]", '"' + "a" * draw.choice((10, 100_000)) + '"', "0x7f", "0o7"),
                *(".".join("a" * draw.choice((3, 100_000))), "{a=" * 3000, "1_000", "-0.0"),
                *("1" + "\n" * 50_000, "1 # " + "[" * 50_000, "9223372036854775808"),
            )
        )
        kind = draw.choice(("value", "value", "value", "key", "remove", "twice"))
        if kind == "value":
            lines[at] = f"{key} = {value}"
        elif kind == "key":
            lines[at] = f"{draw.choice(('x', '', 'a.b', key + 'x'))} = {value}"
        elif kind == "remove":
            del lines[at]
        else:
            lines.insert(at, lines[at])
        self.file.write_text("\n".join(lines))

    def use(self):
        return load_run(self.file)

    def check(self, run):
        table = tomllib.loads(self.file.read_text())
        for section, values in table.items():
            for key, value in values.items():
                found = getattr(getattr(run, section), key)
                wanted = tuple(value) if isinstance(value, list) else value
                require(found == wanted, f"{section}.{key} is {found!r}")


class Reading(Kind):
    """A file alone, with what reads it: `readers.py`. Nothing is made of it."""

    reader: readers.Reader

    def prepare(self, folder):
        self.folder = folder
        readers.prepare(folder)
        self.reader.read(folder)

    def change(self, draw):
        file = self.folder / self.reader.file
        change = mutate.of_json if file.suffix == ".json" else mutate.of_bytes
        file.write_bytes(change(file.read_bytes(), draw))

    def use(self):
        return self.reader.read(self.folder)

    def check(self, result):
        """Whatever was read is right."""


KINDS = {
    "source": Sources,
    "model": Models,
    "lineage": Lineages,
    "optimizer": Optimizers,
    "cache": Caches,
    "toml": Toml,
}
KINDS |= {
    f"read-{name}": type(name, (Reading,), {"reader": reader})
    for name, reader in readers.READERS.items()
}
