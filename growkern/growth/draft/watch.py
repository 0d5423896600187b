"""A tiny float64 model with random parameters: what enters and leaves each of its modules."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.initialization import no_init_weights

from growkern.errors import GrowthError, reason
from growkern.growth.draft.probe import shapes
from growkern.growth.models import restore_buffers
from growkern.growth.outputs import Float64
from growkern.growth.own_table import randomize

# parameters of the small model
MOST = 2e7


class Call(NamedTuple):
    """One call of a module: the first tensors that go in and out and are no integers."""

    name: str
    module: nn.Module
    x: Tensor
    y: Tensor


@torch.no_grad()
def watch(cls: Any, config: Any, dtype: Any = torch.float64) -> tuple[Any, Tensor, list[Call]]:
    """A tiny model, the tokens that it read, and the calls of its modules, inner ones first."""
    if sum(map(math.prod, shapes(cls, config)[0].values())) > MOST:
        raise GrowthError("the small config still makes a large model")
    # its parameters are random without the numbers of the process
    with warnings.catch_warnings(), no_init_weights():
        warnings.simplefilter("ignore")
        model = cls._from_config(copy.deepcopy(config), dtype=torch.float64).eval()
    restore_buffers(model)
    randomize(model)
    model.to(dtype)
    calls: list[Call] = []

    def hook(name: str) -> Any:
        def called(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            x, y = first_tensor((args, kwargs)), first_tensor(out)
            if y is not None:
                # embeddings read integers
                calls.append(Call(name, module, (y if x is None else x).clone(), y.clone()))

        return called

    modules = [(name, module) for name, module in model.named_modules() if name]
    hooks = [m.register_forward_hook(hook(name), with_kwargs=True) for name, m in modules]
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    try:
        with Float64():
            model(input_ids=ids)
    except Exception as error:
        # classes raise errors of any type where sizes do not fit each other
        raise GrowthError(f"a small model of this class does not run: {reason(error)}") from error
    for each in hooks:
        each.remove()
    return model, ids, calls


def first_tensor(values: Any) -> Tensor | None:
    """The first tensor that holds no integers."""
    leaves = (x for x in tree_leaves(values) if torch.is_tensor(x) and x.is_floating_point())
    return next(leaves, None)


def same(a: Tensor, b: Tensor) -> bool:
    """True if both hold the same numbers, in any shape and order."""
    if a.numel() != b.numel():
        return False
    a, b = (x.flatten().sort().values for x in (a, b))
    return bool(torch.allclose(a, b, rtol=1e-9, atol=1e-11))
