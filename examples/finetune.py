"""How well a model learns a task: to say from which source a passage of text comes.

    python -m examples.finetune MODEL SOURCE SOURCE... [--seeds 3] [--length 128]

A source is a file or a pattern of your own texts. The last fifth of each is the test, and all have
equally many passages. Compare two models with the same seeds: they see the same in the same order.
"""

import argparse
import glob
import math
import tempfile
from pathlib import Path

import numpy as np
import transformers
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback


def blocks(files, tokenizer, length):
    """The joined tokens of files, each with a separator at its end, in rows of one length."""
    eos, sep, cls = tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.cls_token_id
    end = [token for token in (eos, sep) if token is not None][:1]
    head = [] if cls is None else [cls]
    texts = [file.read_text("utf-8") for file in files]
    found = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    tokens, body = [token for ids in found for token in [*ids, *end]], length - len(head)
    starts = range(0, len(tokens) - body + 1, body)
    return np.array([head + tokens[start : start + body] for start in starts])


def passages(sources, tokenizer, length, most):
    """Passages for training and for the test, spread evenly over each source."""
    files = [[Path(name) for name in sorted(glob.glob(s, recursive=True))] for s in sources]
    rows = [blocks(one, tokenizer, length) for one in files]
    if not all(map(len, rows)):
        raise ValueError(f"each source needs a text of at least {length} tokens")
    count, train, test = min(most, *map(len, rows)), [], []
    for label, tokens_NS in enumerate(rows):
        chosen = np.linspace(0, len(tokens_NS) - 1, count).round().astype(int)
        found = [{"input_ids": row, "labels": label} for row in tokens_NS[chosen]]
        train += found[: -math.ceil(count / 5)]
        test += found[-math.ceil(count / 5) :]
    return train, test


def accuracy(model, sources, seed=0, *, length=128, learning_rate=5e-5, epochs=3.0, most=500):
    """The share of test passages that a fine-tuned checkpoint gets right."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    train, test = passages(sources, tokenizer, length, most)
    transformers.set_seed(seed)
    kind = {"num_labels": len(sources), "dtype": "float32"}
    classifier = AutoModelForSequenceClassification.from_pretrained(model, **kind)
    # decoders are read at the last token that is no padding, and no passage has any
    classifier.config.pad_token_id = -1
    rows = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16, "seed": seed}
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    how = {"num_train_epochs": epochs, "learning_rate": learning_rate, **rows, **quiet}
    with tempfile.TemporaryDirectory() as scratch:
        args = TrainingArguments(scratch, dataloader_pin_memory=False, **how)
        trainer = Trainer(classifier, args, train_dataset=train)
        trainer.remove_callback(PrinterCallback)  # it prints a line that says nothing of the result
        trainer.train()
        found = trainer.predict(test)
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    return float((logits.argmax(-1) == found.label_ids).mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--length", type=int, default=128)
    given = parser.parse_args()
    for number in range(given.seeds):
        right = accuracy(given.model, given.sources, number, length=given.length)
        print(f"seed {number}: {100 * right:.1f} %, by chance {100 / len(given.sources):.1f} %")
