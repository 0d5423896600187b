"""Compiling csrc/*.cu and launching it; an emulation stands in for the driver."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.shared.cuda_cases import cuda_cases
from growkern.errors import GrowthError
from growkern.ops.backend import nvrtc
from growkern.ops.backend.nvrtc import Grid
from growkern.ops.expand.call import ExpandCall
from growkern.ops.expand.on_cuda import ExpandRowsArgs, launches_of
from testbed.cuda_emulator import emulate

CUDA_HOME = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
NVCC = next((str(p) for p in [CUDA_HOME / "bin/nvcc"] if p.is_file()), shutil.which("nvcc"))


# those of sm_90 are all there are
CASES = {case.name: case for case in cuda_cases("sm_90")}


@pytest.mark.skipif(NVCC is None, reason="no nvcc: set CUDA_HOME or put it on PATH")
def test_nvcc_agrees_that_nothing_is_spilled(tmp_path, record_property):
    case = CASES["CUDA expand AKI, noise bf16"]
    kernel, registers = case.kernel, case.registers
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in (90, 100)]
    flags = [*kernel.flags, "-fatbin", "-Xptxas=-v", *targets]
    source = nvrtc.source_folder() / kernel.file
    command = [NVCC, *flags, "-o", str(tmp_path / "kernel.fatbin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pattern = rf"entry function '{kernel.name}' for '(\w+)'.*\n.*\n *(.*)\n.*Used (\d+) registers"
    archs, kept, used = zip(*re.findall(pattern, done.stderr), strict=True)
    assert archs == ("sm_90", "sm_100"), done.stderr
    record_property("registers", dict(zip(archs, used, strict=True)))
    assert set(kept) == {"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"}, (
        done.stderr
    )
    assert max(map(int, used)) <= registers, done.stderr


@pytest.mark.skipif(nvrtc.nvrtc() is None, reason="no NVRTC: PyTorch's CUDA wheels bring it")
@pytest.mark.parametrize("name", CASES)
def test_nvrtc_needs_no_header(name, tmp_path, monkeypatch):
    kernel = CASES[name].kernel
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cubin = nvrtc.cached_cubin(kernel, "sm_90")
    assert cubin[:4] == b"\x7fELF" and kernel.name.encode() in cubin
    # the second time it comes from the disk
    monkeypatch.setattr(nvrtc, "compile_cubin", None)
    assert nvrtc.cached_cubin(kernel, "sm_90") == cubin
    assert len(list(tmp_path.rglob("*.cubin"))) == len(list(tmp_path.rglob("*.*")))


def test_a_changed_source_or_header_is_compiled_again(tmp_path, monkeypatch):
    """Every file that a kernel includes is in the name of its cached machine code."""
    csrc = nvrtc.source_folder().parent
    copied = shutil.copytree(csrc, tmp_path / "csrc") / "cuda"
    kernel = CASES["CUDA expand FPI bf16"].kernel
    before = nvrtc.cache_path(kernel, "sm_90")
    monkeypatch.setattr(nvrtc, "source_folder", lambda: copied)
    assert nvrtc.cache_path(kernel, "sm_90") == before
    included, seen = {kernel.file}, {before}
    for path in [copied / name for name in included]:
        included |= set(re.findall(r'#include "(.*)"', path.read_text()))
    assert included >= {"expand_rows.cu", "device.h", "../line_hash.h"}
    for name in included:
        path = copied / name
        path.write_text(path.read_text() + "// changed\n")
        seen.add(nvrtc.cache_path(kernel, "sm_90"))
    assert len(seen) == 1 + len(included)


@pytest.mark.skipif(nvrtc.nvrtc() is None, reason="no NVRTC: PyTorch's CUDA wheels bring it")
def test_nvrtc_says_why_it_does_not_compile():
    with pytest.raises(GrowthError, match=r"expand_rows.cu for sm_90: .*error"):
        nvrtc.compile_cubin(
            nvrtc.Kernel("expand_rows", "expand_rows.cu", (("IN", "quad"),)), "sm_90"
        )


def test_nvrtc_is_found_beside_pytorch_and_in_a_toolkit(tmp_path, monkeypatch):
    """In pip's packages, in CUDA_HOME, and beside an nvcc, also one that is a script."""
    packages = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: packages)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    nvcc = tmp_path / "local" / "bin" / "nvcc"
    monkeypatch.setattr(nvrtc.shutil, "which", lambda name: str(nvcc))
    expected = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "home/lib64", "local/lib64"]
    expected += ["local/cuda/lib64"]
    found = list(nvrtc._nvrtc_folders("13"))
    assert [f for f in found if str(f.relative_to(tmp_path)) in expected] == [
        tmp_path / folder for folder in expected
    ]
    # from every one of them: both halves, the second of which the first opens by name alone
    opened = []
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda path: opened.append(path) or path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for folder in reversed(found):
        folder.mkdir(parents=True)
        for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
            (folder / name).touch()
        opened.clear()
        assert nvrtc.nvrtc.__wrapped__() == str(folder / "libnvrtc.so.13")
        assert opened[0] == str(folder / "libnvrtc-builtins.so.13.0")
    monkeypatch.setattr(nvrtc, "_nvrtc_folders", lambda major: [tmp_path])
    assert nvrtc.nvrtc.__wrapped__() == "libnvrtc.so.13"


