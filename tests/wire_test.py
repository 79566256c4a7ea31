"""What travels: the formats themselves, int8 in gossip, and the bytes of its compiled exchange."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxdec
from jaxdec import wire
from tests import hlo, lifts, reference

N, DIM = 8, 300  # a block, and a shorter one
KEY = jax.random.key(7)


@functools.partial(jax.jit, static_argnums=0)
def _roundtrip(form, x, key=KEY):
    message, decode = form.encode(x, key)
    return decode(message)


def _values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def _noise(key, leaf=0, size=DIM):
    """What gossip draws for a leaf of float64."""
    return np.asarray(jax.random.uniform(jax.random.fold_in(key, leaf), (size,), np.float64))


def _blocks(x):
    """A column for each entry of [m, d]: the largest absolute value of its block."""
    return np.concatenate(
        [
            np.broadcast_to(np.abs(x[:, i : i + 256]).max(axis=1, keepdims=True), part.shape)
            for i in range(0, x.shape[1], 256)
            if (part := x[:, i : i + 256]).size
        ],
        axis=1,
    )


def test_int8_is_unbiased_and_off_by_less_than_a_step():
    draws = 2000
    x = _values(DIM).astype(np.float32)
    x[0], x[256:] = 0.0, 1e-3 * x[256:]
    keys = jax.random.split(jax.random.key(0), draws)
    q = np.asarray(jax.jit(jax.vmap(lambda key: _roundtrip(wire.Int8(), x, key)))(keys), np.float64)
    step = _blocks(x[None])[0].astype(np.float64) / 127
    assert (np.abs(q - x) <= step * (1 + 1e-6)).all()
    assert len(np.unique(q[:, 1])) == 2
    # Of a draw that is off by a step at most, the deviation is half a step at most.
    assert (np.abs(q.mean(axis=0) - x) <= 5 * 0.5 * step / math.sqrt(draws)).all()
    assert (q[:, 0] == 0).all()
    largest = np.abs(x[:256]).argmax()
    np.testing.assert_allclose(q[:, largest], x[largest], rtol=1e-6)


@pytest.mark.parametrize(
    ("size", "most"), [(256, 0.254), (1_000_000, 0.254), (300, 0.27), (3, 0.6)]
)
def test_int8_pads_nothing(size, most):
    sent = wire.message_bytes(wire.Int8(), jax.ShapeDtypeStruct((size,), np.float32))
    assert sent == size + 4 * math.ceil(size / 256)
    assert sent / (4 * size) <= most


def test_int8_does_not_hide_what_is_not_finite():
    for bad in (np.nan, np.inf):
        x = np.ones(DIM, np.float32)
        x[3] = bad
        q = np.asarray(_roundtrip(wire.Int8(), x))
        assert np.isnan(q[:256]).all()
        np.testing.assert_array_equal(q[256:], 1)


@pytest.mark.parametrize(
    ("form", "sent", "bytes_of_entry"),
    [(wire.TopK(0.1), 6, 8), (wire.RandomK(0.1), 6, 4), (wire.TopK(1e-9), 1, 8)],
    ids=str,
)
def test_a_share_of_the_entries_is_kept(form, sent, bytes_of_entry):
    x = _values(12, 5).astype(np.float32)
    q = np.asarray(_roundtrip(form, x))
    assert np.count_nonzero(q) == sent
    np.testing.assert_array_equal(q[q != 0], x[q != 0])
    assert wire.message_bytes(form, x) == sent * bytes_of_entry
    if isinstance(form, wire.TopK):
        assert np.abs(x[q == 0]).max() <= np.abs(x[q != 0]).min()
    else:
        other = np.asarray(_roundtrip(form, x, jax.random.key(8)))
        assert (other != q).any()


def test_two_byte_leaves_come_back_in_the_dtype_of_sums():
    forms = (wire.Int8(), wire.TopK(0.1), wire.RandomK(0.1), wire.Floating())
    x = jnp.asarray(_values(4, 5), jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        found = jax.jit(lambda x: [_roundtrip(form, x) for form in forms])(x)
    exact = np.asarray(x, np.float32)
    for form, q in zip(forms, map(np.asarray, found), strict=True):
        assert (q.dtype, q.shape) == (np.float32, x.shape)
        atol = np.abs(exact).max() / 127 if form == wire.Int8() else 0
        np.testing.assert_allclose(q[q != 0], exact[q != 0], rtol=0, atol=atol)


GRAPHS = {
    "ring": jaxdec.topology.ring(N),
    "star": jaxdec.topology.star(N),
}


@pytest.mark.parametrize("lift", lifts.LIFTS)
def test_int8_dsgd_equals_oracle(lift):
    """X⁺ = Y + (W − I) q(Y), Y = X − γ G."""
    topology, steps, rate = GRAPHS["star"], 20, 1e-3
    A, B = reference.least_squares(N, rows=12, dim=DIM, noise=0.5, seed=0)
    gradient = reference.least_squares_gradient(A, B)
    with jax.enable_x64(True):
        tx = jaxdec.algorithms.dsgd(jaxdec.Gossip(topology, wire_dtype="int8"), rate)
        models = lifts.run(tx, topology, lift, _values(N, DIM), (A, B), steps, "strict", KEY)
        noise = [_noise(jax.random.fold_in(KEY, t)) for t in range(steps)]
    X = _values(N, DIM)
    for t in range(steps):
        Y = X - rate * gradient(X, t)
        X = Y + (topology.matrix(t) - np.eye(N)) @ reference.int8(Y, noise[t])
        np.testing.assert_allclose(models[t + 1], X, rtol=0, atol=1e-10 * np.abs(X).max())


def test_each_exchange_of_a_step_and_each_leaf_has_a_key_of_its_own():
    """da_dmsgd gossips twice: M ← W (β M + G) by the first key, X⁺ = W (X − γ M) by the second."""
    topology, rate = GRAPHS["ring"], 0.1
    difference = topology.matrix(0) - np.eye(N)
    X, G = [_values(N, DIM, seed=i) for i in (0, 1)], [_values(N, DIM, seed=i) for i in (2, 3)]
    with jax.enable_x64(True):
        tx = jaxdec.algorithms.da_dmsgd(jaxdec.Gossip(topology, wire_dtype="int8"), rate)
        step = lifts.lift(lambda g, x: tx.update(g, tx.init(x), x, key=KEY)[0], "simulate", N)
        updates = step(G, X)
        noise = [[_noise(key, leaf) for leaf in (0, 1)] for key in jax.random.split(KEY)]
    for leaf in (0, 1):
        M = G[leaf] + difference @ reference.int8(G[leaf], noise[0][leaf])
        Y = X[leaf] - rate * M
        expected = Y + difference @ reference.int8(Y, noise[1][leaf])
        ours = X[leaf] + np.asarray(updates[leaf])
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-10)


def test_a_thousand_rounds_of_int8():
    """Identical replicas stay identical to the bit; differing ones keep their mean."""

    gossip = jaxdec.Gossip(GRAPHS["ring"], wire_dtype="int8")

    def rounds(x):
        def body(t, x):
            return jax.tree.map(jnp.add, x, gossip(x, t, jax.random.fold_in(KEY, t)))

        return jax.lax.fori_loop(0, 1000, body, x)

    values = _values(N, 64).astype(np.float32)
    same = np.broadcast_to(values[0], values.shape)
    start = lifts.placed((same, values), "mesh", N)
    identical, differing = map(np.asarray, lifts.lift(rounds, "mesh", N)(start))
    np.testing.assert_array_equal(identical, same)
    differing = differing.astype(np.float64)
    drift = differing.mean(axis=0) - values.mean(axis=0, dtype=np.float64)
    assert np.abs(drift).max() <= 1e-6 * np.abs(values).max()
    apart = np.abs(differing - differing.mean(axis=0)).max()
    assert apart <= 4 * np.abs(differing).max() / 127


def _int8_on(mesh, gossip, specs=None):
    """One round, its argument [replicas, 6, 100], and its optimized text."""
    n = gossip.topology.n
    step = jaxdec.nodes.on_mesh(lambda x, *, phase: gossip(x, phase, KEY), mesh, donate_argnums=())
    x = _values(n, 6, 100).astype(np.float32)
    placed = jaxdec.nodes.shard(x, mesh, specs)
    return step, x, placed, step.lower(placed, phase=0).compile().as_text()


def test_int8_moves_a_byte_an_entry():
    gossip = jaxdec.Gossip(GRAPHS["ring"], wire_dtype="int8")
    _, x, _, text = _int8_on(jaxdec.nodes.make_mesh(node=N), gossip)
    assert hlo.collectives(text) == {"collective-permute": 2 * (600 + 3 * 4)}
    assert gossip.bytes_sent(x[0], 0) == 2 * (600 + 3 * 4)
    assert text.count("collective-permute(") + text.count("collective-permute-start(") == 2


def test_int8_between_hosts_moves_shards():
    topology = jaxdec.topology.hierarchical(jaxdec.topology.ring(4), 2)
    gossip = jaxdec.Gossip(topology, wire_dtype="int8", local_axis="local")
    step, x, placed, text = _int8_on(jaxdec.nodes.make_mesh(node=4, local=2), gossip)
    assert hlo.collectives(text)["collective-permute"] == 2 * (300 + 2 * 4)
    assert gossip.bytes_sent(x[0], 0) == 2 * (300 + 2 * 4)
    found = x + np.asarray(step(placed, phase=0))
    exact = np.tensordot(topology.matrix(0), x, 1)
    np.testing.assert_allclose(found, exact, rtol=0, atol=2 * np.abs(x).max() / 127)
    np.testing.assert_allclose(found.mean(axis=0), x.mean(axis=0), rtol=0, atol=1e-6)


def test_int8_rounds_model_shards_where_they_lie():
    specs = P(None, "model")
    gossip = jaxdec.Gossip(jaxdec.topology.ring(4), wire_dtype="int8", specs=specs)
    mesh = jaxdec.nodes.make_mesh(node=4, model=2)
    step, x, placed, text = _int8_on(mesh, gossip, specs)
    assert hlo.collectives(text) == {"collective-permute": 2 * (300 + 2 * 4)}
    found = x + np.asarray(step(placed, phase=0))
    exact = np.tensordot(gossip.topology.matrix(0), x, 1)
    np.testing.assert_allclose(found, exact, rtol=0, atol=2 * np.abs(x).max() / 127)


def test_int8_takes_empty_leaves():
    gossip = jaxdec.Gossip(GRAPHS["ring"], wire_dtype="int8")
    tree = {"empty": np.zeros((N, 0), np.float32), "full": np.ones((N, 3), np.float32)}
    found = lifts.lift(lambda x: gossip(x, 0, KEY), "simulate", N)(tree)
    assert found["empty"].shape == (N, 0)
    assert gossip.bytes_sent(jax.tree.map(lambda x: x[0], tree), 0) == 2 * (3 + 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: jaxdec.Gossip(GRAPHS["ring"], wire_dtype="int8")(np.ones(3), 0),
            r"wire_dtype='int8' draws at random and needs a key, .* write key=",
        ),
        (
            lambda: jaxdec.Gossip(GRAPHS["ring"]).compressed(np.ones(3), 0, wire.RandomK(0.5)),
            r"compressor RandomK\(keep=0.5\) draws at random and needs a key",
        ),
        (
            lambda: wire.wire_format("uint8"),
            "wire_dtype='uint8' is not a wire format; write one of",
        ),
        (lambda: wire.compressor("topk", 0.1), "compressor='topk' is unknown; did you mean top_k"),
        (lambda: wire.compressor("top_k", None), "compressor='top_k' needs keep"),
        (lambda: wire.compressor("random_k", 0.0), r"keep=0.0 must be in \(0, 1\]"),
        (
            lambda: wire.compressor("int8", 0.1),
            "keep=0.1 is set, but compressor='int8' sends every",
        ),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
