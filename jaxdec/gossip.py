"""One round of a topology as `jax.lax.ppermute`: the only place where models are exchanged.

The code is written for one node and runs under `jax.vmap(axis_name=...)` (nodes simulated on one
device) and under `jax.shard_map` (one node a device) alike.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxdec import wire
from jaxdec.topology import Topology
from jaxdec.topology.core import Round

PyTree = Any


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
    return lax.select(_own(receives, axis_name), received, x)


def _own(values: np.ndarray, axis_name: str) -> jax.Array:
    """This node's of one value a node; traced at a fraction of the cost of `values[...]`."""
    return lax.dynamic_index_in_dim(values, lax.axis_index(axis_name), keepdims=False)


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

    "int8" rounds at random, by `jaxdec.wire.Int8`: about a quarter of float32's bytes. It needs a
    key, the same on all nodes, and draws from fold_in(key, l) for the l-th leaf.

    An exact mean (`complete`, the steps of `with_mean`) is one `psum` in float32 instead of n − 1
    exchanges: it leaves all nodes with the same model, but may move that model by its rounding.

    >>> import jaxdec
    >>> gossip = jaxdec.Gossip(jaxdec.topology.ring(3))
    >>> jax.vmap(lambda x: x + gossip(x, phase=0), axis_name="node")(jnp.array([0.0, 3.0, 6.0]))
    Array([3., 3., 3.], dtype=float32)

    Attributes:
      topology: over all replicas.
      axis_name: of the nodes; with `local_axis`, of the hosts.
      wire_dtype: what travels, one of `jaxdec.wire.DTYPES`; None: the leaf's own dtype.
      local_axis: axis of the replicas inside a host, for a hierarchical topology: averages inside
        the host by reduce-scatter, exchanges shards between hosts, gathers back, so that a link
        between hosts carries one model and not one a replica.
      specs: the PartitionSpec of each leaf over further automatic mesh axes, so that `local_axis`
        scatters, and "int8" rounds, each model shard where it lies; None: no such axes.
      buckets: flat arrays, of about equal size, in which the leaves of a tree travel, at the price
        of copying them; 0: each leaf on its own. The sums are the same. "int8", whose blocks are a
        leaf's own, and trees with `specs` keep their leaves.
    """

    topology: Topology
    axis_name: str = "node"
    wire_dtype: DTypeLike | None = None
    local_axis: str | None = None
    specs: PyTree | None = None
    buckets: int = 0

    def __post_init__(self):
        if self.wire_dtype is not None:
            wire.wire_format(self.wire_dtype)
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
          key: of a wire format that rounds at random ("int8"), the same on all nodes; another for
            every call.

        Raises:
          TypeError: a leaf is not floating-point.
          ValueError: an axis has another number of nodes than the topology, or the wire format
            needs a key.
        """
        if key is None and self._is_int8:
            raise ValueError(_needs_key(f"wire_dtype={self.wire_dtype!r}"))
        self._check(tree)
        return self._switch(self._round, phase, tree, key)

    def compressed(
        self,
        tree: PyTree,
        phase: int | jax.Array,
        compressor: wire.Format,
        key: jax.Array | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Q(x) and W_phase q(x) − q(x) of every leaf x, with nothing but messages on the wire.

        An exact mean too is n − 1 exchanges here, and `wire_dtype` has no say.

        Args:
          tree: as for a call, without `local_axis`.
          phase: likewise.
          compressor: q, of `jaxdec.wire`.
          key: of a compressor that draws, the same on all nodes; another for every call.

        Returns:
          Two trees in the dtypes of sums: float32 at least.

        Raises:
          TypeError, ValueError: as a call does.

        >>> import jaxdec
        >>> gossip = jaxdec.Gossip(jaxdec.topology.ring(3))
        >>> def largest(x):
        ...     return gossip.compressed(x, 0, jaxdec.wire.TopK(keep=0.5))
        >>> x = jnp.array([[1.0, 3.0], [1.0, 3.0], [6.0, 0.0]])
        >>> q, delta = jax.vmap(largest, axis_name="node")(x)
        >>> q.tolist(), delta.tolist()
        ([[0.0, 3.0], [0.0, 3.0], [6.0, 0.0]], [[2.0, -1.0], [2.0, -1.0], [-4.0, 2.0]])
        """
        if key is None and compressor.draws:
            raise ValueError(_needs_key(f"compressor {compressor}"))
        self._check(tree)

        def round_(phase: int, tree: PyTree, key: jax.Array | None) -> PyTree:
            return _map_leaves(
                lambda x, key: self._compressed_leaf(x, phase, compressor, key), tree, key
            )

        pairs = self._switch(round_, phase, tree, key)
        return jax.tree.transpose(jax.tree.structure(tree), jax.tree.structure((0, 0)), pairs)

    def bytes_sent(self, tree: PyTree, phase: int, compressor: wire.Format | None = None) -> float:
        """Bytes that a node sends in a round, the mean over nodes; with a compressor, `compressed`.

        With `local_axis`, those between hosts, a replica; what a host's own links carry is left
        out. An exact mean counts as a ring all-reduce in the dtype of its sums.
        """
        topology = self.topology if self.local_axis is None else self.topology.outer
        assert topology is not None
        exchanges = topology.rounds[phase % topology.period]
        replicas = self.topology.local if self.local_axis is not None else 1
        if compressor is None and topology.is_mean(phase):
            return all_reduce_bytes(tree, topology.n) / replicas
        messages = sum(s != i for exchange in exchanges for i, s in enumerate(exchange.source))
        model = 0
        for x in jax.tree.leaves(tree):
            shard = jax.ShapeDtypeStruct((-(-x.size // replicas),), x.dtype)
            model += wire.message_bytes(compressor or self._format(x.dtype), shard)
        return messages / topology.n * model

    @property
    def _is_int8(self) -> bool:
        return self.wire_dtype is not None and jnp.dtype(self.wire_dtype) == jnp.int8

    def _format(self, dtype: DTypeLike) -> wire.Floating | wire.Int8:
        """Of the messages of a leaf."""
        return (
            wire.Floating(dtype) if self.wire_dtype is None else wire.wire_format(self.wire_dtype)
        )

    def _check(self, tree: PyTree) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise TypeError(
                    f"gossip averages floating-point leaves; {jax.tree_util.keystr(path)} has "
                    f"dtype {jnp.result_type(leaf)}: leave it out of the tree"
                )
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

    def _switch(self, round_: Callable[..., PyTree], phase: Any, *operands: PyTree) -> PyTree:
        if isinstance(phase, int | np.integer):
            return round_(int(phase), *operands)
        distinct = self.topology.distinct_phases
        index = [distinct.index(self.topology.phase(p)) for p in range(self.topology.period)]
        branches = [functools.partial(round_, p) for p in distinct]
        return lax.switch(jnp.asarray(index)[phase % self.topology.period], branches, *operands)

    def _round(self, phase: int, tree: PyTree, key: jax.Array | None) -> PyTree:
        leaf = self._leaf if self.local_axis is None else self._leaf_over_hosts

        def leaves(tree: PyTree, key: jax.Array | None) -> PyTree:
            return _map_leaves(lambda x, key: leaf(x, phase, key), tree, key)

        if self.buckets and self.specs is None and not self._is_int8:
            packed, unpack = _packed(tree, self.buckets)
            return unpack(leaves(packed, key))
        flattens = self.local_axis is not None or self._is_int8
        if self.specs is None or not flattens:
            return leaves(tree, key)
        axes = {axis for spec in jax.tree.leaves(self.specs) for axis in _axes_of(spec)}
        return jax.shard_map(
            leaves,
            in_specs=(self.specs, jax.sharding.PartitionSpec()),
            out_specs=self.specs,
            axis_names=axes,
        )(tree, key)

    def _leaf(self, x: jax.Array, phase: int, key: jax.Array | None) -> jax.Array:
        if x.size == 0:
            return x
        return self._mix(x, self.topology, phase, x.dtype, key).astype(x.dtype)

    def _compressed_leaf(
        self, x: jax.Array, phase: int, compressor: wire.Format, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        if x.size == 0:
            empty = x.astype(wire.sum_dtype(x.dtype))
            return empty, empty
        exchanges = self.topology.rounds[phase % self.topology.period]
        return self._exchanged(x, compressor, exchanges, key, is_lossy=False)

    def _mix(
        self,
        x: jax.Array,
        topology: Topology,
        phase: int,
        dtype: DTypeLike,
        key: jax.Array | None,
    ) -> jax.Array:
        """W q(x) − q(x) in the dtype of sums, for x that holds values of `dtype`."""
        form = self._format(dtype)
        if topology.is_mean(phase):
            own, _ = self._exchanged(x, form, (), key, is_lossy=False)
            return lax.pmean(own, self.axis_name) - own
        exchanges = topology.rounds[phase % topology.period]
        _, delta = self._exchanged(x, form, exchanges, key, is_lossy=form.rounds(dtype))
        return delta

    def _exchanged(
        self, x: jax.Array, form: wire.Format, exchanges: Round, key: Any, *, is_lossy: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Q(x) and W q(x) − q(x) in the dtype of sums."""
        message, decode = form.encode(x, key)
        own = decode(message)
        delta = jnp.zeros_like(own)
        for source, weight in exchanges:
            received = decode(exchange(message, source, self.axis_name))
            mine: float | jax.Array = (
                _own(np.asarray(weight, own.dtype), self.axis_name)
                if isinstance(weight, tuple)
                else weight
            )
            if is_lossy:
                delta += _on_grid(mine * received, weight) - _on_grid(mine * own, weight)
            else:
                delta += mine * (received - own)
        return own, delta

    def _leaf_over_hosts(self, x: jax.Array, phase: int, key: jax.Array | None) -> jax.Array:
        outer = self.topology.outer
        assert outer is not None
        assert self.local_axis is not None
        if x.size == 0:
            return x
        wide = wire.sum_dtype(x.dtype)
        local = self.topology.local
        flat = x.astype(wide).reshape(-1)
        flat = jnp.pad(flat, (0, -flat.size % local))
        shard = lax.psum_scatter(flat, self.local_axis, tiled=True) / local
        shard += self._mix(shard, outer, phase, x.dtype, key)
        mean = lax.all_gather(shard, self.local_axis, tiled=True)[: x.size].reshape(x.shape)
        return (mean - x.astype(wide)).astype(x.dtype)


def all_reduce_bytes(tree: PyTree, n: int) -> float:
    """Bytes that a node sends in a ring all-reduce over n: 2 (n − 1)/n of the tree, in float32.

    >>> all_reduce_bytes(jnp.zeros(100), 8)
    700.0
    """
    sizes = (x.size * wire.sum_dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
    return 2 * (n - 1) / n * sum(sizes)


def _map_leaves(
    f: Callable[[jax.Array, jax.Array | None], Any], tree: PyTree, key: jax.Array | None
) -> PyTree:
    """f(leaf, its own key) of every leaf."""
    leaves, structure = jax.tree.flatten(tree)
    keys = [None if key is None else jax.random.fold_in(key, i) for i in range(len(leaves))]
    return jax.tree.unflatten(structure, map(f, leaves, keys))


def _packed(tree: PyTree, buckets: int) -> tuple[list[jax.Array], Callable[..., PyTree]]:
    """Leaves of a dtype in a row, cut where a bucket is full, and what takes results apart."""
    leaves, structure = jax.tree.flatten(tree)
    share = sum(x.size * x.dtype.itemsize for x in leaves) / buckets
    members: list[list[int]] = []
    filled = 0.0
    for dtype in dict.fromkeys(x.dtype for x in leaves):
        filled = share
        for i in (i for i, x in enumerate(leaves) if x.dtype == dtype):
            if filled >= share:
                members.append([])
                filled = 0.0
            members[-1].append(i)
            filled += leaves[i].size * dtype.itemsize
    packed = [jnp.concatenate([leaves[i].reshape(-1) for i in bucket]) for bucket in members]

    def unpack(results: list[jax.Array]) -> PyTree:
        found = list(leaves)
        for bucket, result in zip(members, results, strict=True):
            ends = np.cumsum([leaves[i].size for i in bucket])[:-1].tolist()
            for i, part in zip(bucket, jnp.split(result, ends), strict=True):
                found[i] = part.reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, found)

    return packed, unpack


def _needs_key(what: str) -> str:
    return (
        f"{what} draws at random and needs a key, the same on all nodes and new in every step; "
        "write key=jax.random.fold_in(jax.random.key(seed), step) for gossip or update"
    )


def _on_grid(weighted: jax.Array, weight: float | tuple[float, ...]) -> jax.Array:
    """W q, rounded to multiples of two units in the last place of q in the dtype of sums."""
    smallest = min((w for w in np.atleast_1d(weight) if w > 0), default=1.0)
    finfo = jnp.finfo(weighted.dtype)
    bits = max(0, finfo.nmant - 1 + math.floor(math.log2(smallest)))
    return lax.reduce_precision(weighted, finfo.nexp, bits)


def _axes_of(spec: jax.sharding.PartitionSpec) -> list[str]:
    return [axis for part in spec if part for axis in ((part,) if isinstance(part, str) else part)]
