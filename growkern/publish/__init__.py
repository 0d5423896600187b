"""Writes directories and files whole, or not at all."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.publish import manifest, workplace
    from growkern.publish.calls import (delete, Held, Lock, LOCK_FILE, lock_file_of, locked,
        make_folder, move, open_ours)
    from growkern.publish.manifest import (damage_of, Differences, differences, MANIFEST,
        read_manifest, read_record, recorded_in, why_kept, write_manifest, write_record)
    from growkern.publish.workplace import check_space
# fmt: on

__getattr__ = opener(__name__, __file__)
