"""Graphs that change from step to step, and what is built on other topologies."""

import math
import pathlib
from collections.abc import Sequence

import numpy as np

from jaxdec.topology.core import (
    Exchange,
    Round,
    Topology,
    offsets_round,
    pairs_round,
    rounds_from_matrices,
)
from jaxdec.topology.static import at_least, complete, power_of_two


def one_peer_ring(n: int) -> Topology:
    """Even steps pair (2i, 2i + 1), odd steps (2i, 2i − 1 mod n); ½ and ½.

    >>> [e.source for (e,) in one_peer_ring(4).rounds]
    [(1, 0, 3, 2), (3, 2, 1, 0)]
    """
    if n < 2 or n % 2:
        raise ValueError(
            f"topology one_peer_ring: n={n} must be even, at least 2; for any n use ring"
        )
    rounds = tuple(
        pairs_round(n, ((i, (i + step) % n) for i in range(0, n, 2))) for step in (1, -1)
    )
    return Topology(f"one_peer_ring({n})", n, rounds)


def one_peer_exponential(n: int, symmetric: bool = False) -> Topology:
    """Step t: node i averages with i − 2^(t mod ⌈log₂ n⌉), ½ and ½.

    When n is a power of two, one period gives the exact mean.

    Args:
      n: number of nodes.
      symmetric: pair j with j XOR 2^t instead, both ways; needs a power of two.

    >>> bool(np.allclose(one_peer_exponential(8).period_matrix(), 1 / 8))
    True
    """
    if symmetric:
        bits = power_of_two("one_peer_exponential(symmetric=True)", n)
        rounds = tuple(pairs_round(n, ((i, i ^ (1 << b)) for i in range(n))) for b in range(bits))
        return Topology(f"one_peer_exponential({n}, symmetric=True)", n, rounds)
    at_least("one_peer_exponential", n, 2)
    rounds = tuple(offsets_round(n, (1 << bit,), 0.5) for bit in range((n - 1).bit_length()))
    return Topology(f"one_peer_exponential({n})", n, rounds)


def alternating_exponential_ring(n: int, local: int = 1) -> Topology:
    """AER: pairs of hosts take turns at merging, so that a host's link rests every other step.

    Hosts j and j XOR 2^r meet in round r, which lasts two steps. The round's pairs are counted
    from zero: an even pair averages inside its hosts at step 2r and merges both hosts at step
    2r + 1; an odd pair the other way round. One period gives the exact mean.

    Args:
      n: number of replicas, hosts × local; the hosts a power of two, at least 2.
      local: replicas a host.

    Source: arXiv 2410.11998.

    >>> topology = alternating_exponential_ring(8, local=2)
    >>> topology.period, topology.outer.n, bool(np.allclose(topology.period_matrix(), 1 / 8))
    (4, 4, True)
    """
    name = f"alternating_exponential_ring({n}, local={local})"
    hosts = _hosts(name, n, local)
    bits = power_of_two(name, hosts, remedy="hierarchical with outer='base_k'")
    rounds = []
    for bit in range(bits):
        pairs = [(j, j ^ (1 << bit)) for j in range(hosts) if not j & (1 << bit)]
        rounds += [pairs_round(hosts, pairs[1::2]), pairs_round(hosts, pairs[0::2])]
    return _over_hosts(name, Topology(name, hosts, tuple(rounds)), local)


def random_matching(
    n: int, period: int = 8, seed: int = 0, bipartite: bool = False, lazy: bool = False
) -> Topology:
    """Seeded random perfect matchings; ½ and ½ (near-perfect at odd n: one node idles).

    Args:
      n: number of nodes.
      period: number of matchings before they repeat.
      seed: of the draw.
      bipartite: pair even nodes with odd ones only.
      lazy: ¾ and ¼ instead.

    >>> random_matching(4, period=2, seed=0).rounds[0][0].weight
    0.5
    """
    at_least("random_matching", n, 2)
    at_least("random_matching", period, 1, "period")
    at_least("random_matching", seed, 0, "seed")
    rng = np.random.default_rng(seed)
    rounds = []
    for _ in range(period):
        if bipartite:
            left, right = rng.permutation(range(0, n, 2)), rng.permutation(range(1, n, 2))
        else:
            left, right = np.array_split(rng.permutation(n)[: n - n % 2], 2)
        pairs = zip(left.tolist(), right.tolist(), strict=False)
        rounds.append(pairs_round(n, pairs, 0.25 if lazy else 0.5))
    options = ", bipartite=True" * bipartite + ", lazy=True" * lazy
    name = f"random_matching({n}, {period}, seed={seed}{options})"
    return Topology(name, n, tuple(rounds))


def hierarchical(outer: Topology, local: int) -> Topology:
    """Hosts of `local` replicas: an exact mean inside a host, `outer` between hosts.

    W = W_outer ⊗ 11ᵀ/local; replica (host h, device d) is node h · local + d.

    >>> import jaxdec
    >>> topology = hierarchical(jaxdec.topology.ring(3), local=2)
    >>> topology.n, topology.matrix(0)[0].round(3).tolist()
    (6, [0.167, 0.167, 0.167, 0.167, 0.167, 0.167])
    """
    at_least("hierarchical", local, 1, "local")
    return _over_hosts(f"hierarchical({outer.name}, local={local})", outer, local)


