"""Checks the losses on the device: at large sizes, and with every option.

Vocabularies go up to 262 144, and logits past 2**31 elements. The calls with options are those of
`bench.launches.cases`. The truth is the ops' reference in float64. New memory is filled with NaN,
so that values a kernel does not write show up.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.launches.cases import losses
from bench.launches.smoke import check_case
from bench.shared.inputs import IGNORED, LOGITS_PART, make_heads, make_labels, make_logits
from bench.shared.loss_measure import frobenius
from bench.shared.recorder import Recorder, fill_new_memory
from growkern.ops.loss.kl_mlm_loss import kl_mlm_loss
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss
from growkern.ops.loss.topk_kl_mlm_loss import topk_kl_mlm_loss

ALPHA, T = 0.7, 2.0
# (alpha, temperature) of calls with kernels of their own: at temperature 1, and without a teacher
OTHERS = ((ALPHA, 1.0), (0.0, 1.0))
PARTS = ("loss", "dX", "dW")
# largest allowed relative Frobenius error of a gradient, by dtype of the inputs
BARS = {torch.bfloat16: 5e-3, torch.float32: 1e-5, torch.float16: 1e-3}
# float16 has no gradient under 6e-8. As in training, the loss is scaled, so that none is that small
LOSS_SCALES = {torch.float16: 2.0**12}


def run(recorder: Recorder) -> None:
    fill_new_memory()
    if recorder.document["piece"] == "check_options":
        every_option(recorder)
    for check in CHECKS[recorder.document["piece"]]:
        with recorder.attempt(check.__name__.strip("_")):
            check(recorder)


# ----------------------------------------------------------------- ready logits


def check_rows(
    recorder: Recorder,
    name: str,
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    alpha: float = ALPHA,
    temperature: float = T,
) -> None:
    """Check one forward and backward pass against float64. With alpha 0 there is no teacher."""
    N, V = student.shape
    given = (student, teacher, labels, alpha, temperature)
    with recorder.attempt(name):
        loss, grad = _loss_and_gradient(*given)
        truth, squares, norm = 0.0, 0.0, 0.0
        for part in (slice(i, i + LOGITS_PART // V + 1) for i in range(0, N, LOGITS_PART // V + 1)):
            some = (student[part].double(), teacher[part].double(), labels[part], *given[3:])
            total, grad64 = _loss_and_gradient(*some, "reference")
            truth += total
            squares += (grad[part].double() - grad64).square().sum().item()
            norm += grad64.square().sum().item()
        facts = {"shape": f"{N}x{V}", "dtype": str(student.dtype).removeprefix("torch.")}
        # The loss sums differences of logsumexps of about 20, each with float32's rounding error.
        recorder.check(f"{name}: loss", abs(loss / truth - 1), 1e-5, **facts)
        bar = BARS[student.dtype]
        recorder.check(f"{name}: gradient", (squares / norm) ** 0.5, bar, **facts)
        if bool((grad[labels == IGNORED] != 0).any()):
            recorder.fail(f"{name}: rows without a label have a gradient")


def _loss_and_gradient(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    alpha: float,
    temperature: float,
    backend: str = "triton",
) -> tuple[float, Tensor]:
    z = student.detach().requires_grad_()
    options = {"alpha": alpha, "temperature": temperature, "backend": backend}
    loss = kl_mlm_loss(z, teacher if alpha else None, labels, reduction="sum", **options)
    (grad,) = torch.autograd.grad(loss, z)
    return loss.item(), grad


def _rows(recorder: Recorder) -> None:
    rng = torch.Generator(recorder.device).manual_seed(0)
    # the vocabularies of BERT and GPT-2 are not multiples of 16; the last two pass 2**31 elements
    vocabularies = recorder.pick((30_522, 50_257, 128_256, 262_144, 262_145), (50, 4097))
    for dtype in recorder.pick(tuple(BARS), (torch.bfloat16, torch.float32)):
        for V in vocabularies:
            student, teacher = make_logits(recorder.pick(256, 3), V, dtype, rng)
            labels = make_labels(len(student), V, rng)
            check_rows(recorder, "rows", student, teacher, labels)
            for alpha, temperature in OTHERS if V in vocabularies[:1] else ():
                name = f"rows, alpha {alpha}, temperature {temperature}"
                check_rows(recorder, name, student, teacher, labels, alpha, temperature)
    for N, V in recorder.pick(((16_900, 128_256), (8_200, 262_144)), ((5, 33),)):
        student, teacher = make_logits(N, V, torch.bfloat16, rng)
        labels = make_labels(N, V, rng)
        check_rows(recorder, "2**31 logits", student, teacher, labels)


def close_teacher(recorder: Recorder) -> None:
    """The error of the KL gradient when the student is only 1, 5 or 20 % from its teacher."""
    rng = torch.Generator(recorder.device).manual_seed(3)
    for V in recorder.pick((1000, 30_522, 262_144), (1000,)):
        for drift in (0.01, 0.05, 0.2):
            teacher = 3 * torch.randn(recorder.pick(64, 2), V, generator=rng, device=rng.device)
            moved = torch.randn(teacher.shape, generator=rng, device=rng.device)
            labels = torch.zeros(len(teacher), dtype=torch.int64, device=rng.device)
            given = (teacher + drift * moved, teacher)
            with recorder.attempt(f"drift {drift}"):
                _, grad = _loss_and_gradient(*given, labels, 1.0, T)
                wide = (x.double() for x in given)
                _, exact = _loss_and_gradient(*wide, labels, 1.0, T, "reference")
                error = frobenius(grad, exact)
                recorder.check(f"drift {drift}: gradient", error, BARS[torch.float32], shape=f"{V}")


def _padded_and_strided(recorder: Recorder) -> None:
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
            check_rows(recorder, name, z, teacher, labels)
        padded = torch.full((N, V + 47), float("nan"), dtype=dtype, device=rng.device)
        padded[:, :V] = student
        padded.requires_grad_()
        options = {"alpha": ALPHA, "temperature": T, "vocab_size": V, "backend": "triton"}
        with recorder.attempt("gradient of padding"):
            loss = kl_mlm_loss(padded, teacher, labels, **options)
            (grad,) = torch.autograd.grad(loss, padded)
            facts = {"dtype": str(dtype).removeprefix("torch.")}
            recorder.check("gradient of padding", grad[:, V:].abs().max().item(), 0.0, **facts)


# -------------------------------------------------------------------- the heads


def _linear(recorder: Recorder) -> None:
    """The linear loss as a whole, in one chunk and in many, with and without `max_rows`."""
    rng = torch.Generator(recorder.device).manual_seed(2)
    shapes = recorder.pick(
        [(4096, 30_522, 768, 512), (1024, 128_256, 2048, 1024), (512, 262_144, 1024, 768)],
        [(7, 50, 12, 8)],
    )
    for N, V, H, H_t in shapes:
        for dtype in recorder.pick(tuple(BARS), (torch.bfloat16, torch.float32)):
            student, teacher = make_heads(N, V, H, H_t, dtype, rng)
            labels = make_labels(N, V, rng)
            # the default on a GPU, here on a CPU as well
            ways: dict[str, dict[str, Any]] = {"linear": {"logits_dtype": torch.float32}}
            # many chunks, without room for ignored rows
            chunks = {"chunk_bytes": 8 * V * max(2, N // 5), "max_rows": int((labels >= 0).sum())}
            ways["linear, chunks"] = ways["linear"] | chunks
            truth: list[Tensor] = []
            for name, options in ways.items():
                with recorder.attempt(name):
                    made = _linear_gradients(student, teacher, labels, "triton", **options)
                    # after the loss, which may fail
                    wide = ([x.double() for x in head] for head in (student, teacher))
                    truth = truth or _linear_gradients(*wide, labels, "reference")
                    facts = {"shape": f"{N}x{V}x{H}/{H_t}", "dtype": f"{dtype}"[6:]}
                    bars = (1e-4, BARS[dtype], BARS[dtype])
                    for wrt, x, exact, bar in zip(PARTS, made, truth, bars, strict=True):
                        recorder.check(f"{name}: {wrt}", frobenius(x, exact), bar, **facts)


def _linear_gradients(
    student: Sequence[Tensor], teacher: Sequence[Tensor], labels: Tensor, backend: str, **o: Any
) -> list[Tensor]:
    given = [x.detach().requires_grad_() for x in student]
    o |= {"alpha": ALPHA, "temperature": T, "backend": backend}
    loss = linear_kl_mlm_loss(*given, *teacher, labels, **o)
    scale = LOSS_SCALES.get(given[0].dtype, 1.0)
    grads = torch.autograd.grad(loss * scale, given)
    return [loss.detach(), *(x.double() / scale for x in grads)]


# ------------------------------------------------------------------- every option


# largest relative Frobenius error, by the dtype in the case's name
OPTION_BARS = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-4}


def every_option(recorder: Recorder) -> None:
    """Every option of the three losses, one by one and all at once."""
    rng = torch.Generator(recorder.device).manual_seed(3)
    shapes = recorder.pick(((64, 128_256), (256, 50_257), (256, 30_522)), ((5, 41),))
    for shape in shapes:
        for number, case in enumerate(losses(rng, [shape])):
            # an interpreted kernel takes a second, so a dry run takes a part of them
            if number % recorder.pick(1, 4) == 0:
                with recorder.attempt(case.name):
                    check_case(recorder, case, OPTION_BARS)


def _past_int32(recorder: Recorder) -> None:
    """Chunks of more than 2**31 logits must give what small chunks give."""
    rng = torch.Generator(recorder.device).manual_seed(6)
    N, V, H = recorder.pick((8_300, 262_144, 64), (5, 41, 12))
    student, teacher = make_heads(N, V, H, H - 4, torch.bfloat16, rng)
    labels = make_labels(N, V, rng)
    topk = _kept(teacher, recorder.pick(64, 5))
    given = [x.detach().requires_grad_() for x in student]
    for name, loss, beside in (
        ("linear", linear_kl_mlm_loss, teacher),
        ("top-k", topk_kl_mlm_loss, topk),
    ):
        made = []
        for chunk_bytes in (1 << 28, 1 << 36):
            limits = {"temperature": T, "chunk_bytes": chunk_bytes}
            total = loss(*given, *beside, labels, backend="triton", **limits)
            made.append((total.detach(), *torch.autograd.grad(total, given)))
        for wrt, small, large in zip(("loss", "dX", "dW"), *made, strict=True):
            # dW is summed in another order, so it differs in the last digits
            error = frobenius(large, small.double())
            recorder.check(f"{name}, 2**31 logits: {wrt}", error, 2e-3, shape=f"{N}x{V}x{H}")


def _kept(teacher: Sequence[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """What a cache keeps of a teacher, some rows at a time."""
    hidden_NH, weight_VH = teacher
    parts = [
        ((part.double() @ weight_VH.double().t()) / T).log_softmax(-1).topk(k)
        for part in hidden_NH.split(256)
    ]
    return torch.cat([x.indices for x in parts]), torch.cat([x.values for x in parts]).float()


# what training calls comes first
CHECKS = {
    "check_loss": (_linear, close_teacher, _rows, _padded_and_strided),
    "check_options": (_past_int32,),
}
