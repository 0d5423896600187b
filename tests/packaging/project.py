"""The source tree and its metadata, for the tests of packages."""

from pathlib import Path

from growkern.files import parse_toml

ROOT = Path(__file__).parents[2]
SETTINGS = parse_toml((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
