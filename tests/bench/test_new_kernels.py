"""The pieces for new kernels fail where the kernel that was asked for is not the one that ran."""

import pytest

from bench.on_gpu import new_kernels
from bench.shared.recorder import Recorder
from growkern.ops.backend.launch import HAS_TRITON
from growkern.ops.expand import on_triton
from growkern.ops.loss.rows import on_triton as rows_on_triton

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
]
# what refuses the new kernel, how the other one reads, and the calls that ask for the new one
REFUSALS = {
    "check_gathers": (on_triton, "whole_of", 0, "memory", 3),
    "gathers": (on_triton, "whole_of", 0, "memory", 4),
    "check_once": (rows_on_triton, "may_read_once", False, "twice", 3),
    "rows": (rows_on_triton, "may_read_once", False, "twice", 2),
}


@pytest.fixture
def rows_of(tmp_path, monkeypatch):
    monkeypatch.setattr(new_kernels, "fill_new_memory", lambda: None)
    monkeypatch.setattr(new_kernels, "KINDS", ({},))
    monkeypatch.setattr(new_kernels, "interleaved_ms", lambda calls, _: dict.fromkeys(calls, 1.0))
    monkeypatch.setattr(new_kernels, "turns_ms", lambda calls, *_, **__: {x: [1] for x in calls})

    def run(piece, **limits):
        recorder = Recorder(piece, tmp_path / "document.json", toy=True, **limits)
        # a processor may read rows twice, and a device may not
        recorder.device = "cpu:0"
        new_kernels.run(recorder)
        recorder.finish()
        return recorder.document

    return run


@pytest.mark.parametrize("piece", REFUSALS)
def test_a_kernel_that_another_one_stood_for_is_a_failure(piece, rows_of, monkeypatch):
    assert rows_of(piece)["status"] == "ok"
    module, name, value, other, calls = REFUSALS[piece]
    monkeypatch.setattr(module, name, lambda *_: value)
    made = rows_of(piece)
    assert made["status"] == "failed" and len(made["failures"]) == calls
    assert all(why.endswith(f"ran: {other}") for why in made["failures"])
    # a row says what ran, not what was asked for
    assert sum(other in str(row) for row in made["rows"]) >= calls
