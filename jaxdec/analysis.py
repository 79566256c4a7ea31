"""What a topology does to disagreement, and whether an algorithm is stable on it."""

import functools
from collections.abc import Callable

import numpy as np

from jaxdec import algorithms
from jaxdec.topology import Topology, by_name, is_connected, lazy
from jaxdec.topology.core import GIVEN_TOLERANCE, TOLERANCE

# At zero gradient every algorithm is a linear map of (X, buffer). Its blocks, one step, from the
# mixing matrix W, momentum β and (quasi-global momentum) μ; buffers are scaled by γ, so that no
# map depends on the learning rate.
Step = Callable[[np.ndarray, float, float], np.ndarray]


def _gossip_only(W: np.ndarray, beta: float, mu: float) -> np.ndarray:
    """X⁺ = W X; also for I + α (W − I) with α in (0, 1], which is stable where W is."""
    del beta, mu
    return W


def _local_momentum(W: np.ndarray, beta: float, mu: float) -> np.ndarray:
    """M ← β m; X⁺ = W (X − m)."""
    del mu
    eye = np.eye(len(W))
    return np.block([[W, -beta * W], [0 * W, beta * eye]])


def _awc_momentum(W: np.ndarray, beta: float, mu: float) -> np.ndarray:
    """M ← β m; X⁺ = W X − m."""
    del mu
    eye = np.eye(len(W))
    return np.block([[W, -beta * eye], [0 * W, beta * eye]])


def _averaged_momentum(W: np.ndarray, beta: float, mu: float) -> np.ndarray:
    """M ← W β m; X⁺ = W (X − m)."""
    del mu
    return np.block([[W, -beta * W @ W], [0 * W, beta * W]])


def _quasi_global(W: np.ndarray, beta: float, mu: float) -> np.ndarray:
    """X⁺ = W (X − β m); m ← μ m + (1 − μ)(X − X⁺)."""
    eye = np.eye(len(W))
    return np.block(
        [[W, -beta * W], [(1 - mu) * (eye - W), mu * eye + (1 - mu) * beta * W]],
    )


def _d2(W: np.ndarray, beta: float, mu: float) -> np.ndarray:
    """X⁺ = W (2X − X₋)."""
    del beta, mu
    eye = np.eye(len(W))
    return np.block([[2 * W, -W], [eye, 0 * W]])


def _decentlam(W: np.ndarray, beta: float, mu: float) -> np.ndarray:
    """V ← β v + X − W X; X⁺ = X − v."""
    del mu
    eye = np.eye(len(W))
    return np.block([[W, -beta * eye], [eye - W, beta * eye]])


def _decentlam_nesterov(W: np.ndarray, beta: float, mu: float) -> np.ndarray:
    """V ← β v + X − W X; X⁺ = X − β v − (X − W X)."""
    del mu
    eye = np.eye(len(W))
    return np.block([[W - beta * (eye - W), -(beta**2) * eye], [eye - W, beta * eye]])


_STEPS: dict[str, Step] = {
    "accumulated_adamw": _gossip_only,
    "awc_dmsgd": _awc_momentum,
    "choco": _gossip_only,
    "d2_dmsgd": _d2,
    "da_dmsgd": _averaged_momentum,
    "decentlam": _decentlam,
    "decentlam_nesterov": _decentlam_nesterov,
    "decentralized_adamw": _gossip_only,
    "deep_squeeze": _gossip_only,
    "dmsgd": _local_momentum,
    "dsgd": _gossip_only,
    "qg_dmsgd": _quasi_global,
    "slowmo": _local_momentum,
}


def consensus_factor(topology: Topology) -> float:
    """‖W_{p−1} … W_0 − 11ᵀ/n‖₂: what is left of disagreement after one period.

    >>> import jaxdec
    >>> round(consensus_factor(jaxdec.topology.one_peer_ring(8)), 3)
    0.707
    """
    product = topology.period_matrix() - 1 / topology.n
    return float(np.linalg.norm(product, 2))


def spectral_gap(topology: Topology) -> float:
    """1 − ρ, ρ = consensus_factor^(1/period): of a static W, one less its second singular value.

    >>> import jaxdec
    >>> round(spectral_gap(jaxdec.topology.exponential(16)), 3)
    0.4
    """
    return 1 - consensus_factor(topology) ** (1 / topology.period)


def spectral_radius(
    algorithm: str,
    topology: Topology,
    momentum: float | None = None,
    *,
    mu: float | None = None,
    nesterov: bool = False,
) -> float:
    """How fast an algorithm's disagreement grows or shrinks over a period, a step, no gradient.

    The largest |eigenvalue|^(1/period) of one period's linear map on disagreement (all
    nodes' models and buffers, less what is the same on all nodes). Below one: stable, at any small
    enough learning rate; one or above: at none.

    Args:
      algorithm: a name of `jaxdec.algorithms`; `allreduce` does not gossip and has none.
      topology: the mixing schedule.
      momentum: β; None: the algorithm's default.
      mu: of `qg_dmsgd`; None: β.
      nesterov: of `decentlam`.

    Raises:
      ValueError: an algorithm without a mixing matrix.

    >>> import jaxdec
    >>> ring, directed = jaxdec.topology.ring(8), jaxdec.topology.exponential(8)
    >>> round(spectral_radius("decentlam", ring, 0.9), 3)
    0.949
    >>> round(spectral_radius("decentlam", directed, 0.9), 3)
    1.237
    """
    name = f"{algorithm}_nesterov" if nesterov else algorithm
    if name not in _STEPS:
        raise ValueError(f"{name!r} mixes no models; choices: {', '.join(sorted(_STEPS))}")
    step = _STEPS[name]
    if momentum is None:
        momentum = _default_momentum(algorithm)
    disagreement = _disagreement_basis(topology.n)
    maps = []
    for phase in range(topology.period):
        W = disagreement.T @ topology.matrix(phase) @ disagreement
        maps.append(step(W, momentum, momentum if mu is None else mu))
    product = functools.reduce(lambda product, matrix: matrix @ product, maps)
    if not product.size:
        return 0.0
    return float(np.abs(np.linalg.eigvals(product)).max() ** (1 / topology.period))


