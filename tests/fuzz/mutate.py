"""Changes to bytes and to nested values, drawn from a seeded generator."""

import json
import random
from copy import deepcopy

HOSTILE = (
    *(None, True, False, -1, 0, 1, 2, 7, 2**31, 2**63, 2**64 - 1, 10**30, 10**400, -(10**9)),
    *(0.5, -1.0, 1e308, float("nan"), float("inf"), "", "x", "../x", "/etc/passwd", "\0", "\ud800"),
    *("0" * 64, "9" * 300, "a" * 100_000, [], {}, [[]], {"a": {}}, [1] * 1000, [None]),
)


def deep(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def hostile(draw: random.Random):
    # a copy: a later change would put the list into itself
    return deep(30) if draw.random() < 0.05 else deepcopy(draw.choice(HOSTILE))


def of_bytes(data: bytes, draw: random.Random) -> bytes:
    """Some bytes flipped, cut, doubled, removed or inserted."""
    raw = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        at = draw.randrange(len(raw) + 1)
        size = draw.choice((1, 1, 4, 32))
        kind = draw.choice(("flip", "flip", "set", "cut", "double", "remove", "insert", "zero"))
        if kind == "flip" and at < len(raw):
            raw[at] ^= 1 << draw.randrange(8)
        elif kind == "set" and at < len(raw):
            raw[at] = draw.randrange(256)
        elif kind == "cut" and draw.random() < 0.3:
            del raw[at:]
        elif kind == "double":
            raw[at:at] = raw[at : at + size]
        elif kind == "remove":
            del raw[at : at + size]
        elif kind == "insert":
            raw[at:at] = draw.randbytes(size)
        elif kind == "zero":
            raw[at : at + size] = bytes(len(raw[at : at + size]))
    return bytes(raw)


def of_values(value, draw: random.Random):
    """A nested value with one or two of its parts replaced, removed, renamed or added."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice((1, 1, 2))):
        _change(value, draw)
    return value


def _change(value, draw: random.Random) -> None:
    holder = value
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return
        key = draw.choice(keys)
        inner = holder[key]
        if not isinstance(inner, (dict, list)) or not inner or draw.random() < 0.2:
            break
        holder = inner
    kind = draw.choice(("replace", "replace", "replace", "number", "remove", "rename", "add"))
    if kind == "number" and isinstance(inner, (int, float)) and not isinstance(inner, bool):
        holder[key] = draw.choice((inner + 1, inner - 1, -inner, inner * 2, inner * 10**6))
    elif kind == "remove":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[draw.choice((f"{key}x", "", "x", *keys))] = holder.pop(key)
    elif kind == "add" and isinstance(holder, dict):
        holder["more"] = hostile(draw)
    else:
        holder[key] = hostile(draw)


def of_json(text: bytes, draw: random.Random) -> bytes:
    """A JSON file, changed as bytes or as values."""
    if draw.random() < 0.3:
        return of_bytes(text, draw)
    return json.dumps(of_values(json.loads(text), draw)).encode()
