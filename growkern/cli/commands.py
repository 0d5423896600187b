"""The typer application with every command: importing a module registers its commands."""

from growkern.cli import evaluation, growth, lineage, pictures, teacher, train
from growkern.cli.app import app

__all__ = ["app", "evaluation", "growth", "lineage", "pictures", "teacher", "train"]
