"""Snapshots: of values that a caller hands in, and of what a process shares."""

import dataclasses
import hashlib
import locale
import logging
import os
import random
import signal
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

PLAIN = (type(None), bool, int, float, complex, str, bytes)
PLAIN += (torch.dtype, torch.device, torch.layout, torch.Size, type, os.PathLike)
# their objects are read attribute by attribute, and all others are one value
READ = ("transformers.", "growkern.", "tests.", "testbed.", "torch.nn.", "torch.optim.")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)


def digest(data) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def of_values(**values) -> dict:
    """Place in the values -> what stands there, of all that can be reached from them."""
    found: dict = {}
    for name, value in values.items():
        _walk(name, value, {}, found)
    return found


def _walk(place, value, seen, found):
    if isinstance(value, Path):
        found |= {f"{place}/{name}": state for name, state in _files(value)}
    elif isinstance(value, PLAIN):
        found[place] = repr(value)
    elif id(value) in seen:
        found[place] = f"the same as {seen[id(value)]}"
    else:
        seen[id(value)] = place
        _walk_object(place, value, seen, found)


def _walk_object(place, value, seen, found):
    parts: dict = {}
    found[place] = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        found[f"{place} values"], found[f"{place} trains"] = _tensor(value), value.requires_grad
        parts = {"grad": value.grad} if value.is_leaf else {}
    elif isinstance(value, np.ndarray):
        found[place] = digest(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict):
        keys = [str(k) if isinstance(k, PLAIN) else f"key {i}" for i, k in enumerate(value)]
        found[place] += f" {keys}"
        parts = dict(zip(keys, value.values(), strict=True))
    elif isinstance(value, list | tuple):
        found[place] += f" {len(value)}"
        parts = dict(enumerate(value))
    elif isinstance(value, set | frozenset):
        found[place] += f" {sorted(map(str, value))}"
    elif type(value).__module__ == "tokenizers":
        found[place] = digest(value.to_str().encode())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        # attributes of our own are worked out when they are asked for; a config may get new ones
        if type(value).__module__.startswith("transformers."):
            parts |= vars(value)
    elif isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        found[place] += f" {value.__qualname__} {getattr(value, '__self__', None).__class__}"
    elif f"{type(value).__module__}.".startswith(READ) or isinstance(value, torch.nn.Module):
        parts = dict(vars(value)) if hasattr(value, "__dict__") else {}
        if isinstance(value, torch.nn.Module):
            for kind in ("_parameters", "_buffers", "_modules"):
                parts |= parts.pop(kind)
        # a new attribute is named below
    else:
        found[place] += f" {id(value)}"
    for name, part in list(parts.items()):
        _walk(f"{place}.{name}", part, seen, found)


def _tensor(x):
    kind = f"{type(x).__name__} {x.dtype} {tuple(x.shape)} {x.device}"
    if x.is_meta:
        return kind
    local = x.detach().to_local() if isinstance(x, DTensor) else x.detach()
    return f"{kind} {digest(local.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())}"


def _files(path):
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            mode = oct(file.stat().st_mode)
            yield str(file.relative_to(path)), f"{mode} {digest(file.read_bytes())}"


def of_process() -> dict:
    """What every library in a process shares, by its name."""
    numbers = np.random.get_state()  # noqa: NPY002
    found = {
        "directory": os.getcwd(),
        "path": list(sys.path),
        "arguments": list(sys.argv),
        "streams": (id(sys.stdout), id(sys.stderr), id(sys.stdin)),
        "hooks": (id(sys.excepthook), id(sys.unraisablehook), sys.gettrace()),
        "recursion limit": sys.getrecursionlimit(),
        "locale": locale.setlocale(locale.LC_ALL),
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "warnings": list(warnings.filters),
        "how warnings are shown": (warnings.showwarning, warnings.formatwarning),
        "numbers of torch": digest(torch.get_rng_state().numpy().tobytes()),
        "numbers of Python": digest(repr(random.getstate()).encode()),
        "numbers of numpy": digest(repr((numbers[1].tolist(), numbers[2:])).encode()),
        "processes": dist.is_initialized(),
        "verbosity": transformers.logging.get_verbosity(),
        "progress bars": transformers.logging.is_progress_bar_enabled(),
    }
    found |= {f"variable {name}": value for name, value in os.environ.items()}
    # a module that is imported makes its logger
    for name in (None, *logging.root.manager.loggerDict):
        log = logging.getLogger(name)
        found[f"log {name}"] = (log.level, log.disabled, log.propagate, list(log.handlers))
    return found | {f"torch {name}": value for name, value in _torch().items()}


def _torch():
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    found = {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "tf32": (cuda.allow_tf32, cudnn.allow_tf32),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "fused attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "autocast": [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "function modes": [type(mode) for mode in _get_current_function_mode_stack()],
        "dispatch modes": [type(mode) for mode in _get_current_dispatch_mode_stack()],
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "multiplication": torch.backends.mkldnn.enabled,
    }
    if frame := sys.modules.get("torch._dynamo.eval_frame"):
        found["stance"] = repr(frame._stance)
    return found


def differences(before: dict, after: dict, *, ignored=()) -> set[str]:
    """The names whose values differ, and those that came or went."""
    missing = object()
    names = before.keys() | after.keys()
    return {n for n in names if before.get(n, missing) != after.get(n, missing)} - set(ignored)


def of_process_changed(before: dict, after: dict) -> set[str]:
    """`differences` of two states of the process, without loggers that are new."""
    new = {name for name in after.keys() - before.keys() if name.startswith("log ")}
    stance = {"torch stance"} if "torch stance" not in before else set()
    return differences(before, after, ignored=new | stance)
