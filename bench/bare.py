"""What lets the library run on a machine with PyTorch, Triton and transformers alone."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock


def _no_sums(data: Any) -> NoReturn:
    raise ModuleNotFoundError("xxhash is not installed: no file can be summed", name="xxhash")


@contextlib.contextmanager
def growth_importable() -> Iterator[None]:
    """Inside, growth is imported with or without xxhash, which it needs for sums of files alone."""
    if importlib.util.find_spec("xxhash") is not None:
        yield
        return
    stand_in = ModuleType("xxhash")
    stand_in.xxh3_128_hexdigest = _no_sums  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules):
        sys.modules["xxhash"] = stand_in
        before = set(sys.modules)
        yield
        made = {name: module for name, module in sys.modules.items() if name not in before}
    sys.modules.update(made)
