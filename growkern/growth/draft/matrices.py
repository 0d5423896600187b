"""The matrices of a draft: what each reads, by the values that enter it, and what it writes."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from growkern.growth.draft.probe import NoRule, template
from growkern.growth.draft.sizes import (
    Draft,
    experts_of,
    is_of_experts,
    row_of,
    size_key,
    units_of,
)
from growkern.growth.draft.watch import Call, same

NAMED = r"(^|[._wW])(q|k|v|query|key|value)(_proj|_lin|_layer|_linear)?\d?$"
GATE = "gate|^g"
# names of the matrices of experts that write the stream
LAST = "down|w2|output|wo"


class Matrices:
    """Writes the rows of matrices that modules multiply with, in the order of their calls."""

    def __init__(self, draft: Draft, written: list[tuple[Tensor, str]], streams: list[Tensor]):
        self.draft, self.written, self.streams = draft, written, streams
        self.used = [c for c in draft.watch.calls if _is_matrix(c)]
        self._read: dict[str, str | None] = {}

    def find(self) -> None:
        """Look at all calls of matrices."""
        for call in self.used:
            if f"{call.name}.weight" not in self.draft.probe.base:
                continue
            if template(call.name) in self._read:
                self._of_later_block(call)
            else:
                self._row(call)

    def _source(self, x: Tensor) -> str | None:
        """The space of what enters a matrix; None: nothing known wrote it."""
        known = (space for value, space in self.written if same(value, x))
        return next(known, "stream" if any(same(s, x) for s in self.streams) else None)

    def _of_later_block(self, call: Call) -> None:
        """Block 0 may read something else than those behind it."""
        if not call.name.startswith(f"{self.draft.stack}.1.") or call.x is None:
            return
        name = template(call.name)
        other, before, row = (
            self._source(call.x),
            self._read[name],
            self.draft.rows[f"{name}.weight"],
        )
        if {other, before} == {"stream", "normed"} and isinstance(row, dict):
            axes = [f"read:{other}" if axis == f"read:{before}" else axis for axis in row["axes"]]
            self.draft.rows[f"{name}.weight"] = [{**row, "only": "first"}, {"axes": axes}]

    def _row(self, call: Call) -> None:
        draft, name, weight = self.draft, call.name, f"{call.name}.weight"
        # weights of GPT-2's kind of module have inputs first
        is_linear = type(call.module).__name__ != "Conv1D"
        ends = (1, 0) if is_linear else (0, 1)
        shape, fields = (
            [draft.probe.base[weight][axis] for axis in ends],
            [draft.probe.fields(weight, axis) for axis in ends],
        )
        assert call.x is not None
        read, write = self._spaces(call, self._source(call.x), shape, fields)
        if write is None:
            is_vocab = draft.sizes["vocab"] in fields[1]
            own = "vocab" if is_vocab else size_key(draft, fields[1], shape[1])
        else:
            own = f"write:{write}"
        axes = [own, f"read:{read}"]
        draft.rows[f"{template(name)}.weight"] = {"axes": axes if is_linear else axes[::-1]}
        if f"{name}.bias" in draft.probe.base:
            draft.rows[f"{template(name)}.bias"] = {"axes": [own]}
        self._read[template(name)] = read

    def _spaces(
        self, call: Call, read: str | None, shape: list[int], fields: list[dict[str, Any]]
    ) -> tuple[str | None, str | None]:
        """What a matrix reads and writes; it writes None where its outputs are no space."""
        draft, name, (n_in, n_out), (f_in, f_out) = self.draft, call.name, shape, fields
        if not name.startswith(f"{draft.stack}."):
            return self._outside(name, read, n_in, n_out, f_out)
        width, attended = draft.width, draft.heads * draft.head_dim
        in_attention = re.search("att", name.rpartition(".")[0], re.I)
        if n_in == width and read is not None:
            return read, self._written(call, n_out, f_out)
        is_output = n_in == attended or (n_in == width and "head_dim" not in draft.sizes)
        if in_attention and is_output:
            return "attn", "stream"
        if n_out == width and n_in != width:
            units = units_of(draft, f_in, n_in)
            return draft.normed_units.get(units, units), "stream"
        if n_in == width and draft.place == "output" and not in_attention:
            return "stream", self._written(call, n_out, f_out)
        raise NoRule(f"{template(name)}.weight {[n_out, n_in]} reads and writes nothing known")

    def _outside(
        self, name: str, read: str | None, n_in: int, n_out: int, f_out: dict[str, Any]
    ) -> tuple[str, str | None]:
        draft, weight = self.draft, f"{name}.weight"
        norms = (row.get("norm") for row in draft.rows.values() if isinstance(row, dict))
        final = "final" if "stream>final" in norms else "stream"
        if weight in draft.probe.ties or draft.sizes["vocab"] in f_out:
            return read or ("head" if "head" in draft.spaces else final), None
        if n_out == n_in == draft.width and "head" in draft.spaces:
            return read or "stream", "head_pre"
        raise NoRule(f"{template(name)}.weight {[n_out, n_in]} lies outside the layers")

    def _written(self, call: Call, n_out: int, fields: dict[str, Any]) -> str | None:
        """The space that a matrix of a layer writes that reads the stream, or its norm."""
        draft, name = self.draft, call.name
        attended, keys = (n * draft.head_dim for n in (draft.heads, draft.key_heads))
        in_attention = re.search("att", name.rpartition(".")[0], re.I)
        if (named := re.search(NAMED, name)) and n_out in (attended, keys):
            part = named[2][0]
            return f"{part}_pre" if f"{part}_pre" in draft.spaces else part
        shared = attended + 2 * draft.head_dim
        is_fused = n_out == attended + 2 * keys
        if in_attention and (is_fused or (n_out == shared and "intermediate_size" not in fields)):
            if not is_fused:
                # one key and one value for all heads, which no field says
                draft.sizes["kv_heads"] = 1
                draft.spaces["k"]["heads"] = draft.spaces["v"]["heads"] = "kv_heads"
            # the order is assumed; a search tries others
            return "q|k|v"
        if in_attention and n_out == attended and re.search(GATE, name.rpartition(".")[2]):
            return "attn"
        if is_of_experts(fields):
            return experts_of(draft, fields)
        return None if n_out == 1 else units_of(draft, fields, n_out)


def _is_matrix(call: Call) -> bool:
    weight = getattr(call.module, "weight", None)
    is_embedding = isinstance(call.module, nn.Embedding)
    has_values = call.x is not None and call.y is not None
    return has_values and not is_embedding and weight is not None and weight.ndim == 2


def other_rows(draft: Draft, embedding_norm: str | None) -> None:
    """The rows of all tensors that no watched module multiplies with."""
    for name, shape in draft.probe.base.items():
        if row_of(draft, name) is None:
            row = _other_row(draft, name, shape)
            if embedding_norm and row["axes"][-1] == "write:stream" and len(shape) == 2:
                row["into"] = embedding_norm
            draft.rows[template(name)] = row
    for name, owner in draft.probe.ties.items():
        if template(name) in draft.rows:
            draft.rows[template(name)]["tied"] = owner


def _other_row(draft: Draft, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    owner, _, leaf = name.rpartition(".")
    fields = [draft.probe.fields(name, axis) for axis in range(len(shape))]
    stream, heads = draft.sizes["stream"], draft.sizes["q_heads"]
    module = draft.watch.model.get_submodule(owner)
    if isinstance(module, nn.Embedding):
        return _embedding_row(draft, name, shape, fields)
    if fields and "expert" in " ".join(fields[0]):
        return _experts_row(draft, name, shape, fields)
    if leaf == "bias" and draft.sizes["vocab"] in fields[0]:
        return {"axes": ["vocab"]}
    if leaf == "bias" and len(shape) == 1 and shape[0] == draft.width and stream in fields[0]:
        return {"axes": ["write:stream"]}
    if len(shape) == 1 and shape[0] == draft.heads and heads in fields[0]:
        draft.spaces["sinks"] = {"kind": "heads", "heads": "q_heads", "width": 1}
        return {"axes": ["write:sinks"]}
    follows = "; ".join(", ".join(f) or "no field" for f in fields)
    raise NoRule(f"no rule for {template(name)} {list(shape)}; its axes follow: {follows}")


def _embedding_row(
    draft: Draft, name: str, shape: tuple[int, ...], fields: list[dict[str, Any]]
) -> dict[str, Any]:
    is_main = name == draft.embedding
    count = "vocab" if is_main else size_key(draft, fields[0], shape[0])
    if shape[1] == draft.width:
        return {"axes": [count, "write:stream"]}
    if shape[1] == draft.heads and draft.sizes["q_heads"] in fields[1]:
        draft.spaces["bias"] = {"kind": "heads", "heads": "q_heads", "width": 1}
        return {"axes": [count, "write:bias"]}
    raise NoRule(f"no rule for {template(name)} {list(shape)}: it is no embedding of the stream")


def _experts_row(
    draft: Draft, name: str, shape: tuple[int, ...], fields: list[dict[str, Any]]
) -> dict[str, Any]:
    """A tensor with something for each expert."""
    experts, stream, own = experts_of(draft, fields[0]), draft.sizes["stream"], template(name)
    leaf = name.rpartition(".")[2]
    if len(shape) == 1:
        row: dict[str, Any] = {"axes": [f"write:{experts}"]}
        if re.search("correction|score", name):
            draft.spaces["experts"]["asleep"] = own
            row |= {"keep": "float32", "fallback": "zero"}
        return row
    if len(shape) == 2:
        is_stream, is_bias = [*fields[1]] == [stream], "bias" in leaf
        if is_stream and not is_bias:
            return {"axes": [f"write:{experts}", f"read:{draft.source}"]}
        written = "stream" if is_stream else units_of(draft, fields[1], shape[1])
        return {"axes": [f"write:{experts}", f"write:{written}"]}
    first = stream in fields[1]
    units = units_of(draft, fields[2 if first else 1], shape[2 if first else 1])
    is_last = bool(re.search(LAST, leaf))
    pair = (
        ("write:stream", f"read:{units}") if is_last else (f"read:{draft.source}", f"write:{units}")
    )
    return {"axes": [f"write:{experts}", *(pair if first else pair[::-1])]}
