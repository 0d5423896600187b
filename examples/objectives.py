"""Trains a tiny model with one of the objectives, on the source code of Python itself.

`python examples/objectives.py denoising`. The names are those of `[data] objective` in a run file:
mlm, clm, span_corruption, denoising.
"""

import sys
import sysconfig
import tempfile
from pathlib import Path

import tokenizers
import torch
import transformers

import growkern

# objective -> class of the model, tokens of its tokenizer
MODELS = {
    "mlm": ("BertForMaskedLM", "bert"),
    "clm": ("GPT2LMHeadModel", "gpt2"),
    "span_corruption": ("T5ForConditionalGeneration", "t5"),
    "denoising": ("BartForConditionalGeneration", "bart"),
}
TOKENS = {
    "bert": {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "gpt2": {"eos": "</s>"},
    "t5": {"pad": "<pad>", "eos": "</s>"},
    "bart": {"pad": "<pad>", "bos": "<s>", "cls": "<s>", "eos": "</s>", "mask": "<mask>"},
}
SENTINELS = [f"<extra_id_{i}>" for i in range(20)]
TEXTS = [Path(sysconfig.get_path("stdlib")) / f"{name}.py" for name in ("typing", "doctest")]
LENGTH = 48


def make_tokenizer(kind):
    """A byte-pair tokenizer of 400 tokens, trained on the texts."""
    special = {f"{name}_token": token for name, token in TOKENS[kind].items()}
    extra = SENTINELS if kind == "t5" else []
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*dict.fromkeys(special.values()), *extra],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train([str(path) for path in TEXTS], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def make_model(name, tokenizer, width=32):
    """A model of two layers (or two and two) without dropout."""
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    start = {"T5": pad, "Bart": eos}.get(name.split("For")[0])
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        **dict.fromkeys(("num_hidden_layers", "num_decoder_layers"), 2),
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": pad,
        "bos_token_id": tokenizer.bos_token_id or eos,
        "eos_token_id": eos,
        "decoder_start_token_id": start,
        "intermediate_size": 2 * width,
        **{"d_kv": width // 2, "d_ff": 2 * width},
        **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
        **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": 2 * width for part in ("encoder", "decoder")},
        **{f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")},
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        **dict.fromkeys(("dropout", "dropout_rate"), 0.0),
    }
    cls = getattr(transformers, name)
    # configs keep the keys of other families as plain attributes
    return cls(cls.config_class(**sizes))


def train(objective, directory, **options):
    """Train for 50 steps; the trainer."""
    name, kind = MODELS[objective]
    tokenizer = make_tokenizer(kind)
    torch.manual_seed(0)
    model = make_model(name, tokenizer)
    files = [str(path) for path in TEXTS]
    section = growkern.DataSection(
        train=files, objective=objective, sequence_length=LENGTH, cache=f"{directory}/tokens"
    )
    data = growkern.load_data(section, tokenizer, progress=False)
    arguments = transformers.TrainingArguments(
        f"{directory}/run",
        max_steps=50,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.accelerator.is_available(),
        disable_tqdm=True,
    )
    trainer = growkern.TwoStageTrainer(
        model,
        arguments,
        processing_class=tokenizer,
        train_dataset=data.train,
        data_collator=data.collator(tokenizer),
        **options,
    )
    trainer.train()
    return trainer


def main():
    objective = sys.argv[1] if len(sys.argv) > 1 else "span_corruption"
    trainer = train(objective, tempfile.mkdtemp())
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(f"{objective}: loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps")


if __name__ == "__main__":
    main()
