"""Training on many processes: sharded models, their optimizer state and their checkpoints."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.train.distributed.shard import (check_gradient_division, check_replicas,
        check_sharding, check_split_teacher, is_sharded, join_processes, leave_processes, prime,
        refuse_replicas)
    from growkern.train.distributed.shards import (all_finite, create_optimizer_state, has_weights,
        largest_entry, load_weights, Parts, Shards, without_shared, write_parts)
# fmt: on

__getattr__ = opener(__name__, __file__)
