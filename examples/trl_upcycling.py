"""A dense model becomes a mixture of experts, which `trl.SFTTrainer` trains.

`python examples/trl_upcycling.py` does this with a tiny Llama on text that it writes itself. The
directory of the mixture is a plain one of transformers. Do not resume such a run from a checkpoint:
the Trainer of transformers 5.23, on which TRL builds, drops the trained experts when it resumes.
"""

import tempfile
from pathlib import Path

import tokenizers
import torch
import transformers
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import growkern

WORDS = 48


def make_dense() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=2, vocab_size=WORDS, pad_token_id=0, eos_token_id=1
    )
    return transformers.LlamaForCausalLM(config)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = {"[PAD]": 0, "[EOS]": 1} | {f"w{i}": i for i in range(2, WORDS)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[EOS]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "eos_token": "[EOS]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **special)


def train(folder: Path) -> SFTTrainer:
    """Make a mixture in `folder / "moe"` and train it; the trainer."""
    make_dense().save_pretrained(folder / "dense")
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    # from a shell: growkern grow dense/ moe/ --to mixtral --num-local-experts 4 ...
    growkern.grow_checkpoint(folder / "dense", folder / "moe", to="mixtral", **experts)
    # the router's auxiliary loss keeps every expert in use
    moe = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "moe", output_router_logits=True
    )
    texts = [{"text": " ".join(f"w{2 + (i + 3 * j) % 40}" for j in range(8))} for i in range(40)]
    args = SFTConfig(
        str(folder / "run"),
        max_steps=30,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.accelerator.is_available(),
    )
    data = Dataset.from_list(texts)
    trainer = SFTTrainer(moe, args, train_dataset=data, processing_class=make_tokenizer())
    trainer.train()
    return trainer


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(Path(folder))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
