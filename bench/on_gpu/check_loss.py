"""Checks both losses on the device against float64.

Vocabularies go up to 262 144, and logits past 2**31 elements. The truth is PyTorch's own
cross-entropy and KL in float64, a few rows at a time. New memory is filled with NaN, so that values
a kernel does not write show up.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.shared.inputs import IGNORED, LOGITS_PART, make_heads, make_labels, make_logits
from bench.shared.loss_measure import frobenius
from bench.shared.recorder import Recorder, fill_new_memory
from growkern.ops.loss.kl_mlm_loss import kl_mlm_loss
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss

ALPHA, T = 0.7, 2.0
# (alpha, temperature) of calls with kernels of their own: at the default, and without a teacher
OTHERS = ((ALPHA, 1.0), (0.0, 1.0))
# largest allowed relative Frobenius error of a gradient, by dtype of the inputs
BARS = {torch.bfloat16: 5e-3, torch.float32: 1e-5, torch.float16: 1e-3}


def run(recorder: Recorder) -> None:
    fill_new_memory()
    for check in CHECKS:
        with recorder.attempt(check.__name__.strip("_")):
            check(recorder, "triton")


# ---------------------------------------------------------------------- truth


def loss_sum(
    z: Tensor, u: Tensor, labels: Tensor, alpha: float = ALPHA, temperature: float = T
) -> Tensor:
    """Sum over the labelled rows of (1 - alpha) MLM + alpha T^2 KL, in the dtype of z."""
    live = labels != IGNORED
    mlm = F.cross_entropy(z, labels, ignore_index=IGNORED, reduction="sum")
    log_q, log_p = ((x[live] / temperature).log_softmax(-1) for x in (z, u))
    kl = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    return (1 - alpha) * mlm + alpha * temperature**2 * kl


# ----------------------------------------------------------------- ready logits


def check_rows(
    recorder: Recorder,
    name: str,
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    backend: str = "triton",
    alpha: float = ALPHA,
    temperature: float = T,
) -> None:
    """Check one forward and backward pass against float64. With alpha 0 there is no teacher."""
    with recorder.attempt(name):
        _check_rows(recorder, name, student, teacher, labels, backend, alpha, temperature)


def _check_rows(
    recorder: Recorder,
    name: str,
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    backend: str,
    alpha: float,
    temperature: float,
) -> None:
    N, V = student.shape
    z = student.detach().requires_grad_()
    loss = kl_mlm_loss(
        z, teacher if alpha else None, labels, alpha=alpha, temperature=temperature,
        reduction="sum", backend=backend,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss, z)
    truth, squares, norm = 0.0, 0.0, 0.0
    step = max(1, LOGITS_PART // V)
    for i in range(0, N, step):
        part = slice(i, i + step)
        z64 = student[part].double().requires_grad_()
        total = loss_sum(z64, teacher[part].double(), labels[part], alpha, temperature)
        (grad64,) = torch.autograd.grad(total, z64)
        truth += total.item()
        squares += (grad[part].double() - grad64).square().sum().item()
        norm += grad64.square().sum().item()
    facts = {"shape": f"{N}x{V}", "dtype": str(student.dtype).removeprefix("torch.")}
    # The loss sums differences of logsumexps of about 20, each with float32's rounding error.
    recorder.check(f"{name}: loss", abs(loss.item() / truth - 1), 1e-5, **facts)
    bar = BARS[student.dtype]
    recorder.check(f"{name}: gradient", (squares / norm) ** 0.5, bar, **facts)
    ignored = grad[labels == IGNORED]
    if ignored.numel() and not bool((ignored == 0).all()):
        recorder.fail(f"{name}: rows without a label have a gradient")


def _rows(recorder: Recorder, backend: str) -> None:
    rng = torch.Generator(recorder.device).manual_seed(0)
    # the vocabularies of BERT and GPT-2 are not multiples of 16; the last two pass 2**31 elements
    vocabularies = recorder.pick((30_522, 50_257, 128_256, 262_144, 262_145), (50, 4097))
    for dtype in recorder.pick(tuple(BARS), (torch.bfloat16, torch.float32)):
        for V in vocabularies:
            student, teacher = make_logits(recorder.pick(256, 3), V, dtype, rng)
            labels = make_labels(len(student), V, rng)
            check_rows(recorder, "rows", student, teacher, labels, backend)
            for alpha, temperature in OTHERS if V in vocabularies[:1] else ():
                name = f"rows, alpha {alpha}, temperature {temperature}"
                check_rows(recorder, name, student, teacher, labels, backend, alpha, temperature)
    for N, V in recorder.pick(((16_900, 128_256), (8_200, 262_144)), ((5, 33),)):
        student, teacher = make_logits(N, V, torch.bfloat16, rng)
        labels = make_labels(N, V, rng)
        check_rows(recorder, "2**31 logits", student, teacher, labels, backend)


def close_teacher(recorder: Recorder, backend: str) -> None:
    """The error of the KL gradient when the student is only 1, 5 or 20 % from its teacher."""
    rng = torch.Generator(recorder.device).manual_seed(3)
    for V in recorder.pick((1000, 30_522, 262_144), (1000,)):
        for drift in (0.01, 0.05, 0.2):
            teacher = 3 * torch.randn(recorder.pick(64, 2), V, generator=rng, device=rng.device)
            moved = torch.randn(teacher.shape, generator=rng, device=rng.device)
            labels = torch.zeros(len(teacher), dtype=torch.int64, device=rng.device)
            with recorder.attempt(f"drift {drift}"):
                z = (teacher + drift * moved).requires_grad_()
                loss = kl_mlm_loss(
                    z, teacher, labels, alpha=1.0, temperature=T, reduction="sum", backend=backend
                )
                (grad,) = torch.autograd.grad(loss, z)
                z64 = z.detach().double().requires_grad_()
                log_q, log_p = ((x / T).log_softmax(-1) for x in (z64, teacher.double()))
                loss = T**2 * F.kl_div(log_q, log_p, reduction="sum", log_target=True)
                error = frobenius(grad, *torch.autograd.grad(loss, z64))
                recorder.check(f"drift {drift}: gradient", error, BARS[torch.float32], shape=f"{V}")


def _padded_and_strided(recorder: Recorder, backend: str) -> None:
    """Vocabularies with different padding, filled with NaN; gaps between rows and columns."""
    rng = torch.Generator(recorder.device).manual_seed(1)
    N, V = recorder.pick((64, 50_257), (3, 41))
    for dtype in recorder.pick(tuple(BARS), (torch.float32,)):
        labels = make_labels(N, V, rng)
        student, teacher = make_logits(N, V, dtype, rng)
        for name, wide in (("padded", (N, V + 47)), ("columns apart", (N, 2 * V))):
            place = torch.full(wide, float("nan"), dtype=dtype, device=rng.device)
            z = place[:, :V] if name == "padded" else place[:, ::2]
            z.copy_(student)
            check_rows(recorder, name, z, teacher, labels, backend)
        padded = torch.full((N, V + 47), float("nan"), dtype=dtype, device=rng.device)
        padded[:, :V] = student
        padded.requires_grad_()
        options = {"alpha": ALPHA, "temperature": T, "vocab_size": V, "backend": backend}
        with recorder.attempt("gradient of padding"):
            loss = kl_mlm_loss(padded, teacher, labels, **options)
            (grad,) = torch.autograd.grad(loss, padded)
            facts = {"dtype": str(dtype).removeprefix("torch.")}
            recorder.check("gradient of padding", grad[:, V:].abs().max().item(), 0.0, **facts)


# -------------------------------------------------------------------- the heads


def linear_truth(
    student: Sequence[Tensor], teacher: Sequence[Tensor], labels: Tensor
) -> tuple[float, Tensor, Tensor]:
    """Loss summed over the labelled rows, dX and dW in float64, some rows at a time."""
    x, w = (t.double() for t in student)
    x_t, w_t = (t.double() for t in teacher)
    dx, dw, loss = torch.zeros_like(x), torch.zeros_like(w), 0.0
    step = max(1, LOGITS_PART // len(w))
    for i in range(0, len(x), step):
        part = slice(i, i + step)
        z = (x[part] @ w.t()).requires_grad_()
        total = loss_sum(z, x_t[part] @ w_t.t(), labels[part])
        (dz,) = torch.autograd.grad(total, z)
        dx[part] = dz @ w
        dw.addmm_(dz.t(), x[part])
        loss += total.item()
    return loss, dx, dw


def _linear(recorder: Recorder, backend: str) -> None:
    """The linear loss as a whole, in one chunk and in many, with and without `max_rows`."""
    rng = torch.Generator(recorder.device).manual_seed(2)
    shapes = recorder.pick(
        [(9830, 30_522, 768, 512), (4096, 128_256, 2048, 1024), (512, 262_144, 1024, 768)],
        [(7, 50, 12, 8)],
    )
    for N, V, H, H_t in shapes:
        for dtype in recorder.pick(tuple(BARS), (torch.bfloat16, torch.float32)):
            student, teacher = make_heads(N, V, H, H_t, dtype, rng)
            labels = make_labels(N, V, rng)
            truth = None
            live = int((labels != IGNORED).sum())
            inputs = [x.detach().requires_grad_() for x in student]
            facts = {"shape": f"{N}x{V}x{H}/{H_t}", "dtype": str(dtype).removeprefix("torch.")}
            # first the chunks it chooses, then many, without room for ignored rows
            for name, limits in (("", {}), (", chunks", {"chunk_bytes": 8 * V * max(2, N // 5)})):
                with recorder.attempt(f"linear{name}"):
                    loss = linear_kl_mlm_loss(
                        *inputs, *teacher, labels, alpha=ALPHA, temperature=T,
                        backend=backend, max_rows=live if limits else None,
                        # the default on a GPU, here for the emulator as well
                        logits_dtype=torch.float32, **limits,
                    )  # fmt: skip
                    grads = torch.autograd.grad(loss, inputs)
                    # after the loss, which may fail
                    truth = truth or linear_truth(student, teacher, labels)
                    # the loss is a mean over the labelled rows, the truth a sum
                    error = abs(loss.item() * live / truth[0] - 1)
                    recorder.check(f"linear{name}: loss", error, 1e-4, **facts)
                    for wrt, grad, grad64 in zip(("dX", "dW"), grads, truth[1:], strict=True):
                        error = frobenius(grad, grad64 / live)
                        recorder.check(f"linear{name}: {wrt}", error, BARS[dtype], **facts)


# what training calls comes first
CHECKS = (_linear, close_teacher, _rows, _padded_and_strided)
