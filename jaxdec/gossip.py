"""One round of a topology as `jax.lax.ppermute`: the only place where models are exchanged.

The code is written for one node and runs under `jax.vmap(axis_name=...)` (nodes simulated on one
device) and under `jax.shard_map` (one node a device) alike.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxdec.topology import Topology

PyTree = Any

WIRE_DTYPES = ("bfloat16", "float16", "float32")


def exchange(x: jax.Array, source: tuple[int, ...], axis_name: str) -> jax.Array:
    """What each node receives: x of node source[i], or its own x where source[i] == i.

    A partial permutation sends nothing for idle nodes on a mesh. `vmap` knows full permutations
    only, so there the idle ones are paired up; either way an idle node selects its own value, and
    no other node's NaN can reach it.

    Args:
      x: any shape; this node's value.
      source: [n], distinct among the nodes that receive.
      axis_name: the node axis.

    >>> shift = (3, 0, 1, 2)
    >>> jax.vmap(lambda x: exchange(x, shift, "node"), axis_name="node")(jnp.arange(4)).tolist()
    [3, 0, 1, 2]
    """
    n = len(source)
    sends = [(sender, i) for i, sender in enumerate(source) if sender != i]
    pairs = sends
    if len(sends) < n and axis_name not in jax.sharding.get_abstract_mesh().manual_axes:
        senders, receivers = {s for s, _ in sends}, {r for _, r in sends}
        idle = zip(
            [i for i in range(n) if i not in senders],
            [i for i in range(n) if i not in receivers],
            strict=True,
        )
        pairs = sends + list(idle)
    received = _permute(x, pairs, axis_name)
    if len(sends) == n:
        return received
    receives = np.zeros(n, bool)
    receives[[r for _, r in sends]] = True
    return jnp.where(jnp.asarray(receives)[lax.axis_index(axis_name)], received, x)


def _permute(x: jax.Array, pairs: list[tuple[int, int]], axis_name: str) -> jax.Array:
    # XLA on CPU would widen two-byte floats to four on the wire.
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2:
        bits = lax.ppermute(lax.bitcast_convert_type(x, jnp.uint16), axis_name, pairs)
        return lax.bitcast_convert_type(bits, x.dtype)
    return lax.ppermute(x, axis_name, pairs)


@dataclasses.dataclass(frozen=True)
class Gossip:
    r"""Mixes a tree with the neighbours' trees: (tree, phase) → W_phase x − x.

    With q the rounding to `wire_dtype` (none: q(x) = x), node i gets
    δ_i = Σ_j W[i, j] (q(x_j) − q(x_i)), summed in float32 at least and returned in the dtype of
    x_i. A doubly stochastic W keeps the mean whatever q does, and the differences keep identical
    replicas identical to the bit, which a weighted sum would not. Where q rounds, so does each
    W[i, j] q(x_j), to two units in the last place of q(x_j) in float32: nodes that agree to within
    q never stop exchanging differences, and x + δ is then exact, not a drift of the mean.

    An exact mean (`complete`, the steps of `with_mean`) is one `psum` in float32 instead of n − 1
    exchanges: it leaves all nodes with the same model, but may move that model by its rounding.

    >>> import jaxdec
    >>> gossip = jaxdec.Gossip(jaxdec.topology.ring(3))
    >>> jax.vmap(lambda x: x + gossip(x, phase=0), axis_name="node")(jnp.array([0.0, 3.0, 6.0]))
    Array([3., 3., 3.], dtype=float32)

    Attributes:
      topology: over all replicas.
      axis_name: of the nodes; with `local_axis`, of the hosts.
      wire_dtype: what travels; None: the leaf's own dtype.
      local_axis: axis of the replicas inside a host, for a hierarchical topology: averages inside
        the host by reduce-scatter, exchanges shards between hosts, gathers back, so that a link
        between hosts carries one model and not one a replica.
      specs: the PartitionSpec of each leaf over further automatic mesh axes, so that `local_axis`
        scatters each model shard where it lies (without it no leaf moves); None: no such axes.
    """

    topology: Topology
    axis_name: str = "node"
    wire_dtype: DTypeLike | None = None
    local_axis: str | None = None
    specs: PyTree | None = None

    def __post_init__(self):
        if self.wire_dtype is not None and not _is_wire_dtype(self.wire_dtype):
            raise ValueError(
                f"wire_dtype={self.wire_dtype!r} is not a wire format; "
                f"write one of {', '.join(WIRE_DTYPES)}, or None for the parameters' own"
            )
        if self.local_axis is not None and self.topology.outer is None:
            raise ValueError(
                f"local_axis={self.local_axis!r} needs a hierarchical topology, got "
                f"{self.topology.name}; write hierarchical(topology, local)"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that hold replicas."""
        return (self.axis_name,) if self.local_axis is None else (self.axis_name, self.local_axis)

    def __call__(
        self, tree: PyTree, phase: int | jax.Array, key: jax.Array | None = None
    ) -> PyTree:
        """W_phase x − x of every leaf x.

        Args:
          tree: floating-point leaves, this node's.
          phase: a Python int (the step, or its phase) compiles that round's exchanges only; a
            traced integer, the same on all nodes, compiles every round behind a `lax.switch`,
            which is right but cannot overlap with compute.
          key: of a wire format that rounds at random, the same on all nodes; these formats do not.

        Raises:
          TypeError: a leaf is not floating-point.
          ValueError: an axis has another number of nodes than the topology.
        """
        del key
        self._check_axes()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise TypeError(
                    f"gossip averages floating-point leaves; {jax.tree_util.keystr(path)} has "
                    f"dtype {jnp.result_type(leaf)}: leave it out of the tree"
                )
        if isinstance(phase, int | np.integer):
            return self._round(tree, int(phase))
        distinct = self.topology.distinct_phases
        index = [distinct.index(self.topology.phase(p)) for p in range(self.topology.period)]
        branches = [functools.partial(self._round, phase=p) for p in distinct]
        return lax.switch(jnp.asarray(index)[phase % self.topology.period], branches, tree)

    def bytes_sent(self, tree: PyTree, phase: int) -> float:
        """Bytes that a node sends in a round, the mean over nodes.

        With `local_axis`, those between hosts, a replica; what a host's own links carry is left
        out. An exact mean counts as a ring all-reduce in the dtype of its sums.
        """
        topology = self.topology if self.local_axis is None else self.topology.outer
        assert topology is not None
        exchanges = topology.rounds[phase % topology.period]
        replicas = self.topology.local if self.local_axis is not None else 1
        if topology.is_mean(phase):
            return all_reduce_bytes(tree, topology.n) / replicas
        messages = sum(s != i for exchange in exchanges for i, s in enumerate(exchange.source))
        itemsize = None if self.wire_dtype is None else jnp.dtype(self.wire_dtype).itemsize
        model = sum(x.size * (itemsize or x.dtype.itemsize) for x in jax.tree.leaves(tree))
        return messages / topology.n * model / replicas

    def _check_axes(self) -> None:
        if not any(self.topology.rounds):  # nobody talks, and no axis is needed
            return
        outer = self.topology if self.local_axis is None else self.topology.outer
        assert outer is not None
        for axis, size in zip(self.axes, (outer.n, self.topology.local), strict=False):
            if lax.axis_size(axis) != size:
                raise ValueError(
                    f"{self.topology.name} has {size} nodes for the axis {axis!r}, which has "
                    f"{lax.axis_size(axis)}; make both equal"
                )

    def _round(self, tree: PyTree, phase: int) -> PyTree:
        if self.local_axis is None:
            return jax.tree.map(lambda x: self._leaf(x, phase), tree)
        if self.specs is None:
            return jax.tree.map(lambda x: self._leaf_over_hosts(x, phase), tree)
        axes = {axis for spec in jax.tree.leaves(self.specs) for axis in _axes_of(spec)}
        return jax.shard_map(
            lambda shards: jax.tree.map(lambda x: self._leaf_over_hosts(x, phase), shards),
            in_specs=(self.specs,),
            out_specs=self.specs,
            axis_names=axes,
        )(tree)

    def _leaf(self, x: jax.Array, phase: int) -> jax.Array:
        return self._mix(x, self.topology, phase, x.dtype).astype(x.dtype)

    def _mix(self, x: jax.Array, topology: Topology, phase: int, dtype: DTypeLike) -> jax.Array:
        """W q(x) − q(x) in the dtype of sums, for x that holds values of `dtype`."""
        wide = sum_dtype(dtype)
        wire = dtype if self.wire_dtype is None else self.wire_dtype
        wired = _rounded(x, wire)
        own = wired.astype(wide)
        if topology.is_mean(phase):
            return lax.pmean(own, self.axis_name) - own
        is_lossy = jnp.finfo(wire).nmant < jnp.finfo(dtype).nmant
        delta = jnp.zeros_like(own)
        for source, weight in topology.rounds[phase % topology.period]:
            received = exchange(wired, source, self.axis_name).astype(wide)
            mine: float | jax.Array = (
                jnp.asarray(weight, wide)[lax.axis_index(self.axis_name)]
                if isinstance(weight, tuple)
                else weight
            )
            if is_lossy:
                delta += _on_grid(mine * received, weight) - _on_grid(mine * own, weight)
            else:
                delta += mine * (received - own)
        return delta

    def _leaf_over_hosts(self, x: jax.Array, phase: int) -> jax.Array:
        outer = self.topology.outer
        assert outer is not None
        assert self.local_axis is not None
        if x.size == 0:
            return x
        wide = sum_dtype(x.dtype)
        local = self.topology.local
        flat = x.astype(wide).reshape(-1)
        flat = jnp.pad(flat, (0, -flat.size % local))
        shard = lax.psum_scatter(flat, self.local_axis, tiled=True) / local
        shard += self._mix(shard, outer, phase, x.dtype)
        mean = lax.all_gather(shard, self.local_axis, tiled=True)[: x.size].reshape(x.shape)
        return (mean - x.astype(wide)).astype(x.dtype)


