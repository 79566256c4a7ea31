"""The two lifts of a per-node function, and the arrays and meshes they work on.

A per-node function has no leading node axis. `simulate` runs all nodes on one device by `vmap`;
`on_mesh` runs one node a device by `shard_map`. Stacked arrays carry the nodes first: [n, ...].
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxdec.wire import sum_dtype

PyTree = Any

MANUAL_AXES = ("node", "local")


def simulate(
    f: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    donate_argnums: int | Sequence[int] = 0,
) -> jax.stages.Wrapped:
    """Lift a per-node function to n nodes on one device, compiled.

    All replicas lie on the axis "node": a hierarchical topology is gossiped flat here, by the same
    matrices, without `local_axis`.

    Args:
      f: function of one node's arguments; it may use the axis name "node". `phase`, if it takes
        one, is passed as a keyword and is static.
      in_axes: prefix tree of the positional arguments, as in `jax.vmap`; None: replicated.
      out_axes: likewise of the result; None: the same on all nodes.
      donate_argnums: arguments whose buffers the result may take over; the state, first, by
        default. A donated array cannot be used again: write () for a function like `tx.init`,
        whose argument lives on.

    >>> deviation = simulate(lambda x: x - jax.lax.pmean(x, "node"))
    >>> deviation(jnp.array([1.0, 3.0]))
    Array([-1.,  1.], dtype=float32)
    """

    def lifted(*args: Any, **static: Any) -> Any:
        per_node = functools.partial(f, **static)
        return jax.vmap(per_node, in_axes, out_axes, axis_name="node")(*args)

    return jax.jit(lifted, static_argnames="phase", donate_argnums=donate_argnums)


def on_mesh(
    f: Callable[..., Any],
    mesh: Mesh,
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    donate_argnums: int | Sequence[int] = 0,
    compiler_options: dict[str, Any] | None = None,
) -> jax.stages.Wrapped:
    """Lift a per-node function to one node a device (or group of devices), compiled.

    Manual over the axes "node" and "local" of the mesh; its other axes stay automatic, so that a
    node's arrays may be sharded over them.

    Args:
      f: as in `simulate`; it may use the mesh's axis names "node" and "local".
      mesh: has an axis "node"; the stacked axis has node × local entries.
      in_axes: as in `simulate`.
      out_axes: as in `simulate`; None is checked to be the same on all nodes.
      donate_argnums: as in `simulate`.
      compiler_options: XLA's, see `compiler.options`; None: its own defaults.

    Raises:
      ValueError: the mesh has no axis "node", or an axis is negative.

    >>> mesh = make_mesh(node=2)
    >>> deviation = on_mesh(lambda x: x - jax.lax.pmean(x, "node"), mesh)
    >>> deviation(shard(jnp.array([1.0, 3.0]), mesh))
    Array([-1.,  1.], dtype=float32)
    """
    manual = _manual_axes(mesh)
    spec = functools.partial(_axis_spec, manual=manual)
    in_axes, out_axes = (
        tuple(axes) if isinstance(axes, list) else axes for axes in (in_axes, out_axes)
    )
    for field, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        if any(axis < 0 for axis in jax.tree.leaves(axes)):
            raise ValueError(f"{field}={axes} counts from the end; on a mesh count from 0")

    def lifted(*args: Any, **static: Any) -> Any:
        def per_device(*blocks: Any) -> Any:
            args = _map_prefix(lambda axis, x: jnp.squeeze(x, axis), in_axes, blocks)
            result = f(*args, **static)
            return _map_prefix(lambda axis, x: jnp.expand_dims(x, axis), out_axes, result)

        return jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=_map_axes(spec, in_axes),
            out_specs=_map_axes(spec, out_axes),
            axis_names=set(manual),
        )(*args)

    return jax.jit(
        lifted,
        static_argnames="phase",
        donate_argnums=donate_argnums,
        compiler_options=compiler_options,
    )


def make_mesh(
    node: int,
    local: int = 1,
    data: int = 1,
    model: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh ("node", "local", "data", "model"), without the axes beyond "node" that are 1.

    Args:
      node: hosts, or nodes where local is 1.
      local: replicas a host.
      data: devices that share one replica, each with a part of its batch.
      model: devices that share one replica, each with a part of its parameters.
      devices: node × local × data × model of them, or more; None: all of JAX's.

    Raises:
      ValueError: too few devices.

    >>> make_mesh(node=4, model=2).axis_names
    ('node', 'model')
    """
    available = list(jax.devices() if devices is None else devices)
    sizes = {"node": node, "local": local, "data": data, "model": model}
    needed = math.prod(sizes.values())
    if needed > len(available):
        raise ValueError(
            f"a mesh of {' × '.join(f'{axis}={size}' for axis, size in sizes.items())} needs "
            f"{needed} devices, {len(available)} are here; on CPU set "
            f"JAX_NUM_CPU_DEVICES={needed}, or use simulate"
        )
    sizes = {axis: size for axis, size in sizes.items() if axis == "node" or size > 1}
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=available[:needed],
    )


