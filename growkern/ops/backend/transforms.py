"""Takes custom ops through `torch.func.grad`, and refuses the transforms that have no rule.

A custom op with `register_autograd` has no rule for forward-mode AD: PyTorch then returns a tangent
of 0 without a word. It does not work under the transforms of `torch.func` either. An
`autograd.Function` around the op has a rule for each of them.
"""

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from growkern.errors import GrowthError

_REFERENCE = "use backend='reference', which is plain PyTorch"
_IN_COMPILED_CODE = (
    "torch.func and forward-mode AD do not reach this loss inside torch.compile: call it outside, "
    f"where torch.func.grad and vjp work; or {_REFERENCE}"
)


class Rules(NamedTuple):
    """An op and its autograd rules, as `register_autograd` of a custom op takes them."""

    op: Callable[..., Any]
    backward: Callable[..., Any]
    setup_context: Callable[..., None] = lambda *_: None


class _Call(NamedTuple):
    """One call of an op: a Function takes its tensors outside of lists.

    Attributes:
        rules: of the op.
        lengths: per argument, the length of a list of tensors, or None.
    """

    rules: Rules
    lengths: Sequence[int | None]

    def nested(self, flat: Sequence[Any]) -> list[Any]:
        """The op's arguments from a flat list."""
        items = iter(flat)
        return [
            next(items) if length is None else list(islice(items, length))
            for length in self.lengths
        ]

    def flat(self, nested: Sequence[Any]) -> list[Any]:
        """A flat list from the op's arguments or their gradients."""
        pairs = zip(nested, self.lengths, strict=True)
        return list(chain.from_iterable([x] if length is None else x for x, length in pairs))


def _length(argument: Any) -> int | None:
    is_list = isinstance(argument, list) and all(isinstance(x, Tensor) for x in argument)
    return len(argument) if is_list else None


def apply(rules: Rules, *arguments: Any) -> Any:
    """Call an op so that `torch.func.grad`, `vjp` and backward work.

    Args:
        rules: of the op.
        arguments: of the op. Tensors may lie in lists.

    Raises:
        GrowthError: later, when forward-mode AD or `torch.vmap` reaches the op.
    """
    if torch.compiler.is_compiling():
        # the compiler uses the op's own rules, and cannot trace a Function with a rule for jvp
        if _is_transformed():
            raise GrowthError(_IN_COMPILED_CODE)
        return rules.op(*arguments)
    call = _Call(rules, [_length(argument) for argument in arguments])
    return _Transformed.apply(call, *call.flat(arguments))


# torch.compile cannot trace this check; it adds its own guard
@torch.compiler.assume_constant_result
def _is_transformed() -> bool:
    """Whether `torch.func` or forward-mode AD is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class _Transformed(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *flat: Any) -> Any:
        result = call.rules.op(*call.nested(flat))
        return tuple(result) if isinstance(result, list) else result

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        call, *flat = inputs
        ctx.call = call
        call.rules.setup_context(ctx, call.nested(flat), output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.call.flat(ctx.call.rules.backward(ctx, *grads))

    @staticmethod
    def jvp(*_: Any) -> NoReturn:
        raise GrowthError(
            "this loss has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad): "
            f"{_REFERENCE}, or torch.func.vjp"
        )

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        raise GrowthError(
            "this loss cannot be batched by torch.vmap (jacrev uses it too): pass all rows in one "
            f"call, with reduction='none' for the loss of each; or {_REFERENCE}"
        )


def refuse_second_derivative(*_: Any) -> NoReturn:
    """The backward of every backward op: the gradient comes from a kernel, without a graph.

    Raises:
        GrowthError: always.
    """
    raise GrowthError(
        "this loss can be differentiated once only: for the gradient of a gradient "
        f"(create_graph=True, torch.func.hessian) {_REFERENCE}"
    )
