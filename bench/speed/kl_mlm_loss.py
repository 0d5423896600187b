"""Measures `kl_mlm_loss` on ready logits: time, bandwidth, memory and gradient error.

    python -m bench.speed.kl_mlm_loss

Each row is one forward and backward pass with temperature 2 and alpha 0.5. "labelled" is the share
of rows with a label; only these count. "copy" is the limit: the rate at which the machine reads and
writes. All take turns. "x compile" is the median, over the turns, of the time over that of
torch.compile.

The gradient error is that of the KL part (alpha 1), on 64 rows of a student that has drifted 5 %
from its teacher. The truth is float64 on the same rounded logits.

The rows "labels alone" have no teacher, to compare with libraries that offer only that case. Their
error is that of the label loss's gradient.
"""

from functools import partial

import torch
from torch.nn import functional as F

from bench.shared import peers
from bench.shared.harness import measure_all, name_of, options_of
from bench.shared.loss_measure import DEVICE, Provider, gradient_error, in_turns, loss_parser
from growkern.ops.loss.kl_mlm_loss import kl_mlm_loss

# rows and vocabulary: those of BERT, GPT-2 and modern models
SHAPES = {
    "cpu": [(512, 30522), (1024, 8192), (333, 50257), (128, 128_256)],
    "cuda": [(8192, 128_256), (9830, 30522)],
}
# as masked training labels its rows; of the first shape, on a CPU
MASKED = 0.15
DRIFT, T, IGNORED = 0.05, 2.0, -100


def bytes_moved(N, V, element, alone):
    """Least bytes possible: forward reads s and u; backward reads s and u and writes ds."""
    return (3 if alone else 5) * N * V * element


def make_inputs(N, V, labelled, dtype):
    rng = torch.Generator(DEVICE).manual_seed(0)
    teacher = 3 * torch.randn(N, V, generator=rng, device=DEVICE)
    student = teacher + 3 * DRIFT * torch.randn(N, V, generator=rng, device=DEVICE)
    labels = torch.randint(V, (N,), generator=rng, device=DEVICE)
    labels[torch.rand(N, generator=rng, device=DEVICE) >= labelled] = IGNORED
    return student.to(dtype).requires_grad_(), teacher.to(dtype), labels


def plain(student, teacher, labels, alpha):
    z, u = (x if x.dtype == torch.float64 else x.float() for x in (student, teacher))
    log_q, log_p = (z / T).log_softmax(-1), (u / T).log_softmax(-1)
    # no indexing with a mask: its size would split a compiled graph
    rows = labels != IGNORED
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    kl = torch.where(rows, kl, 0).sum() / rows.sum()
    return (1 - alpha) * F.cross_entropy(z, labels) + alpha * T**2 * kl


def growkern(student, teacher, labels, alpha):
    return kl_mlm_loss(student, teacher, labels, alpha=alpha, temperature=T)


def plain_labels(student, teacher, labels, alpha):
    return F.cross_entropy(student.float(), labels)


def growkern_labels(student, teacher, labels, alpha):
    return kl_mlm_loss(student, None, labels, alpha=0.0)


def losses(with_compile):
    """The losses to compare, each as (name, loss, whether it has no teacher, peer or None)."""
    both = {"plain": plain, "growkern": growkern}
    alone = {"plain": plain_labels, "growkern": growkern_labels}
    if with_compile:
        both["torch.compile"] = torch.compile(plain)
        alone["torch.compile"] = torch.compile(plain_labels)
    named = [(name, loss, False, None) for name, loss in both.items()]
    named += [
        (name, partial(peer.call, temperature=T), False, peer)
        for name, peer in peers.ROWS_WITH_TEACHER.items()
    ]
    named += [(f"{name}, labels alone", loss, True, None) for name, loss in alone.items()]
    return named


def error_of(fn, alpha, V, dtype):
    student, teacher, labels = make_inputs(64, V, 1.0, dtype)
    z64 = student.detach().double().requires_grad_()
    truth = torch.autograd.grad(plain(z64, teacher.double(), labels, alpha), [z64])
    actual = torch.autograd.grad(fn(student, teacher, labels, alpha), [student])
    return gradient_error(actual, truth)


def measured(shape, labelled, dtype, with_compile, repeats):
    """One row per provider. "GB/s" is the least bytes of its case over its time."""
    student, teacher, labels = make_inputs(*shape, labelled, dtype)
    target = torch.empty_like(teacher)

    def step(fn):
        fn(student, teacher, labels, 0.5).backward()
        student.grad = None

    providers = [Provider("copy", partial(target.copy_, teacher))]
    moved = {"copy": 2 * teacher.nbytes}
    for name, fn, alone, peer in losses(with_compile):
        error = partial(error_of, fn, 0.0 if alone else 1.0, shape[1], dtype)
        ours = name.startswith("growkern")
        providers.append(Provider(name, partial(step, fn), error, peer, ours))
        moved[name] = bytes_moved(*shape, student.element_size(), alone)
    rows = in_turns(providers, repeats)
    for row in rows:
        if "wall s" in row:
            row["GB/s"] = moved[row["provider"]] / row["wall s"] / 1e9
    return rows


def cases(threads):
    """Shape, share of labelled rows, dtype and threads of every case."""
    for i, shape in enumerate(SHAPES[DEVICE]):
        on_cpu = DEVICE == "cpu"
        for labelled in (1.0, MASKED) if on_cpu and i == 0 else (1.0,):
            for dtype in (torch.bfloat16, torch.float32):
                for count in sorted({1, threads}) if on_cpu else (threads,):
                    yield shape, labelled, dtype, count


def main():
    args = options_of(loss_parser(__doc__), "tests/ops/loss/test_kl_mlm_loss.py")
    measure_all("kl_mlm_loss", all_rows(args))


def all_rows(args):
    for shape, labelled, dtype, threads in cases(args.threads):
        torch.set_num_threads(threads)
        # After 8 shapes the cache is full, and PyTorch runs all others uncompiled.
        torch._dynamo.reset()
        what = {
            "shape": "{}x{}".format(*shape),
            "labelled": labelled,
            "dtype": name_of(dtype),
            "threads": threads,
        }
        for row in measured(shape, labelled, dtype, args.compile, args.repeats):
            yield what | row


if __name__ == "__main__":
    main()
