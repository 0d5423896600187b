"""The `growkern` command: `main.py` runs it, `commands.py` lists the commands."""
