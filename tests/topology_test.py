"""Topologies: their matrices, what a period does, and what they refuse."""

import networkx
import numpy as np
import pytest

from jaxdec import topology as topologies
from tests import reference

CASES = [
    ("complete", 5, {}),
    ("ring", 7, {}),
    ("one_peer_ring", 8, {}),
    ("hypercube", 8, {}),
    ("exponential", 8, {}),
    ("exponential", 11, {}),
    ("symmetric_exponential", 6, {}),
    ("symmetric_exponential", 16, {}),
    ("one_peer_exponential", 8, {}),
    ("one_peer_exponential", 6, {}),
    ("one_peer_exponential", 16, {"symmetric": True}),
    ("alternating_exponential_ring", 8, {"local": 1}),
    ("alternating_exponential_ring", 8, {"local": 2}),
    ("alternating_exponential_ring", 12, {"local": 3}),
    ("alternating_exponential_ring", 32, {"local": 2}),
    ("star", 5, {}),
]
EVERY = [
    *((name, n, kwargs) for name, n, kwargs in CASES),
    ("isolated", 4, {}),
    ("grid", 12, {}),
    ("torus", 12, {"rows": 3}),
    ("random_matching", 8, {"period": 3}),
    ("random_matching", 7, {"bipartite": True}),
    ("erdos_renyi", 12, {"seed": 3}),
    ("base_k", 10, {"k": 2}),
    ("hierarchical", 12, {"outer": "star", "local": 3}),
    ("ring", 5, {"lazy": True}),
    ("one_peer_exponential", 8, {"mean_every": 5}),
    ("hierarchical", 8, {"outer": "ring", "local": 2, "mean_every": 3}),
]


@pytest.mark.parametrize(("name", "n", "kwargs"), CASES)
def test_matrices_are_the_reference(name, n, kwargs):
    topology = topologies.by_name(name, n, **kwargs)
    expected = reference.mixing_matrices(name, n, **kwargs)
    assert topology.period == len(expected)
    for step in range(2 * topology.period):
        np.testing.assert_allclose(
            topology.matrix(step), expected[step % len(expected)], rtol=0, atol=1e-15
        )


@pytest.mark.parametrize(("name", "n", "kwargs"), EVERY)
def test_every_topology_keeps_the_mean(name, n, kwargs):
    topology = topologies.by_name(name, n, **kwargs)
    assert topology.n == n
    for phase in range(topology.period):
        W = topology.matrix(phase)
        assert W.dtype == np.float64
        assert W.min() >= 0
        np.testing.assert_allclose(W.sum(axis=0), 1, atol=1e-12)
        np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "n", "kwargs"),
    [
        ("complete", 6, {}),
        ("one_peer_exponential", 32, {}),
        ("one_peer_exponential", 32, {"symmetric": True}),
        ("alternating_exponential_ring", 64, {"local": 4}),
    ],
)
def test_finite_time_topologies_reach_the_mean(name, n, kwargs):
    product = topologies.by_name(name, n, **kwargs).period_matrix()
    np.testing.assert_allclose(product, 1 / n, rtol=0, atol=1e-12)


def test_aer_hosts_take_turns():
    topology = topologies.alternating_exponential_ring(16, local=2)
    for step in range(0, topology.period, 2):
        even, odd = (topology.outer.matrix(step + half) for half in (0, 1))
        idle_even, idle_odd = (np.diag(W) == 1 for W in (even, odd))
        np.testing.assert_array_equal(idle_even, ~idle_odd)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_base_k_is_exact_for_any_n(k):
    for n in range(max(2, k + 1), 65):
        topology = topologies.base_k(n, k)
        np.testing.assert_allclose(topology.period_matrix(), 1 / n, rtol=0, atol=1e-12)
        for phase in range(topology.period):
            W = topology.matrix(phase)
            np.testing.assert_array_equal(W, W.T)
            assert ((W > 0).sum(axis=1) - (np.diag(W) > 0)).max() <= k
            assert len(topology.rounds[phase]) <= k