def _default_momentum(algorithm: str) -> float:
    return algorithms.default_of(algorithm, "momentum") or 0.0


def _disagreement_basis(n: int) -> np.ndarray:
    """An orthonormal basis [n, n − 1] of what sums to zero over nodes."""
    return np.linalg.svd(np.ones((1, n)))[2][1:].T


def largest_stable_momentum(
    algorithm: str, topology: Topology, *, mu: float | None = None, nesterov: bool = False
) -> float:
    """The largest β below one at which `spectral_radius` is below one, to 0.001.

    >>> import jaxdec
    >>> round(largest_stable_momentum("decentlam", jaxdec.topology.one_peer_exponential(8)), 2)
    0.71
    """
    low, high = 0.0, 1.0
    while high - low > 1e-3:
        beta = (low + high) / 2
        radius = spectral_radius(algorithm, topology, beta, mu=mu, nesterov=nesterov)
        low, high = (beta, high) if radius < 1 - TOLERANCE else (low, beta)
    return low


def check(
    algorithm: str,
    topology: Topology,
    momentum: float | None = None,
    *,
    mu: float | None = None,
    nesterov: bool = False,
) -> None:
    """Refuse a topology that the algorithm cannot use, and name one that it can.

    Args:
      algorithm: a name of `jaxdec.algorithms`.
      topology: the mixing schedule.
      momentum: β; None: the algorithm's default.
      mu: of `qg_dmsgd`; None: β.
      nesterov: of `decentlam`.

    Raises:
      ValueError: the topology is not connected over its period, or not doubly stochastic; or lacks
        what the algorithm needs of it (static, symmetric, λ_min); or the pair is unstable.

    >>> import jaxdec
    >>> check("decentlam", jaxdec.topology.one_peer_exponential(8), momentum=0.9)
    Traceback (most recent call last):
    ValueError: decentlam with momentum=0.9 is unstable on one_peer_exponential(8): ...
    """
    if algorithm == "allreduce" or topology.n == 1:
        return
    matrices = [topology.matrix(phase) for phase in topology.distinct_phases]
    if not is_connected(sum(np.abs(W) for W in matrices)):
        raise ValueError(
            f"{topology.name} is not connected over its period: some nodes never hear of others; "
            "add edges, or use ring or one_peer_exponential"
        )
    for W in matrices:
        off = np.abs(W.sum(axis=0) - 1).max()
        if off > GIVEN_TOLERANCE:
            raise ValueError(
                f"{topology.name} is not doubly stochastic (a column is off by {off:.2g}), so "
                f"{algorithm} would not keep the mean model; give it columns that sum to one"
            )
    if algorithm in ("choco", "d2_dmsgd"):
        _check_static_symmetric(algorithm, topology, matrices)
    if algorithm == "d2_dmsgd":
        _check_d2(topology, matrices[0])
    if momentum is None:
        momentum = _default_momentum(algorithm)
    radius = spectral_radius(algorithm, topology, momentum, mu=mu, nesterov=nesterov)
    if radius >= 1 - TOLERANCE:
        raise ValueError(
            f"{algorithm} with momentum={momentum:g} is unstable on {topology.name}: the spectral "
            f"radius is {radius:.4f}, and must be below 1; "
            + _remedy(algorithm, topology, momentum, mu, nesterov)
        )


def _check_static_symmetric(algorithm: str, topology: Topology, matrices: list[np.ndarray]) -> None:
    remedy = "use a static symmetric graph such as lazy ring, grid or symmetric_exponential"
    if len(matrices) > 1:
        raise ValueError(
            f"{algorithm} needs a static graph; {topology.name} changes over {topology.period} "
            f"steps; {remedy}"
        )
    (W,) = matrices
    if np.abs(W - W.T).max() > TOLERANCE:
        raise ValueError(f"{algorithm} needs a symmetric graph; {topology.name} is not; {remedy}")


def _check_d2(topology: Topology, W: np.ndarray) -> None:
    smallest = np.linalg.eigvalsh(W)[0]
    if smallest <= -1 / 3 + TOLERANCE:
        raise ValueError(
            f"d2_dmsgd needs λ_min > -1/3; {topology.name} has {smallest:.4f}; "
            "use lazy of it (topology.lazy=True)"
        )


def _remedy(
    algorithm: str, topology: Topology, momentum: float, mu: float | None, nesterov: bool
) -> str:
    def is_stable(other: Topology) -> bool:
        radius = spectral_radius(algorithm, other, momentum, mu=mu, nesterov=nesterov)
        return radius < 1 - TOLERANCE

    remedies = []
    largest = largest_stable_momentum(algorithm, topology, mu=mu, nesterov=nesterov)
    if 0.01 < largest < momentum:
        remedies.append(f"momentum up to {int(largest * 100) / 100:g}")
    for name in ("ring", "symmetric_exponential"):
        if topology.n < 3:
            break
        for other in (by_name(name, topology.n), lazy(by_name(name, topology.n))):
            if is_stable(other):
                remedies.append(f"topology {other.name}")
                break
    return "use " + " or ".join(remedies) if remedies else "use another topology"
