"""The base-(k+1) graph: the exact mean for any n in finitely many rounds of degree at most k."""

from collections.abc import Sequence

import numpy as np

from jaxdec.topology.core import Topology, rounds_from_matrices
from jaxdec.topology.static import at_least

Edges = dict[tuple[int, int], float]  # undirected edge → weight; the rest stays with the node


def base_k(n: int, k: int = 1) -> Topology:
    """Any n, exact mean after one period, at most k neighbours a round.

    The shorter of two constructions: the simple base-(k+1) graph on all nodes, or, with n = p q
    and p the largest divisor whose prime factors are at most k + 1, the simple graph inside p
    groups of q and then hyper-hypercubes across them.

    Args:
      n: number of nodes, at least 2.
      k: largest degree of a round, in [1, n − 1].

    Source: Takezawa et al., arXiv 2305.11420, algorithms 1 to 3.

    >>> topology = base_k(5, k=1)
    >>> topology.period, bool(np.allclose(topology.period_matrix(), 1 / 5))
    (5, True)
    """
    at_least("base_k", n, 2)
    if not 1 <= k < n:
        raise ValueError(f"topology base_k: k={k} must be in [1, n - 1] = [1, {n - 1}]")
    nodes = list(range(n))
    rounds = _simple(nodes, k)
    smooth = int(np.prod(_factors(n, k + 1)))
    if 1 < smooth < n:
        size = n // smooth
        groups = [nodes[g * size : (g + 1) * size] for g in range(smooth)]
        across = [[group[i] for group in groups] for i in range(size)]
        grouped = _together([_simple(group, k) for group in groups])
        grouped += _together([_hyper_hypercube(members, k) for members in across])
        rounds = min(rounds, grouped, key=len)
    return Topology(f"base_k({n}, k={k})", n, rounds_from_matrices([_dense(n, e) for e in rounds]))


def _factors(n: int, largest: int) -> list[int]:
    """Prime factors of n that are at most `largest`, with multiplicity."""
    factors = []
    for prime in range(2, largest + 1):
        while n % prime == 0:
            factors.append(prime)
            n //= prime
    return factors


def _hyper_hypercube(nodes: Sequence[int], k: int) -> list[Edges]:
    """Exact mean of a (k+1)-smooth number of nodes: one mixed-radix digit a round."""
    rounds: list[Edges] = []
    factors = _factors(len(nodes), k + 1)
    merged: list[int] = []
    for factor in sorted(factors):  # fewer rounds: multiply small factors while they fit
        if merged and merged[-1] * factor <= k + 1:
            merged[-1] *= factor
        else:
            merged.append(factor)
    stride = 1
    for size in merged:
        edges: Edges = {}
        for i, node in enumerate(nodes):
            digit = i // stride % size
            for other in range(digit + 1, size):
                edges[node, nodes[i + (other - digit) * stride]] = 1 / size
        rounds.append(edges)
        stride *= size
    return rounds


def _simple(nodes: Sequence[int], k: int) -> list[Edges]:
    """The simple base-(k+1) graph.

    n = Σ_l a_l (k+1)^{p_l} with falling p_l splits the nodes into V_1, V_2, …, and each V_l into
    a_l blocks of (k+1)^{p_l}. First every V_l takes its own mean. Then, for each l, every node
    of V_{l+1}, V_{l+2}, … meets one node of each block of V_l, with the weight that makes
    the mean of each block, and that of the rest, the mean of all; the blocks finish alone.
    """
    parts: list[tuple[list[int], int]] = []
    start, left = 0, len(nodes)
    while left:
        block = 1
        while block * (k + 1) <= left:
            block *= k + 1
        count = left // block * block
        parts.append((list(nodes[start : start + count]), block))
        start, left = start + count, left - count
    first = _together([_hyper_hypercube(part, k) for part, _ in parts])
    if len(parts) == 1:
        return first
    finishing: list[list[Edges]] = []
    remaining = len(nodes)
    for level, (part, block) in enumerate(parts[:-1]):
        rest = [node for later, _ in parts[level + 1 :] for node in later]
        blocks = [part[b : b + block] for b in range(0, len(part), block)]
        meeting: Edges = {
            (members[i], node): block / remaining
            for members in blocks
            for i, node in enumerate(rest)
        }
        idle: list[Edges] = [{} for _ in range(level)]
        alone = _together([_hyper_hypercube(members, k) for members in blocks])
        finishing.append([*idle, meeting, *alone])
        remaining = len(rest)
    return first + _together(finishing)


def _together(schedules: Sequence[list[Edges]]) -> list[Edges]:
    """Schedules of disjoint edges side by side; the shorter ones idle at their end."""
    length = max(map(len, schedules))
    return [
        {edge: w for rounds in schedules if r < len(rounds) for edge, w in rounds[r].items()}
        for r in range(length)
    ]


def _dense(n: int, edges: Edges) -> np.ndarray:
    matrix = np.zeros((n, n))
    for (i, j), weight in edges.items():
        matrix[i, j] = matrix[j, i] = weight
    return matrix + np.diag(1 - matrix.sum(axis=1))
