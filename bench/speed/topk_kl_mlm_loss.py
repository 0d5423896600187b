"""Measures `topk_kl_mlm_loss`, the loss with a cached teacher: time, memory, gradient error.

    python -m bench.speed.topk_kl_mlm_loss

Each row is one forward and backward pass with temperature 1 and alpha 0.5. Every row of the hidden
states has a label. The loss is compared with the live teacher's loss ("live teacher") and with
plain PyTorch on the same k entries.

The gradient error is that of the KL part (alpha 1), on 64 rows of a student that has drifted 5 %
from its teacher. The truth is float64 on the same k entries. So the error is that of the
arithmetic only. `bench.speed.topk` measures the loss of accuracy by storing k entries.
"""

import torch
from torch.nn import functional as F

from bench.shared.harness import Rows, machine, show_and_save
from bench.shared.inputs import DRIFT
from bench.shared.loss_measure import (
    DEVICE,
    gradient_error,
    loss_parser,
    make_inputs,
    measure,
    prepare,
)
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss
from growkern.ops.loss.topk_kl_mlm_loss import topk_kl_mlm_loss
from growkern.train.topk_teacher.rows import topk_of_head

# rows, vocabulary, student width, teacher width
SHAPES = {
    "cpu": [(1024, 32_000, 768, 512)],
    "cuda": [(9830, 30522, 768, 512), (8192, 128_256, 4096, 2048)],
}
KS = (64, 1024)


def plain(student, topk, labels, alpha):
    """The loss as one writes it without a library: all logits, then the rest in float32."""
    ids, log_p = topk
    z = F.linear(*student)
    log_q = (z if z.dtype == torch.float64 else z.float()).log_softmax(-1)
    log_p = log_p.to(log_q.dtype)
    tail_p, tail_q = (1 - x.exp().sum(-1) for x in (log_p, log_q.gather(1, ids)))
    kl = (log_p.exp() * (log_p - log_q.gather(1, ids))).sum(-1)
    kl = kl + tail_p * (tail_p.log() - tail_q.log())
    return (1 - alpha) * F.nll_loss(log_q, labels) + alpha * kl.mean()


def growkern(student, topk, labels, alpha):
    return topk_kl_mlm_loss(*student, *topk, labels, alpha=alpha)


def exact(student, topk, labels, alpha):
    return topk_kl_mlm_loss(*student, *topk, labels, alpha=alpha, backend="reference")


def main():
    args = loss_parser(__doc__, compiled=False).parse_args()
    prepare(args, "topk_kl_mlm_loss")
    facts = machine() | {"drift": DRIFT}
    rows = Rows()
    for N, V, H, H_t in SHAPES[DEVICE]:
        for dtype in (torch.float32, torch.bfloat16):
            student, teacher, labels = make_inputs(N, V, H, H_t, dtype)
            near = [(student[0][:64], student[1]), labels[:64]]
            named = {"live teacher": (None, linear_kl_mlm_loss)}
            for k in KS:
                kept = topk_of_head(*teacher, None, V, k, 1.0)
                named |= {f"plain, k {k}": (kept, plain), f"growkern, k {k}": (kept, growkern)}
            for name, (topk, fn) in named.items():

                def step(fn=fn, topk=topk, student=student, teacher=teacher, labels=labels):
                    if topk is None:
                        fn(*student, *teacher, labels, alpha=0.5).backward()
                    else:
                        fn(student, topk, labels, 0.5).backward()
                    for x in student:
                        x.grad = None

                error = None
                if topk is not None:
                    first = [x[:64] for x in topk]
                    heads = [[x.detach().to(d).requires_grad_() for x in near[0]]
                             for d in (dtype, torch.float64)]  # fmt: skip
                    gradients = [
                        torch.autograd.grad(f(head, first, near[1], 1.0), head)
                        for f, head in zip((fn, exact), heads, strict=True)
                    ]
                    error = gradient_error(*gradients)
                row = {
                    "shape": f"{N}x{V}x{H}/{H_t}",
                    "dtype": str(dtype).removeprefix("torch."),
                    "provider": name,
                    **measure(step, args.repeats),
                    "gradient error": error,
                }
                rows.append(row)
    show_and_save("topk_kl_mlm_loss", facts, rows)


if __name__ == "__main__":
    main()
