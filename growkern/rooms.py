"""The doors of a room: the names in a folder that others may use.

A folder's `__init__` imports its doors for type checkers alone. `opener` reads these lines, and
loads the module of a door when the door is first used. So a room costs no time before.
"""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def doors(file: str) -> dict[str, str]:
    """The module of each name that an `__init__` imports for type checkers, in their order."""
    body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    blocks = [node.body for node in body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def opener(room: str, file: str) -> Callable[[str], Any]:
    """The `__getattr__` of a room, given its `__name__` and `__file__`."""
    found: dict[str, str] = {}

    def open_door(name: str) -> Any:
        # asked for by Python itself, as `__path__` is
        if not found and not name.startswith("__"):
            found.update(doors(file))
        if name not in found:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(importlib.import_module(found[name]), name)

    return open_door
