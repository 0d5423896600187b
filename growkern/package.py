"""Facts about this package: its version, its pages, and the folders that hold its files."""

import functools
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from growkern.files import parse_toml

# the pages that messages point to
DOCS = "https://github.com/growkern/growkern/blob/main/docs"
# of a class that transformers does not have
WIDEN = f"growkern.widen grows models of any class: {DOCS}/own_models.md"


@functools.cache
def version() -> str:
    """The version of growkern, such as "0.1.0".

    It is that of the installed package, or of pyproject.toml in a source tree that is not
    installed, or else "unknown".
    """
    try:
        return metadata.version("growkern")
    except metadata.PackageNotFoundError:
        file = Path(__file__).parents[1] / "pyproject.toml"
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        project = parse_toml(text).get("project", {})
        # another project's file may lie there
        return project.get("version", "unknown") if project.get("name") == "growkern" else "unknown"


def folders() -> list[Path]:
    """The folders of the package; an editable install may have more than one."""
    spec = find_spec("growkern")
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
