"""Measures `linear_kl_mlm_loss` from hidden states: time, memory and gradient error.

    python -m bench.bench_linear_kl_mlm_loss

Each row is one forward and backward pass with temperature 1 and alpha 0.5, which all libraries
support. Every row of the hidden states has a label. "GEMMs alone" is the limit: the time of the
matrix products that no such loss can avoid.

The gradient error is that of the KL part (alpha 1), on 64 rows of a student that has drifted 5 %
from its teacher. The truth is float64.

The rows "labels alone" have no teacher (alpha 0), to compare with libraries that offer only that
case. Their error is that of the label loss's gradient.
"""

from functools import partial

import torch
from torch.nn import functional as F

from bench.shared import peers
from bench.shared.harness import Rows, machine, show_and_save
from bench.shared.loss_measure import (
    DEVICE,
    Provider,
    gradient_error,
    in_turns,
    loss_parser,
    prepare,
)
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss

# rows, vocabulary, student width, teacher width
SHAPES = {
    "cpu": [(256, 30522, 768, 512), (2048, 32_000, 768, 512)],
    "cuda": [(N, 30522, 768, 512) for N in (256, 2048, 9830)]
    + [(N, 128_256, 4096, 2048) for N in (256, 2048, 8192)],
}
DTYPES = (torch.float32, torch.bfloat16)
DRIFT = 0.05


def make_inputs(N, V, H, H_t, dtype):
    """A teacher, and a student made from it: widened, then moved by DRIFT."""
    rng = torch.Generator(DEVICE).manual_seed(0)
    columns = torch.cat([torch.arange(H_t), torch.randint(H_t, (H - H_t,))]).to(DEVICE)
    hidden_t, weight_t = (torch.randn(rows, H_t, generator=rng, device=DEVICE) for rows in (N, V))
    weight_t *= 3 / H_t**0.5
    hidden, weight = hidden_t[:, columns], weight_t[:, columns] / columns.bincount()[columns]
    student = [
        (x + DRIFT * x.std() * torch.randn(x.shape, generator=rng, device=DEVICE)).to(dtype)
        for x in (hidden, weight)
    ]
    labels = torch.randint(V, (N,), generator=rng, device=DEVICE)
    return [x.requires_grad_() for x in student], [hidden_t.to(dtype), weight_t.to(dtype)], labels


def plain(student, teacher, labels, alpha):
    """The loss as one writes it without a library: all logits, then both losses in float32."""
    logits = [F.linear(*head) for head in (student, teacher)]
    z, u = (x if x.dtype == torch.float64 else x.float() for x in logits)
    mlm = F.cross_entropy(z, labels)
    kl = F.kl_div(z.log_softmax(-1), u.log_softmax(-1), log_target=True, reduction="batchmean")
    return (1 - alpha) * mlm + alpha * kl


def growkern(student, teacher, labels, alpha):
    return linear_kl_mlm_loss(*student, *teacher, labels, alpha=alpha)


def growkern_float32(student, teacher, labels, alpha):
    """With float32 logits, as plain PyTorch has them. On a CPU the default is float64."""
    return linear_kl_mlm_loss(*student, *teacher, labels, alpha=alpha, logits_dtype=torch.float32)


def plain_labels(student, teacher, labels, alpha):
    z = F.linear(*student)
    return F.cross_entropy(z if z.dtype == torch.float64 else z.float(), labels)


def growkern_labels(student, teacher, labels, alpha):
    return linear_kl_mlm_loss(*student, None, None, labels, alpha=0.0)


def gemms_alone(student, teacher, labels, alpha):
    """Only the matrix products that every loss from hidden states needs."""
    with torch.no_grad():
        (hidden, weight), heads = student, (student, teacher) if alpha else (student,)
        # The teacher's logits are dropped here. A loss could overwrite them, too.
        *_, z = (F.linear(*head) for head in reversed(heads))
        return z @ weight, z.t() @ hidden


def losses(with_compile, dtype):
    """The losses to compare, each as (name, loss, alpha, alpha of its error, peer or None)."""
    both = {"plain": plain, "growkern": growkern}
    alone = {"plain": plain_labels, "growkern": growkern_labels}
    if DEVICE == "cpu" and dtype == torch.float32:
        both["growkern, float32 logits"] = growkern_float32
    if with_compile:
        both["torch.compile"] = torch.compile(plain)
        alone["torch.compile"] = torch.compile(plain_labels)
    named = [(name, loss, 0.5, 1.0, None) for name, loss in both.items()]
    named += [(name, peer.call, 0.5, 1.0, peer) for name, peer in peers.WITH_TEACHER.items()]
    named += [(f"{name}, labels alone", loss, 0.0, 0.0, None) for name, loss in alone.items()]
    named += [
        (f"{name}, labels alone", peer.call, 0.0, 0.0, peer)
        for name, peer in peers.LABELS_ALONE.items()
    ]
    return named


def error_of(fn, alpha, V, H, H_t, dtype):
    student, teacher, labels = make_inputs(64, V, H, H_t, dtype)
    in64 = [x.detach().double().requires_grad_() for x in student]
    truth = torch.autograd.grad(plain(in64, [x.double() for x in teacher], labels, alpha), in64)
    return gradient_error(torch.autograd.grad(fn(student, teacher, labels, alpha), student), truth)


def providers(shape, dtype, with_compile):
    student, teacher, labels = make_inputs(*shape, dtype)

    def step(fn, alpha):
        fn(student, teacher, labels, alpha).backward()
        for x in student:
            x.grad = None

    gemms = partial(gemms_alone, student, teacher, labels)
    return [
        *(
            Provider(
                name, partial(step, fn, alpha),
                partial(error_of, fn, error_alpha, *shape[1:], dtype), peer,
                ours=name.startswith("growkern"),
            )
            for name, fn, alpha, error_alpha, peer in losses(with_compile, dtype)
        ),
        Provider("GEMMs alone", partial(gemms, 0.5)),
        Provider("GEMMs alone, labels alone", partial(gemms, 0.0)),
    ]  # fmt: skip


def main():
    parser = loss_parser(__doc__)
    parser.add_argument("--vocabulary", type=int, help="measure only shapes with this vocabulary")
    args = parser.parse_args()
    prepare(args, "linear_kl_mlm_loss")
    facts = machine()
    rows = Rows()
    for shape in SHAPES[DEVICE]:
        for dtype in DTYPES if args.vocabulary in (None, shape[1]) else ():
            # After 8 shapes the cache is full, and PyTorch runs all others uncompiled.
            torch._dynamo.reset()
            what = {
                "shape": "{}x{}x{}/{}".format(*shape),
                "dtype": str(dtype).removeprefix("torch."),
            }
            for row in in_turns(providers(shape, dtype, args.compile), args.repeats):
                rows.append(what | row)
    show_and_save("linear_kl_mlm_loss", facts, rows)


if __name__ == "__main__":
    main()
