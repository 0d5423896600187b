"""python -m bench.bench_linear_kl_mlm_loss: time, memory and gradient error beside plain PyTorch.

Forward and backward, every row labelled, temperature 1 and alpha 0.5 (what every provider can
do). The error is that of the KL gradient (alpha 1) on 64 rows at 5 % drift against float64. Then
the same without a teacher ("labels alone", alpha 0), beside losses that know no other case; there
the error is that of its own gradient. "GEMMs alone" is the time of the products, the limit.
"""

import argparse
from functools import partial

import torch
from torch.nn import functional as F

from bench.shared import peers
from bench.shared.harness import Rows, machine, require_green, show_and_save
from bench.shared.loss_measure import DEVICE, Provider, gradient_error, in_turns
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
    """A student that is its teacher widened and then moved by DRIFT."""
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
    """What one writes without a library: logits, then losses in float32."""
    logits = [F.linear(*head) for head in (student, teacher)]
    z, u = (x if x.dtype == torch.float64 else x.float() for x in logits)
    mlm = F.cross_entropy(z, labels)
    kl = F.kl_div(z.log_softmax(-1), u.log_softmax(-1), log_target=True, reduction="batchmean")
    return (1 - alpha) * mlm + alpha * kl


def growkern(student, teacher, labels, alpha):
    return linear_kl_mlm_loss(*student, *teacher, labels, alpha=alpha)


def growkern_float32(student, teacher, labels, alpha):
    """Logits as plain PyTorch has them, where a CPU would take float64."""
    return linear_kl_mlm_loss(*student, *teacher, labels, alpha=alpha, logits_dtype=torch.float32)


def plain_labels(student, teacher, labels, alpha):
    z = F.linear(*student)
    return F.cross_entropy(z if z.dtype == torch.float64 else z.float(), labels)


def growkern_labels(student, teacher, labels, alpha):
    return linear_kl_mlm_loss(*student, None, None, labels, alpha=0.0)


def gemms_alone(student, teacher, labels, alpha):
    """The products no loss of hidden states can do without, and nothing else."""
    with torch.no_grad():
        (hidden, weight), heads = student, (student, teacher) if alpha else (student,)
        # of the teacher's logits nothing stays, as a loss would overwrite them too
        *_, z = (F.linear(*head) for head in reversed(heads))
        return z @ weight, z.t() @ hidden


def losses(with_compile, dtype):
    """Name, loss, its alpha, that of its error, and the library it comes from if not from here."""
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True,
        help="torch.compile of plain as well",
    )  # fmt: skip
    parser.add_argument("--vocabulary", type=int, help="of all shapes only those")
    parser.add_argument("--no-test", action="store_true", help="skip the op's tests")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.no_test:
        require_green("linear_kl_mlm_loss")
    facts = machine()
    rows = Rows()
    for shape in SHAPES[DEVICE]:
        for dtype in DTYPES if args.vocabulary in (None, shape[1]) else ():
            # else a cache that is full after eight shapes would leave the rest uncompiled
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
