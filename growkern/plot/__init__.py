"""Pictures and tables of the losses of training runs, and of what they saved."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.plot.curves import log_of, runs_in, savings_rows, savings_table
    from growkern.plot.losses import notes_on, plot_runs
# fmt: on

__getattr__ = opener(__name__, __file__)
