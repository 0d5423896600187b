"""Chooses and loads backends: compiled CPU code, Triton, CUDA C++."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.ops.backend import native, nvrtc
    from growkern.ops.backend.choose import BACKENDS, choose_backend, COMMON, describe_backends
    from growkern.ops.backend.custom_ops import (apply, check_tensors, has_tangent,
        is_last_backward, is_plain_call, NAMESPACE, refuse_second_derivative, Rules, without_graph)
    from growkern.ops.backend.launch import acc_dtype, EXACT, HAS_TRITON, jit, next_power_of_2, tl
    from growkern.ops.backend.native import acc_torch_dtype, advise_huge_pages
    from growkern.ops.backend.nvrtc import Grid, Kernel, TYPES
# fmt: on

__getattr__ = opener(__name__, __file__)
