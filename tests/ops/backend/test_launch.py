"""Options of a launch that not every compiler knows."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from growkern.ops.backend.launch import launch


@pytest.mark.parametrize(("device", "hip", "knows"), [
    ("cuda", None, True), ("cpu", None, True), ("cuda", "7.0", False), ("xpu", None, False),
    ("mtia", None, False),
])  # fmt: skip
def test_only_the_compiler_for_nvidia_gets_its_own_option(device, hip, knows, monkeypatch):
    given = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **constants: given.update(constants)

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    like = SimpleNamespace(device=torch.device(device, 0))
    launch(Kernel(), 1, like, maxnreg=128, num_warps=8)
    assert given == {"num_warps": 8, **({"maxnreg": 128} if knows else {})}
