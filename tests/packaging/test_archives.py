"""The source archive and the wheel without the compiled library, built from it, offline."""

import importlib
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packaging.project import PROJECT, ROOT, SETTINGS

NAME = f"{PROJECT['name']}-{PROJECT['version']}"
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
EXCLUDED = tuple(SETTINGS["tool"]["scikit-build"]["sdist"]["exclude"])
WHEEL = """
from scikit_build_core.build import build_wheel
build_wheel({folder!r}, {{"wheel.cmake": "false"}})
"""
SDIST = "from scikit_build_core.build import build_sdist; build_sdist({folder!r})"


def run(code, cwd, *options):
    line = [sys.executable, *options, "-c", code]
    done = subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def listed_by_git():
    """The files of the source tree; skips where git does not know them."""
    line = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a clone of the repository")
    return {file for file in done.stdout.splitlines() if (ROOT / file).is_file()}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The folder that the source archive unpacks to."""
    folder = tmp_path_factory.mktemp("sdist")
    run(SDIST.format(folder=str(folder)), ROOT)
    with tarfile.open(folder / f"{NAME}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / NAME


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory):
    """The wheel that the source archive builds without a compiler, opened."""
    folder = tmp_path_factory.mktemp("wheel")
    run(WHEEL.format(folder=str(folder)), unpacked)
    with zipfile.ZipFile(folder / f"{NAME}-py3-none-any.whl") as archive:
        yield archive


def test_the_source_archive_holds_the_repository(unpacked):
    found = {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file()}
    expected = {file for file in listed_by_git() if not file.startswith(EXCLUDED)}
    assert found == expected | {"PKG-INFO"}


def test_the_wheel_holds_the_package_and_the_cuda_kernels(unpacked, wheel):
    files = [p for p in (unpacked / "growkern").rglob("*") if p.is_file()]
    expected = {str(p.relative_to(unpacked)) for p in files}
    headers = [p for p in (unpacked / "csrc").rglob("*") if p.is_file() and p.parent.name != "cpu"]
    expected |= {f"growkern/{p.relative_to(unpacked)}" for p in headers}
    assert {"growkern/py.typed", "growkern/csrc/line_hash.h"} < expected
    info = {name for name in wheel.namelist() if name.startswith(f"{NAME}.dist-info/")}
    assert {name for name in wheel.namelist() if not name.endswith("/")} - info == expected
    assert f"{NAME}.dist-info/licenses/LICENSE" in info


def test_links_of_the_readme_leave_the_index(wheel):
    """A package index shows the README, but has no files beside it."""
    text = wheel.read(f"{NAME}.dist-info/METADATA").decode()
    links = re.findall(r"\]\(([^)#][^)]*)\)", text)
    assert len(links) > 10 and all(link.startswith("https://") for link in links)


def test_the_wheel_works_outside_of_the_source_tree(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
sys.path.append({str(Path(tomllib.__file__).parents[1])!r})
import growkern
from growkern.families.table_files import load_family, supported_families
from growkern.package import folders
assert all(load_family(name).model_type == name for name in supported_families())
print(growkern.__file__, (folders()[0] / "csrc" / "cuda" / "expand_rows.cu").is_file())
"""
    # no site-packages: their editable install leads to the source tree
    assert run(code, tmp_path, "-I", "-S").split() == [
        str(tmp_path / "growkern/__init__.py"),
        "True",
    ]
