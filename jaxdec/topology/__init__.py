"""Who talks to whom, and when. Mixing matrices are row-stochastic: row i is what node i gives.

`by_name` takes the names and fields that configs use; the constructors are the same names.
"""

from collections.abc import Callable
from typing import Any

from jaxdec import registry
from jaxdec.topology import schedules
from jaxdec.topology.base_k import base_k
from jaxdec.topology.core import Exchange, Round, Topology, is_connected
from jaxdec.topology.schedules import (
    alternating_exponential_ring,
    from_matrices,
    hierarchical,
    lazy,
    one_peer_exponential,
    one_peer_ring,
    random_matching,
    with_mean,
)
from jaxdec.topology.static import (
    complete,
    erdos_renyi,
    exponential,
    from_networkx,
    grid,
    hypercube,
    isolated,
    ring,
    star,
    symmetric_exponential,
    torus,
)


def _hierarchical_by_name(n: int, outer: str = "ring", local: int = 1) -> Topology:
    if local < 1 or n % local:
        raise ValueError(f"topology hierarchical: {local=} must be at least 1 and divide {n=}")
    return hierarchical(by_name(outer, n // local), local)


def _from_matrices_by_name(n: int, matrices: Any) -> Topology:
    topology = from_matrices(matrices)
    if topology.n != n:
        raise ValueError(
            f"topology from_matrices: matrices={matrices!r} are for n={topology.n} nodes, not {n}"
        )
    return topology


NAMES: dict[str, Callable[..., Topology]] = {
    "alternating_exponential_ring": alternating_exponential_ring,
    "base_k": base_k,
    "complete": complete,
    "erdos_renyi": erdos_renyi,
    "exponential": exponential,
    "from_matrices": _from_matrices_by_name,
    "grid": grid,
    "hierarchical": _hierarchical_by_name,
    "hypercube": hypercube,
    "isolated": isolated,
    "one_peer_exponential": one_peer_exponential,
    "one_peer_ring": one_peer_ring,
    "random_matching": random_matching,
    "ring": ring,
    "star": star,
    "symmetric_exponential": symmetric_exponential,
    "torus": torus,
}


def by_name(
    name: str, n: int, *, lazy: bool = False, mean_every: int | None = None, **fields: Any
) -> Topology:
    """The topology that a config names.

    Args:
      name: a key of `NAMES`.
      n: number of nodes.
      lazy: take (I + W)/2 of it.
      mean_every: put an exact mean every so many steps (after `lazy`); None: never.
      **fields: the constructor's own, those set to None left out.

    Raises:
      ValueError: an unknown name, a field that the name does not take, or an impossible n.

    >>> by_name("random_matching", 4, lazy=True, period=2, seed=None).matrix(0).max()
    np.float64(0.75)
    """
    given = {field: value for field, value in fields.items() if value is not None}
    factory = registry.lookup("topology", NAMES, name, given, given=1)
    topology = factory(n, **given)
    if lazy:
        topology = schedules.lazy(topology)
    return topology if mean_every is None else with_mean(topology, mean_every)


__all__ = [
    "NAMES",
    "Exchange",
    "Round",
    "Topology",
    "alternating_exponential_ring",
    "base_k",
    "by_name",
    "complete",
    "erdos_renyi",
    "exponential",
    "from_matrices",
    "from_networkx",
    "grid",
    "hierarchical",
    "hypercube",
    "is_connected",
    "isolated",
    "lazy",
    "one_peer_exponential",
    "one_peer_ring",
    "random_matching",
    "ring",
    "star",
    "symmetric_exponential",
    "torus",
    "with_mean",
]
