"""The work of one of several processes, for `python -m testbed.forked_ranks`.

Trains a model that grows twice, and leaves its weights as FOLDER/weights.pt. Float64, so that the
order of a sum shows nowhere.
"""

import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from growkern import GrowthStep, TwoStageTrainer
from testbed.tiny import VOCAB, Batches, arguments, build

# a run file; more of [training] and growths follow it
FILE = """
[model]
path = "model"
[data]
train = ["text/*.txt"]
sequence_length = 16
[output]
directory = "out"
tensorboard = false
[training]
steps = 6
batch_size = 4
"""
STEPS = 9
EVEN = {"symmetry": "none", "stream": "copies"}
# copies alone, so that the grown model takes the steps of the small one
GROWTH = (
    GrowthStep(at_step=3, sizes={"n_embd": 32, "n_head": 4}, moments="grow", **EVEN),
    GrowthStep(at_step=6, sizes={"n_embd": 64, "n_head": 8}, moments="grow", **EVEN),
)


def tokenizer():
    """With special tokens of its own."""
    vocabulary = {"<s>": 3, "</s>": 4, "<pad>": 5}
    vocabulary |= {f"w{i}": i for i in range(VOCAB) if i not in vocabulary.values()}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="w0")),
        bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="w0",
    )  # fmt: skip


def trainer_for(folder, batch=4, growth=GROWTH, model=None, **options):
    model = build("gpt2", layers=2, tied=True).double() if model is None else model
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": batch, "save_strategy": "steps",
        "save_steps": 2, "max_grad_norm": 0.5, "adam_epsilon": 1e-3, "weight_decay": 0.1,
        "use_cpu": True,
    }  # fmt: skip
    return TwoStageTrainer(
        model, arguments(folder, **settings), growth=growth, train_dataset=Batches(36),
        **{"processing_class": tokenizer(), **options},
    )  # fmt: skip


def main(folder):
    trainer = trainer_for(folder / "run", 2)
    trainer.train()
    if dist.get_rank() == 0:
        torch.save(trainer.model.state_dict(), folder / "weights.pt")
    dist.barrier()
