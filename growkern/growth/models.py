"""Models of transformers without weights, or without initialised ones.

It creates them, gives meta models real memory, and finds out how a class initialises its tensors.
It relies on private parts of transformers: `_from_config`, `_init_weights`, the mark
`_is_hf_initialized` and the table `TORCH_INIT_FUNCTIONS`. Check these when transformers is updated.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import initialization
from transformers.initialization import guard_torch_init_functions, no_init_weights

from growkern.errors import GrowthError, a_kind, reason, warn
from growkern.families import ModelSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# an activation may be one of these
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
# quantised modules of PyTorch
QUANTISED = ("torch.ao.nn.", "torch.nn.quantized.")

# what a wrapper around a whole model calls it: torch.compile, DistributedDataParallel and
# DataParallel, activation checkpointing
INNER = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
# version 1 of FSDP
FLATTENED = ("_fsdp_wrapped_module", "_flat_param")
UNFLATTEN = "shard the model with torch.distributed.fsdp.fully_shard"
# what to do with other modules around a model
ADVICE = {
    "FullyShardedDataParallel": f"it flattens parameters: {UNFLATTEN}",
    "SentenceTransformer": "save it and give the directory, so that its other modules grow too",
}
# what to do with any other class
OTHER = (
    "pass the transformers.PreTrainedModel that it wraps; a model of a class of your own grows by "
    "growkern.widen"
)


F = TypeVar("F", bound=Callable[..., Any])


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """True for a `DTensor`, which is spread over processes."""
    # not isinstance: importing the class takes 0.5 s, and few growths have such tensors
    return hasattr(tensor, "device_mesh")


def local_tensor(parameter: Tensor) -> Tensor:
    """This process's part of a parameter: it shares memory and is detached from autograd."""
    return (parameter.to_local() if is_dtensor(parameter) else parameter).detach()


def untrained_model(spec: ModelSpec, dtype: torch.dtype | None = None) -> Any:
    """A new model whose weights are neither initialised nor tied (`tie`), on the default device."""
    # copy the config, as some classes change it: BART for question answering sets num_labels
    config, how = copy.deepcopy(spec.config), {} if dtype is None else {"dtype": dtype}
    try:
        with no_init_weights():
            return getattr(transformers, spec.class_name)._from_config(config, **how)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # values in a config make classes raise all kinds of errors
        why = reason(error)
        raise GrowthError(
            f"transformers cannot build {spec.class_name} with this config: {why}"
        ) from error


def tie(model: Any, spec: ModelSpec) -> None:
    """Tie the weights of a new model, except those that `spec` calls untied."""
    for name in spec.untied:
        del model.all_tied_weights_keys[name]
    model.tie_weights(recompute_mapping=False)


