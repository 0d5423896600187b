"""Run only the bottom layers of a model, and train only the top ones of those.

Stage 1 of two-stage training (bert2BERT, Algorithm 2) runs the bottom n layers and the head, with
gradients for the top l_b of the n layers and the head alone. Nothing is taken out of the model:
inside `sub_model(...)` the list of layers shows a window of itself, so that parameters, state
dicts, hooks and wrappers see every layer at all times.

    layer     0 ... n-l_b-1     n-l_b ... n-1     n ... L-1
    runs      without a graph   with a graph      not at all

A layer's place is decided by what surrounds the stack in the forward pass: what comes before it
(the embeddings) is below every sub-model, what comes after it (final norm, transform, output
projection) is the head. With `embeddings="frozen"` (the default) the input embeddings get no
gradient through the layers at any depth; a tied matrix still gets the head's gradient, at every
depth alike. With `embeddings="bottom"` they train along with the bottom block, that is at n = l_b.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from growkern.errors import GrowthError

Embeddings = Literal["frozen", "bottom"]


class _Proxy:
    """A layer with another way of being called; its attributes read through.

    Blocks are asked for `attention_type` and the like by the loops that run them. No __slots__:
    dynamo recurses without end on slots together with __getattr__.
    """

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
    """Cuts the graph below the layer: its hidden states are a constant."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            return self.layer(args[0].detach(), *args[1:], **kwargs)
        kwargs["hidden_states"] = kwargs["hidden_states"].detach()
        return self.layer(**kwargs)


class _LayerWindow(nn.ModuleList):
    """A ModuleList that shows its bottom layers only when iterated, counted or indexed."""

    _shown: list[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shown)

    def __len__(self) -> int:
        return len(self._shown)

    def __getitem__(self, index: Any) -> Any:
        # a slice is a plain list: the loops that take one only iterate over it
        return self._shown[index]


def layer_stacks(model: nn.Module) -> list[nn.ModuleList]:
    """The stacks of transformer blocks of a model, in the order of its modules.

    raises: GrowthError when there is none (blocks shared between depths, or of an unknown kind).
    """
    stacks = find_stacks(model)
    if not stacks:
        raise GrowthError(
            f"{type(model).__name__} has no stack of transformer blocks that can be cut at a "
            "depth (its layers share weights or are not a list of blocks): train it without "
            "the sub-model stage (two_stage=None)"
        )
    return stacks


def find_stacks(model: nn.Module) -> list[nn.ModuleList]:
    """As `layer_stacks`, but a model without one is no error."""
    return [
        module
        for module in model.modules()
        if type(module) is nn.ModuleList
        and len(module) > 0
        and all(isinstance(block, GradientCheckpointingLayer) for block in module)
    ]


def model_depth(stacks: Sequence[nn.ModuleList]) -> int:
    """Number of layers of the deepest stack; 0 if there is none."""
    return max((len(stack._modules) for stack in stacks), default=0)


@contextlib.contextmanager
def sub_model(
    stacks: Sequence[nn.ModuleList],
    depth: int,
    trained_layers: int,
    embeddings: Embeddings = "frozen",
) -> Iterator[None]:
    """Inside: the bottom `depth` layers run, the top `trained_layers` of them with a graph.

    stacks: from `layer_stacks`; found once, used in every step. A stack shorter than `depth` runs
        whole. The model is as before on leaving, by an exception too.
    """
    if depth < 1 or trained_layers < 1:
        raise GrowthError(f"depth {depth}, trained_layers {trained_layers}: both must be positive")
    for stack in stacks:
        blocks = list(stack._modules.values())[:depth]
        cut = max(0, len(blocks) - trained_layers)
        shown: list[Any] = [_Frozen(block) for block in blocks[:cut]] + blocks[cut:]
        if cut == 0 and embeddings == "frozen":
            shown[0] = _FirstTrained(blocks[0])
        stack.__dict__["_shown"] = shown
        stack.__class__ = _LayerWindow
    try:
        yield
    finally:
        for stack in stacks:
            stack.__class__ = nn.ModuleList
            del stack.__dict__["_shown"]
