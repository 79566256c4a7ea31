"""How the examples of a training set are split over nodes. Each example goes to one node."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxdec import registry


def iid(labels: np.ndarray, nodes: int, seed: int) -> list[np.ndarray]:
    """A random split into equal parts (to one example).

    >>> [len(part) for part in iid(np.zeros(10), 4, seed=0)]
    [3, 3, 2, 2]
    """
    order = np.random.default_rng(seed).permutation(len(labels))
    return np.array_split(order, nodes)


def by_class(labels: np.ndarray, nodes: int, seed: int) -> list[np.ndarray]:
    """Sorted by class, then cut into equal parts: each node sees few classes.

    >>> [part.tolist() for part in by_class(np.array([0, 1, 0, 1]), 2, seed=0)]
    [[2, 0], [1, 3]]
    """
    order = np.random.default_rng(seed).permutation(len(labels))
    return np.array_split(order[np.argsort(labels[order], kind="stable")], nodes)


def dirichlet(labels: np.ndarray, nodes: int, seed: int, alpha: float) -> list[np.ndarray]:
    """Each class is split over nodes by proportions drawn from Dirichlet(α, …, α).

    Redrawn until every node has an example.

    Args:
      labels: int [examples].
      nodes: number of parts.
      seed: of the draw.
      alpha: concentration α > 0; large: nearly IID, small: each class on few nodes.

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
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
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


NAMES: dict[str, Callable[..., list[np.ndarray]]] = {
    "by_class": by_class,
    "dirichlet": dirichlet,
    "iid": iid,
}


def split(
    name: str, labels: np.ndarray, nodes: int, seed: int, alpha: float | None = None
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
    if nodes > len(labels):
        raise ValueError(f"nodes={nodes} is more than the {len(labels)} training examples")
    return NAMES[name](labels, nodes, seed, **fields)
