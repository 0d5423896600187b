"""Model knowledge as data: one TOML table per family, and the code that reads it."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.families.family import Family, field_faults, growable_fields, inner, NORM_KINDS
    from growkern.families.model import class_faults, known_class, known_type, ModelSpec, Names
    from growkern.families.spec import (ANY, condition_of, Dense, follow_layers, FOLLOWING, holds,
        is_met, parse_scale, Row, SpaceSpec, TensorSpec, unfollowed, value_of)
    from growkern.families.table_files import (dense_families, load_family, own_family, read_family,
        refuse_other_mixture, supported_families)
# fmt: on

__getattr__ = opener(__name__, __file__)
