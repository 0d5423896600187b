"""Makes a Python that has only PyTorch, Triton, transformers and their requirements."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

GIVEN = ("torch", "triton", "transformers")


def required(packages):
    """The packages and all their requirements, without extras: name -> distribution."""
    found, todo = {}, list(packages)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in found[name].requires or ():
            if "extra ==" not in line:
                todo.append(re.match(r"[\w.-]+", line)[0])
    return found


def make_bare_python(directory: Path) -> Path:
    """Make a virtual environment that links to these packages, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    (site,) = directory.glob("lib/python*/site-packages")
    for distribution in required(GIVEN).values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            place = site / top
            if not place.exists():
                place.symlink_to(distribution.locate_file(top))
    return directory / "bin" / "python"