def test_base_k_takes_few_rounds():
    # Powers of k + 1 take their logarithm; any other n at most about twice that and two.
    assert [topologies.base_k(2**p, 1).period for p in range(1, 7)] == [1, 2, 3, 4, 5, 6]
    for n in range(2, 65):
        assert topologies.base_k(n, 1).period <= 2 * np.log2(n) + 2


def test_from_matrices_is_exact_and_uses_as_few_exchanges_as_the_degree():
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(2, 14))
        W = rng.random((n, n)) * (rng.random((n, n)) < rng.random()) + 0.1 * np.eye(n)
        W /= W.sum(axis=1, keepdims=True)
        topology = topologies.from_matrices([W])
        np.testing.assert_allclose(topology.matrix(0), W, rtol=0, atol=1e-14)
        support = (W > 0) & ~np.eye(n, dtype=bool)
        degree = max(support.sum(axis=0).max(), support.sum(axis=1).max())
        assert len(topology.rounds[0]) == degree


def test_from_matrices_takes_what_float32_rounded():
    W = topologies.erdos_renyi(9).matrix(0).astype(np.float32)
    W[0, W[0] == 0] -= 1e-10
    topology = topologies.from_matrices([W])
    np.testing.assert_allclose(topology.matrix(0), W, rtol=0, atol=1e-6)
    np.testing.assert_allclose(topology.matrix(0).sum(axis=1), 1, rtol=0, atol=1e-15)
    assert topology.matrix(0).min() >= 0


def test_rounds_may_be_plain_tuples():
    plain = topologies.Topology("mine", 2, (((((1, 0)), 0.5),),))
    assert plain.rounds == topologies.one_peer_exponential(2).rounds
    assert plain.rounds[0][0].source == (1, 0)


def test_a_mean_is_declared_and_checked():
    assert topologies.complete(4).is_mean(0)
    assert not topologies.ring(3).is_mean(0)
    assert topologies.hierarchical(topologies.complete(2), 2).is_mean(0)
    assert not topologies.lazy(topologies.complete(4)).is_mean(0)
    assert [topologies.with_mean(topologies.ring(4), 2).is_mean(p) for p in range(3)] == [0, 1, 0]
    with pytest.raises(ValueError, match="declared an exact mean and is none"):
        topologies.Topology("mine", 4, topologies.ring(4).rounds, means=frozenset({0}))


def test_from_matrices_reads_a_file(tmp_path):
    schedule = np.stack([topologies.ring(4).matrix(0), np.eye(4)])
    np.save(tmp_path / "w.npy", schedule)
    topology = topologies.by_name("from_matrices", 4, matrices=str(tmp_path / "w.npy"))
    assert topology.period == 2
    np.testing.assert_allclose(topology.matrix(2), schedule[0])


def test_from_networkx_matches_the_grid():
    graph = networkx.grid_2d_graph(2, 4)
    np.testing.assert_allclose(
        topologies.from_networkx(graph).matrix(0), topologies.grid(8).matrix(0), atol=1e-15
    )


def test_base_k_groups_where_that_is_shorter():
    # 6 = 2 · 3 and 12 = 4 · 3: groups of three, then across; from Takezawa et al., Base-2.
    assert [topologies.base_k(n, 1).period for n in (3, 6, 12)] == [3, 4, 5]


def test_bipartite_matchings_pair_even_with_odd():
    topology = topologies.random_matching(10, bipartite=True)
    for (exchange,) in topology.rounds:
        assert all((i - source) % 2 for i, source in enumerate(exchange.source))


def test_erdos_renyi_has_the_edges_it_promises():
    edges = [(topologies.erdos_renyi(64, seed=seed).matrix(0) > 0).sum() - 64 for seed in range(20)]
    assert np.mean(edges) / (64 * 63) == pytest.approx(2 * np.log(64) / 64, rel=0.05)


def test_random_graphs_are_seeded():
    for name in ("random_matching", "erdos_renyi"):
        first, again, other = (topologies.by_name(name, 16, seed=s) for s in (1, 1, 2))
        assert first == again
        assert first.rounds != other.rounds


