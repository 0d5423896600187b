"""Options of a launch that not every compiler knows, and launches that were compiled before."""

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


def test_a_record_of_launches_holds_in_every_clone():
    pytest.importorskip("triton")
    from tests.ops.backend.known_launches import mark_of

    source = SimpleNamespace(hash=str)
    one, other = ({"extern_libs": (("libdevice", f"/{x}/libdevice.bc"),)} for x in "ab")
    assert mark_of(source, one, "") == mark_of(source, other, "")
    assert mark_of(source, one, "") != mark_of(source, one | {"maxnreg": 128}, "")