def materialise(model: Any, device: torch.device | str) -> None:
    """Give meta parameters memory for this process's part of them; tied weights stay tied."""
    if not any(t.is_meta for t in chain(model.parameters(), model.buffers())):
        return
    first: dict[int, str] = {}
    shared = {
        name: first.setdefault(id(p), name)
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    # whatever the mode is, the model can be trained
    with torch.inference_mode(False):
        model.to_empty(device=device)
    for name, owner in shared.items():
        kept = model.get_parameter(owner)
        # fully_shard has restored its own ties already
        if model.get_parameter(name) is not kept:
            module, _, key = name.rpartition(".")
            setattr(model.get_submodule(module), key, kept)


def cpu_by_default() -> AbstractContextManager[Any]:
    """Make new tensors of numbers, whatever the default device of the caller is."""
    # a mode of PyTorch slows each of its calls, so enter none where the CPU is the default
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def on_cpu_by_default(function: F) -> F:
    """Decorate a function whose maps must be made of numbers, whatever the default device is."""

    @wraps(function)
    def on_cpu(*args: Any, **options: Any) -> Any:
        with cpu_by_default():
            return function(*args, **options)

    return cast(F, on_cpu)


def restore_buffers(model: Any) -> None:
    """Compute the non-persistent buffers, undefined after `to_empty`. The caller fills others.

    All weights count as initialised then, as after `from_pretrained`: a model that becomes a part
    of another one is initialised again, except where it is marked.
    """
    tensors = (tensor for _, tensor in persistent_buffers(model))
    # modules too, because a deep copy of a parameter loses its mark
    for part in chain(model.modules(), model.parameters(), tensors):
        part._is_hf_initialized = True
    # whatever the default device is, the values that are computed are numbers
    with guard_torch_init_functions(), cpu_by_default():
        _restore(model, model._init_weights)


def _restore(module: nn.Module, compute: Callable[[nn.Module], None]) -> None:
    # a model within another one, such as a tower for images, has a method of its own
    compute = getattr(module, "_init_weights", compute)
    # a model may compute those of its modules
    if module._non_persistent_buffers_set or hasattr(module, "_init_weights"):
        with _local_buffers(module):
            compute(module)
    for child in module.children():
        _restore(child, compute)


@contextmanager
def _local_buffers(module: nn.Module) -> Iterator[None]:
    """Replace DTensor buffers by their local parts, as `_init_weights` handles plain tensors."""
    distributed = {k: b for k, b in module._buffers.items() if is_dtensor(b)}
    module._buffers.update({k: b.to_local() for k, b in distributed.items()})
    try:
        yield
    finally:
        for name, buffer in distributed.items():
            # `_init_weights` may have written in place or replaced the buffer
            buffer.to_local().copy_(module.get_buffer(name))
            module._buffers[name] = buffer


def fit_cache(spec: ModelSpec, *configs: Any) -> None:
    """Turn the cache of keys and values off, with a warning, where it is made for too few layers.

    Generation with such a cache raises an IndexError. Configs that are None are skipped.
    """
    cached = [c for c in configs if spec.short_cache and getattr(c, "use_cache", False)]
    for config in cached:
        config.use_cache = False
    if cached:
        field, layers = spec.short_cache or ("", 0)
        warn(
            f"transformers makes its cache of keys and values for {field}={layers} layers, and the "
            "decoder of the grown model has more: use_cache is now False, so generation works but "
            f"is slower; grow {field} too to keep the cache"
        )


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the buffers that are part of a checkpoint."""
    for name, buffer in model.named_buffers(remove_duplicate=False):
        module, _, key = name.rpartition(".")
        if key not in model.get_submodule(module)._non_persistent_buffers_set:
            yield name, buffer


def class_shapes(spec: ModelSpec, dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, also tied ones, in the order of the class's `state_dict`."""
    with torch.device("meta"):
        state = untrained_model(spec, dtype).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def computed_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """The tensors of a class that follow from its config, by name, in float32 on the CPU."""
    names = [tensor.name for tensor in spec.tensors if tensor.row.computed]
    if not names:
        return {}
    with torch.device("meta"):
        model = untrained_model(spec, torch.float32)
    for owner in {name.rpartition(".")[0] for name in names}:
        module = model.get_submodule(owner)
        module.to_empty(device="cpu", recurse=False)
        with cpu_by_default():
            model._init_weights(module)
    return {name: x for name, x in model.state_dict().items() if name in names}


# the patched table belongs to transformers and is shared by all threads
_patching = threading.Lock()


@dataclass(frozen=True)
class Initial:
    """How a tensor is initialised: constant, or normal around `value`."""

    value: float
    deviation: float = 0.0
    cutoff: float = math.inf  # in deviations: numbers beyond are drawn again
    zero_rows: tuple[int, ...] = ()  # set to 0 afterwards (padding tokens)


def initial_tensors(
    spec: ModelSpec, needed: Collection[str], *, may_lack: bool = False
) -> dict[str, Initial]:
    """The initialisation of parameters and persistent buffers of a model, by name.

    With `may_lack`, those that are initialised in other ways than `Initial` knows are left out.
    """
    with torch.device("meta"):
        model = untrained_model(spec)
    every = chain(persistent_buffers(model), model.named_parameters(remove_duplicate=False))
    tensors = {name: tensor for name, tensor in every if name in needed}
    initial: dict[int, Initial] = {}
    with _recorded_calls(initial, {id(tensor) for tensor in tensors.values()}):
        for module in model.modules():
            module._is_hf_initialized = False
        model.initialize_weights()
    unknown = [name for name, tensor in tensors.items() if id(tensor) not in initial]
    if unknown and not may_lack:
        raise GrowthError(
            f"{unknown[0]}: how {spec.class_name} initialises it is not known: use method='fpi'"
        )
    return {name: initial[id(tensor)] for name, tensor in tensors.items() if name not in unknown}


@contextmanager
def _recorded_calls(known: dict[int, Initial], ours: set[int]) -> Iterator[None]:
    """Record initialisation calls on our tensors in `known`, both by their `id`; run all others."""

    def recording(name: str, run: Callable[..., Tensor]) -> Any:
        read = _READERS.get(name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            base = tensor if tensor._base is None else tensor._base
            if id(base) not in ours:
                return run(tensor, *args, **kwargs)
            if read is None:
                known.pop(id(base), None)
                return tensor
            initial = read(*args, **kwargs)
            if base is not tensor:
                initial = _with_row(known[id(base)], base, tensor, initial)
            known[id(base)] = initial
            return tensor

        return call

    table = initialization.TORCH_INIT_FUNCTIONS
    with _patching:
        before = dict(table)
        table.update({name: recording(name, function) for name, function in before.items()})
        try:
            yield
        finally:
            table.update(before)


def _with_row(initial: Initial, base: Tensor, row: Tensor, row_initial: Initial) -> Initial:
    """`initial` of a tensor, after one of its rows (a view) was set to 0."""
    if row_initial != Initial(0.0) or row.shape != base.shape[1:]:
        raise GrowthError(
            "the model class initialises a part of a tensor to something other than a row of "
            "zeros, which is not supported: use method='fpi'"
        )
    index = (row.storage_offset() - base.storage_offset()) // base.stride(0)
    return Initial(initial.value, initial.deviation, initial.cutoff, (*initial.zero_rows, index))


def _truncated(
    mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, **_: Any
) -> Initial:
    return Initial(mean, std, min(mean - a, b - mean) / std)


# torch.nn.init function -> the same arguments as an `Initial`
_READERS: dict[str, Callable[..., Initial]] = {
    "normal_": lambda mean=0.0, std=1.0, **_: Initial(mean, std),
    "trunc_normal_": _truncated,
    "constant_": lambda val: Initial(val),
    "zeros_": lambda: Initial(0.0),
    "ones_": lambda: Initial(1.0),
}


def unwrapped(model: Any, role: str = "model") -> Any:
    """The transformers model inside the wrappers of `INNER`; `role` names it: "source"."""
    while not isinstance(model, transformers.PreTrainedModel):
        kind = type(model).__name__
        inner = getattr(model, INNER.get(kind, ""), None)
        if inner is None:
            advice = ADVICE.get(kind, OTHER)
            raise GrowthError(f"{role} is {a_kind(model)}: {advice}")
        model = inner
    return model


def refuse_flattened(name: str) -> None:
    """Refuse a parameter that FSDP, version 1, has flattened."""
    if any(part in name for part in FLATTENED):
        raise GrowthError(f"{name} is flattened by FullyShardedDataParallel: {UNFLATTEN}")


def class_of(module: Any) -> type:
    """The class of a module; torch.distributed replaces it by a subclass when it shards."""
    classes = type(module).__mro__
    return next(c for c in classes if not c.__module__.startswith("torch.distributed."))
