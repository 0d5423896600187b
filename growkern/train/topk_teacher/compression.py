"""How DistillKit packs the ids and log-probs of a row into bytes, as `distillkit.py` explains.

Shape letters used in this file: R rows, k tokens per row.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.files import read_bounded
from growkern.train.topk_teacher.facts import MOST_IDS

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
SPECIAL = {"sqrt": torch.sqrt, "exp": torch.exp}
KINDS = {"int": int, "str": str, "bool": bool}
MOST_BITS = 63
# a config has some 500 bytes
MOST_BYTES = 10_000
# a config has five: the stream, the document, its table, the list of bins, a bin
MOST_LEVELS = 10
# errors of the YAML reader and of fields that are no config
UNREADABLE = (AttributeError, TypeError, ValueError, LookupError, RecursionError)


@dataclass(frozen=True)
class Bin:
    """Residuals that share a scale.

    Attributes:
        scale_dtype: of the scale.
        element_bits: of each integer.
        num_elements: number of residuals.
    """

    scale_dtype: str
    element_bits: int
    num_elements: int


@dataclass(frozen=True)
class Compression:
    """How DistillKit packed one row: the fields of its `compression_config.yaml`."""

    d: int
    k: int
    exact_k: int
    residual_bins: tuple[Bin, ...] = ()
    exact_dtype: str = "float32"
    polynomial_terms: tuple[int | str, ...] = ()
    term_dtype: str = "float32"
    delta_encoding: bool = True
    error_diffusion: bool = False  # a matter of the writer alone
    normalize_t: bool = False

    @property
    def id_bits(self) -> int:
        """Bits of one id."""
        return max(1, math.ceil(math.log2(self.d)))

    def ids(self, packed: np.ndarray) -> Tensor:
        """Unpack (R, bytes) uint8 into ids (R, k) int64."""
        return _integers(packed, self.id_bits, self.k)

    def logprobs(self, packed: np.ndarray) -> Tensor:
        """Unpack (R, bytes) uint8 into log-probs (R, k) float32.

        Raises:
            ValueError: the bytes do not have the size that the fields ask for.
        """
        reader = _Reader(packed)
        exact = reader.floats(self.exact_k, self.exact_dtype)
        rest = self.k - self.exact_k
        others = torch.zeros(len(packed), rest)
        factors = reader.floats(len(self.polynomial_terms), self.term_dtype)
        start = 0
        for one in self.residual_bins:
            others[:, start : start + one.num_elements] = reader.residuals(one)
            start += one.num_elements
        reader.check_end()
        # the dtypes of each step are DistillKit's, so that the same bytes give the same values
        others = others.to(exact.dtype)
        if self.polynomial_terms:
            others = (self._terms(rest, factors.dtype) * factors[:, None]).sum(-1) + others
        values = torch.cat([exact, others], dim=-1)
        if self.delta_encoding:
            values = values.float().cumsum(-1).to(exact.dtype)
        return values.float()

    def _terms(self, count: int, dtype: torch.dtype) -> Tensor:
        """The terms of the curve at each of its places, (count, terms)."""
        t = torch.arange(count, dtype=dtype)
        if self.normalize_t:
            t = torch.linspace(0, 1, count, dtype=dtype)
        columns = [SPECIAL[x](t) if isinstance(x, str) else t**x for x in self.polynomial_terms]
        return torch.stack(columns, -1)


class _Reader:
    """Takes the parts of packed rows (R, bytes) one after the other."""

    def __init__(self, packed: np.ndarray) -> None:
        self.packed, self.place = packed, 0

    def take(self, size: int) -> np.ndarray:
        part = self.packed[:, self.place : self.place + size]
        if part.shape[1] != size:
            raise ValueError(f"{self.packed.shape[1]} bytes per row are too few")
        self.place += size
        return part

    def check_end(self) -> None:
        if self.place != self.packed.shape[1]:
            raise ValueError(f"{self.packed.shape[1]} bytes per row, {self.place} expected")

    def floats(self, count: int, dtype: str) -> Tensor:
        kind = DTYPES[dtype]
        part = np.ascontiguousarray(self.take(count * kind.itemsize))
        return torch.from_numpy(part).view(kind) if count else torch.empty(len(part), 0, dtype=kind)

    def residuals(self, one: Bin) -> Tensor:
        scale = self.floats(1, one.scale_dtype).float()
        size = -(-one.num_elements * one.element_bits // 8)
        whole = _integers(self.take(size), one.element_bits, one.num_elements).float()
        # one bit is a sign; more bits count from the smallest integer
        centred = whole * 2 - 1 if one.element_bits == 1 else whole - 2 ** (one.element_bits - 1)
        return centred * scale


def _integers(packed: np.ndarray, bits: int, count: int) -> Tensor:
    """Unpack `count` unsigned integers of (R, bytes) uint8, the highest bits first: (R, count)."""
    if packed.shape[1] * 8 < count * bits:
        raise ValueError(f"{packed.shape[1]} bytes per row, {-(-count * bits // 8)} expected")
    flat = np.unpackbits(packed, axis=1, count=count * bits)
    bits_Rcb = flat.reshape(len(packed), count, bits).astype(np.int64)
    return torch.from_numpy(bits_Rcb @ (1 << np.arange(bits - 1, -1, -1, dtype=np.int64)))


def read_compression(file: Path) -> Compression:
    """Read `compression_config.yaml`.

    Raises:
        GrowthError: it is missing, or not such a file.
    """
    import yaml

    content = read_bounded(file, MOST_BYTES, "compression config")
    try:
        _check_plain(yaml.parse(content, Loader=yaml.SafeLoader))
        table = yaml.safe_load(content)
        if not isinstance(table, dict):
            raise ValueError(f"it holds a {type(table).__name__}, not a table of fields")
        bins = tuple(Bin(**one) for one in table.pop("residual_bins", ()))
        terms = tuple(table.pop("polynomial_terms", None) or ())
        found = Compression(**table, residual_bins=bins, polynomial_terms=terms)
        _check_kinds(found)
        for one in bins:
            _check_kinds(one)
        _check_sizes(found)
    except (yaml.YAMLError, *UNREADABLE) as error:
        reason = " ".join(str(error).split())[:300]
        raise GrowthError(f"{file}: not a compression config of DistillKit: {reason}") from error
    return found


def _check_plain(events: Iterable[Any]) -> None:
    """Refuse what makes a short text large or slow, or takes a value for what it is not.

    Args:
        events: of the parser, which reads no further than it is asked to.

    Raises:
        ValueError: a part of the text is no plain value.
    """
    level = 0
    for event in events:
        kind = type(event).__name__
        if getattr(event, "tag", None):
            raise ValueError(f"it has the tag {reprlib.repr(event.tag)}: write values without tags")
        if getattr(event, "value", None) == "<<" or kind == "AliasEvent":
            raise ValueError("it has an alias or a merge (<<): write each value where it stands")
        level += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if level > MOST_LEVELS:
            raise ValueError(f"it is nested in more than {MOST_LEVELS} levels")


def _check_kinds(one: Compression | Bin) -> None:
    for field in fields(one):
        value = getattr(one, field.name)
        # not isinstance: True is an int
        if type(value) is not KINDS.get(str(field.type), type(value)):
            raise ValueError(f"{field.name} is {reprlib.repr(value)}: it must be {field.type}")


def _check_sizes(found: Compression) -> None:
    bins, terms = found.residual_bins, found.polynomial_terms
    dtypes = {found.exact_dtype, found.term_dtype, *(one.scale_dtype for one in bins)}
    powers = [x for x in terms if type(x) is int]
    sizes = [found.k, *(n for x in bins for n in (x.element_bits, x.num_elements))]
    if not dtypes <= DTYPES.keys() or not {*terms} <= {*SPECIAL, *powers}:
        raise ValueError("a dtype or a term is none of DistillKit's")
    if min(sizes) < 1 or not found.k <= found.d <= MOST_IDS:
        raise ValueError("a size is not positive, or k is not below d")
    if any(one.element_bits > MOST_BITS for one in bins):
        raise ValueError(f"element_bits is above {MOST_BITS}")
    if any(not 0 <= x <= MOST_BITS for x in powers):
        raise ValueError(f"a power in polynomial_terms is not in 0 .. {MOST_BITS}")
    residuals = sum(one.num_elements for one in bins)
    if not 0 <= found.exact_k <= found.k or residuals > found.k - found.exact_k:
        raise ValueError("exact_k and the residual_bins do not fit k")
