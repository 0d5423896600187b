"""Random inputs of the ops for checks, sweeps and benchmarks, and rows of a correct `expand`."""

from typing import Any

import torch
from torch import Tensor

from growkern.ops.expand import Routing, expand

IGNORED = -100
DRIFT = 0.05
# how many elements of logits exist in a wider dtype at a time
LOGITS_PART = 1 << 26
# options of the losses: each by itself, then many at once
OPTIONS: tuple[dict[str, Any], ...] = (
    {"divergence": "reverse"},
    {"divergence": "jsd", "beta": 0.3},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-3},
    {"softcap": 20.0, "teacher_softcap": 25.0},
    {"row_weights": True},
    {"reduction": "none"},
    {"kl_rows": "all"},
    {"teacher_weights": [0.3, 0.7]},
    {"divergence": "jsd", "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0}
    | {"teacher_weights": [0.4, 0.6], "row_weights": True, "reduction": "none", "kl_rows": "all"},
)


# ---------------------------------------------------------------------- expand


def truth_rows(case: dict[str, Any], at: Tensor) -> Tensor:
    """Rows of the correct result: those of the op's reference in float64."""
    wide = {name: case[name].double() for name in ("weight", "upper") if case.get(name) is not None}
    # a share or noise depends on the place of its row
    if any(case.get(name) is not None for name in ("row_noise", "col_noise", "routing")):
        return expand(**(case | wide), backend="reference")[at]
    scale = case.get("row_scale")
    rows = at if case.get("rows") is None else case["rows"][at]
    some = {"rows": rows, "row_scale": None if scale is None else scale[at]}
    return expand(**(case | wide | some), backend="reference")


def routing_of(index: Tensor, dim: int, amplitude: float = 1.0) -> Routing:
    """The routing of an axis of the result, whose entries read the sources `index`, (n,) int64.

    Copies of a source are numbered in their order.
    """
    count = index.bincount()
    order = index.argsort(stable=True)
    number = torch.empty_like(index)
    first = count.cumsum(0) - count
    number[order] = torch.arange(len(index), device=index.device) - first[index[order]]
    return Routing(dim, torch.stack([number, count[index]], 1), amplitude)


def make_case(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    rng: torch.Generator,
    *,
    upper: bool = False,
    noise: str = "",
    routing: str = "",
    amplitude: float = 1.0,
    scales: bool = True,
) -> dict[str, Any]:
    """Random arguments of `expand`, on the generator's device.

    Args:
        sizes: rows and columns of the weight, rows and columns of the result.
        upper: whether to also take the layer above.
        noise: "row", "col" or "" for none.
        routing: likewise; at most one of the two is given.
    """
    R, C, M, N = sizes
    made = {"generator": rng, "device": rng.device}

    def index(n: int, m: int) -> Tensor:
        last = 2 * n if upper else n
        drawn = torch.randint(last, (m,), **made)
        # the last source index in the last place, where an overflow would show
        drawn[-1] = last - 1
        return drawn

    def factor(n: int) -> Tensor:
        return torch.rand(n, **made) + 0.25

    case: dict[str, Any] = {"weight": torch.randn(R, C, **made).to(dtype), "seed": 0x1234_89ABCDEF}
    case |= {"rows": index(R, M), "cols": index(C, N)}
    if upper:
        case["upper"] = torch.randn(R, C, **made).to(dtype)
    if scales:
        case |= {"row_scale": factor(M), "col_scale": factor(N)}
    if noise:
        case[f"{noise}_noise"] = factor(M if noise == "row" else N) - 0.75
    if routing:
        dim = ("row", "col").index(routing)
        case["routing"] = routing_of(case[("rows", "cols")[dim]], dim, amplitude)
    return case


def in_nan(shape: tuple[int, int], dtype: torch.dtype, rng: torch.Generator, layout: str) -> Tensor:
    """Memory for a result, filled with NaN.

    Args:
        rng: draws gaps and offsets; the memory is on its device.
        layout: "dense" (nothing around it), "padded" (gaps between rows), "strided" (gaps between
            rows and columns) or "turned" (padded and transposed).
    """
    M, N = shape
    if layout == "dense":
        return torch.full(shape, float("nan"), dtype=dtype, device=rng.device)
    draw = torch.randint(0, 7, (4,), generator=rng, device=rng.device).tolist()
    step_m, step_n = 1 + draw[0] % 3, 1 + draw[1] % 3 * (layout == "strided")
    first = draw[2]
    size = (M * step_m + first, N * step_n + draw[3] + first)
    if layout == "turned":
        base = torch.full(size[::-1], float("nan"), dtype=dtype, device=rng.device).t()
    else:
        base = torch.full(size, float("nan"), dtype=dtype, device=rng.device)
    return base[first : first + M * step_m : step_m, first : first + N * step_n : step_n]


# ---------------------------------------------------------------------- losses


def make_labels(N: int, V: int, rng: torch.Generator) -> Tensor:
    """Random labels (N,); every third row has none."""
    labels = torch.randint(V, (N,), generator=rng, device=rng.device)
    labels[1::3] = IGNORED
    labels[0], labels[-1] = V - 1, 0
    return labels


def make_logits(N: int, V: int, dtype: torch.dtype, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits (N, V) of a student and its teacher, DRIFT apart. The last logit is the largest."""
    teacher = torch.empty(N, V, dtype=dtype, device=rng.device)
    student = torch.empty_like(teacher)
    for i in range(0, N, step := max(1, LOGITS_PART // V)):
        part = 3 * torch.randn(min(step, N - i), V, generator=rng, device=rng.device)
        teacher[i : i + step] = part
        student[i : i + step] = part + 3 * DRIFT * torch.randn(
            part.shape, generator=rng, device=rng.device
        )
    teacher[:, -1], student[:, -1] = 17, 16
    return student, teacher


def make_heads(
    N: int, V: int, H: int, H_t: int, dtype: torch.dtype, rng: torch.Generator, drift: float = DRIFT
) -> tuple[list[Tensor], list[Tensor]]:
    """A student and its teacher, each as [hidden, weight].

    The student is its teacher widened from H_t to H, then moved by `drift`.
    """
    made = {"generator": rng, "device": rng.device}
    extra = torch.randint(H_t, (H - H_t,), **made)
    columns = torch.cat([torch.arange(H_t, device=rng.device), extra])
    hidden, weight = torch.randn(N, H_t, **made), 3 / H_t**0.5 * torch.randn(V, H_t, **made)
    wide = [hidden[:, columns], weight[:, columns] / columns.bincount()[columns]]
    student = [x + drift * x.std() * torch.randn(x.shape, **made) for x in wide]
    return [x.to(dtype) for x in student], [x.to(dtype) for x in (hidden, weight)]
