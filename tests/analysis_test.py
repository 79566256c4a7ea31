"""Spectral figures against published and closed forms, and stability against running it."""

import numpy as np
import pytest

import jaxdec
from jaxdec import analysis
from jaxdec import topology as topologies
from tests import reference

# Largest stable β of DecentLaM.
LARGEST = [
    (topologies.exponential(8), 0.52),
    (topologies.exponential(16), 0.50),
    (topologies.exponential(64), 0.53),
    (topologies.one_peer_exponential(8), 0.705),
    (topologies.one_peer_exponential(16), 0.555),
    (topologies.one_peer_exponential(8, symmetric=True), 0.71),
    (topologies.alternating_exponential_ring(8, local=2), 0.54),
    (topologies.alternating_exponential_ring(16, local=2), 0.515),
]


@pytest.mark.parametrize(("topology", "beta"), LARGEST, ids=lambda x: getattr(x, "name", None))
def test_largest_stable_momentum(topology, beta):
    found = analysis.largest_stable_momentum("decentlam", topology)
    assert found == pytest.approx(beta, abs=0.006)


@pytest.mark.parametrize("n", [3, 5, 8, 16, 64])
def test_symmetric_graphs_are_stable_at_any_momentum(n):
    for topology in (topologies.ring(n), topologies.symmetric_exponential(n)):
        assert analysis.largest_stable_momentum("decentlam", topology) >= 0.998


def test_radius_of_decentlam_is_that_of_its_quadratic():
    topology, beta = topologies.grid(8), 0.9
    worst = max(
        np.abs(np.roots([1, -(t + beta), beta])).max()
        for t in np.linalg.eigvalsh(topology.matrix(0))[:-1]
    )
    assert analysis.spectral_radius("decentlam", topology, beta) == pytest.approx(worst)


def test_spectral_gap_of_the_exponential_graph():
    for n in (6, 8, 16, 30):
        rho = 1 - 2 / (2 + np.floor(np.log2(n - 1)))
        gap = analysis.spectral_gap(topologies.exponential(n))
        assert gap == pytest.approx(1 - rho)


def test_spectral_gap_is_a_step_s():
    topology = topologies.one_peer_ring(8)
    assert analysis.spectral_gap(topology) == pytest.approx(1 - 0.5**0.25, abs=1e-6)


def test_nesterov_needs_a_larger_smallest_eigenvalue():
    """Its bound: λ_min > −1/(1 + 2β); the 2 × 4 mesh has −0.384."""
    mesh = topologies.grid(8)
    smallest = np.linalg.eigvalsh(mesh.matrix(0))[0]
    largest = analysis.largest_stable_momentum("decentlam", mesh, nesterov=True)
    assert largest == pytest.approx((-1 / smallest - 1) / 2, abs=0.002)
    assert analysis.largest_stable_momentum("decentlam", mesh) > 0.99
    analysis.check("decentlam", mesh, 0.9)
    with pytest.raises(ValueError, match=r"momentum up to 0.8"):
        analysis.check("decentlam", mesh, 0.9, nesterov=True)


def test_consensus_factors():
    assert analysis.consensus_factor(topologies.one_peer_ring(8)) == pytest.approx(0.7071, abs=1e-4)
    for topology in (topologies.one_peer_exponential(8), topologies.base_k(7)):
        assert analysis.consensus_factor(topology) < 1e-12


STABILITY = [
    ("dmsgd", {}),
    ("awc_dmsgd", {}),
    ("da_dmsgd", {}),
    ("qg_dmsgd", {}),
    ("decentlam", {}),
    ("decentlam", {"nesterov": True}),
    ("d2_dmsgd", {}),
]
GRAPHS = (
    topologies.ring(5),
    topologies.lazy(topologies.ring(8)),
    topologies.exponential(8),
    topologies.one_peer_exponential(8),
    topologies.star(6),
)


@pytest.mark.parametrize(("name", "kwargs"), STABILITY, ids=str)
@pytest.mark.parametrize("topology", GRAPHS, ids=lambda t: t.name)
def test_radius_is_the_growth_that_the_oracle_shows(name, kwargs, topology):
    """With no gradient after the first, disagreement grows as radius^steps."""
    beta, n = 0.8, topology.n
    radius = analysis.spectral_radius(name, topology, beta, **kwargs)
    rng = np.random.default_rng(0)
    kick = rng.standard_normal((n, 3))
    steps = 60 * topology.period
    models = reference.trajectory(
        name,
        topology.matrix,
        rng.standard_normal((n, 3)),
        lambda X, t: kick if t == 0 else 0 * X,
        lambda t: 1.0,
        steps,
        momentum=beta,
        **kwargs,
    )
    apart = [np.linalg.norm(X - X.mean(axis=0)) for X in models]
    half = steps // 2
    growth = (apart[-1] / apart[half]) ** (1 / half)
    if radius < 1 - 1e-9:  # repeated eigenvalues decay late
        assert apart[-1] < 1e-12 or growth < min(1, radius + 0.1)
    else:
        assert growth == pytest.approx(radius, rel=0.02)


