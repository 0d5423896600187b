"""`python -m growkern` is the `growkern` command."""

from growkern.cli import main

main()
