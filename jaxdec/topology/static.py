"""Graphs that stay the same at every step."""

from typing import Any

import numpy as np

from jaxdec.topology.core import (
    Topology,
    is_connected,
    metropolis,
    offsets_round,
    rounds_from_matrices,
)


def at_least(name: str, value: int, least: int, field: str = "n") -> None:
    """Refuse an n, or another count, below `least`."""
    if value < least:
        raise ValueError(f"topology {name}: {field}={value} must be at least {least}")


def power_of_two(name: str, n: int, remedy: str = "base_k") -> int:
    """log₂ n, or an error that names what takes any n."""
    if n < 2 or n & (n - 1):
        raise ValueError(
            f"topology {name}: n={n} must be a power of two, at least 2; for any n use {remedy}"
        )
    return n.bit_length() - 1


def complete(n: int) -> Topology:
    """Every node takes the exact mean at every step: W = 11ᵀ/n.

    >>> complete(3).matrix(0).round(3)[0].tolist()
    [0.333, 0.333, 0.333]
    """
    at_least("complete", n, 1)
    rounds = (offsets_round(n, range(1, n), 1 / n),)
    return Topology(f"complete({n})", n, rounds, means=frozenset({0} if n > 1 else ()))


def isolated(n: int) -> Topology:
    """No averaging at all: W = I. The baseline that shows what gossip brings.

    >>> isolated(2).rounds
    ((),)
    """
    at_least("isolated", n, 1)
    return Topology(f"isolated({n})", n, ((),))


def ring(n: int) -> Topology:
    """Both neighbours and itself, ⅓ each.

    >>> ring(5).matrix(0).round(2)[0].tolist()
    [0.33, 0.33, 0.0, 0.0, 0.33]
    """
    at_least("ring", n, 3)
    return Topology(f"ring({n})", n, (offsets_round(n, (1, -1), 1 / 3),))


def _mesh_2d(name: str, n: int, rows: int | None, wrap: bool) -> Topology:
    at_least(name, n, 4)
    if rows is None:
        rows = max(r for r in range(1, int(n**0.5) + 1) if n % r == 0)
    if rows < 2 or n % rows or n // rows < 2:
        raise ValueError(
            f"topology {name}: n={n} has no shape of {rows} rows with both sides at least 2; "
            "give n a product of two such sides, or use ring"
        )
    columns = n // rows
    adjacency = np.zeros((n, n), bool)
    for i in range(n):
        row, column = divmod(i, columns)
        for r, c in ((row + 1, column), (row, column + 1)):
            if wrap or (r < rows and c < columns):
                j = (r % rows) * columns + c % columns
                adjacency[i, j] = adjacency[j, i] = True
    rounds = rounds_from_matrices([metropolis(adjacency)])
    return Topology(f"{name}({rows}x{columns})", n, rounds)


def grid(n: int, rows: int | None = None) -> Topology:
    """A two-dimensional mesh, as square as n allows, with Metropolis weights.

    >>> grid(8).name, grid(8).matrix(0)[0].round(2).tolist()
    ('grid(2x4)', [0.42, 0.25, 0.0, 0.0, 0.33, 0.0, 0.0, 0.0])
    """
    return _mesh_2d("grid", n, rows, wrap=False)


def torus(n: int, rows: int | None = None) -> Topology:
    """A two-dimensional mesh that closes on itself, with Metropolis weights.

    >>> torus(9).matrix(0)[0].round(2).tolist()
    [0.2, 0.2, 0.2, 0.2, 0.0, 0.0, 0.2, 0.0, 0.0]
    """
    return _mesh_2d("torus", n, rows, wrap=True)


def star(n: int) -> Topology:
    """Node 0 in the middle, with Metropolis weights.

    >>> star(4).matrix(0)[1].tolist()
    [0.25, 0.75, 0.0, 0.0]
    """
    at_least("star", n, 2)
    adjacency = np.zeros((n, n), bool)
    adjacency[0, 1:] = adjacency[1:, 0] = True
    return Topology(f"star({n})", n, rounds_from_matrices([metropolis(adjacency)]))


