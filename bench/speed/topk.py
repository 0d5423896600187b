"""Measures how much accuracy a cached teacher loses when only its top k tokens are stored.

    python -m bench.speed.topk

A small GPT-2 is trained on the source text of Python's own library. It teaches two students. One
was grown from it and then trained a little on labels alone. The other one began at random. Columns
of the table, for each k:

- "KL left out": the part of the KL that is lost because the tokens outside the top k are one
  bucket, in nats.
- "gradient error": distance of the KL gradient from that of the whole teacher in float64.
- "renormalised": the same when the top k are renormalised and the other tokens are ignored.
- "stored fp16", "stored bf16": the gradient error with log-probs stored in that dtype. All other
  columns use float32 log-probs.
"""

import time

import torch
import transformers
from torch import Tensor

import growkern
from bench.paper.models import FAMILIES, Size
from bench.shared.harness import benchmark_parser, machine, measure_all, options_of
from bench.shared.loss_measure import gradient_error
from examples.demo.corpus import library_files, read_corpus, train_tokenizer
from growkern.train.dataset import pack_text
from growkern.train.model import align_labels, head_inputs
from growkern.train.topk_teacher.computed import topk_of_head
from growkern.train.topk_teacher.store import FORMAT, CacheHeader

VOCABULARY, LENGTH, BATCH = 4096, 64, 16
TEACHER, STUDENT = Size(3, 128, 4), Size(4, 192, 6)
KS = (1, 4, 16, 64, 256)
STORED = {"fp16": torch.float16, "bf16": torch.bfloat16}


def train(model, tokens_NS: Tensor, steps: int, rate: float) -> None:
    rng = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 50, 2 * (1 - step / steps))
        batch = tokens_NS[torch.randint(len(tokens_NS), (BATCH,), generator=rng)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def gpt2(size):
    return transformers.GPT2LMHeadModel(FAMILIES["gpt2"].config(size, VOCABULARY, LENGTH, 0.0))


@torch.no_grad()
def head_of(model, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states of the labelled rows, and the weight of the output head."""
    labelled = align_labels(tokens_BS, causal=True) >= 0
    hidden, weight, _ = head_inputs(model, {"input_ids": tokens_BS})
    return hidden[labelled], weight.detach()


def kl_and_gradient(loss_function, student, *teacher, **options):
    head = [x.detach().clone().requires_grad_() for x in student]
    labels = torch.zeros(len(head[0]), dtype=torch.long)
    loss, parts = loss_function(*head, *teacher, labels, alpha=1.0, return_parts=True, **options)
    return parts.kl.item() / options["temperature"] ** 2, torch.autograd.grad(loss, head)


def rows_of(name, student, teacher, temperature):
    """Yield one row of the table per k."""
    in64 = [[x.double() for x in head] for head in (student, teacher)]
    options = {"temperature": temperature}
    whole, truth = kl_and_gradient(growkern.linear_kl_mlm_loss, in64[0], *in64[1], **options)
    for k in KS:
        ids, log_p = topk_of_head(*teacher, None, len(teacher[1]), k, temperature)
        topk = growkern.topk_kl_mlm_loss
        kl, _ = kl_and_gradient(topk, in64[0], ids, log_p, **options)

        def error(stored=log_p, ids=ids, **tail):
            _, gradient = kl_and_gradient(
                growkern.topk_kl_mlm_loss, student, ids, stored, **options, **tail
            )
            return gradient_error(gradient, truth)

        header = CacheHeader(
            temperature=temperature, rows="labels", causal=True, vocab_size=len(teacher[1]),
            tokenizer=None, epochs=1, format=FORMAT, k=k, dtype="float16", examples=1,
            teacher="", data="",
        )  # fmt: skip
        yield {
            "student": name,
            "T": temperature,
            "k": k,
            "teacher mass": log_p.exp().sum(-1).mean().item(),
            "KL, nats": whole,
            "KL left out": whole - kl,
            "gradient error": error(),
            "renormalised": error(tail="renormalise"),
            **{f"stored {d}": error(log_p.to(dtype)) for d, dtype in STORED.items()},
            "bytes/row": header.row_bytes,
            "bytes/token at 15 %": 0.15 * header.row_bytes,
        }


def main():
    parser = benchmark_parser(__doc__, repeats=None)
    parser.add_argument("--steps", type=int, default=1000, help="training steps of the teacher")
    parser.add_argument("--rows", type=int, default=1008, help="validation rows to measure on")
    args = options_of(parser, "tests/ops/loss/test_topk_kl_mlm_loss.py")
    facts = machine()
    torch.manual_seed(0)
    corpus = read_corpus(library_files())
    tokenizer = train_tokenizer(corpus.train, VOCABULARY)
    train_NS, valid_NS = (
        torch.from_numpy(pack_text(texts, tokenizer, LENGTH).tokens_NS).long() for texts in corpus
    )
    start = time.perf_counter()
    teacher = gpt2(TEACHER)
    train(teacher, train_NS, args.steps, 3e-3)
    sizes = {"n_embd": STUDENT.width, "n_layer": STUDENT.layers, "n_head": STUDENT.heads}
    students = {
        "grown + 50 steps": growkern.grow(teacher, depth="identity", **sizes),
        "random + 150 steps": gpt2(STUDENT),
    }
    for (name, student), steps in zip(students.items(), (50, 150), strict=True):
        train(student, train_NS.flip(0), steps, 1e-4 if "grown" in name else 1e-3)
    spread = torch.linspace(0, len(valid_NS) - 1, args.rows // (LENGTH - 1)).long()
    tokens_BS = valid_NS[spread]
    with torch.no_grad():
        facts["teacher loss"] = round(teacher(tokens_BS, labels=tokens_BS).loss.item(), 3)
    facts["vocabulary"], facts["rows"] = len(tokenizer), tokens_BS[:, 1:].numel()
    facts["training seconds"] = round(time.perf_counter() - start)
    teacher_head = head_of(teacher, tokens_BS)
    rows = (
        row
        for name, student in students.items()
        for temperature in (1.0, 2.0)
        for row in rows_of(name, head_of(student, tokens_BS), teacher_head, temperature)
    )
    measure_all("topk", rows, facts)


if __name__ == "__main__":
    main()