def _hosts(name: str, n: int, local: int) -> int:
    if local < 1 or n % local:
        raise ValueError(f"topology {name}: local={local} must be at least 1 and divide n={n}")
    return n // local


def _over_hosts(name: str, outer: Topology, local: int) -> Topology:
    n = outer.n * local
    rounds = tuple(_flatten(outer, phase, local) for phase in range(outer.period))
    return Topology(name, n, rounds, outer, local, outer.means, outer.mean_every)


def _flatten(outer: Topology, phase: int, local: int) -> Round:
    """The exchanges between replicas that make up one exchange between hosts."""

    def over_replicas(source: Sequence[int], shift: int) -> tuple[int, ...]:
        return tuple(h * local + (d + shift) % local for h in source for d in range(local))

    def spread(weights: np.ndarray) -> float | tuple[float, ...]:
        if np.ptp(weights) == 0:
            return float(weights[0]) / local
        return tuple(np.repeat(weights / local, local).tolist())

    hosts = range(outer.n)
    own = np.diag(outer.matrix(phase))
    inside = [Exchange(over_replicas(hosts, shift), spread(own)) for shift in range(1, local)]
    between = []
    for source, weight in outer.rounds[phase]:
        for shift in range(local):
            replicas = over_replicas(source, shift)
            idle = np.repeat(np.equal(source, hosts), local)
            replicas = tuple(np.where(idle, np.arange(len(replicas)), replicas).tolist())
            between.append(Exchange(replicas, spread(np.broadcast_to(np.asarray(weight), outer.n))))
    return tuple(inside + between)


def lazy(topology: Topology) -> Topology:
    """(I + W)/2 at every step: all eigenvalues of a symmetric W become non-negative.

    >>> import jaxdec
    >>> lazy(jaxdec.topology.one_peer_ring(2)).matrix(0).tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    """

    def halve(weight: float | tuple[float, ...]) -> float | tuple[float, ...]:
        return tuple(w / 2 for w in weight) if isinstance(weight, tuple) else weight / 2

    if topology.mean_every is not None:
        raise ValueError(
            f"lazy({topology.name}) would halve its exact means; write with_mean(lazy(...))"
        )
    rounds = tuple(
        tuple(Exchange(source, halve(weight)) for source, weight in exchanges)
        for exchanges in topology.rounds
    )
    return Topology(f"lazy({topology.name})", topology.n, rounds)


def with_mean(topology: Topology, every: int) -> Topology:
    """An exact mean in place of the round at steps every − 1, 2 · every − 1, ….

    SlowMo, Gossip-PGA and local SGD are built on it.

    >>> import jaxdec
    >>> topology = with_mean(jaxdec.topology.one_peer_exponential(4), every=3)
    >>> topology.period, [topology.is_mean(phase) for phase in range(3)]
    (6, [False, False, True])
    """
    at_least("with_mean", every, 1, "every")
    if topology.mean_every is not None:
        raise ValueError(f"{topology.name} already takes a mean every {topology.mean_every} steps")
    name = f"with_mean({topology.name}, every={every})"
    if topology.outer is not None:
        return _over_hosts(name, with_mean(topology.outer, every), topology.local)
    (mean,) = complete(topology.n).rounds
    period = math.lcm(topology.period, every)
    taken = {step for step in range(period) if (step + 1) % every == 0}
    rounds = tuple(
        mean if step in taken else topology.rounds[step % topology.period] for step in range(period)
    )
    means = taken | {step for step in range(period) if topology.is_mean(step)}
    return Topology(name, topology.n, rounds, means=frozenset(means), mean_every=every)


def from_matrices(matrices: Sequence[np.ndarray] | np.ndarray | str | pathlib.Path) -> Topology:
    """Your own schedule of mixing matrices, its edges coloured into the fewest exchanges.

    Args:
      matrices: [period] matrices of [n, n], or one, or the path of a .npy file of either; rows
        are non-negative and sum to one, within 1e-6.

    Raises:
      ValueError: the file cannot be read, or a matrix is not stochastic.

    >>> from_matrices([[0.5, 0.5], [0.5, 0.5]]).rounds
    ((Exchange(source=(1, 0), weight=0.5),),)
    """
    if isinstance(matrices, str | pathlib.Path):
        try:
            loaded = np.load(matrices, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"from_matrices: cannot read matrices={str(matrices)!r} as a .npy file of shape "
                f"[n, n] or [period, n, n]: {error}"
            ) from error
    else:
        loaded = np.asarray(matrices, np.float64)
    if not isinstance(loaded, np.ndarray) or loaded.dtype.kind not in "fiub":
        kind = getattr(loaded, "dtype", type(loaded).__name__)
        raise ValueError(f"from_matrices: matrices must be one array of real numbers, not {kind}")
    if loaded.ndim not in (2, 3):
        raise ValueError(f"from_matrices: shape {loaded.shape} must be [n, n] or [period, n, n]")
    stack = list(loaded if loaded.ndim == 3 else loaded[None])
    n = loaded.shape[-1]
    return Topology(f"from_matrices({n}, period={len(stack)})", n, rounds_from_matrices(stack))
