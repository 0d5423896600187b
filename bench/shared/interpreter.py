"""Lets the interpreter of older versions of Triton work with new versions of NumPy."""

from typing import Any


def allow_new_numpy() -> None:
    """Let kernels that are interpreted use a scalar as the bound of a loop.

    Triton 3.5 and 3.6 call int() on an array with one element, which NumPy refuses from 2.4 on.
    Triton 3.7 does not. On a GPU nothing is interpreted.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = interpreter._patch_lang_tensor
    if getattr(patch, "allows_new_numpy", False):
        return

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        # the scope of Triton's own patch puts back what was there before
        tensor.__index__ = lambda self: int(self.handle.data.item())

    patched.allows_new_numpy = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
