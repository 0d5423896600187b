"""Measures `topk_kl_mlm_loss`, the loss with a cached teacher: time, memory, gradient error.

    python -m bench.speed.topk_kl_mlm_loss

Each row is one forward and backward pass with temperature 1 and alpha 0.5. Every row of the hidden
states has a label. The loss is compared with the live teacher's loss ("live teacher") and with
plain PyTorch on the same k entries.

The gradient error is that of the KL part (alpha 1), on 64 rows of a student that has drifted 5 %
from its teacher. The truth is float64 on the same k entries. So the error is that of the
arithmetic only. `bench.speed.topk` measures the loss of accuracy by storing k entries.
"""

from functools import partial

import torch
from torch.nn import functional as F

from bench.shared.harness import machine, measure_all, name_of, options_of
from bench.shared.inputs import DRIFT
from bench.shared.loss_measure import (
    DEVICE,
    gradient_error,
    loss_parser,
    make_inputs,
    measure,
    run_step,
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


def growkern(student, topk, labels, alpha, backend=None):
    return topk_kl_mlm_loss(*student, *topk, labels, alpha=alpha, backend=backend)


def live(student, teacher, labels, alpha):
    return linear_kl_mlm_loss(*student, *teacher, labels, alpha=alpha)


def error_of(fn, student, topk, labels):
    """The gradient error on the first 64 rows."""
    hidden, *rest = (x.detach() for x in student)
    kept, gradients = [x[:64] for x in topk], []
    for loss, dtype in (
        (fn, hidden.dtype),
        (partial(growkern, backend="reference"), torch.float64),
    ):
        head = [x.to(dtype).requires_grad_() for x in (hidden[:64], *rest)]
        gradients.append(torch.autograd.grad(loss(head, kept, labels[:64], 1.0), head))
    return gradient_error(*gradients)


def all_rows(repeats):
    for N, V, H, H_t in SHAPES[DEVICE]:
        for dtype in (torch.float32, torch.bfloat16):
            student, teacher, labels = make_inputs(N, V, H, H_t, dtype)
            named = {"live teacher": (live, teacher)}
            for k in KS:
                kept = topk_of_head(*teacher, None, V, k, 1.0)
                named |= {f"plain, k {k}": (plain, kept), f"growkern, k {k}": (growkern, kept)}
            for name, (fn, beside) in named.items():
                step = partial(run_step, fn, student, beside, labels, 0.5)
                is_live = fn is live
                yield {
                    "shape": f"{N}x{V}x{H}/{H_t}",
                    "dtype": name_of(dtype),
                    "provider": name,
                    **measure(step, repeats),
                    "gradient error": None if is_live else error_of(fn, student, beside, labels),
                }


def main():
    parser = loss_parser(__doc__, compiled=False)
    args = options_of(parser, "tests/ops/loss/test_topk_kl_mlm_loss.py")
    measure_all("topk_kl_mlm_loss", all_rows(args.repeats), machine() | {"drift": DRIFT})


if __name__ == "__main__":
    main()
