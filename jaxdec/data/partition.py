"""How the examples of a training set are split over nodes. Each example goes to one node.

Groups are `Examples.groups`: classes, or the source files of a text.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from jaxdec import registry


def iid(groups: np.ndarray, nodes: int, seed: int) -> list[np.ndarray]:
    """A random split into equal parts (to one example).

    >>> [len(part) for part in iid(np.zeros(10), 4, seed=0)]
    [3, 3, 2, 2]
    """
    order = np.random.default_rng(seed).permutation(len(groups))
    return np.array_split(order, nodes)


def by_class(groups: np.ndarray, nodes: int, seed: int) -> list[np.ndarray]:
    """Sorted by group, then cut into equal parts: each node sees few classes.

    >>> [part.tolist() for part in by_class(np.array([0, 1, 0, 1]), 2, seed=0)]
    [[2, 0], [1, 3]]
    """
    order = np.random.default_rng(seed).permutation(len(groups))
    return np.array_split(order[np.argsort(groups[order], kind="stable")], nodes)


def dirichlet(groups: np.ndarray, nodes: int, seed: int, alpha: float) -> list[np.ndarray]:
    """Each group is split over nodes by proportions drawn from Dirichlet(α, …, α).

    Redrawn until every node has an example.

    Args:
      groups: int [examples].
      nodes: number of parts.
      seed: of the draw.
      alpha: concentration α > 0; large: nearly IID, small: each group on few nodes.

    Raises:
      ValueError: α is not positive, or no draw of 1000 gave every node an example.

    >>> parts = dirichlet(np.arange(100) % 2, 4, seed=0, alpha=1.0)
    >>> sorted(np.concatenate(parts).tolist()) == list(range(100))
    True
    """
    if not 0 < alpha < float("inf"):
        raise ValueError(f"data.alpha={alpha} must be positive and finite; for no skew use iid")
    rng = np.random.default_rng(seed)
    for _ in range(1000):
        parts: list[list[np.ndarray]] = [[] for _ in range(nodes)]
        for group in np.unique(groups):
            members = rng.permutation(np.flatnonzero(groups == group))
            shares = np.cumsum(rng.dirichlet(np.full(nodes, alpha)))[:-1]
            for part, chunk in zip(
                parts, np.split(members, np.round(shares * len(members)).astype(int)), strict=True
            ):
                part.append(chunk)
        joined = [np.concatenate(part) for part in parts]
        if min(map(len, joined)) > 0:
            return joined
    raise ValueError(
        f"data.alpha={alpha} left a node of {nodes} without examples in 1000 draws; "
        "write a larger alpha, or fewer nodes"
    )


def by_file(groups: np.ndarray, nodes: int, seed: int) -> list[np.ndarray]:
    """Whole groups to nodes, the largest first, each to the node that holds the least.

    Args:
      groups: int [examples].
      nodes: number of parts, at most that of groups.
      seed: of the order among groups of one size, and of the nodes.

    >>> [part.tolist() for part in by_file(np.array([0, 0, 1, 2, 2, 2]), 2, seed=0)]
    [[0, 1, 2], [3, 4, 5]]
    """
    ids, members, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if nodes > len(ids):
        raise ValueError(
            f"nodes={nodes} is more than the {len(ids)} groups that data.partition='by_file' "
            "keeps whole; write fewer nodes, or iid"
        )
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(ids))
    held = [(0, int(node)) for node in rng.permutation(nodes)]
    owner = np.empty(len(ids), int)
    for group in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        size, node = heapq.heappop(held)
        owner[group] = node
        heapq.heappush(held, (size + int(sizes[group]), node))
    return [np.flatnonzero(owner[members] == node) for node in range(nodes)]


NAMES: dict[str, Callable[..., list[np.ndarray]]] = {
    "by_class": by_class,
    "by_file": by_file,
    "dirichlet": dirichlet,
    "iid": iid,
}


def split(
    name: str, groups: np.ndarray, nodes: int, seed: int, alpha: float | None = None
) -> Sequence[np.ndarray]:
    """The partition that a config names: [nodes] arrays of example indices.

    Raises:
      ValueError: an unknown name, an alpha that is missing or out of place, too few examples.

    >>> [len(part) for part in split("iid", np.zeros(4), nodes=2, seed=0)]
    [2, 2]
    """
    if name not in NAMES:
        raise ValueError(f"data.partition={name!r} is unknown; {registry.suggestion(name, NAMES)}")
    if (name == "dirichlet") != (alpha is not None):
        remedy = "set data.alpha" if alpha is None else "leave data.alpha unset"
        raise ValueError(f"data.partition={name!r} with data.alpha={alpha}: {remedy}")
    fields = {} if alpha is None else {"alpha": alpha}
    if nodes > len(groups):
        raise ValueError(f"nodes={nodes} is more than the {len(groups)} training examples")
    return NAMES[name](groups, nodes, seed, **fields)