def hypercube(n: int) -> Topology:
    """All neighbours i XOR 2^k, and itself, 1 / (log₂ n + 1) each.

    >>> hypercube(4).matrix(0).round(2)[0].tolist()
    [0.33, 0.33, 0.33, 0.0]
    """
    bits = power_of_two("hypercube", n)
    matrix = np.eye(n)
    for bit in range(bits):
        matrix[np.arange(n), np.arange(n) ^ (1 << bit)] = 1
    return Topology(f"hypercube({n})", n, rounds_from_matrices([matrix / (bits + 1)]))


def exponential(n: int) -> Topology:
    """Directed: node i receives from i − 2^k for k < ⌈log₂ n⌉; equal weights.

    >>> exponential(5).matrix(0)[0].tolist()
    [0.25, 0.25, 0.0, 0.25, 0.25]
    """
    at_least("exponential", n, 2)
    offsets = [1 << k for k in range((n - 1).bit_length())]
    return Topology(f"exponential({n})", n, (offsets_round(n, offsets, 1 / (len(offsets) + 1)),))


def symmetric_exponential(n: int) -> Topology:
    """Undirected: offsets ±2^k for k < ⌈log₂ n⌉, each once; equal weights.

    >>> symmetric_exponential(6).matrix(0).round(2)[0].tolist()
    [0.2, 0.2, 0.2, 0.0, 0.2, 0.2]
    """
    at_least("symmetric_exponential", n, 2)
    steps = [1 << k for k in range((n - 1).bit_length())]
    offsets = sorted({o % n for step in steps for o in (step, -step)})
    return Topology(
        f"symmetric_exponential({n})", n, (offsets_round(n, offsets, 1 / (len(offsets) + 1)),)
    )


def erdos_renyi(n: int, probability: float | None = None, seed: int = 0) -> Topology:
    """A seeded random graph, drawn until connected, with Metropolis weights.

    Args:
      n: number of nodes.
      probability: of each edge; None: min(1, 2 ln n / n), twice what connects a large graph.
      seed: of the draw.

    Raises:
      ValueError: a thousand draws gave no connected graph.

    >>> bool(erdos_renyi(8, 0.4, seed=1).matrix(0).sum() == 8)
    True
    """
    at_least("erdos_renyi", n, 2)
    if probability is None:
        probability = min(1.0, 2 * np.log(n) / n)
    if not 0 < probability <= 1:
        raise ValueError(f"topology erdos_renyi: probability={probability} must be in (0, 1]")
    at_least("erdos_renyi", seed, 0, "seed")
    rng = np.random.default_rng(seed)
    for _ in range(1000):
        upper = np.triu(rng.random((n, n)) < probability, 1)
        if is_connected(adjacency := upper | upper.T):
            rounds = rounds_from_matrices([metropolis(adjacency)])
            return Topology(f"erdos_renyi({n}, {probability:.3g}, seed={seed})", n, rounds)
    raise ValueError(
        f"topology erdos_renyi: no connected graph in 1000 draws with n={n}, "
        f"probability={probability}; write a larger probability"
    )


def from_networkx(graph: Any) -> Topology:
    """An undirected networkx graph, nodes in its own order, with Metropolis weights.

    Raises:
      ValueError: the graph is directed, or not connected.

    >>> import networkx
    >>> from_networkx(networkx.path_graph(3)).matrix(0).round(2)[0].tolist()
    [0.67, 0.33, 0.0]
    """
    if graph.is_directed():
        raise ValueError(
            "from_networkx: the graph is directed, and its weights would not keep the mean; "
            "give graph.to_undirected(), or your own weights to from_matrices"
        )
    index = {node: i for i, node in enumerate(graph.nodes)}
    adjacency = np.zeros((len(index), len(index)), bool)
    for a, b in graph.edges():
        if a != b:
            adjacency[index[a], index[b]] = adjacency[index[b], index[a]] = True
    if not is_connected(adjacency):
        raise ValueError(
            f"from_networkx: the graph of {len(index)} nodes is not connected; join its parts"
        )
    rounds = rounds_from_matrices([metropolis(adjacency)])
    return Topology(f"from_networkx({len(index)})", len(index), rounds)
