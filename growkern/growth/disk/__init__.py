"""Writes a grown checkpoint piece by piece, whole or not at all."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.growth.disk.checksums import (are_stored, CHECKSUMS_FILE, verify_checksums,
        write_checksums)
    from growkern.growth.disk.companions import (complete_config, copy_companions, read_modules,
        write_companions, write_modules)
    from growkern.growth.disk.staging import (check_space, check_target, free_target,
        is_unedited, Journal, may_replace, stamped)
    from growkern.growth.disk.stream import lay_out, ShardLayout, Stream
# fmt: on

__getattr__ = opener(__name__, __file__)
