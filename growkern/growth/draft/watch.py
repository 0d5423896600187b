"""A tiny float64 model whose modules are watched: what enters and leaves each of them."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from growkern.errors import reason
from growkern.families.family import NORM_KINDS, Norm
from growkern.growth.draft.probe import MOST, NoRule, shapes
from growkern.growth.models import restore_buffers
from growkern.growth.own_table import normed, randomize
from growkern.growth.source.loading import Float64


class Call(NamedTuple):
    """One call of a module: its first tensors that are no integers."""

    name: str
    module: nn.Module
    x: Tensor | None
    y: Tensor | None


class NormFacts(NamedTuple):
    """What a norm computes."""

    kind: str
    plus_one: bool
    eps: float | None


class Watch:
    """A tiny model with random parameters, and the calls of its modules."""

    def __init__(self, cls: Any, config: Any) -> None:
        if sum(map(math.prod, shapes(cls, config)[0].values())) > MOST:
            raise NoRule("the small config still makes a large model")
        # its parameters are random without the numbers of the process
        with warnings.catch_warnings(), no_init_weights():
            warnings.simplefilter("ignore")
            self.model = cls._from_config(copy.deepcopy(config), dtype=torch.float64).eval()
        restore_buffers(self.model)
        randomize(self.model)
        self.ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
        self.calls = self._run()

    @torch.no_grad()
    def _run(self) -> list[Call]:
        """The calls of all modules in a run of the model."""
        calls: list[Call] = []

        def watch(name: str) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
                x, y = _first([*args, *kwargs.values()]), _first([out])
                calls.append(Call(name, module, _copy(x), _copy(y)))

            return hook

        hooks = [
            module.register_forward_hook(watch(name), with_kwargs=True)
            for name, module in self.model.named_modules()
            if name
        ]
        try:
            with Float64():
                self.model(input_ids=self.ids)
        except Exception as error:
            # classes raise errors of any type where sizes do not fit each other
            raise NoRule(f"a small model of this class does not run: {reason(error)}") from error
        finally:
            for hook in hooks:
                hook.remove()
        return calls


def _first(values: Sequence[Any]) -> Tensor | None:
    for value in values:
        inner = _first(value) if isinstance(value, (tuple, list)) else value
        if torch.is_tensor(inner) and inner.is_floating_point():
            return inner
        if hasattr(value, "last_hidden_state"):
            return _first([value.last_hidden_state])
    return None


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """True if both hold the same numbers."""
    if a is None or b is None or a.numel() != b.numel():
        return False
    return bool(torch.allclose(a.flatten(), b.flatten(), rtol=1e-9, atol=1e-11))


@torch.no_grad()
def norm_facts(module: nn.Module, length: int) -> NormFacts | None:
    """What a norm computes, found by feeding it a vector; None: it is no norm."""
    if not re.search("norm", type(module).__name__, re.I) or any(True for _ in module.children()):
        return None
    found = {name: getattr(module, name, None) for name in ("weight", "bias")}
    gains = {name: p for name, p in found.items() if torch.is_tensor(p)}
    if any(p.ndim != 1 for p in gains.values()):
        return None
    shape, rng = gains["weight"].shape if gains else (length,), torch.Generator().manual_seed(0)
    x = 2 + torch.randn(1, 1, *shape, dtype=torch.float64, generator=rng)
    try:
        y = module(x).double()
    except Exception:
        # norms that take a gate raise errors of any type
        return None
    eps = [v for k, v in vars(module).items() if "eps" in k and isinstance(v, float)]
    for kind, plus_one in product(NORM_KINDS, (False, True)):
        norm = Norm(kind, "pre", 0.0, plus_one)
        is_like = NORM_KINDS[kind].tensors == tuple(gains)
        if is_like and torch.allclose(y, normed(norm, module, x, 0.0), rtol=1e-2, atol=1e-2):
            return NormFacts(kind, plus_one, eps[0] if eps else None)
    has = " and ".join(gains) or "no weight"
    raise NoRule(f"{type(module).__name__}, with {has}, computes none of {', '.join(NORM_KINDS)}")
