"""The op `expand`: gathers and rescales the entries of a weight."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.ops.expand.call import DTYPES, Routing
    from growkern.ops.expand.limits import MOST_AMPLITUDE
    from growkern.ops.expand.many import Work, work_on
    from growkern.ops.expand.expand_op import expand
# fmt: on

__getattr__ = opener(__name__, __file__)
