"""Finds the compiled CPU library and says why there is none."""

import ctypes


def library() -> ctypes.CDLL | None:
    return None


def reason() -> str:
    return "the compiled library is missing"
