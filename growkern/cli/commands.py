"""The typer application with every command: importing a module registers its commands."""

from typing import Any

from growkern.cli import centroids, evaluation, growth, lineage, pictures, teacher, train
from growkern.cli.app import app

__all__ = ["app", "centroids", "evaluation", "growth", "lineage", "pictures", "teacher", "train"]

# the groups and the order of the help, as in docs/commands.md
GROUPS = {
    "Growing": ("plan", "grow", "verify", "fold", "replay", "centroids", "family"),
    "Training": ("train", "export", "cache-teacher"),
    "Measuring": ("eval", "finetune", "plot"),
    "This machine": ("info",),
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def _name(command: Any) -> str:
    return command.name or command.callback.__name__.replace("_", "-")


app.registered_commands.sort(key=lambda command: list(GROUP_OF).index(_name(command)))
for _command in app.registered_commands:
    _command.rich_help_panel = GROUP_OF[_name(_command)]
