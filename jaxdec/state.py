"""The state of a run."""

from typing import Any

import flax.struct
import jax


@flax.struct.dataclass
class TrainState:
    """Everything that a step reads and writes, beside the batch.

    `AXES` is its `in_axes` under both lifts: the step is replicated, the rest stacked over nodes.
    """

    step: jax.Array  # int32 []; steps taken
    params: Any  # [nodes, ...] a leaf
    statistics: Any  # [nodes, ...] a leaf; running batch statistics, each node's own
    opt_state: Any  # [nodes, ...] a leaf


AXES: Any = TrainState(step=None, params=0, statistics=0, opt_state=0)  # type: ignore[arg-type]
