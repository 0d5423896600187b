"""Runs: their files, what these resolve to, and their directories."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.train.run.file import check_paths, load_run, load_runs
    from growkern.train.run.resolve import locate
    from growkern.train.run.start import run
# fmt: on

__getattr__ = opener(__name__, __file__)
