"""Measures training steps with a teacher, with and without the fused loss.

A step runs student and teacher, then loss, backward and AdamW. "plain" computes both logits and the
loss as one writes it in PyTorch. "growkern" replaces the output projections by
`linear_kl_mlm_loss`. The models are Hugging Face models with random weights in bfloat16 and random
tokens, so nothing is downloaded.
"""

import copy
import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from bench.shared.harness import now
from bench.shared.recorder import Recorder
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss
from growkern.train.model import align_labels, head_inputs, head_swap

ALPHA, T = 0.5, 2.0
IGNORED = -100
Loss = Callable[[Any, Any, dict[str, Tensor], Tensor, bool], Tensor]


# in the order of `FULL`
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "vocab_size",
)


def _llama(*sizes: int) -> Any:
    config = transformers.LlamaConfig(
        **dict(zip(SIZES, sizes, strict=True)),
        num_key_value_heads=max(1, sizes[2] // 4),
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def bert(*sizes: int) -> Any:
    # without dropout, because both sides must compute the same function
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**dict(zip(SIZES, sizes, strict=True)), **dropout)
    return transformers.BertForMaskedLM(config)


# builder, (width, layers, heads, ffn) of student and teacher, vocabulary, (batch, sequence),
# share of labelled tokens
FULL = {
    "train_bert": (bert, (768, 12, 12, 3072), (512, 12, 8, 2048), 30_522, (128, 512), 0.15),
    "train_llama": (_llama, (2048, 16, 32, 8192), (1024, 16, 16, 4096), 128_256, (4, 2048), 1.0),
}
TOY = {
    "train_bert": (bert, (24, 1, 2, 48), (16, 1, 2, 32), 60, (2, 12), 0.3),
    "train_llama": (_llama, (32, 1, 4, 48), (16, 1, 4, 32), 60, (2, 8), 1.0),
}


def plain(
    student: Any, teacher: Any, inputs: dict[str, Tensor], labels: Tensor, causal: bool
) -> Tensor:
    """The loss from both logits, with the labelled rows in float32."""
    rows = align_labels(labels, causal=causal).flatten()
    live = rows != IGNORED
    with torch.no_grad():
        u = teacher(**inputs).logits.flatten(0, 1)[live].float()
    z = student(**inputs).logits.flatten(0, 1)[live].float()
    mlm = F.cross_entropy(z, rows[live])
    log_q, log_p = ((x / T).log_softmax(-1) for x in (z, u))
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    return (1 - ALPHA) * mlm + ALPHA * T**2 * kl


def ours(
    student: Any, teacher: Any, inputs: dict[str, Tensor], labels: Tensor, causal: bool
) -> Tensor:
    """The loss from hidden states, computed inside the student's own forward pass."""
    rows = align_labels(labels, causal=causal)
    # A collator knows this bound, so the GPU need not be asked how many rows are labelled.
    most = rows.numel() if causal else int(0.2 * rows.numel()) + 64
    with torch.no_grad():
        head = head_inputs(teacher, inputs)

    def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_kl_mlm_loss(
            *(hidden, weight, head.hidden, head.weight, rows),
            student_bias=bias,
            teacher_bias=head.bias,
            alpha=ALPHA,
            temperature=T,
            max_rows=min(most, rows.numel()),
        )

    with head_swap(student, loss_of):
        return student(**inputs).logits


def make_batch(
    shape: tuple[int, int], vocab: int, share: float, device: str, seed: int
) -> tuple[dict[str, Tensor], Tensor]:
    rng = torch.Generator(device).manual_seed(seed)
    ids = torch.randint(vocab, shape, generator=rng, device=device)
    drawn = torch.rand(shape, generator=rng, device=device) < share
    drawn[:, 1] = True
    return {"input_ids": ids}, torch.where(drawn, ids, IGNORED)


def measure(
    loss_of: Loss, models: tuple[Any, Any], batches: list[Any], causal: bool, steps: int
) -> dict[str, Any]:
    """Train the student for some steps: median time, first and last loss, peak memory."""
    student, teacher = models
    cuda = batches[0][1].is_cuda
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, fused=cuda)
    seconds, losses = [], []
    for step in range(steps + 2):
        inputs, labels = batches[step % len(batches)]
        if cuda and step == 2:
            # the gradients and the optimizer's state exist by now
            torch.cuda.reset_peak_memory_stats()
        start = now()
        loss = loss_of(student, teacher, inputs, labels, causal)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(now() - start)
        losses.append(loss.detach())
        del loss
    step_s = statistics.median(seconds[2:])
    return {
        "ms per step": 1e3 * step_s,
        "tokens/s": batches[0][1].numel() / step_s,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "first loss": losses[0].item(),
        "last loss": losses[-1].item(),
    }


def run(recorder: Recorder) -> None:
    name = recorder.document["piece"]
    build, student_size, teacher_size, vocab, shape, share = recorder.pick(FULL, TOY)[name]
    causal = build is _llama
    torch.manual_seed(0)
    with torch.device(recorder.device):
        models = tuple(build(*size, vocab) for size in (student_size, teacher_size))
    batches = [make_batch(shape, vocab, share, recorder.device, seed) for seed in range(4)]
    for model in models:
        model.requires_grad_(model is models[0]).train(model is models[0])
    part = [{k: v[:1] for k, v in batches[0][0].items()}, batches[0][1][:1]]
    truth = _truth(models, part, causal)
    models = tuple(model.to(torch.bfloat16) for model in models)
    # kept on the CPU, because on the device it would count as memory of the step
    start = {name: x.cpu().clone() for name, x in models[0].state_dict().items()}
    for provider, loss_of in (("plain", plain), ("growkern", ours)):
        models[0].load_state_dict(start)
        gc.collect()
        if recorder.device == "cuda":
            torch.cuda.empty_cache()
        with torch.no_grad():
            error = abs(loss_of(*models, *part, causal).item() / truth - 1)
        figures = measure(loss_of, models, batches, causal, recorder.pick(12, 1))
        facts = {"provider": provider, "batch": "x".join(map(str, shape)), **figures}
        # bfloat16 models differ from float64 by up to this; a wrong loss differs by more
        recorder.check(f"{name}, {provider}", error, 2e-2, **facts)


def _truth(models: tuple[Any, Any], part: list[Any], causal: bool) -> float:
    """The loss of the first batch's first row, with the models in float64."""
    with torch.no_grad():
        return plain(*(copy.deepcopy(m).double() for m in models), *part, causal).item()
