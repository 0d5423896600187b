"""A small thread-safe cache, shared by the pieces of a tensor while they are built."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

# the pieces under way belong to few tensors; a map over 30 000 entries takes 0.7 MB
MAX_ENTRIES = 32


class _Entry:
    def __init__(self) -> None:
        self.lock, self.is_made, self.value = threading.Lock(), False, None


class SharedCache:
    """Values by key, for several threads; the least recently used ones are dropped.

    A pickled or deep copy starts empty: locks cannot be copied, and values can be made again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of this key, made by `make` on first use; other threads wait for it."""
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            if len(self._entries) > MAX_ENTRIES:
                self._entries.popitem(last=False)
        with entry.lock:
            if not entry.is_made:
                entry.value, entry.is_made = make(), True
            return entry.value

    def __reduce__(self) -> tuple[type[SharedCache], tuple[()]]:
        return SharedCache, ()
