"""The values that options of the losses may have. Needs no PyTorch, as run files do not."""

from typing import Literal

from growkern.arguments import NOT_NEGATIVE, POSITIVE, Limit

Divergence = Literal["forward", "reverse", "jsd"]
KLRows = Literal["labels", "all"]
Reduction = Literal["mean", "sum", "none"]
Tail = Literal["bucket", "renormalise"]

_CAP = POSITIVE._replace(must=f"{POSITIVE.must}, or None for no cap")
LIMITS = {
    "temperature": POSITIVE,
    "softcap": _CAP,
    "teacher_softcap": _CAP,
    "label_smoothing": Limit(lambda x: 0 <= x < 1, "lie in [0, 1)"),
    "z_loss": NOT_NEGATIVE,
    "beta": Limit(
        lambda x: 0 < x < 1,
        "lie in (0, 1), as the divergence is 0 at both ends (use 'forward' or 'reverse')",
    ),
}
# how the term of a label is computed: also without a teacher, and in section [loss] of a run file
LABEL_OPTIONS = ("label_smoothing", "z_loss")
# how student and teachers are compared: also in section [inheritance]
KL_OPTIONS = ("temperature", "divergence", "beta")