class FakeDriver:
    """Answers like libcuda, and launches in the emulation."""

    def __init__(self, kernel, current_device):
        self.kernel, self.calls, self.attributes = kernel, [], {}
        self.current_device, self.launched_on = current_device, []

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes[attribute] = value
        return 0

    def cuModuleGetFunction(self, function, module, name):
        self.calls.append(name)
        return 0

    def cuLaunchKernel(self, function, *rest):
        *grid, shared, stream, params, extra = rest
        if shared.value > self.attributes[nvrtc.MAX_DYNAMIC_SHARED_BYTES]:
            return 1
        blocks, y, z, threads, ty, tz = (n.value for n in grid)
        assert (y, z, ty, tz, extra) == (1, 1, 1, 1, None)
        self.stream = stream.value
        self.launched_on.append(self.current_device.index)
        args = ExpandRowsArgs.from_address(params._obj.value)
        emulate(self.kernel, Grid(blocks, threads, shared.value), args)
        return 0

    def cuGetErrorString(self, status, text):
        text._obj.value = b"no binary for this GPU"
        return 0

    def __getattr__(self, name):
        def other(*args):
            self.calls.append(name)
            return 0

        return other


@pytest.fixture
def launched(monkeypatch, current_device):
    """The launches of two rows, and the driver that gets it."""
    made = launches_of(ExpandCall(torch.empty(2, 9), torch.randn(2, 9)))
    ((kernel, grid),) = made.steps
    driver = FakeDriver(kernel, current_device)
    nvrtc._function.cache_clear()
    monkeypatch.setattr(nvrtc, "_allowed", {})
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    monkeypatch.setattr(nvrtc, "cached_cubin", lambda kernel, arch: arch.encode())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current_device.index)
    streams = [SimpleNamespace(cuda_stream=77 + index) for index in range(2)]
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    yield made, driver, grid
    nvrtc._function.cache_clear()


def assert_done(made):
    weight, _, out, *_ = made.tensors
    assert torch.equal(out, weight)


def test_launch_reaches_the_kernel_through_the_driver(launched):
    made, driver, grid = launched
    device = torch.device("cuda", 0)
    for _ in range(2):
        nvrtc.launch(driver.kernel, grid, made.args, device)
    assert driver.calls.count("cuModuleLoadData") == 1 and b"expand_rows" in driver.calls
    assert driver.attributes == {nvrtc.MAX_DYNAMIC_SHARED_BYTES: grid.shared_bytes}
    assert driver.stream == 77
    assert_done(made)
    # a thread that has no context gets one
    assert "cuCtxSetCurrent" in driver.calls


def test_a_smaller_launch_leaves_a_larger_one_its_shared_memory(launched):
    """The limit is the kernel's: a narrow weight comes between two wide ones in a model."""
    made, driver, grid = launched
    larger = grid._replace(shared_bytes=grid.shared_bytes + 4096)
    for each in (larger, grid, larger):
        made.tensors[2].zero_()
        nvrtc.launch(driver.kernel, each, made.args, torch.device("cuda", 0))
        assert_done(made)
    assert driver.attributes == {nvrtc.MAX_DYNAMIC_SHARED_BYTES: larger.shared_bytes}


@pytest.mark.parametrize("given, expected", [(0, 0), (1, 1), (None, 0)])
def test_a_kernel_is_launched_on_the_device_of_its_tensors(given, expected, launched):
    """With the current device, which is another one, it would be the wrong memory."""
    made, driver, grid = launched
    device = torch.device("cuda") if given is None else torch.device("cuda", given)
    nvrtc.launch(driver.kernel, grid, made.args, device)
    assert driver.launched_on == [expected] and driver.stream == 77 + expected
    assert driver.current_device.index == 0


def test_what_the_driver_refuses_is_told(launched, monkeypatch):
    made, driver, grid = launched
    monkeypatch.setattr(driver, "cuModuleLoadData", lambda *args: 209, raising=False)
    with pytest.raises(RuntimeError, match=r"loading expand_rows: no binary for this GPU \(209\)"):
        nvrtc.launch(driver.kernel, grid, made.args, torch.device("cuda", 0))
