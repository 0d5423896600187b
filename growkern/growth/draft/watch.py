"""A tiny float64 model whose modules are watched: what enters and leaves each of them."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from growkern.errors import reason
from growkern.families.family import NORM_KINDS, NormKind
from growkern.growth.draft.probe import MOST, NoRule, shapes
from growkern.growth.models import restore_buffers
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = cls._from_config(copy.deepcopy(config), dtype=torch.float64).eval()
        restore_buffers(self.model)
        rng = torch.Generator().manual_seed(0)
        for name, parameter in self.model.named_parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
            is_gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.data = 1 + noise if is_gain else noise
        self.ids = torch.randint(3, 90, (2, 9), generator=rng)
        self.calls = self.run(None)

    @torch.no_grad()
    def run(self, at: str | None) -> list[Call]:
        """The calls of one module in a run of the model, or of all."""
        calls: list[Call] = []

        def watch(name: str) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
                x, y = _first([*args, *kwargs.values()]), _first([out])
                calls.append(Call(name, module, _copy(x), _copy(y)))

            return hook

        modules = self.model.named_modules()
        hooks = [
            module.register_forward_hook(watch(name), with_kwargs=True)
            for name, module in modules
            if name and at in (None, name)
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

    def value_parts(self, module: Any, inside: str, step: int) -> list[bool]:
        """Which parts of a fused projection, `step` rows each, are values.

        What the output projection `inside` reads is linear in these.
        """
        weight, bias = module.weight, getattr(module, "bias", None)
        size = weight.shape[0] if isinstance(module, nn.Linear) else weight.shape[1]
        result = []
        for row in range(0, size, step):
            read: list[Any] = []
            for factor in (1, 2, 3):
                saved = weight.data.clone(), None if bias is None else bias.data.clone()
                (weight.data if isinstance(module, nn.Linear) else weight.data.T)[row] *= factor
                if bias is not None:
                    bias.data[row] *= factor
                read.append(self.run(inside)[0].x)
                weight.data = saved[0]
                if bias is not None:
                    bias.data = saved[1]
            one, two, three = read
            is_linear = same(three - two, two - one) and not same(one, two)
            result.append(is_linear)
        return result


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
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    gains = [p for p in (weight, bias) if torch.is_tensor(p)]
    if any(p.ndim != 1 for p in gains):
        return None
    x = 2 + torch.randn(1, 1, len(gains[0]) if gains else length, dtype=torch.float64)
    saved = [p.data.clone() for p in gains]
    try:
        for p in gains:
            p.data.zero_()
        plus_one = torch.is_tensor(weight) and bool(module(x).abs().max() > 1e-9)
        if torch.is_tensor(weight) and not plus_one:
            weight.data.fill_(1)
        y = module(x).double()
    except Exception:
        # norms that take a gate raise errors of any type
        return None
    finally:
        for p, value in zip(gains, saved, strict=True):
            p.data = value
    centred = (x - x.mean()) / x.var(unbiased=False).sqrt()
    centres = bool(torch.allclose(y, centred, atol=1e-2))
    title = type(module).__name__
    if not centres and not torch.allclose(y, x / x.square().mean().sqrt(), atol=1e-2):
        raise NoRule(f"{title} is neither an RMS norm nor a layer norm")
    named = zip(("weight", "bias"), (weight, bias), strict=True)
    tensors = tuple(name for name, tensor in named if torch.is_tensor(tensor))
    facts = NormKind(centres, tensors)
    kind = next((name for name, known in NORM_KINDS.items() if known == facts), None)
    if kind is None:
        raise NoRule(f"{title}: an RMS norm with {' and '.join(tensors) or 'no weight'}")
    eps = [v for k, v in vars(module).items() if "eps" in k and isinstance(v, float)]
    return NormFacts(kind, plus_one, eps[0] if eps else None)
