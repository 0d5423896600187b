"""python -m tests.faults.work DIRECTORY NAME...: walk through growths, caches, exports."""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

import growkern
from growkern.growth.disk import stream
from growkern.publish.manifest import write_manifest
from growkern.train.dataset.cache import cached_rows
from growkern.train.objectives.language_modeling import CausalLMCollator
from growkern.train.safety.export import export
from testbed.tiny import VOCAB, TinyTokenizer
from tests.faults.walk import (
    CHANGES,
    EVERY,
    MEMORY,
    Walk,
    Work,
    library,
    models_made_once,
    only_one_thread,
)

SIZES = {
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 5,
    "max_position_embeddings": 8,
    "tie_word_embeddings": True,
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
HOW = {"hidden_size": 8, "max_shard_size": 1600, "progress": False}


def tiny(seed=0, **sizes):
    """A model of 8 tensors: most operations of a walk are those of a tensor, one like another."""
    torch.manual_seed(seed)
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES | sizes))


def save_source(folder, *, optimizer=False, **sizes):
    folder.mkdir(exist_ok=True)
    model = tiny(**sizes)
    model.save_pretrained(folder / "source")
    (folder / "source" / "tokenizer.json").write_text("{}")
    if optimizer:
        adam = torch.optim.AdamW(list(model.named_parameters()))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        adam.step()
        torch.save(adam.state_dict(), folder / "source" / "optimizer.pt")


def grow(folder, **how):
    growkern.grow_checkpoint(folder / "source", folder / "target", **HOW, **how)


def start_growth_over(folder):
    save_source(folder, optimizer=True)
    grow(folder, seed=1)


def grow_over(folder):
    grow(folder, overwrite=True, optimizer=folder / "source")


def cache(folder, teacher=None, **how):
    growkern.cache_teacher(
        teacher or TEACHER,
        [{"input_ids": [1, 2, 3, number]} for number in range(4)],
        folder / "target",
        collator=CausalLMCollator(TinyTokenizer()),
        **{"k": 2, "temperature": 1.0, "progress": False, "batch_size": 2, "shard_bytes": 40} | how,
    )


TEACHER = tiny(vocab_size=VOCAB)
# bytes of a large allocation, and a model whose tensors take more
LARGE = 1 << 15
WIDE = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 600}


def grow_wide(folder):
    growkern.grow_checkpoint(
        folder / "source", folder / "target", hidden_size=128, max_shard_size=400_000,
        optimizer=folder / "source", overwrite=True, progress=False,
    )  # fmt: skip


def start_wide(folder):
    save_source(folder, optimizer=True, **WIDE)
    growkern.grow_checkpoint(
        folder / "source", folder / "target", num_hidden_layers=2, progress=False
    )


def cache_wide(folder):
    cache(folder, overwrite=True, teacher=WIDE_TEACHER, k=64)


def start_cache_wide(folder):
    start_cache(folder)
    cache(folder, teacher=WIDE_TEACHER)


WIDE_TEACHER = tiny(**WIDE)


def start_cache(folder):
    (folder / "source").mkdir()


def start_cache_over(folder):
    start_cache(folder)
    cache(folder, k=3)


def cache_over(folder):
    cache(folder, overwrite=True)


def tokens(folder):
    rows = [{"input_ids": np.arange(i, i + 4), "labels": np.arange(4)} for i in range(3)]
    cached_rows(folder / "target", rows, "data", 100, None)


def start_tokens(folder):
    """A cache that is damaged."""
    (folder / "source").mkdir()
    tokens(folder)
    file = folder / "target" / "input_ids.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def start_export(folder):
    checkpoint = folder / "source" / "checkpoint-2"
    tiny().save_pretrained(checkpoint)
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "trainer_state.json").write_text("{}")
    write_manifest(checkpoint)


def start_export_over(folder):
    start_export(folder)
    tiny(1).save_pretrained(folder / "target")
    write_manifest(folder / "target")


def export_run(folder):
    export(folder / "source", folder / "target")


def export_over(folder):
    export(folder / "source", folder / "target", overwrite=True)


WORKS = {
    work.name: work
    for work in (
        # with everything that a growth can do, and every operation
        Work("grow-over", start_growth_over, grow_over, overwrite=True),
        Work("grow", save_source, grow, kinds=CHANGES),
        Work("cache", start_cache, cache, kinds=CHANGES),
        Work("cache-over", start_cache_over, cache_over, overwrite=True, kinds=CHANGES),
        Work("grow-memory", start_wide, grow_wide, overwrite=True, kinds=MEMORY),
        Work("cache-memory", start_cache_wide, cache_wide, overwrite=True, kinds=MEMORY),
        Work("export", start_export, export_run, kinds=CHANGES),
        Work("export-over", start_export_over, export_over, overwrite=True, kinds=CHANGES),
        Work("tokens", start_tokens, tokens, overwrite=True, kinds=CHANGES),
    )
}


class Sample(Walk):
    stride = 5


def main(walk=Sample):
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    directory, shim = Path(sys.argv[1]), library()
    shim.faults_large(LARGE)
    with only_one_thread(stream), models_made_once(transformers.Phi3ForCausalLM):
        for name in (name for name in sys.argv[2:] if name != EVERY):
            work = WORKS[name]
            for line in walk(work, directory, shim).run():
                print(line, file=sys.stderr)
            print(work.report(), flush=True)


if __name__ == "__main__":
    main()
