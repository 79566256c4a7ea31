"""Where full-gradient least squares ends: with momentum, without its bias, and compressed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdec
from tests import reference

N, RATE = 8, 1e-3
A, B = reference.least_squares(N, rows=50, dim=30, noise=0.1, seed=0)
OPTIMUM = reference.optimum(A, B)
MESH = jaxdec.topology.grid(N)


def _error(models):
    return np.mean(np.sum((models - OPTIMUM) ** 2, axis=1)) / np.sum(OPTIMUM**2)


@functools.cache
def _limit(name, topology, steps=30_000, **hyperparameters):
    """The models after many steps, all in one compiled loop."""
    with jax.enable_x64(True):
        gossip = jaxdec.Gossip(topology)
        tx = jaxdec.algorithms.by_name(name, gossip, learning_rate=RATE, **hyperparameters)

        def run(a, b):
            x = jnp.zeros(a.shape[1])

            def body(_, carry):
                x, state = carry
                updates, state = tx.update(a.T @ (a @ x - b), state, x, phase=0)
                return x + updates, state

            return jax.lax.fori_loop(0, steps, body, (x, tx.init(x)))[0]

        models = jaxdec.nodes.simulate(run, donate_argnums=())(jnp.asarray(A), jnp.asarray(B))
        return np.asarray(models)


@functools.cache
def _fixed_point(rate, order):
    return reference.fixed_point(A, B, MESH.matrix(0), rate, order)


@pytest.mark.parametrize("beta", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("name", ["decentlam", "qg_dmsgd"])
def test_limit_is_that_of_atc_dsgd_whatever_the_momentum(name, beta):
    ours = _error(_limit(name, MESH, momentum=beta))
    assert ours == pytest.approx(_error(_fixed_point(RATE, "atc")), rel=1e-3)
    assert ours == pytest.approx(_error(_limit("dsgd", MESH, order="atc")), rel=1e-3)


@pytest.mark.parametrize(("beta", "nesterov"), [(0.5, False), (0.9, False), (0.3, True)])
def test_overlapping_decentlam_ends_where_cta_dsgd_does(beta, nesterov):
    models = _limit("decentlam", MESH, momentum=beta, order="awc", nesterov=nesterov)
    np.testing.assert_allclose(models, _fixed_point(RATE, "awc"), rtol=0, atol=1e-9)


@pytest.mark.parametrize("beta", [0.5, 0.8, 0.9])
@pytest.mark.parametrize(("name", "order"), [("dmsgd", "atc"), ("awc_dmsgd", "awc")])
def test_momentum_amplifies_the_bias_to_that_of_a_larger_rate(name, order, beta):
    models = _limit(name, MESH, momentum=beta)
    expected = _fixed_point(RATE / (1 - beta), order)
    assert _error(models) == pytest.approx(_error(expected), rel=1e-3)
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-9)
    assert _error(models) > 2 * _error(_fixed_point(RATE, order))


@pytest.mark.parametrize("beta", [0.5, 0.8, 0.9])
def test_d2_reaches_the_optimum_itself(beta):
    models = _limit("d2_dmsgd", jaxdec.topology.lazy(MESH), momentum=beta)
    assert _error(models) <= 1e-18


def _compressed_limit(rate, order):
    W = np.eye(N) + rate * (MESH.matrix(0) - np.eye(N))
    return reference.fixed_point(A, B, W, RATE, order)


TENTH = dict(compressor="top_k", keep=0.1)


@pytest.mark.parametrize("order", ["atc", "awc"])
def test_choco_reaches_the_limit_of_what_it_compresses(order):
    models = _limit("choco", MESH, steps=1000, order=order, consensus_rate=0.3, **TENTH)
    np.testing.assert_allclose(models, _compressed_limit(0.3, order), rtol=0, atol=1e-9)


def test_choco_with_a_tenth_of_the_entries_diverges_at_a_rate_of_one():
    assert _error(_limit("choco", MESH, steps=500, consensus_rate=1.0, **TENTH)) > 1e3


def test_deep_squeeze_stays_as_far_from_its_limit_as_its_rate_is_large():
    """It compresses the models themselves, whose entries never vanish."""
    away = []
    for rate in (0.005, 0.02):
        models = _limit("deep_squeeze", MESH, steps=2000, consensus_rate=rate, **TENTH)
        away.append(np.linalg.norm(models - _compressed_limit(rate, "atc")))
    assert away[1] / away[0] == pytest.approx(4, rel=0.2)
    assert away[0] < 0.05 * np.linalg.norm(OPTIMUM)