def _is_wire_dtype(dtype: DTypeLike) -> bool:
    try:
        return jnp.dtype(dtype).name in WIRE_DTYPES
    except TypeError:
        return False


def all_reduce_bytes(tree: PyTree, n: int) -> float:
    """Bytes that a node sends in a ring all-reduce over n: 2 (n − 1)/n of the tree, in float32.

    >>> all_reduce_bytes(jnp.zeros(100), 8)
    700.0
    """
    sizes = (x.size * sum_dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
    return 2 * (n - 1) / n * sum(sizes)


def sum_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype in which values of a floating-point dtype are summed: float32 at least.

    >>> sum_dtype("bfloat16"), sum_dtype("float64")
    (dtype('float32'), dtype('float64'))
    """
    return jnp.dtype(dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32)


def _rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    # Of two conversions in a row alone, XLA may keep the excess precision of the first.
    wire = jnp.finfo(dtype)
    if wire.nmant < jnp.finfo(x.dtype).nmant:
        x = lax.reduce_precision(x, exponent_bits=wire.nexp, mantissa_bits=wire.nmant)
    return x.astype(dtype)


def _on_grid(weighted: jax.Array, weight: float | tuple[float, ...]) -> jax.Array:
    """W q, rounded to multiples of two units in the last place of q in the dtype of sums."""
    smallest = min((w for w in np.atleast_1d(weight) if w > 0), default=1.0)
    finfo = jnp.finfo(weighted.dtype)
    bits = max(0, finfo.nmant - 1 + math.floor(math.log2(smallest)))
    return lax.reduce_precision(weighted, finfo.nexp, bits)


def _axes_of(spec: jax.sharding.PartitionSpec) -> list[str]:
    return [axis for part in spec if part for axis in ((part,) if isinstance(part, str) else part)]
