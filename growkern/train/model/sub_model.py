"""Runs only the bottom layers of a model, and trains only the top ones of these.

Stage 1 of two-stage training (bert2BERT, Algorithm 2) runs the bottom n layers and the head. Only
the top l_b of the n layers and the head get gradients. No layer is removed from the model: inside
`sub_model(...)` the list of layers only shows its bottom part when it is iterated. Parameters,
state dicts, hooks and wrappers see every layer at all times.

    layer     0 ... n-l_b-1     n-l_b ... n-1     n ... L-1
    runs      without a graph   with a graph      not at all

Modules that run before the layers (the embeddings) are part of every sub-model. Modules that run
after them (final norm, transform, output projection) are the head.

With `embeddings="frozen"` (the default) the input embeddings get no gradient through the layers at
any depth. A tied matrix still gets the gradient of the head at every depth. With
`embeddings="bottom"` the embeddings train together with the bottom block, that is at n = l_b.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from growkern.errors import GrowthError

Embeddings = Literal["frozen", "bottom"]


class ModelPart(NamedTuple):
    """The part of a model that runs and trains in a step.

    Attributes:
        depth: layers that run, from the bottom. A stack with fewer runs completely.
        trained: how many of these train, from the top: in every stack, or a number for each.
        embeddings: "frozen", or "bottom" to train them together with the bottom layers.
    """

    depth: int
    trained: int | tuple[int, ...]
    embeddings: Embeddings = "frozen"

    def of(self, stacks: Sequence[Sequence[Any]]) -> list[tuple[int, int]]:
        """For each stack: the layers that run, and how many of these are frozen."""
        each = self.trained if isinstance(self.trained, tuple) else (self.trained,) * len(stacks)
        runs = [min(self.depth, len(stack)) for stack in stacks]
        return [(n, max(0, n - trained)) for n, trained in zip(runs, each, strict=True)]


class _Proxy:
    """Stands in for a layer, to call it in another way. Attributes are those of the layer.

    Models read attributes such as `attention_type` from the layers that they run.
    """

    # no __slots__: dynamo recurses without end on slots together with __getattr__

    def __init__(self, layer: nn.Module) -> None:
        self.__dict__["layer"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)


class _Frozen(_Proxy):
    """Runs the layer without recording a graph."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.layer(*args, **kwargs)


class _FirstTrained(_Proxy):
    """Runs the layer on detached hidden states, so that no gradient passes below it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            return self.layer(args[0].detach(), *args[1:], **kwargs)
        kwargs["hidden_states"] = kwargs["hidden_states"].detach()
        return self.layer(**kwargs)


class _LayerWindow(nn.ModuleList):
    """A ModuleList that shows only its bottom layers when it is iterated, counted or indexed."""

    _shown: list[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shown)

    def __len__(self) -> int:
        return len(self._shown)

    def __getitem__(self, index: Any) -> Any:
        # a slice is a plain list: the loops that take one only iterate over it
        return self._shown[index]


def text_model(model: Any) -> Any:
    """The part of a model that reads text; a tower for images has layers of its own."""
    return getattr(getattr(model, "base_model", model), "language_model", model)


def layer_stacks(model: nn.Module) -> list[nn.ModuleList]:
    """The stacks of transformer blocks of a model's text, in the order of its modules."""
    stacks = find_stacks(text_model(model))
    if not stacks:
        raise GrowthError(
            f"{type(model).__name__} has no list of transformer blocks (its layers share weights, "
            "or are built in another way), so stage 1 cannot run its bottom layers alone: train "
            "it with two_stage=None"
        )
    return stacks


def find_stacks(model: nn.Module) -> list[nn.ModuleList]:
    """Like `layer_stacks`, but returns an empty list when there is none."""
    return [
        module
        for module in model.modules()
        if type(module) is nn.ModuleList
        and len(module) > 0
        and all(isinstance(block, GradientCheckpointingLayer) for block in module)
    ]


def model_depth(stacks: Sequence[nn.ModuleList]) -> int:
    """The number of layers of the deepest stack, 0 without stacks."""
    return max((len(stack._modules) for stack in stacks), default=0)


@contextlib.contextmanager
def sub_model(stacks: Sequence[nn.ModuleList], part: ModelPart | None) -> Iterator[None]:
    """While active, only the bottom layers of a model run, and only the top ones of these train.

    Afterwards the model is as it was before, also after an exception. None changes nothing.
    """
    if part is None:
        yield
        return
    layers = [list(stack._modules.values()) for stack in stacks]
    of_stacks = part.of(layers)
    if part.depth < 1 or all(frozen >= n for n, frozen in of_stacks):
        raise GrowthError(
            f"depth {part.depth}, trained_layers {part.trained}: both must be positive"
        )
    for stack, blocks, (n, frozen) in zip(stacks, layers, of_stacks, strict=True):
        shown: list[Any] = [_Frozen(block) for block in blocks[:frozen]] + blocks[frozen:n]
        if frozen == 0 and part.embeddings == "frozen":
            shown[0] = _FirstTrained(blocks[0])
        stack.__dict__["_shown"] = shown
        stack.__class__ = _LayerWindow
    try:
        yield
    finally:
        for stack in stacks:
            stack.__class__ = nn.ModuleList
            del stack.__dict__["_shown"]
