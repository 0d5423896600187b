"""The doors of a room: the names in a folder that others may use.

A folder's `__init__` imports its doors for type checkers alone. `opener` reads these lines, and
loads the module of a door when the door is first used. So a room costs no time before.
"""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

IMPORT = re.compile(r"^    from (growkern\.\S+) import (\([^)]*\)|.+)$", re.MULTILINE)
NAME = re.compile(r"(?:^|[(,])\s*(\w+)")


def doors(file: str) -> dict[str, str]:
    """The module of each name that an `__init__` imports for type checkers."""
    found = IMPORT.findall(Path(file).read_text(encoding="utf-8"))
    return {name: module for module, names in found for name in NAME.findall(names)}


def opener(room: str, file: str) -> Callable[[str], Any]:
    """The `__getattr__` of a room, given its `__name__` and `__file__`."""
    found: dict[str, str] = {}

    def open_door(name: str) -> Any:
        # asked for by Python itself, as `__path__` is
        if not found and not name.startswith("__"):
            found.update(doors(file))
        if name not in found:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        if found[name] == room:  # a whole module
            return importlib.import_module(f"{room}.{name}")
        value = getattr(importlib.import_module(found[name]), name)
        # Python asks again only for what the room lacks
        setattr(sys.modules[room], name, value)
        return value

    return open_door
