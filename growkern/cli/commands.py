"""The typer application with every command: importing a module registers its commands."""

from growkern.cli import growth, lineage, teacher, tools, train
from growkern.cli.app import app

__all__ = ["app", "growth", "lineage", "teacher", "tools", "train"]
