"""The source tree and its metadata, for the tests of packages."""

from pathlib import Path

from growkern.families.load import tomllib

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
