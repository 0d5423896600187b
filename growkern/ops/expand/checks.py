"""What `expand` refuses before any work, and why."""

import torch
from torch import Tensor

from growkern.errors import GrowthError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _check_layout(name: str, x: Tensor | None) -> None:
    if isinstance(x, Tensor) and x.layout != torch.strided:
        layout = str(x.layout).removeprefix("torch.")
        raise GrowthError(f"{name} is {layout}: {name}.to_dense()")


def _check_index(name: str, x: Tensor | None, device: torch.device) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise GrowthError(f"{name} must be a tensor, got {type(x).__name__}: torch.tensor({name})")
    if x.ndim != 1:
        raise GrowthError(f"{name} must be a vector of indices, got shape {tuple(x.shape)}")
    if x.dtype != torch.int64:
        raise GrowthError(f"{name} must be an int64 tensor, got {x.dtype}: use {name}.long()")
    if x.device != device:
        raise GrowthError(f"{name} is on {x.device}, the result on {device}: move {name}")


def _check_factor(name: str, x: Tensor | None, n: int, device: torch.device) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise GrowthError(f"{name} must be a tensor, got {type(x).__name__}: torch.tensor({name})")
    if tuple(x.shape) != (n,):
        raise GrowthError(f"{name} must have shape ({n},), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise GrowthError(f"{name} must be a float tensor, got {x.dtype}")
    if x.device != device:
        raise GrowthError(f"{name} is on {x.device}, the result on {device}: move {name}")
    if x.requires_grad and torch.is_grad_enabled():
        raise GrowthError(f"{name} gets no gradient: detach it")


def _check_weight(weight: Tensor, upper: Tensor | None) -> None:
    if weight.ndim not in (1, 2):
        raise GrowthError(f"weight must have 1 or 2 dimensions, got shape {tuple(weight.shape)}")
    if weight.dtype not in DTYPES:
        raise GrowthError(f"weight must be one of {DTYPES}, got {weight.dtype}")
    if upper is None:
        return
    for what in ("shape", "dtype", "device"):
        found, wanted = getattr(upper, what), getattr(weight, what)
        if found != wanted:
            raise GrowthError(f"upper has {what} {found}, the weight {wanted}: they must agree")


def _check_out(
    out: Tensor,
    shape: tuple[int, ...],
    weight: Tensor,
    upper: Tensor | None,
    device: torch.device,
) -> None:
    if tuple(out.shape) != shape:
        raise GrowthError(f"out has shape {tuple(out.shape)}, the result {shape}")
    if out.dtype not in DTYPES:
        raise GrowthError(f"out must be one of {DTYPES}, got {out.dtype}")
    if out.device != device:
        raise GrowthError(f"out is on {out.device}, the weight on {weight.device}")
    if any(n > 1 and step == 0 for n, step in zip(out.shape, out.stride(), strict=True)):
        raise GrowthError(f"out has strides {out.stride()}: it needs memory for every element")
    differentiable = any(x is not None and x.requires_grad for x in (out, weight, upper))
    if differentiable and torch.is_grad_enabled():
        raise GrowthError("out= has no gradient: leave out= away, or use torch.no_grad()")


def check_expand(
    weight: Tensor,
    upper: Tensor | None,
    maps: dict[str, Tensor | None],
    row_factors: dict[str, Tensor | None],
    col_factors: dict[str, Tensor | None],
    seed: int,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    reads_host: bool = False,
) -> None:
    """Everything that shapes, dtypes and devices can tell; GrowthError names what is wrong.

    `reads_host`: the backend reads pinned memory of the host, and `out` says where it writes.
    """
    given = {"weight": weight, "upper": upper, "out": out, **maps, **row_factors, **col_factors}
    for name, x in given.items():
        _check_layout(name, x)
    _check_weight(weight, upper)
    device = weight.device
    if reads_host and out is not None and out.is_cuda and weight.device.type == "cpu":
        device = out.device
        for name, x in (("weight", weight), ("upper", upper)):
            if x is not None and not x.is_pinned():
                raise GrowthError(f"{name} is on the CPU and not pinned: {name}.pin_memory()")
    is_vector = weight.ndim == 1
    col_given = (maps["cols"], row_factors["row_noise"], *col_factors.values())
    if is_vector and any(x is not None for x in col_given):
        raise GrowthError("a 1-D weight takes rows and row_scale only: no columns, no noise")
    if row_factors["row_noise"] is not None and col_factors["col_noise"] is not None:
        raise GrowthError("noise goes on the axis that is read: row_noise or col_noise, not both")
    if not 0 <= seed < 2**63:
        raise GrowthError(f"seed must be in [0, 2**63), got {seed}")

    shape = list(weight.shape)
    for axis, (name, index) in enumerate(maps.items()):
        _check_index(name, index, device)
        if index is not None:
            shape[axis] = index.shape[0]
    for axis, factors in enumerate((row_factors, col_factors)):
        for name, x in factors.items():
            if x is not None:
                _check_factor(name, x, shape[axis], device)

    if out_dtype not in (None, *DTYPES):
        raise GrowthError(f"out_dtype must be one of {DTYPES}, got {out_dtype}")
    if out is not None:
        _check_out(out, tuple(shape), weight, upper, device)
        if out_dtype not in (None, out.dtype):
            raise GrowthError(f"out has dtype {out.dtype}, but out_dtype={out_dtype}")


def check_range(name: str, index: Tensor | None, n: int, with_upper: bool) -> None:
    """GrowthError for an index out of range. On the CPU only: asking a GPU stops its stream."""
    if index is None or index.device.type != "cpu" or not index.numel():
        return
    low, high = (int(x) for x in index.aminmax())
    limit = 2 * n if with_upper else n
    if low < 0 or high >= limit:
        fix = "" if with_upper else "; only with `upper` may an index pass the end of the weight"
        raise GrowthError(f"{name} holds {low} to {high}, allowed are 0 to {limit - 1}{fix}")


def check_no_overlap(out: Tensor, weight: Tensor, upper: Tensor | None) -> None:
    """GrowthError if the result would overwrite what it is computed from."""
    for name, x in (("weight", weight), ("upper", upper)):
        if x is not None and _span(out)[0] < _span(x)[1] and _span(x)[0] < _span(out)[1]:
            raise GrowthError(f"out shares memory with {name}: give it its own")


def _span(x: Tensor) -> tuple[int, int]:
    """First and one-past-last address; both 0 for an empty tensor."""
    if not x.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
