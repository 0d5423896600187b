"""Checks every option of the losses on the device, at the vocabularies of models.

The calls are those of `bench.launches.cases`. The truth is the op's reference in float64. The tests
of the ops compare it with PyTorch's own losses.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.launches.cases import losses
from bench.launches.smoke import check_case
from bench.shared.inputs import make_heads, make_labels
from bench.shared.loss_measure import frobenius
from bench.shared.recorder import Recorder, fill_new_memory
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss
from growkern.ops.loss.topk_kl_mlm_loss import topk_kl_mlm_loss

# largest relative Frobenius error, by the dtype in the case's name
BARS = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-4}
T = 2.0


def run(recorder: Recorder) -> None:
    fill_new_memory()
    every_option(recorder)
    with recorder.attempt("past int32"):
        _past_int32(recorder)


def every_option(recorder: Recorder) -> None:
    """Every option of the three losses, one by one and all at once."""
    rng = torch.Generator(recorder.device).manual_seed(3)
    shapes = recorder.pick(((64, 128_256), (256, 50_257), (256, 30_522)), ((5, 41),))
    for shape in shapes:
        for number, case in enumerate(losses(rng, [shape])):
            # an interpreted kernel takes a second, so a dry run takes a part of them
            if number % recorder.pick(1, 4) == 0:
                with recorder.attempt(case.name):
                    check_case(recorder, case, BARS)


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
