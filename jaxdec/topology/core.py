"""The `Topology` type: who averages with whom, at each step."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

TOLERANCE = 1e-9
# Weights that a person wrote, perhaps in float32.
GIVEN_TOLERANCE = 1e-6


class Exchange(NamedTuple):
    """One message for each node at most: a (partial) permutation, and what it weighs."""

    source: tuple[int, ...]  # [n]; node i receives from source[i]; source[i] == i: nothing
    weight: float | tuple[float, ...]  # one for all receivers, or [n], one for each


Round = tuple[Exchange, ...]


@dataclasses.dataclass(frozen=True)
class Topology:
    """A periodic schedule of mixing matrices W_0, W_1, …, held as rounds of exchanges.

    At step t, node i replaces its model x_i by Σ_j W_t[i, j] x_j. A round lists the exchanges
    that bring the x_j; the self weight W_t[i, i] is what the exchanges leave of one.

    >>> import jaxdec
    >>> topology = jaxdec.topology.one_peer_exponential(4)
    >>> topology.period, topology.rounds[1]
    (2, (Exchange(source=(2, 3, 0, 1), weight=0.5),))
    >>> topology.matrix(0)
    array([[0.5, 0. , 0. , 0.5],
           [0.5, 0.5, 0. , 0. ],
           [0. , 0.5, 0.5, 0. ],
           [0. , 0. , 0.5, 0.5]])

    Attributes:
      name: the constructor's name with its arguments, for logs and plots.
      n: number of nodes.
      rounds: [period] rounds; each exchange a (source, weight).
      outer: of a hierarchical topology, the topology over hosts; otherwise None.
      local: replicas a host; n = outer.n · local.
      means: phases whose round is declared an exact mean, 11ᵀ/n, and lowers to one psum.
      mean_every: every so many steps `with_mean` put an exact mean; None: never.
    """

    name: str
    n: int
    rounds: tuple[Round, ...]
    outer: "Topology | None" = None
    local: int = 1
    means: frozenset[int] = frozenset()
    mean_every: int | None = None

    def __post_init__(self):
        rounds = tuple(tuple(Exchange(*exchange) for exchange in each) for each in self.rounds)
        object.__setattr__(self, "rounds", rounds)
        if self.n < 1:
            raise ValueError(f"topology {self.name}: n={self.n} must be at least 1")
        if not self.rounds:
            raise ValueError(f"topology {self.name}: it has no rounds; period must be at least 1")
        for phase, exchanges in enumerate(self.rounds):
            _check_round(exchanges, self.n, where=f"topology {self.name}, phase {phase}")
        for phase in self.means:
            if np.abs(self.matrix(phase) - 1 / self.n).max() > TOLERANCE:
                raise ValueError(
                    f"topology {self.name}: phase {phase} is declared an exact mean and is none"
                )

    @property
    def period(self) -> int:
        return len(self.rounds)

    def matrix(self, step: int) -> np.ndarray:
        """The mixing matrix of a step: float64 [n, n], row i the weights that node i gives."""
        receiver = np.arange(self.n)
        matrix = np.zeros((self.n, self.n))
        for exchange in self.rounds[step % self.period]:
            source = np.asarray(exchange.source)
            weight = np.broadcast_to(np.asarray(exchange.weight, np.float64), self.n)
            matrix[receiver, source] += np.where(source == receiver, 0.0, weight)
        matrix[receiver, receiver] += 1.0 - matrix.sum(axis=1)
        return matrix

    def period_matrix(self) -> np.ndarray:
        """The product W_{period-1} … W_1 W_0: float64 [n, n]."""
        return functools.reduce(
            lambda product, phase: self.matrix(phase) @ product, range(self.period), np.eye(self.n)
        )

    def is_mean(self, phase: int) -> bool:
        """Whether the round of a phase is declared an exact mean."""
        return phase % self.period in self.means

    def phase(self, step: int) -> int:
        """The first phase whose round is that of `step`: the key of a compiled step.

        >>> import jaxdec
        >>> topology = jaxdec.topology.with_mean(jaxdec.topology.ring(4), every=3)
        >>> [topology.phase(step) for step in range(7)]
        [0, 0, 2, 0, 0, 2, 0]
        """
        return self._first_phases[step % self.period]

    @property
    def distinct_phases(self) -> tuple[int, ...]:
        """One phase for each distinct round: as many executables as a run compiles."""
        return tuple(sorted(set(self._first_phases)))

    @functools.cached_property
    def _first_phases(self) -> tuple[int, ...]:
        # An algorithm's own work at the means of `with_mean` is part of what is compiled.
        every = self.mean_every
        first: dict[tuple[Round, bool, bool], int] = {}
        return tuple(
            first.setdefault(
                (
                    exchanges,
                    self.is_mean(phase),
                    every is not None and (phase + 1) % every == 0,
                ),
                phase,
            )
            for phase, exchanges in enumerate(self.rounds)
        )


def _check_round(exchanges: Round, n: int, where: str) -> None:
    receiver = np.arange(n)
    total = np.zeros(n)
    for source_, weight_ in exchanges:
        source, weight = np.asarray(source_), np.asarray(weight_, np.float64)
        if source.shape != (n,) or source.min() < 0 or source.max() >= n:
            raise ValueError(f"{where}: source={source_} must hold {n} nodes in [0, {n})")
        if weight.shape not in ((), (n,)) or not np.all(np.isfinite(weight) & (weight >= 0)):
            raise ValueError(f"{where}: weight={weight_} must be one or {n} numbers ≥ 0")
        senders = source[source != receiver]
        if len(np.unique(senders)) != len(senders):
            raise ValueError(f"{where}: source={source_} makes a node send twice in one exchange")
        total += np.where(source == receiver, 0.0, weight)
    if np.any(total > 1 + TOLERANCE):
        raise ValueError(
            f"{where}: node {total.argmax()} gives its neighbours {total.max()} in all; "
            "weights of a row must sum to at most one"
        )


def offsets_round(n: int, offsets: Iterable[int], weight: float) -> Round:
    """Exchanges in which node i receives from i − o mod n, for each offset o."""
    return tuple(Exchange(tuple((i - offset) % n for i in range(n)), weight) for offset in offsets)


def pairs_round(n: int, pairs: Iterable[tuple[int, int]], weight: float = 0.5) -> Round:
    """One exchange in which each node of a pair gives `weight` to the other; the others idle."""
    source = list(range(n))
    for i, j in pairs:
        source[i], source[j] = j, i
    return (Exchange(tuple(source), weight),)


def metropolis(adjacency: np.ndarray) -> np.ndarray:
    """Metropolis weights w_ij = 1 / (1 + max(d_i, d_j)) of an undirected graph [n, n]."""
    degree = adjacency.sum(axis=1)
    weights = adjacency / (1.0 + np.maximum.outer(degree, degree))
    return weights + np.diag(1.0 - weights.sum(axis=1))


def is_connected(adjacency: np.ndarray) -> bool:
    """Whether every node reaches every other along the edges of a directed graph [n, n]."""
    n = len(adjacency)
    reach = (adjacency != 0) | np.eye(n, dtype=bool)
    for _ in range(max(n - 1, 1).bit_length()):
        reach = reach @ reach
    return bool(reach.all())


def rounds_from_matrices(matrices: Sequence[np.ndarray]) -> tuple[Round, ...]:
    """Check each matrix [n, n] and colour its edges into as few exchanges as its degree allows."""
    if not len(matrices):
        raise ValueError("matrices is empty; give at least one [n, n] matrix")
    n = len(matrices[0])
    rounds = []
    for phase, matrix_ in enumerate(matrices):
        matrix = np.asarray(matrix_, np.float64)
        if matrix.shape != (n, n):
            raise ValueError(f"matrix {phase} has shape {matrix.shape}; expected ({n}, {n})")
        if not np.all(np.isfinite(matrix)) or matrix.min() < -GIVEN_TOLERANCE:
            raise ValueError(f"matrix {phase} has a negative or non-finite weight {matrix.min()}")
        sums = matrix.sum(axis=1)
        row = np.abs(sums - 1).argmax()
        if abs(sums[row] - 1) > GIVEN_TOLERANCE:
            raise ValueError(
                f"matrix {phase} is not stochastic: row {row} sums to {sums[row]}, not 1"
            )
        rounds.append(_color(_repaired(matrix)))
    return tuple(rounds)


def _repaired(matrix: np.ndarray) -> np.ndarray:
    """A matrix [n, n] without what rounding left in it: no negative weight, rows of sum one."""
    matrix = np.maximum(matrix, 0)
    off = ~np.eye(len(matrix), dtype=bool)
    excess = np.maximum(matrix.sum(axis=1, where=off), 1)
    return np.where(off, matrix / excess[:, None], matrix)


def _color(matrix: np.ndarray) -> Round:
    """König's edge colouring of the bipartite graph senders → receivers, by alternating paths."""
    n = len(matrix)
    support = (np.abs(matrix) > 1e-15) & ~np.eye(n, dtype=bool)
    degree = int(max(support.sum(axis=0).max(), support.sum(axis=1).max()))
    receives_from = [[-1] * degree for _ in range(n)]  # [receiver][colour]
    sends_to = [[-1] * degree for _ in range(n)]  # [sender][colour]
    for i, j in np.argwhere(support).tolist():
        free, wanted = sends_to[j].index(-1), receives_from[i].index(-1)
        # Swap the two colours along the path that leaves i by `free`; it cannot come to j,
        # where `free` ends no edge.
        path, node, colour, at_receiver = [], i, free, True
        while (partner := (receives_from if at_receiver else sends_to)[node][colour]) != -1:
            path.append((node, partner, colour) if at_receiver else (partner, node, colour))
            node, at_receiver = partner, not at_receiver
            colour = wanted if colour == free else free
        for receiver, sender, colour in path:
            receives_from[receiver][colour] = sends_to[sender][colour] = -1
        for receiver, sender, colour in path:
            other = wanted if colour == free else free
            receives_from[receiver][other], sends_to[sender][other] = sender, receiver
        receives_from[i][free], sends_to[j][free] = j, i
    exchanges = []
    for colour in range(degree):
        source = tuple(j if (j := receives_from[i][colour]) != -1 else i for i in range(n))
        weights = tuple(float(matrix[i, j]) if i != j else 0.0 for i, j in enumerate(source))
        used = {weight for i, weight in enumerate(weights) if source[i] != i}
        exchanges.append(Exchange(source, used.pop() if len(used) == 1 else weights))
    return tuple(exchanges)
