"""Tiny models whose every parameter is random, and batches for them."""

import torch
import transformers
from transformers import PreTrainedModel, TrainingArguments

VOCAB = 48
FAMILIES = ("bert", "gpt2", "llama")
# what a log line measures: it differs between runs that are equal otherwise
MEASURED = (
    *("tokens_per_second", "step_time", "data_time_share", "checkpoint_time"),
    *("max_memory_allocated", "maxrss", "mfu"),
)


def build(
    family: str, *, layers: int = 5, width: int = 16, tied: bool = False, seed: int = 0, **options
) -> PreTrainedModel:
    """A model without dropout, in float32; norms and biases are random too."""
    shared = {"vocab_size": VOCAB, "tie_word_embeddings": tied, **options}
    if family == "bert":
        config = transformers.BertConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **shared,
        )
        model = transformers.BertForMaskedLM(config)
    elif family == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ids = {"bos_token_id": 1, "eos_token_id": 1}
        config = transformers.GPT2Config(
            n_embd=width, n_layer=layers, n_head=2, n_positions=32, **none, **ids, **shared
        )
        model = transformers.GPT2LMHeadModel(config)
    elif family == "t5":
        config = transformers.T5Config(
            d_model=width,
            d_kv=8,
            d_ff=24,
            num_heads=2,
            num_layers=layers,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            **shared,
        )
        model = transformers.T5ForConditionalGeneration(config)
    else:
        sizes = {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 24,
            "max_position_embeddings": 32,
        }
        if family == "deepseek":
            # two groups of four experts, behind a dense layer
            ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "moe_intermediate_size": 8}
            heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
            groups = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2}
            config = transformers.DeepseekV3Config(
                topk_group=1, first_k_dense_replace=1, experts_implementation="eager",
                **sizes | {"num_key_value_heads": 2}, **ranks, **heads, **groups, **shared,
            )  # fmt: skip
            model = transformers.DeepseekV3ForCausalLM(config)
        elif family == "mixtral":
            config = transformers.MixtralConfig(
                num_local_experts=3, output_router_logits=True, router_aux_loss_coef=0.3,
                # the other experts take no float64
                experts_implementation="eager", **sizes, **shared,
            )  # fmt: skip
            model = transformers.MixtralForCausalLM(config)
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **shared))
    return randomise(model, seed)


def randomise(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def stack_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    inner = model.base_model
    return {"bert": lambda: inner.encoder.layer, "gpt2": lambda: inner.h}.get(
        model.config.model_type, lambda: inner.layers
    )()


def is_causal(family: str) -> bool:
    return family not in ("bert", "t5")


def batch(rows: int = 3, length: int = 10, seed: int = 0, labelled: float = 0.4) -> dict:
    """Tokens, and labels at a random share of the places."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(5, VOCAB, (rows, length), generator=generator)
    chosen = torch.rand((rows, length), generator=generator) < labelled
    return {"input_ids": input_ids, "labels": torch.where(chosen, input_ids, -100)}


class TinyTokenizer:
    """The methods of a tokenizer that collators and packer call; ids are characters' codes."""

    cls_token_id, sep_token_id, eos_token_id, pad_token_id, mask_token_id = 1, 2, None, 0, 3
    all_special_ids = (0, 1, 2, 3, 4)

    def __len__(self) -> int:
        return VOCAB

    def __call__(self, texts: list[str], **_) -> dict:
        return {"input_ids": [[5 + ord(c) % (VOCAB - 5) for c in text] for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(VOCAB)}


class Batches(torch.utils.data.Dataset):
    """Rows of unequal numbers of labels, in a fixed order."""

    def __init__(self, rows):
        self.rows = [batch(1, 8, seed=i, labelled=0.1 + 0.08 * (i % 9)) for i in range(rows)]
        for row in self.rows:
            row["labels"][0, 1] = row["input_ids"][0, 1]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {key: value[0] for key, value in self.rows[i].items()}


def arguments(path, **options):
    defaults = {
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": False,
    }
    settings = {**defaults, **options}
    if settings["max_steps"] > 0:
        settings["warmup_steps"] = min(settings["warmup_steps"], settings["max_steps"])
    return TrainingArguments(str(path), **settings)


def losses_of(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]
