"""What several pieces of a tensor need and one of them makes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

# pieces under way belong to few tensors; a map over 30 000 entries takes 0.7 MB
MOST_KEPT = 32


class _Value:
    def __init__(self) -> None:
        self.lock, self.is_made, self.value = threading.Lock(), False, None


class Kept:
    """Values by key, for several threads; the ones longest unused are let go.

    A copy of it, pickled or deep, keeps nothing: locks cannot be copied, values can be made again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, _Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of this key; whoever comes while it is made waits for it."""
        with self._lock:
            entry = self._values.setdefault(key, _Value())
            self._values.move_to_end(key)
            if len(self._values) > MOST_KEPT:
                self._values.popitem(last=False)
        with entry.lock:
            if not entry.is_made:
                entry.value, entry.is_made = make(), True
            return entry.value

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()
