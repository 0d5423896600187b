"""Block sizes: the default, the shipped table, and the candidates of a sweep of `bench.tune`."""

import contextlib
import json
import re
from types import SimpleNamespace

import pytest
import torch

from bench import tune
from bench.shared.recorder import Recorder
from growkern.ops.backend import tuned
from growkern.ops.backend.launch import HAS_TRITON, launch
from growkern.ops.backend.tuned import TUNED_FILE, launch_choice

DEFAULT = {"BLOCK": 512, "num_warps": 4}


def test_a_kernel_that_was_not_measured_takes_the_default():
    """Reads the table that is shipped."""
    assert launch_choice("some", torch.empty(0), 100, **DEFAULT) == DEFAULT


def test_the_table_answers_for_its_gpu_dtype_and_size(monkeypatch):
    table = {"some sm_90 bfloat16 32768": {"num_warps": 8}}
    monkeypatch.setattr(tuned, "tuned_choices", lambda: table)
    monkeypatch.setattr(
        tuned, "_arch", lambda device: "sm_90" if device.type == "cuda" else "interpreted"
    )

    class OnGpu:
        dtype, device = torch.bfloat16, torch.device("cuda", 0)

    assert launch_choice("some", OnGpu, 30_522, **DEFAULT) == {"BLOCK": 512, "num_warps": 8}
    for kernel, size in (("some", 32_769), ("some", 16_384), ("other", 30_522)):
        assert launch_choice(kernel, OnGpu, size, **DEFAULT) == DEFAULT
    on_cpu = torch.empty(0, dtype=torch.bfloat16)
    assert launch_choice("some", on_cpu, 30_522, **DEFAULT) == DEFAULT


def sweep(recorder, call, x):
    """A sweep of two candidates for tensors like `x` whose axis has 100 elements."""
    tune._sweep(recorder, "some", x, 100, call, [{"BLOCK": 64}, {"num_warps": 8}], 0.0)


def test_a_sweep_launches_every_candidate_and_leaves_the_table_as_it_was(tmp_path):
    recorder = Recorder("tune", tmp_path / "tune.json", toy=True)
    x, launched = torch.ones(3), []

    def call():
        launched.append(launch_choice("some", x, 100, **DEFAULT))
        return x

    sweep(recorder, call, x)
    for candidate in (DEFAULT, DEFAULT | {"BLOCK": 64}, DEFAULT | {"num_warps": 8}):
        assert candidate in launched
    assert len(recorder.document["rows"]) == 2 and not recorder.document["failures"]
    assert launch_choice("some", x, 100, **DEFAULT) == DEFAULT


@pytest.mark.parametrize("kernel, size", [("other", 100), ("some", 300)])
def test_a_sweep_is_refused_if_no_launch_would_take_its_candidates(kernel, size, tmp_path):
    x = torch.ones(3)

    def call():
        launch_choice(kernel, x, size, **DEFAULT)
        return x

    with pytest.raises(LookupError, match="no launch looks up some interpreted float32 128"):
        sweep(Recorder("tune", tmp_path / "tune.json", toy=True), call, x)


def test_every_choice_of_the_shipped_table_was_measured():
    table = json.loads(TUNED_FILE.read_text())
    assert table["choices"].keys() == table["measured"].keys()
    for key, choice in table["choices"].items():
        assert re.fullmatch(r"\w+ (sm_\d+|gfx\w+) (bfloat16|float16|float32) \d+", key), key
        assert choice and all(isinstance(value, int) for value in choice.values())
        assert re.search(r" to .* ms, ", table["measured"][key]), key


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("piece", ["tune_expand", "tune_kl_mlm_rows"])
def test_the_launches_of_training_and_growth_are_tuned_apart(piece, tmp_path, monkeypatch):
    """A sweep is refused if its launch looks up another key."""
    if torch.cuda.is_available():
        pytest.skip("its toy sizes are for an interpreter")
    recorder = Recorder(piece, tmp_path / f"{piece}.json", toy=True)
    monkeypatch.setattr(tune, "interleaved_ms", lambda calls, _: dict.fromkeys(calls, 1.0))
    tune.run(recorder)
    found = {row["key"].split()[0] for row in recorder.document["rows"]}
    kernels = {
        "tune_expand": {"expand", "expand_many"},
        "tune_kl_mlm_rows": {"kl_mlm_rows", "kl_mlm_rows_at_once"},
    }
    assert found == kernels[piece] and not recorder.document["failures"]
    assert not [row for row in recorder.document["rows"] if "refused" in row]


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
