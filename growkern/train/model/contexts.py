"""How a model runs for the span of a call: without dropout, without a cache, or as a probe."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
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


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """While active, a model makes no cache."""
    # a decoder may have a config of its own, or a copy
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    with contextlib.ExitStack() as stack:
        for config in {id(part.config): part.config for part in parts}.values():
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