@pytest.mark.parametrize(
    ("algorithm", "topology", "momentum", "message"),
    [
        ("decentlam", topologies.exponential(8), 0.9, r"radius is 1.2375.*use momentum up to 0.51"),
        ("decentlam", topologies.one_peer_exponential(8), 0.9, r"topology ring\(8\)"),
        ("d2_dmsgd", topologies.ring(8), 0.9, "topology.lazy=True"),
        ("d2_dmsgd", topologies.one_peer_ring(8), 0.9, "static"),
        ("d2_dmsgd", topologies.exponential(8), 0.9, "symmetric"),
        ("dsgd", topologies.isolated(4), 0.0, "not connected over its period"),
        ("dsgd", topologies.from_matrices([[0, 1], [1, 0]]), 0.0, "radius is 1.0000"),
        (
            "dsgd",
            topologies.from_matrices([[0.5, 0.5], [0.25, 0.75]]),
            0.0,
            "not doubly stochastic",
        ),
    ],
    ids=str,
)
def test_check_refuses_and_names_a_remedy(algorithm, topology, momentum, message):
    with pytest.raises(ValueError, match=message):
        analysis.check(algorithm, topology, momentum)


def test_check_lets_sound_pairs_pass():
    analysis.check("decentlam", topologies.ring(8), 0.9)
    analysis.check("decentlam", topologies.one_peer_ring(8), 0.9)
    analysis.check("decentlam", topologies.one_peer_exponential(8), 0.7)
    analysis.check("d2_dmsgd", topologies.lazy(topologies.ring(8)), 0.9)
    analysis.check("qg_dmsgd", topologies.one_peer_exponential(8), 0.9)
    analysis.check("allreduce", topologies.isolated(8))
    for topology in (topologies.random_matching(8), topologies.star(8)):
        analysis.check("accumulated_adamw", topology)


def test_momentum_left_out_is_the_algorithms_default():
    ring, directed = topologies.ring(8), topologies.exponential(8)
    assert analysis.spectral_radius("decentlam", ring) == pytest.approx(0.9**0.5)
    with pytest.raises(ValueError, match=r"decentlam with momentum=0.9 is unstable"):
        analysis.check("decentlam", directed)
    analysis.check("dsgd", directed)


def test_quasi_global_momentum_has_its_own_decay():
    topology = topologies.one_peer_exponential(8)
    radii = [analysis.spectral_radius("qg_dmsgd", topology, 0.9, mu=mu) for mu in (0.2, 0.9)]
    assert radii[0] != pytest.approx(radii[1], abs=0.01)
    assert analysis.spectral_radius("qg_dmsgd", topology, 0.9) == radii[1]


def test_slowmo_is_dmsgd_between_its_means():
    """At a mean of every 6th step no disagreement of the models is left, only of the momenta."""
    topology = topologies.with_mean(topologies.ring(8), every=6)
    ours, base = (analysis.spectral_radius(name, topology, 0.9) for name in ("slowmo", "dmsgd"))
    assert ours == base == pytest.approx(0.9, abs=1e-6)
    assert analysis.spectral_radius("awc_dmsgd", topology, 0.9) == pytest.approx(0.9, abs=1e-6)


@pytest.mark.parametrize(("off", "refused"), [(1e-7, False), (1e-5, True)])
def test_columns_may_be_off_by_what_float32_rounds(off, refused):
    W = np.array([[0.5, 0.5], [0.5 + off, 0.5 - off]])
    topology = topologies.from_matrices([W])
    if refused:
        with pytest.raises(ValueError, match="not doubly stochastic"):
            analysis.check("dsgd", topology)
    else:
        analysis.check("dsgd", topology)


def test_unknown_algorithm_is_named():
    with pytest.raises(ValueError, match="'allreduce' mixes no models"):
        analysis.spectral_radius("allreduce", jaxdec.topology.ring(4))
