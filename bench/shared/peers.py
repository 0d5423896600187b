"""Calls the losses of other libraries, so that benchmarks can compare growkern with them.

Each loss is called as its authors call it. None of these libraries is a dependency. A loss that
cannot be imported stays in the table, with the reason. For a machine without a network,
`python -m bench.gpu --wheels DIRECTORY` unpacks their wheels. Where
`nvidia-cutlass-dsl` is installed, Liger 0.8.5 itself takes its kernels in CuTe on sm_90 and newer.
HyperCloning does what `expand` does. It is not on PyPI, so it is not compared.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Peer(NamedTuple):
    """The loss of another library."""

    package: str
    module: str
    call: Callable[..., Tensor]
    needs_gpu: bool = True
    compiles: bool = False

    def why_not(self) -> str:
        """The reason why it cannot run here; empty if it can."""
        if self.needs_gpu and DEVICE == "cpu":
            return "needs a GPU"
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            return f"{self.package} is not installed: no module {error.name}"
        except Exception as error:
            return f"{self.package} does not import: {why_failed(error)}"
        return ""


def why_failed(error: Exception) -> str:
    """The first line of an error, for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def liger_jsd(student: Any, teacher: Any, labels: Tensor, alpha: float) -> Tensor:
    """Its defaults compile each chunk. On a CPU small chunks are called as they are."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    on_cpu = {"compiled": False, "chunk_size": 256} if DEVICE == "cpu" else {}
    return LigerFusedLinearJSDLoss(1 - alpha, alpha, beta=0.0, **on_cpu)(*student, *teacher, labels)


def liger_fused(student: Any, teacher: Any, labels: Tensor, alpha: float) -> Tensor:
    """The sum of two fused losses: Liger has none that takes both labels and a teacher."""
    from liger_kernel.transformers import LigerFusedLinearJSD

    return (1 - alpha) * liger_labels(student, teacher, labels, alpha) + alpha * (
        LigerFusedLinearJSD(jsd_beta=0.0)(*student, *teacher, labels)
    )


def liger_kl(student: Any, teacher: Any, labels: Tensor, alpha: float) -> Tensor:
    """Its newest loss, which takes the teacher's probabilities; labels become part of them.

    Its value differs by an entropy, its gradient does not.
    """
    from liger_kernel.transformers.fused_linear_kl_div import LigerFusedLinearKLDivLoss

    return LigerFusedLinearKLDivLoss()(*student, soft_targets(student, teacher, labels, alpha))


def trl_chunked(student: Any, teacher: Any, labels: Tensor, alpha: float) -> Tensor:
    """The divergence of its DistillationTrainer alone. It has no label loss to go with it.

    The function is not public: versions differ in its arguments.
    """
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    hiddens, weights = zip(student, teacher, strict=True)
    # batch and sequence: one sequence of all rows
    hiddens = [x[None] for x in hiddens]
    names = list(inspect.signature(_chunked_divergence_loss).parameters)
    if "weight" in names[1]:
        tensors = (hiddens[0], weights[0], hiddens[1], weights[1])
    else:
        tensors = (*hiddens, *weights)
    # versions from 1.16 on choose the size of a chunk themselves
    size = {"chunk_size": 256} if "chunk_size" in names else {}
    mask = torch.ones_like(labels)[None]
    divergence, *_ = _chunked_divergence_loss(*tensors, mask, 0.0, **size)
    return alpha * divergence


def orda(student: Any, teacher: Any, labels: Tensor, alpha: float) -> Tensor:
    """One loss of labels and forward KL, in chunks; on a CPU it holds all logits."""
    from orda_kernel import SeparateTeacher, distillation_loss

    teacher = SeparateTeacher(*teacher)
    weights = {"student_ce_weight": 1 - alpha, "kl_weight": alpha}
    return distillation_loss(*student, labels, teacher, **weights).loss


def soft_targets(student: Any, teacher: Any, labels: Tensor, alpha: float) -> Tensor:
    """Labels and teacher as one target of probabilities, (N, V), in the student's dtype."""
    with torch.no_grad():
        hidden, weight = teacher
        target = alpha * (hidden @ weight.t()).float().softmax(-1)
        target.scatter_add_(1, labels[:, None], torch.full_like(target[:, :1], 1 - alpha))
        return target.to(student[0].dtype)


def torch_linear(student: Any, teacher: Any, labels: Tensor, alpha: float) -> Tensor:
    """PyTorch's own loss in chunks, from 2.13 on, with labels and teacher as one target.

    Its value differs by the teacher's entropy, its gradient does not. PyTorch 2.13 cuts no such
    target into chunks, and says so; 2.15 does.
    """
    target = soft_targets(student, teacher, labels, alpha)
    return torch.nn.functional.linear_cross_entropy(*student, target, options=_in_chunks())


def torch_labels(student: Any, teacher: Any, labels: Tensor, alpha: float) -> Tensor:
    return torch.nn.functional.linear_cross_entropy(*student, labels, options=_in_chunks())


def _in_chunks() -> Any:
    """Without these options PyTorch holds all logits. Its defaults choose how they are cut."""
    return torch.nn.LinearCrossEntropyOptions()


def cut_cross_entropy(student: Any, teacher: Any, labels: Tensor, alpha: float) -> Tensor:
    """Its GPU kernel; on a CPU its `torch_compile` version, which holds all logits."""
    from cut_cross_entropy import linear_cross_entropy

    impl = "cce" if DEVICE == "cuda" else "torch_compile"
    return linear_cross_entropy(*student, labels, impl=impl)


def liger_labels(student: Any, teacher: Any, labels: Tensor, alpha: float) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden, weight = student
    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)


def liger_kl_div(
    student: Tensor, teacher: Tensor, labels: Tensor, alpha: float, temperature: float
) -> Tensor:
    """Its KL divergence, which takes log-probabilities; PyTorch computes the label loss."""
    from liger_kernel.transformers import LigerKLDIVLoss

    log_q, log_p = ((x.float() / temperature).log_softmax(-1) for x in (student, teacher))
    kl = LigerKLDIVLoss(reduction="batchmean", log_target=True)(log_q, log_p)
    mlm = torch.nn.functional.cross_entropy(student.float(), labels)
    return (1 - alpha) * mlm + alpha * temperature**2 * kl


WITH_TEACHER = {
    "liger jsd": Peer(
        "liger-kernel", "liger_kernel.chunked_loss", liger_jsd, needs_gpu=False, compiles=True
    ),
    "liger fused jsd": Peer("liger-kernel", "liger_kernel.transformers", liger_fused),
    "liger kl": Peer("liger-kernel", "liger_kernel.transformers.fused_linear_kl_div", liger_kl),
    "trl chunked, divergence alone": Peer(
        "trl", "trl.trainer.distillation_trainer", trl_chunked, needs_gpu=False
    ),
    "orda": Peer("orda-kernel", "orda_kernel", orda, needs_gpu=False),
    "torch soft targets": Peer("torch", "torch", torch_linear, needs_gpu=False),
}
LABELS_ALONE = {
    "cut_cross_entropy": Peer(
        "cut-cross-entropy", "cut_cross_entropy", cut_cross_entropy, needs_gpu=False
    ),
    "liger": Peer("liger-kernel", "liger_kernel.transformers", liger_labels),
    "torch linear_cross_entropy": Peer("torch", "torch", torch_labels, needs_gpu=False),
}
ROWS_WITH_TEACHER = {
    "liger kl_div": Peer("liger-kernel", "liger_kernel.transformers", liger_kl_div)
}
