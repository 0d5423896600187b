"""`python -m growkern` is the `growkern` command."""

from growkern.cli.main import main

main()
