"""TRL's trainers with a teacher and growkern's loss.

`python examples/trl_distillation.py` lets a tiny model learn from a teacher on text that it writes
itself. A grown model can be taught by a larger one in the same way.

`TaughtTrainer` is `trl.SFTTrainer` with a teacher beside the labels: copy it into your script.

`FusedDistillationTrainer` takes the arguments of `trl.DistillationTrainer`. The loss and its
gradients are those of TRL, more exact in bfloat16. TRL's metric "entropy" is not computed.
"""

import tempfile
from typing import Any

import tokenizers
import torch
import transformers
from datasets import Dataset
from torch import Tensor
from trl import DistillationConfig, DistillationTrainer, SFTTrainer

import growkern


class TaughtTrainer(SFTTrainer):
    """`trl.SFTTrainer` with a frozen `teacher`, an attribute that you set."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        batch = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
        # gradients are averaged over processes, but the labels are counted over all of them
        items = num_items_in_batch and num_items_in_batch / self.accelerator.num_processes
        loss = growkern.inherited_loss(model, self.teacher, batch, alpha=0.5, num_items=items)
        return (loss, {}) if return_outputs else loss


def divergence_of(beta: float) -> dict[str, Any]:
    """TRL's `beta` as options of growkern's loss."""
    named = {0.0: "forward", 1.0: "reverse"}.get(beta)
    return {"divergence": "jsd", "beta": beta} if named is None else {"divergence": named}


class FusedDistillationTrainer(DistillationTrainer):
    """`trl.DistillationTrainer` with `growkern.inherited_loss`."""

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if model.training and inputs.get("num_items_in_batch") is not None:
            # gradients are averaged over processes, but the tokens are the sum over processes
            tokens = inputs["num_items_in_batch"].clamp(min=1.0)
            num_items_in_batch = tokens / self.accelerator.num_processes
        trained = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        completions = inputs["completion_ids"].masked_fill(trained == 0, -100)
        batch = {
            "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            "labels": torch.cat([torch.full_like(inputs["prompt_ids"], -100), completions], 1),
        }
        loss = growkern.inherited_loss(
            model,
            self.teacher_model,
            batch,
            alpha=1.0,
            temperature=self.temperature,
            num_items=num_items_in_batch,
            **divergence_of(self.beta),
        )
        # growkern multiplies by the square of the temperature, TRL does not
        loss = loss / self.temperature**2
        return (loss, None) if return_outputs else loss


# --------------------------------------------------------------- a tiny run


def tiny_tokenizer(size: int) -> Any:
    """A tokenizer of `size` numbered words."""
    words = {"[PAD]": 0, "[EOS]": 1} | {f"w{i}": i for i in range(2, size)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[EOS]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", eos_token="[EOS]", padding_side="left"
    )


def tiny_model(size: int, seed: int) -> Any:
    """A Llama of two layers with a head that is sure of its words."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    return model


def trainer_of(
    kind: type[DistillationTrainer], student: Any, teacher: Any, folder: str, **options: Any
) -> DistillationTrainer:
    """A trainer of some prompts of three words."""
    size = student.config.vocab_size
    prompts = [{"prompt": f"w{2 + i % (size - 2)} w{2 + 3 * i % (size - 2)} w5"} for i in range(64)]
    args = DistillationConfig(
        folder,
        **(
            {
                "max_steps": 30,
                "per_device_train_batch_size": 8,
                "learning_rate": 1e-2,
                "max_completion_length": 8,
                "logging_steps": 5,
                "save_strategy": "no",
                "report_to": "none",
                "disable_tqdm": True,
                "bf16": False,
                "gradient_checkpointing": False,
            }
            | options
        ),
    )
    return kind(
        model=student,
        teacher_model=teacher,
        args=args,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tiny_tokenizer(size),
    )


def main() -> None:
    student, teacher = tiny_model(48, 0), tiny_model(48, 1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(FusedDistillationTrainer, student, teacher, folder)
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
