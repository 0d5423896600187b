"""The adjoint of a gather, summed in an order that never changes."""

from torch import Tensor


def folded(x: Tensor, dim: int, index: Tensor, n: int) -> Tensor:
    """Sums the slices of a matrix that share an index: the adjoint of index_select along `dim`."""
    if x.device.type == "cpu":
        shape = (n, x.shape[1]) if dim == 0 else (x.shape[0], n)
        return x.new_zeros(shape).index_add(dim, index, x)
    # index_add is atomic on a GPU, index_put sorts: the same sum every time
    x = x.movedim(dim, 0)
    return x.new_zeros(n, x.shape[1]).index_put((index,), x, accumulate=True).movedim(0, dim)
