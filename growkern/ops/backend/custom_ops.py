"""What the custom ops share: their namespace, a check, and the transforms of PyTorch.

A custom op with `register_autograd` has no rule for forward-mode AD: PyTorch then returns a tangent
of 0 without a word. It does not work under the transforms of `torch.func` either. An
`autograd.Function` around the op has a rule for each of them, or refuses. This module does not
import Triton.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from growkern.arguments import check_kind
from growkern.errors import GrowthError


def namespace_of(sources: Mapping[str, bytes]) -> str:
    """A namespace for the ops of some code, such as "growkern_1f0c93ab".

    torch.compile keeps compiled steps on disk and finds them by the names and arguments of their
    ops. What an op's backward calls is in such a step, but not in the key. After an update of
    growkern, a step compiled before it would still run the old backward. Names that change with
    the code prevent this. `sources` are the contents of the files, by their names.
    """
    digest = hashlib.sha256()
    for name, content in sorted(sources.items()):
        digest.update(b"%s\0%d\0%s" % (name.encode(), len(content), content))
    return f"growkern_{digest.hexdigest()[:8]}"


_OPS = Path(__file__).parents[1]
NAMESPACE = namespace_of(
    {file.relative_to(_OPS).as_posix(): file.read_bytes() for file in _OPS.rglob("*.py")}
)


def check_tensors(given: Mapping[str, Any]) -> None:
    """Refuse arguments that are no tensors, such as arrays of NumPy; they come by their names."""
    for name, x in given.items():
        check_kind(name, x, Tensor, "a tensor")


# --------------------------------------------------------------- transforms

_REFERENCE = "use backend='reference', which is plain PyTorch"
_IN_COMPILED_CODE = (
    "torch.func and forward-mode AD do not reach this op inside torch.compile: call it outside, "
    f"where torch.func.grad and vjp work; a loss may also {_REFERENCE}"
)
_BATCH_OF_GRADIENTS = (
    "this op takes no batch of gradients (is_grads_batched=True, vectorize=True): loop over them; "
    f"a loss may also {_REFERENCE}"
)


def _refuse_forward_mode(*_: Any) -> NoReturn:
    raise GrowthError(
        "this loss has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad): "
        f"{_REFERENCE}, or torch.func.vjp"
    )


def _refuse_batches(*_: Any) -> NoReturn:
    raise GrowthError(
        "this loss cannot be batched by torch.vmap (jacrev uses it too): pass all rows in one "
        f"call, with reduction='none' for the loss of each; or {_REFERENCE}"
    )


class Rules(NamedTuple):
    """An op and its autograd rules.

    Attributes:
        backward, setup_context: as `register_autograd` of the op takes them.
        jvp: takes the context and the tangents of the arguments, and returns that of the result.
            Default: refuses.
        vmap: takes the batch size, the batched axis of every argument (None: it has none), and the
            arguments. Returns the result, batched along axis 0. Default: refuses. An op with a
            list of tensors among its arguments must leave this at the default.
    """

    op: Callable[..., Any]
    backward: Callable[..., Any]
    setup_context: Callable[..., None] = lambda *_: None
    jvp: Callable[..., Any] = _refuse_forward_mode
    vmap: Callable[..., Any] = _refuse_batches


class _Call(NamedTuple):
    """One call of an op: a Function takes its tensors outside of lists."""

    rules: Rules
    lengths: Sequence[int | None]  # per argument, the length of a list of tensors, or None

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
    """Call an op so that `torch.func.grad`, `vjp` and backward work. Tensors may lie in lists.

    Forward-mode AD and `torch.vmap` are refused where the op has no rule for them, and so is a
    batch of gradients, which reaches no rule.
    """
    if torch.compiler.is_compiling():
        # the compiler uses the op's own rules, and cannot trace a Function with a rule for jvp
        if _is_transformed():
            raise GrowthError(_IN_COMPILED_CODE)
        return rules.op(*arguments)
    call = _Call(rules, [_length(argument) for argument in arguments])
    flat = call.flat(arguments)
    _refuse_batch_of_gradients(flat)
    return _Transformed.apply(call, *flat)


def without_graph(op: Any, *arguments: Any) -> Any:
    """Call an op whose derivative nobody asks for.

    The dispatcher takes as long as a small loss. So the function behind the op is called where
    nothing but the dispatcher's own work would be left out.
    """
    # a private name of torch: without it the op does the same
    return (getattr(op, "_init_fn", op) if is_plain_call(arguments) else op)(*arguments)


def is_plain_call(arguments: Sequence[Any]) -> bool:
    """Whether no transform, no mode and no tracer looks on, and all tensors are plain ones."""
    return (
        not torch.compiler.is_compiling()
        and not _is_transformed()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_tracing_state() is None
        and all(map(_is_plain, arguments))
    )


def _is_plain(argument: Any) -> bool:
    if isinstance(argument, list):
        return all(map(_is_plain, argument))
    if not isinstance(argument, Tensor):
        return True
    return type(argument) in (Tensor, nn.Parameter) and not argument.is_meta


def _refuse_batch_of_gradients(arguments: Sequence[Any]) -> None:
    """Refuse what torch.autograd.grad(is_grads_batched=True) passes.

    It batches in a way of its own, which does not use the rule of a Function.
    """
    is_batch = torch._C._functorch.is_legacy_batchedtensor
    if any(isinstance(x, Tensor) and is_batch(x) for x in arguments):
        raise GrowthError(_BATCH_OF_GRADIENTS)


def _is_batched(x: Tensor | None) -> bool:
    """Whether a tensor is one of `torch.vmap`, maybe inside other transforms."""
    functorch = torch._C._functorch
    while x is not None and functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


# torch.compile cannot trace this check; it adds its own guard
@torch.compiler.assume_constant_result
def _is_transformed() -> bool:
    """Whether `torch.func` or forward-mode AD is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_last_backward(saved: Sequence[Tensor]) -> bool:
    """Whether a backward pass may overwrite what its forward pass saved.

    No other backward pass can follow: the graph is neither kept nor differentiated. Tensors of a
    compiler or a transform are left alone.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or _is_transformed():
        return False
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
    return not keeps_graph() and all(type(x) is Tensor for x in saved)


class _Transformed(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *flat: Any) -> Any:
        result = without_graph(call.rules.op, *call.nested(flat))
        return tuple(result) if isinstance(result, list) else result

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        call, *flat = inputs
        ctx.call = call
        call.rules.setup_context(ctx, call.nested(flat), output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        rules = ctx.call.rules
        if rules.vmap is _refuse_batches:
            _refuse_batch_of_gradients(grads)
            if any(map(_is_batched, grads)):
                _refuse_batches()
        return None, *ctx.call.flat(rules.backward(ctx, *grads))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> Any:
        return ctx.call.rules.jvp(ctx, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], call: _Call, *flat: Any) -> tuple[Any, int]:
        return call.rules.vmap(info.batch_size, in_dims[1:], *flat), 0


def has_tangent(x: Tensor) -> bool:
    """Whether forward-mode AD (`torch.func.jvp`, `forward_ad`) follows this tensor."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def refuse_second_derivative(*_: Any) -> NoReturn:
    """The backward of every backward op: the gradient comes from a kernel, without a graph."""
    raise GrowthError(
        "this loss can be differentiated once only: for the gradient of a gradient "
        f"(create_graph=True, torch.func.hessian) {_REFERENCE}"
    )
