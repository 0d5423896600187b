"""How a model runs for the span of a call: without dropout, without a cache, or as a probe."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from growkern.growth.sharded import free_gathered


@contextlib.contextmanager
def setting(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While active, an attribute has this value."""
    had, before = hasattr(owner, name), getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if had else delattr(owner, name)


def parts_of(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The models inside a model. A decoder may have a config of its own, or a copy."""
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """While active, a model makes no cache."""
    with contextlib.ExitStack() as stack:
        for config in {id(part.config): part.config for part in parts_of(model)}.values():
            if getattr(config, "use_cache", None):
                stack.enter_context(setting(config, "use_cache", False))
        yield


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While active, a model is in evaluation mode. Afterwards each module has its own mode."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def probing(model: Any) -> Iterator[None]:
    """While active, a model runs without dropout, cache, gradients, compiled code and router loss.

    Compiled code would be compiled again for a probe, and would not call new hooks. The loss of
    routers fails where no layer that runs has one. The parameters of a sharded model are shards
    again afterwards.
    """
    no_loss = setting(model.config.get_text_config(), "output_router_logits", False)
    try:
        # the stance counts from its call on: nothing may fail between that and its end
        with (
            evaluating(model),
            without_cache(model),
            no_loss,
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        free_gathered(model)


@contextlib.contextmanager
def no_zeros(model: Any) -> Iterator[None]:
    """While active, a model computes as if none of its parameters were zero throughout.

    A layer that was grown to add nothing has an output projection or a norm of zeros. Each module
    computes again with other values there, before a parallel wrapper's own hooks.
    """

    def again(module: nn.Module, inputs: Any, options: Any, output: Any) -> Any:
        own = dict(module.named_parameters(recurse=False))
        with contextlib.ExitStack() as stack:
            for name, p in own.items():
                if _is_zero(p):
                    stack.enter_context(setting(module, name, _filled(p)))
                    output = None
            return module.forward(*inputs, **options) if output is None else output

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if module is not model.get_input_embeddings():
                hook = module.register_forward_hook(again, with_kwargs=True, prepend=True)
                stack.callback(hook.remove)
        yield


def _is_zero(p: Tensor) -> bool:
    if p.is_meta or not p.is_floating_point():
        return False
    found = p.detach().any()
    return not (found.full_tensor() if isinstance(found, DTensor) else found)


def _filled(p: Tensor) -> nn.Parameter:
    """A parameter of p's shape and kind without zeros: a product of one vector for each axis."""
    rng, x = torch.Generator().manual_seed(0), torch.ones(())
    for size in p.shape:
        x = x[..., None] * torch.randn(size, generator=rng)
    x = x.to(p.device, p.dtype)
    if isinstance(p, DTensor):
        x = distribute_tensor(x, p.device_mesh, p.placements)
    return nn.Parameter(x, requires_grad=False)
