"""How a Triton kernel is launched, written down so that it can be compiled without a GPU."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class AotCase(NamedTuple):
    """One launch of a kernel, for `bench.aot`, which compiles it ahead of time.

    ``aot_cases()`` of a module with Triton kernels lists the launches that matter. Pointers and
    integers are multiples of 16, as the launcher finds them, unless `unaligned` names them.

    Attributes:
        name: of the launch, for people.
        kernel: the function under ``triton.jit``.
        signature: the type of every run-time argument: "*bf16", "i32", "fp32", or a tuple of such
            types. In a tuple, None and 1 mean these constants.
        constexprs: the value of every other argument: constants in capitals, strides that are 1,
            pointers that are None.
        unaligned: arguments that are not multiples of 16.
        num_warps: warps of a block.
        maxnreg: the most registers of a thread. None: the compiler decides.
        options: all others that the launch gives the compiler.
        narrow: why loads in the inner loop are narrower than 16 bytes. Empty: they must be 16.
        traffic: the least bytes that cross the device's memory for an element of a block. None:
            all bytes that are asked for.
        narrow_stores: like `narrow`, for stores.
        padded: whether rows begin at multiples of 16 bytes for any vocabulary.
    """

    name: str
    kernel: Any
    signature: dict[str, Any]
    constexprs: dict[str, Any]
    unaligned: tuple[str, ...] = ()
    num_warps: int = 4
    maxnreg: int | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    narrow: str = ""
    traffic: float | None = None
    narrow_stores: str = ""
    padded: bool = False
