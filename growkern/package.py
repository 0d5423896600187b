"""Facts about the installed package: its version and the folders that hold its files."""

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


def version() -> str:
    """The installed version, as in pyproject.toml.

    Raises:
        importlib.metadata.PackageNotFoundError: growkern is imported without being installed.
    """
    return metadata.version("growkern")


def folders() -> list[Path]:
    """The folders of the package; an editable install may have more than one."""
    spec = find_spec("growkern")
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
