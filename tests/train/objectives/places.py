"""Real text, tokenizers and tiny models for each objective."""

import functools
import sysconfig
from pathlib import Path

import tokenizers
import torch
import transformers

from growkern.train.run import train

# modules of Python with much prose in them
MODULES = ("argparse.py", "decimal.py" if False else "typing.py", "tarfile.py", "doctest.py")
LENGTH = 48
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPECIAL = {
    "bert": dict(
        zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), BERT, strict=True)
    ),
    "t5": {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"},
    "bart": {
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "cls_token": "<s>",
        "eos_token": "</s>",
        "sep_token": "</s>",
        "mask_token": "<mask>",
    },
    "gpt2": {"eos_token": "</s>", "unk_token": "<unk>"},
}
SENTINELS = [f"<extra_id_{i}>" for i in range(20)]


@functools.cache
def texts() -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [(folder / name).read_text()[:60_000] for name in MODULES]


@functools.cache
def tokenizer(kind: str):
    """A byte-pair tokenizer of 400 tokens, with the special tokens of a family."""
    special = SPECIAL[kind]
    extra = SENTINELS if kind == "t5" else []
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=special["unk_token"]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*dict.fromkeys(special.values()), *extra],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts(), trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def build(name: str, **options):
    """A model of a class, with the vocabulary of its tokenizer and without dropout."""
    torch.manual_seed(0)
    kind = {"Bert": "bert", "Elec": "bert", "T5Fo": "t5", "Bart": "bart", "GPT2": "gpt2"}[name[:4]]
    vocab_size, pad = len(tokenizer(kind)), tokenizer(kind).pad_token_id
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=vocab_size,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_heads=2,
            num_layers=2,
            dropout_rate=0.0,
            decoder_start_token_id=pad,
            pad_token_id=pad,
            **options,
        )
    elif kind == "bart":
        both = {
            f"{part}_{key}": value
            for part in ("encoder", "decoder")
            for key, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 64))
        }
        config = transformers.BartConfig(
            vocab_size=vocab_size,
            d_model=32,
            max_position_embeddings=64,
            dropout=0.0,
            decoder_start_token_id=tokenizer(kind).eos_token_id,
            pad_token_id=pad,
            **both,
            **options,
        )
    elif kind == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(
            vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=2, n_positions=64, **none, **options
        )
    else:
        cls = transformers.ElectraConfig if name.startswith("Electra") else transformers.BertConfig
        config = cls(vocab_size=vocab_size, **{**SIZES, **options})
    return getattr(transformers, name)(config)


# objective -> class, tokenizer
MODELS = {
    "mlm": ("BertForMaskedLM", "bert"),
    "mlm+nsp": ("BertForPreTraining", "bert"),
    "clm": ("GPT2LMHeadModel", "gpt2"),
    "span_corruption": ("T5ForConditionalGeneration", "t5"),
    "denoising": ("BartForConditionalGeneration", "bart"),
    "rtd": ("ElectraForPreTraining", "bert"),
}
RUN = """
[model]
path = "model"
{model}
[data]
train = ["text/*.txt"]
validation = ["text/0.txt"]
sequence_length = {length}
cache = "tokens"
{data}
[training]
steps = {steps}
batch_size = 8
learning_rate = 3e-3
warmup_steps = 5
log_every = 1
save_every = {save_every}
{more}
[output]
directory = "out"
tensorboard = false
"""


def place_of(directory: Path, objective: str, *, more: str = "", data: str = "", steps: int = 50):
    """Write the inputs of a run to a directory; its run file."""
    name, kind = MODELS[objective]
    models = {"model": build(name, **({"embedding_size": 16} if objective == "rtd" else {}))}
    if objective == "rtd":
        sizes = {"embedding_size": 16, "hidden_size": 16, "intermediate_size": 32}
        models["generator"] = build("ElectraForMaskedLM", **sizes)
    for folder, model in models.items():
        model.save_pretrained(directory / folder)
        tokenizer(kind).save_pretrained(directory / folder)
    (directory / "text").mkdir()
    for i, text in enumerate(texts()):
        (directory / "text" / f"{i}.txt").write_text(text)
    text = RUN.format(
        model='generator = "generator"' if objective == "rtd" else "",
        length=LENGTH,
        data=data,
        steps=steps,
        save_every=steps // 2,
        more=more,
    )
    (directory / "run.toml").write_text(text)
    return directory / "run.toml"


def rows_of(kind: str, length: int):
    """Rows of token ids without special tokens at their ends."""
    from growkern.train.data import TokenBlocks

    ids = tokenizer(kind)(texts()[0], add_special_tokens=False)["input_ids"]
    import numpy as np

    count = len(ids) // length
    return TokenBlocks(np.asarray(ids[: count * length], np.int32).reshape(count, length))


__all__ = ["MODELS", "build", "place_of", "rows_of", "texts", "tokenizer", "train"]
