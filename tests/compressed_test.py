"""CHOCO and DeepSqueeze: against the oracle, what they conserve, and what they send."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdec
from jaxdec import analysis, wire
from tests import hlo, lifts, reference

N, DIM, STEPS, RATE = 8, 40, 20, 2e-3
A, B = reference.least_squares(N, rows=12, dim=DIM, noise=0.5, seed=0)
X0 = np.random.default_rng(1).standard_normal((N, DIM))
KEY = jax.random.key(3)
RING = jaxdec.topology.ring(N)


def _step_key(t):
    return jax.random.fold_in(jax.random.fold_in(KEY, t), 0)


def _int8(V, t):
    return reference.int8(V, np.asarray(jax.random.uniform(_step_key(t), (DIM,), np.float64)))


def _random_k(V, t):
    kept = np.asarray(jax.random.choice(_step_key(t), DIM, (4,), replace=False))
    return V * np.isin(np.arange(DIM), kept)


# What the package is told, and how the oracle does it.
COMPRESSORS = {
    "none": ({}, lambda V, t: V),
    "top_k": (dict(compressor="top_k", keep=0.1), lambda V, t: reference.top_k(V, 4)),
    "random_k": (dict(compressor="random_k", keep=0.1), _random_k),
    "int8": (dict(compressor="int8"), _int8),
}


@pytest.mark.parametrize("lift", lifts.LIFTS)
@pytest.mark.parametrize(
    ("name", "order", "compressor", "graph"),
    [
        ("choco", "atc", "top_k", "ring"),
        ("choco", "atc", "int8", "ring"),
        ("choco", "awc", "random_k", "ring"),
        ("choco", "awc", "none", "complete"),
        ("deep_squeeze", None, "top_k", "ring"),
    ],
)
def test_equals_oracle(name, order, compressor, graph, lift):
    topology, matrices = jaxdec.topology.by_name(graph, N), reference.mixing_matrices(graph, N)
    ours, compress = COMPRESSORS[compressor]
    fields = dict(consensus_rate=0.3, weight_decay=0.05, clip_norm=30.0)
    fields |= {} if order is None else {"order": order}
    with jax.enable_x64(True):
        tx = jaxdec.algorithms.by_name(name, jaxdec.Gossip(topology), RATE, **fields, **ours)
        models = lifts.run(tx, topology, lift, X0, (A, B), STEPS, key=KEY)
        expected = reference.trajectory(
            name,
            lambda t: matrices[t % len(matrices)],
            X0,
            reference.least_squares_gradient(A, B),
            lambda t: RATE,
            STEPS,
            compress=compress,
            **fields,
        )
    for t in range(STEPS + 1):
        scale = np.abs(expected[t]).max()
        np.testing.assert_allclose(models[t], expected[t], rtol=0, atol=1e-10 * scale)


METHODS = {
    "choco atc": ("choco", dict(order="atc", compressor="top_k", keep=0.1)),
    "choco awc": ("choco", dict(order="awc", compressor="int8")),
    "deep_squeeze": ("deep_squeeze", dict(compressor="int8")),
}


def test_identical_replicas_stay_identical_and_differing_ones_keep_their_mean():
    """All of them in one program, 300 steps of one constant gradient on all nodes."""
    txs = {
        method: jaxdec.algorithms.by_name(
            name, jaxdec.Gossip(RING), 1e-3, consensus_rate=0.1, **fields
        )
        for method, (name, fields) in METHODS.items()
    }
    gradient = np.random.default_rng(2).standard_normal(DIM).astype(np.float32)

    def steps(x):
        def body(t, carry):
            key = jax.random.fold_in(KEY, t)
            after = {}
            for method, (models, state) in carry.items():
                grads = jax.tree.map(lambda x: jnp.asarray(gradient), models)
                updates, state = txs[method].update(grads, state, models, phase=0, key=key)
                after[method] = (optax.apply_updates(models, updates), state)
            return after

        carry = jax.lax.fori_loop(0, 300, body, {m: (x, tx.init(x)) for m, tx in txs.items()})
        return {method: models for method, (models, _) in carry.items()}

    differing = X0.astype(np.float32)
    start = {"same": np.broadcast_to(differing[0], differing.shape), "differing": differing}
    for method, end in lifts.lift(steps, "simulate", N)(start).items():
        same = np.asarray(end["same"])
        np.testing.assert_array_equal(same, np.broadcast_to(same[0], same.shape), method)
        expected = differing.mean(axis=0, dtype=np.float64) - 0.3 * gradient
        mean = np.asarray(end["differing"], np.float64).mean(axis=0)
        # 300 float32 steps of a model round it by about this much.
        np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-6 * np.abs(differing).max())


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("choco", dict(compressor="top_k", keep=0.1)),
        ("deep_squeeze", dict(compressor="random_k", keep=0.1)),
    ],
)
def test_compiled_step_permutes_the_messages_and_nothing_else(name, fields):
    gossip = jaxdec.Gossip(RING)
    tx = jaxdec.algorithms.by_name(name, gossip, RATE, consensus_rate=0.3, **fields)
    mesh = jaxdec.nodes.make_mesh(node=N)
    params = {"kernel": jnp.ones((N, 16, 20)), "bias": jnp.ones((N, 3))}
    state = jax.vmap(tx.init)(params)

    def step(params, state):
        updates, state = tx.update(params, state, params, phase=0, key=KEY)
        return optax.apply_updates(params, updates), state

    compiled = jaxdec.nodes.on_mesh(step, mesh, donate_argnums=()).lower(params, state).compile()
    one = jax.tree.map(lambda x: x[0], params)
    compressor = {k: v for k, v in fields.items() if k in ("compressor", "keep")}
    sent = jaxdec.algorithms.bytes_sent(name, gossip, one, 0, **compressor)
    message = {"top_k": 8 * (32 + 1), "random_k": 4 * (32 + 1)}
    assert sent == 2 * message[fields["compressor"]]
    assert hlo.collectives(compiled.as_text()) == {"collective-permute": sent}


def test_two_byte_parameters_have_a_state_of_four():
    fields = dict(consensus_rate=0.3, compressor="top_k", keep=0.1)
    txs = [
        jaxdec.algorithms.choco(jaxdec.Gossip(RING), RATE, **fields),
        jaxdec.algorithms.deep_squeeze(jaxdec.Gossip(RING), RATE, **fields),
    ]

    def step(x):
        with jax.numpy_dtype_promotion("strict"):
            before = [tx.init(x) for tx in txs]
            return before, [tx.update(x, state, x) for tx, state in zip(txs, before, strict=True)]

    before, found = lifts.lift(step, "simulate", N)(jnp.asarray(X0, jnp.bfloat16))
    for state, (updates, after) in zip(before, found, strict=True):
        assert updates.dtype == jnp.bfloat16
        assert {leaf.dtype for leaf in jax.tree.leaves(after.inner)} == {np.dtype(np.float32)}
        described = [jax.tree.map(lambda x: (x.shape, x.dtype), s) for s in (state, after)]
        assert described[0] == described[1]
    assert wire.message_bytes(wire.TopK(0.1), jnp.zeros(DIM, jnp.bfloat16)) == 4 * (2 + 4)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("choco", {}, "algorithm.consensus_rate is not set; algorithm 'choco' needs it"),
        ("deep_squeeze", {"consensus_rate": 0.0}, r"consensus_rate=0.0 must be in \(0, 1\]"),
        ("choco", {"consensus_rate": 0.3, "order": "cta"}, 'write "awc" or "atc"'),
        ("choco", {"consensus_rate": 0.3, "compressor": "top_k"}, "needs keep"),
        ("choco", {"consensus_rate": 0.3, "keep": 0.1}, "keep=0.1 is set, but compressor=None"),
    ],
)
def test_bad_fields_are_named(name, fields, message):
    with pytest.raises(ValueError, match=message):
        jaxdec.algorithms.by_name(name, jaxdec.Gossip(RING), 0.1, **fields)


def test_bad_gossip_is_named():
    with pytest.raises(ValueError, match=r"wire_dtype='int8' is set, but .* compressor='int8'"):
        jaxdec.algorithms.choco(jaxdec.Gossip(RING, wire_dtype="int8"), 0.1, 0.3)
    hosts = jaxdec.topology.hierarchical(RING, 2)
    with pytest.raises(ValueError, match="local_axis='local' is set, but deep_squeeze"):
        jaxdec.algorithms.deep_squeeze(jaxdec.Gossip(hosts, local_axis="local"), 0.1, 0.3)
    changing = jaxdec.Gossip(jaxdec.topology.one_peer_exponential(N))
    with pytest.raises(
        ValueError, match=r"static graph; one_peer_exponential.* changes over 3 steps"
    ):
        jaxdec.algorithms.choco(changing, 0.1, 0.3)


def test_choco_needs_a_symmetric_graph():
    with pytest.raises(ValueError, match="choco needs a symmetric graph; exponential"):
        analysis.check("choco", jaxdec.topology.exponential(N))
    with pytest.raises(ValueError, match="choco needs a static graph; one_peer_exponential"):
        analysis.check("choco", jaxdec.topology.one_peer_exponential(N))
    analysis.check("choco", RING)
    analysis.check("deep_squeeze", jaxdec.topology.one_peer_exponential(N))
