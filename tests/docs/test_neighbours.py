"""The losses of other libraries are growkern's with the options of docs/neighbours.md.

Each of theirs is written here from its documentation, in float64. Where a library is installed, its
own function is called beside it.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import growkern
from growkern import kl_mlm_loss, linear_kl_mlm_loss

PAGE = Path(growkern.__file__).parents[1] / "docs" / "neighbours.md"
ROWS, VOCAB, T = 6, 7, 2.0
torch.manual_seed(0)
STUDENT_X, TEACHER_X = torch.randn(2, ROWS, 4).double()
STUDENT_W, TEACHER_W = torch.randn(2, VOCAB, 4).double()
STUDENT, TEACHER = STUDENT_X @ STUDENT_W.T, TEACHER_X @ TEACHER_W.T
LABELS = torch.tensor([3, -100, 0, 6, -100, 2])
LABELLED = LABELS != -100
# divergences of a row
DIVERGENCES = {0.0: "forward", 1.0: "reverse", 0.3: "jsd"}


def hard(logits, labels=LABELS):
    return F.cross_entropy(logits, labels)


def divergences(student, teacher, beta, temperature=1.0):
    """The generalised Jensen-Shannon divergence of TRL and Liger, per row and token."""
    q, p = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    if beta in (0, 1):
        first, second = (p, q) if beta == 0 else (q, p)
        return first.exp() * (first - second)
    mixed = (beta * p.exp() + (1 - beta) * q.exp()).log()
    return beta * p.exp() * (p - mixed) + (1 - beta) * q.exp() * (q - mixed)


def soft(student, beta=0.0, temperature=1.0):
    """Their mean over the rows with a label."""
    return divergences(student, TEACHER, beta, temperature)[LABELLED].sum() / LABELLED.sum()


def entropy():
    p = TEACHER.log_softmax(-1)[LABELLED]
    return -(p.exp() * p).sum() / LABELLED.sum()


def how(beta):
    """`beta` of TRL and Liger as options of growkern."""
    name = DIVERGENCES[beta]
    return {"divergence": name, "beta": beta} if name == "jsd" else {"divergence": name}


def ours(student, alpha=1.0, labels=LABELS, **options):
    options = {"temperature": 1.0, **options}
    return kl_mlm_loss(student, TEACHER, labels, alpha=alpha, **options)


def liger(student, beta, wh=0.5, ws=0.7):
    theirs = wh * hard(student) + ws * soft(student, beta, T)
    s = wh + ws / T**2
    options = dict(alpha=ws / (T**2 * s), temperature=T, **how(beta))
    return theirs, s * ours(student, **options)


def torchtune_symmetric(student, r=0.3):
    theirs = r * (soft(student) + entropy()) + (1 - r) * soft(student, 1.0)
    reverse = ours(student, divergence="reverse")
    return theirs, r * (ours(student) + entropy()) + (1 - r) * reverse


def torchtune_ratio(student, r=0.4):
    theirs = (1 - r) * hard(student) + r * (soft(student) + entropy())
    return theirs, ours(student, alpha=r) + r * entropy()


def distillkit(student, wc=0.5, wk=1.5):
    """Its KL term takes the rows whose own token has a label, and not those that predict one."""
    shifted = torch.cat([LABELS[1:], LABELS.new_tensor([-100])])
    kl = T**2 * soft(student, temperature=T)
    theirs = (wc * hard(student, shifted) + wk * kl) / (wc + wk)
    return theirs, ours(student, wk / (wc + wk), shifted, kl_rows=LABELS >= 0, temperature=T)


def kl_div(student):
    q, p = student.log_softmax(-1), TEACHER.log_softmax(-1)
    return F.kl_div(q, p, reduction="batchmean", log_target=True), ours(student, kl_rows="all")


def trl(student, beta=0.3, **options):
    theirs = soft(student, beta, T)
    return theirs, ours(student, temperature=T, **how(beta)) / T**2


def trl_sum(student):
    return soft(student) * LABELLED.sum(), ours(student, reduction="sum")


def trl_mean(student):
    """Its "mean" is over tokens of the vocabulary too."""
    return divergences(student, TEACHER, 0.0)[LABELLED].mean(), ours(student) / VOCAB


# the first column of the page's table
CASES = {
    "Liger, `beta=0`": lambda x: liger(x, 0.0),
    "Liger, `beta=1`": lambda x: liger(x, 1.0),
    "Liger, `beta=b`": lambda x: liger(x, 0.3),
    "TRL, `generalized_jsd_loss`": trl,
    'TRL, `reduction="sum"`': trl_sum,
    'TRL, `reduction="mean"`': trl_mean,
    "torchtune, `ForwardKLLoss`": lambda x: (soft(x) + entropy(), ours(x) + entropy()),
    "torchtune, `ReverseKLLoss`": lambda x: (soft(x, 1.0), ours(x, divergence="reverse")),
    "torchtune, `SymmetricKLLoss(r)`": torchtune_symmetric,
    "torchtune, `kd_ratio=r`": torchtune_ratio,
    "DistillKit, weights `wc` and `wk`": distillkit,
    'PyTorch, `F.kl_div(..., "batchmean")`': kl_div,
}


def test_the_page_has_a_row_for_each_case():
    table = PAGE.read_text().split("## Their losses")[1].split("\n## ")[0]
    first = re.findall(r"^\| ([^|]+?) \|", table, re.M)
    assert first[1:] == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_theirs_is_ours_with_the_options_of_the_page(name):
    student = STUDENT.clone().requires_grad_()
    theirs, mine = CASES[name](student)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(x, student, retain_graph=True)[0] for x in (mine, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:You are importing from .trl.experimental")
@pytest.mark.parametrize("beta", DIVERGENCES)
def test_what_is_written_here_is_what_installed_libraries_compute(beta):
    compared = 0
    if sys.version_info >= (3, 11):
        from trl.experimental.gkd.gkd_trainer import GKDTrainer

        logits = STUDENT[None], TEACHER[None], LABELS[None]
        theirs = GKDTrainer.generalized_jsd_loss(*logits, beta=beta, temperature=T)
        torch.testing.assert_close(theirs, soft(STUDENT, beta, T), rtol=1e-6, atol=1e-7)
        compared += 1
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        loss = LigerFusedLinearJSDLoss(0.5, 0.7, beta, temperature=T, compiled=False)
        inputs = STUDENT_X, STUDENT_W, TEACHER_X, TEACHER_W
        theirs, mine = loss(*inputs, LABELS), liger(STUDENT, beta)[0]
        # its sum is float32
        torch.testing.assert_close(theirs.double(), mine, rtol=1e-6, atol=1e-7)
        s, options = 0.5 + 0.7 / T**2, dict(temperature=T, **how(beta))
        mine = s * linear_kl_mlm_loss(*inputs, LABELS, alpha=0.7 / (T**2 * s), **options)
        torch.testing.assert_close(theirs.double(), mine, rtol=1e-6, atol=1e-7)
        compared += 1
    except ImportError:
        pass
    try:
        from torchtune.modules.loss import kd_losses

        for kind, expected in (
            (kd_losses.ForwardKLLoss(), soft(STUDENT) + entropy()),
            (kd_losses.ReverseKLLoss(), soft(STUDENT, 1.0)),
            (kd_losses.SymmetricKLLoss(0.3), torchtune_symmetric(STUDENT)[0]),
        ):
            theirs = kind(STUDENT, TEACHER, LABELS).double()
            torch.testing.assert_close(theirs, expected, rtol=1e-6, atol=1e-7)
        compared += 1
    except ImportError:
        pass
    if not compared:
        pytest.skip("none of them is installed")


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_a_logit_of_minus_infinity_has_its_limit(divergence):
    """In place of the NaN that `F.kl_div` gives. -1e4 stands for -inf."""
    for where in ((True, False), (False, True), (True, True)):
        logits, near = [], []
        for x, is_cut in zip((STUDENT, TEACHER), where, strict=True):
            logits.append(x.clone().index_fill_(1, torch.tensor(5), -torch.inf) if is_cut else x)
            near.append(x.clone().index_fill_(1, torch.tensor(5), -1e4) if is_cut else x)
        found, limit = (
            kl_mlm_loss(*pair, LABELS, alpha=1.0, divergence=divergence) for pair in (logits, near)
        )
        is_infinite = where == {"forward": (True, False), "reverse": (False, True)}.get(divergence)
        assert found.isposinf() and limit > 100 if is_infinite else found.isfinite()
        if not is_infinite:
            torch.testing.assert_close(found, limit, rtol=1e-12, atol=1e-12)
