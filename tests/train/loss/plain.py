"""The loss of one batch from whole logits, written out: the truth that tests compare with."""

import torch
from torch.nn import functional as F


def shifted(x, filler):
    return torch.cat([x[:, 1:], x.new_full((len(x), 1), filler)], 1)


def divergence_of(log_p, log_q, kind, beta):
    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)

    if kind == "jsd":
        log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)
    return kl(log_p, log_q) if kind == "forward" else kl(log_q, log_p)


def plain_loss(
    model, teachers, batch, *, causal, alpha=0.5, temperature=2.0, divergence="forward", beta=0.5,
    label_smoothing=0.0, z_loss=0.0, row_weights=None, teacher_weights=None, kl_rows="labels",
    num_items=None,
):  # fmt: skip
    """Means over the rows of each term, or sums divided by num_items."""
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    labels = batch["labels"]
    weights = torch.ones_like(labels, dtype=torch.float64) if row_weights is None else row_weights
    real = batch.get("attention_mask", torch.ones_like(labels)).bool()
    if causal:
        labels, weights, real = shifted(labels, -100), shifted(weights, 0.0), shifted(real, False)
    z = model(**inputs).logits
    labelled = labels != -100
    kl_mask = labelled if kl_rows == "labels" else real
    ce = F.cross_entropy(
        z[labelled], labels[labelled], reduction="none", label_smoothing=label_smoothing
    )
    ce = (ce + z_loss * z[labelled].logsumexp(-1) ** 2) * weights[labelled]
    total = 0.0
    for i, teacher in enumerate(teachers):
        share = teacher_weights[i] if teacher_weights else 1 / len(teachers)
        with torch.no_grad():
            u = teacher(**inputs).logits
        log_p, log_q = ((x[kl_mask] / temperature).log_softmax(-1) for x in (u, z))
        rows = divergence_of(log_p, log_q, divergence, beta) * weights[kl_mask]
        total = total + share * temperature**2 * rows.sum() / (num_items or kl_mask.sum())
    mlm = ce.sum() / (num_items or labelled.sum())
    return (1 - alpha) * mlm + alpha * total if teachers else mlm
