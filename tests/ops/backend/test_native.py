"""The compiled library is used only if it is built from the sources beside the package."""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from growkern.errors import GrowthWarning
from growkern.ops.backend import choose, native
from growkern.ops.backend.choose import choose_backend
from tests.test_layers import ROOT

OLD = "int growkern_abi() { return 3; }"
OTHER = 'const char* growkern_sources() { return "of another version"; }'


@pytest.fixture
def fresh(monkeypatch):
    """The library is looked for again, in this test and after it."""
    native._load.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    native._load.cache_clear()


def compiled(text, folder):
    source = folder / "library.c"
    source.write_text(text)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / native.FILE_NAME, source], check=True)
    return folder / native.FILE_NAME


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("text", [OLD, OTHER], ids=["without a stamp", "with another stamp"])
def test_a_library_of_other_sources_is_not_used(text, fresh, tmp_path):
    library = compiled(text, tmp_path)
    fresh.setattr(native, "_candidates", lambda: [library])
    with pytest.warns(GrowthWarning, match="not used: .* not built from .* `make setup`") as seen:
        assert native.loaded() is None
    assert len(seen) == 1 and str(library) in native.reason() and "\n" not in native.reason()
    assert choose_backend(None, torch.device("cpu")) == "reference"
    with pytest.raises(choose.GrowthError, match="make setup"):
        choose_backend("cpu", torch.device("cpu"))


# their functions are built into the compiler, called in libc, or always inlined
HEADERS = {"atomic", "cmath", "cstdint", "cstdlib", "cstring", "limits", "type_traits"}
HEADERS |= {"emmintrin.h", "immintrin.h", "omp.h"}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "csrc/cpu").glob("*_body.cpp")), ids=lambda x: x.name
)
def test_code_of_an_instruction_set_shares_no_template_of_the_standard_library(path):
    """The linker keeps one copy of `std::fill_n`, which may have instructions of AVX-512."""
    found, paths = set(), [path]
    for each in paths:
        text = each.read_text()
        found |= set(re.findall(r"#include <(.*)>", text))
        own = {each.parent / name for name in re.findall(r'#include "(.*)"', text)}
        paths += own.difference(paths)
    assert found <= HEADERS


def test_the_library_here_has_the_stamp_of_the_sources_here():
    if not native._candidates():
        pytest.skip("built without the compiled library")
    library = ctypes.CDLL(str(native._candidates()[0]))
    library.growkern_sources.restype = ctypes.c_char_p
    assert library.growkern_sources().decode() == native.source_stamp(ROOT)
    assert native.loaded() is not None


@pytest.mark.parametrize("name", ["csrc/line_hash.h", "csrc/cpu/gemm.h", "csrc/cpu/native.cpp"])
def test_the_stamp_follows_every_source(name, tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    assert native.source_stamp(tmp_path) == native.source_stamp(ROOT)
    (tmp_path / "csrc/cuda/device.h").unlink()  # compiled where it runs, not into the library
    assert native.source_stamp(tmp_path) == native.source_stamp(ROOT)
    (tmp_path / name).write_text((tmp_path / name).read_text().replace("0", "1", 1) + "\n")
    assert native.source_stamp(tmp_path) != native.source_stamp(ROOT)
    (tmp_path / "csrc/cpu/native.cpp").unlink()
    assert native.source_stamp(tmp_path) is None


@pytest.mark.parametrize("size", [1, 9 << 20, (12 << 20) + 1])
def test_advice_about_pages_leaves_the_memory_around_alone(size):
    whole = torch.full((size + (1 << 22),), 7, dtype=torch.uint8)
    start = (1 << 21) + 5
    native.advise_huge_pages(whole[start : start + size])
    assert (whole[:start] == 7).all() and (whole[start + size :] == 7).all()
    whole[start : start + size] = 3
    assert whole.sum().item() == 3 * size + 7 * (1 << 22)
