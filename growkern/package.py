"""Facts about this package: its version, the folders that hold its files, its TOML files."""

import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# the pages that messages point to
DOCS = "https://github.com/growkern/growkern/blob/main/docs"


def version() -> str:
    """The version of growkern, such as "0.1.0".

    Returns:
        The version of the installed package. In a source tree that is not installed, the version
        in pyproject.toml. "unknown" if there is neither.
    """
    try:
        return metadata.version("growkern")
    except metadata.PackageNotFoundError:
        return _source_version() or "unknown"


def _source_version() -> str | None:
    """The version in pyproject.toml beside the package, if that file is growkern's."""
    file = Path(__file__).parents[1] / "pyproject.toml"
    if not file.is_file():
        return None
    project = parse_toml(file.read_text(encoding="utf-8")).get("project", {})
    return project.get("version") if project.get("name") == "growkern" else None


def folders() -> list[Path]:
    """The folders of the package; an editable install may have more than one."""
    spec = find_spec("growkern")
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text, on Python 3.10 too."""
    # here, because `import growkern` must stay quick
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)
