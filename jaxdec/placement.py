"""Where a run's arrays lie: all nodes on one device, or one a device, on one host or many."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdec import compiler, nodes

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Placement:
    """The lift of a run, and how arrays come to where it wants them and back.

    >>> placement = Placement(4)
    >>> placement.fetch(placement.lift(lambda x: 2 * x)(placement.put(np.arange(4)))).tolist()
    [0, 2, 4, 6]

    Attributes:
      n: number of nodes.
      mesh: of `nodes.make_mesh`, over the devices of all processes; None: simulated on one device.
      compiler_options: of what is lifted to the mesh.
    """

    n: int
    mesh: Mesh | None = None
    compiler_options: compiler.Options | None = None

    def lift(self, f: Callable[..., Any], **kwargs: Any) -> jax.stages.Wrapped:
        """`nodes.simulate` or `nodes.on_mesh` of a per-node function."""
        if self.mesh is None:
            return nodes.simulate(f, **kwargs)
        return nodes.on_mesh(f, self.mesh, compiler_options=self.compiler_options, **kwargs)

    @property
    def platform(self) -> str:
        """Of the devices: "cpu", "gpu" or "tpu"."""
        devices = jax.devices() if self.mesh is None else self.mesh.devices.flat
        return devices[0].platform

    @property
    def replicated(self) -> NamedSharding | None:
        """The sharding of what all nodes share; None: it is on the one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    @property
    def stacked(self) -> NamedSharding | None:
        """The sharding of arrays [n, ...] over nodes; None: they are on the one device."""
        if self.mesh is None:
            return None
        local = self.n // self.mesh.shape["node"]
        return NamedSharding(self.mesh, PartitionSpec(("node", "local") if local > 1 else "node"))

    @functools.cached_property
    def own(self) -> tuple[int, ...]:
        """The nodes that this process has, and makes batches for."""
        if self.mesh is None:
            return tuple(range(self.n))
        by_node = self.mesh.devices.reshape(self.n, -1)
        here = jax.process_index()
        return tuple(i for i in range(self.n) if by_node[i, 0].process_index == here)

    def put(self, tree: PyTree) -> PyTree:
        """Stacked arrays [n, ...] that every process has whole; only its own rows are copied."""
        whole = tuple(range(self.n))
        return jax.tree.map(lambda x: self._put(np.asarray(x), whole, self.stacked), tree)

    @property
    def _batched(self) -> NamedSharding | None:
        """The sharding of batches [n, B, ...]: over nodes, and over the devices that share one."""
        stacked = self.stacked
        if stacked is None or "data" not in stacked.mesh.axis_names:
            return stacked
        return NamedSharding(stacked.mesh, PartitionSpec(*stacked.spec, "data"))

    def put_batch(self, batch: PyTree) -> PyTree:
        """The batch of this process's nodes [len(own), B, ...], as a part of all [n, B, ...]."""
        return jax.tree.map(lambda x: self._put(np.asarray(x), self.own, self._batched), batch)

    def spread(self, tree: PyTree) -> PyTree:
        """One node's arrays [...], to all: [n, ...]."""
        return self.put(
            jax.tree.map(lambda x: np.broadcast_to(np.asarray(x), (self.n, *x.shape)), tree)
        )

    def abstract(self, tree: PyTree) -> PyTree:
        """What `spread` would give of one node's arrays [...], as ShapeDtypeStructs [n, ...]."""
        stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.n, *x.shape), x.dtype), tree)
        return self.abstract_stacked(stacked)

    def abstract_stacked(self, tree: PyTree) -> PyTree:
        """What `put` would give of arrays [n, ...], as ShapeDtypeStructs."""
        return _abstract(tree, self.stacked)

    def abstract_batch(self, tree: PyTree) -> PyTree:
        """What `put_batch` would give of one node's batch [B, ...], as ShapeDtypeStructs."""
        stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.n, *x.shape), x.dtype), tree)
        return _abstract(stacked, self._batched)

    def replicate(self, tree: PyTree) -> PyTree:
        """Arrays that every process has whole and all nodes share."""
        sharding = self.replicated
        if sharding is None:
            return jax.tree.map(jnp.asarray, tree)

        def put(x: Any) -> jax.Array:
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(put, tree)

    def fetch(self, x: jax.Array) -> np.ndarray:
        """The whole of an array, on every process: a collective where it lies on several."""
        if x.is_fully_addressable:
            return np.asarray(x)
        if x.is_fully_replicated:
            return np.asarray(x.addressable_data(0))
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    def fetch_own(self, x: jax.Array) -> np.ndarray:
        """The rows [len(own), ...] of this process's nodes, of an array [n, ...]."""
        if x.is_fully_addressable:
            return np.asarray(x)
        rows = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
        return np.concatenate([np.asarray(rows[node]) for node in self.own])

    def gather_own(self, rows: np.ndarray) -> np.ndarray:
        """Rows [len(own), ...] of every process → [n, ...] on every process: a collective."""
        if len(self.own) == self.n:
            return rows
        pairs = multihost_utils.process_allgather((np.asarray(self.own), rows), tiled=True)
        order, gathered = (np.asarray(part) for part in pairs)
        return gathered[np.argsort(order)]

    def _put(
        self, rows: np.ndarray, of_nodes: tuple[int, ...], sharding: NamedSharding | None
    ) -> jax.Array:
        if sharding is None:
            return jnp.asarray(rows)
        at = {node: row for row, node in enumerate(of_nodes)}

        def part(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(self.n)
            return rows[(slice(at[first], at[first] + last - first), *index[1:])]

        return jax.make_array_from_callback((self.n, *rows.shape[1:]), sharding, part)


def _abstract(tree: PyTree, sharding: NamedSharding | None) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
