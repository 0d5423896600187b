"""Sees every operation of a rank: counts collectives, and finds the largest memory given out."""

import functools
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.debug._comm_mode import c10d_collective_ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = CommDebugMode().comm_registry | set(c10d_collective_ops)
MAPPED = (".safetensors", "optimizer.pt")


def mapped_files():
    """Address ranges of memory that is a checkpoint's file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = (line.split()[0].split("-") for line in lines if line.endswith(MAPPED))
    return [(int(start, 16), int(stop, 16)) for start, stop in ranges]


class Watch(TorchDispatchMode):
    """CommDebugMode's count without its records, which take longer than the operations.

    Attributes:
        collectives: operations that communicate.
        largest: bytes of the largest memory that any operation gave out. Mapped files are no
            memory.
    """

    @classmethod
    def _should_skip_dynamo(cls):
        # nothing is compiled inside, and to say so takes as long as an operation
        return False

    def __init__(self):
        super().__init__()
        self.collectives = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            # what it does with its local tensor comes here again
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.collectives += communicates(func)
        for tensor in [result] if isinstance(result, torch.Tensor) else tree_leaves(result):
            if type(tensor) is torch.Tensor and tensor.is_cpu:
                memory = tensor.untyped_storage()
                size = memory.nbytes()
                if size > self.largest and not is_mapped(memory.data_ptr()):
                    self.largest = size
        return result


@functools.cache
def communicates(func):
    return getattr(func, "_overloadpacket", None) in COLLECTIVES


def is_mapped(at):
    return any(start <= at < stop for start, stop in mapped_files())