def stack(tree: PyTree, n: int) -> PyTree:
    """N identical replicas of every leaf: [...] → [n, ...].

    >>> stack(jnp.ones(2), 3).shape
    (3, 2)
    """
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x))), tree)


def mean(tree: PyTree) -> PyTree:
    """The mean model: every leaf [n, ...] → [...], summed in float32 at least.

    >>> mean(jnp.array([[1.0], [2.0]]))
    Array([1.5], dtype=float32)
    """

    def leaf_mean(x: jax.Array) -> jax.Array:
        return jnp.mean(x, axis=0, dtype=sum_dtype(x.dtype)).astype(x.dtype)

    return jax.tree.map(leaf_mean, tree)


def shard(tree: PyTree, mesh: Mesh, specs: PyTree | None = None) -> PyTree:
    """Put stacked arrays [n, ...] on a mesh, each node's on its device.

    Args:
      tree: stacked arrays.
      mesh: as for `on_mesh`.
      specs: PartitionSpec of each leaf's trailing axes over the mesh's automatic axes, a prefix
        tree; None: replicated over them.

    >>> shard(jnp.zeros((2, 3)), make_mesh(node=2)).sharding.spec[0]
    'node'
    """
    nodes = _axis_spec(0, _manual_axes(mesh))

    def put(spec: PartitionSpec, subtree: PyTree) -> PyTree:
        return jax.device_put(subtree, NamedSharding(mesh, PartitionSpec(*nodes, *spec)))

    specs = PartitionSpec() if specs is None else specs
    return jax.tree.map(put, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _manual_axes(mesh: Mesh) -> tuple[str, ...]:
    if "node" not in mesh.axis_names:
        raise ValueError(f'the mesh has axes {mesh.axis_names}; it needs "node" (use make_mesh)')
    return tuple(axis for axis in MANUAL_AXES if axis in mesh.axis_names)


def _axis_spec(axis: int | None, manual: tuple[str, ...]) -> PartitionSpec:
    if axis is None:
        return PartitionSpec()
    return PartitionSpec(*(None,) * axis, manual if len(manual) > 1 else manual[0])


def _is_axis(axis: Any) -> bool:
    return axis is None or isinstance(axis, int)


def _map_axes(f: Callable[[int | None], Any], axes: Any) -> Any:
    return jax.tree.map(f, axes, is_leaf=_is_axis)


def _map_prefix(f: Callable[[int, jax.Array], jax.Array], axes: Any, tree: PyTree) -> PyTree:
    """f(axis, leaf) on every leaf below an axis of the prefix tree; None leaves it alone."""

    def below(axis: int | None, subtree: PyTree) -> PyTree:
        return subtree if axis is None else jax.tree.map(lambda x: f(axis, x), subtree)

    return jax.tree.map(below, axes, tree, is_leaf=_is_axis)
