"""Embeds the activation spaces of a source in those of the target."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.growth.space.depth import way_of
    from growkern.growth.space.layout import Layer, Layout
    from growkern.growth.space.maps import cyclic, generator, pair_step, partial_sums, rank_in_group
    from growkern.growth.space.maps import rotary_entries, take_shares
    from growkern.growth.space.rules import adds_nothing, adds_up, are_asleep, are_split
    from growkern.growth.space.rules import check_copies, check_kinds, computed_head_dim, copies_of
    from growkern.growth.space.rules import depth_of_sleep, followers, has_pairs, is_output
    from growkern.growth.space.rules import is_undeclared, keep_choice, layers_of, period_of
    from growkern.growth.space.rules import refuse_unportable, rule_of, whole_depths
    from growkern.growth.space.spaces import copies, Space
    from growkern.growth.space.upcycling import as_source_of, check_router_sizes, dense_families
    from growkern.growth.space.upcycling import dense_model, mixture_config, mixture_of, parts_of
    from growkern.growth.space.upcycling import taken_together, upcycled, with_start
# fmt: on

__getattr__ = opener(__name__, __file__)