def test_lazy_matching_is_lazy_of_the_matching():
    ours = topologies.random_matching(8, seed=3, bipartite=True, lazy=True)
    assert (
        ours.rounds == topologies.lazy(topologies.random_matching(8, seed=3, bipartite=True)).rounds
    )


def test_with_mean_replaces_the_round_and_keeps_phases_apart():
    topology = topologies.with_mean(topologies.complete(4), every=2)
    assert topology.rounds[0] == topology.rounds[1]
    assert topology.distinct_phases == (0, 1)
    topology = topologies.with_mean(topologies.one_peer_exponential(8), every=12)
    assert topology.period == 12
    assert topology.distinct_phases == (0, 1, 2, 11)
    np.testing.assert_allclose(topology.matrix(11), 1 / 8)


def test_topologies_are_immutable_and_hashable():
    topology = topologies.ring(4)
    with pytest.raises(AttributeError):
        topology.n = 5
    assert hash(topology) == hash(topologies.ring(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: topologies.ring(2), "n=2 must be at least 3"),
        (lambda: topologies.hypercube(6), "for any n use base_k"),
        (lambda: topologies.one_peer_exponential(6, symmetric=True), "use base_k"),
        (lambda: topologies.one_peer_ring(5), "n=5 must be even"),
        (lambda: topologies.alternating_exponential_ring(12, local=2), "power of two"),
        (lambda: topologies.alternating_exponential_ring(8, local=3), "divide n=8"),
        (lambda: topologies.grid(7), "use ring"),
        (lambda: topologies.random_matching(4, seed=-1), "seed=-1 must be at least 0"),
        (lambda: topologies.erdos_renyi(4, seed=-1), "seed=-1 must be at least 0"),
        (lambda: topologies.torus(8, rows=3), "3 rows"),
        (lambda: topologies.base_k(4, k=4), r"k=4 must be in \[1, n - 1\]"),
        (lambda: topologies.random_matching(4, period=0), "period=0 must be at least 1"),
        (lambda: topologies.erdos_renyi(50, probability=0.001), "write a larger probability"),
        (lambda: topologies.erdos_renyi(5, probability=2.0), "probability=2.0"),
        (lambda: topologies.from_matrices([[0.5, 0.4], [0.5, 0.5]]), "row 0 sums to 0.9"),
        (lambda: topologies.from_matrices([[1.5, -0.5], [0.5, 0.5]]), "negative"),
        (lambda: topologies.from_matrices([]), r"shape \(0,\)"),
        (lambda: topologies.from_matrices(np.ones((2, 2, 3)) / 3), "expected"),
        (lambda: topologies.from_matrices("none.npy"), "matrices='none.npy'"),
        (lambda: topologies.from_networkx(networkx.empty_graph(3)), "not connected"),
        (lambda: topologies.from_networkx(networkx.DiGraph([(0, 1)])), "directed"),
        (lambda: topologies.by_name("rnig", 4), "did you mean ring"),
        (lambda: topologies.by_name("ring", 4, local=2), "topology.local is set"),
        (lambda: topologies.by_name("from_matrices", 4), "topology.matrices is not set"),
        (lambda: topologies.by_name("from_matrices", 4, matrices=np.eye(3)), "n=3 nodes, not 4"),
        (lambda: topologies.with_mean(topologies.ring(4), every=0), "every=0 must be at least 1"),
        (
            lambda: topologies.with_mean(topologies.with_mean(topologies.ring(4), 2), 3),
            "already takes a mean",
        ),
        (lambda: topologies.lazy(topologies.with_mean(topologies.ring(4), 2)), "with_mean"),
        (lambda: topologies.Topology("none", 2, ()), "no rounds"),
        (
            lambda: topologies.Topology("twice", 3, ((topologies.Exchange((0, 0, 0), 0.5),),)),
            "send twice",
        ),
        (
            lambda: topologies.Topology("heavy", 2, ((topologies.Exchange((1, 0), 1.5),),)),
            "at most one",
        ),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
