"""Embeds the activation spaces of a source in those of the target."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.growth.space.layout import Layer, Layout
    from growkern.growth.space.ways import (check_copies, check_layer_kinds, computed_head_dim,
        copies_of, depth_of_sleep, eps_factor, followers, is_undeclared, keep_choice, layers_of,
        period_of, refuse_unportable, repetition_of, way_of, way_of_experts, whole_depths)
    from growkern.growth.space.spaces import (copies, cyclic, generator, pair_step, partial_sums,
        rank_in_group, rotary_entries, Space, take_shares)
    from growkern.growth.space.upcycling import (class_that_became, is_output, mixture_config,
        mixture_of, upcycled, Upcycling)
# fmt: on

__getattr__ = opener(__name__, __file__)
