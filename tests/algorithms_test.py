"""Every algorithm × topology × lift against the dense oracle, and what must hold for each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdec
from tests import lifts, reference

N, DIM, STEPS = 8, 6, 20
A, B = reference.least_squares(N, rows=12, dim=DIM, noise=0.5, seed=0)
X0 = np.random.default_rng(1).standard_normal((N, DIM))

# Topologies of the table: jaxdec's and the oracle's own matrices, where it has them.
TOPOLOGIES = {
    "ring": ("ring", {}),
    "one_peer_exponential": ("one_peer_exponential", {}),
    "aer": ("alternating_exponential_ring", {"local": 2}),
    "complete": ("complete", {}),
    "star": ("star", {}),
}


def _topology(name):
    if name == "random_matching":
        topology = jaxdec.topology.random_matching(N, period=3, seed=5)
        return topology, [topology.matrix(phase) for phase in range(3)]
    name, kwargs = TOPOLOGIES[name]
    return (
        jaxdec.topology.by_name(name, N, **kwargs),
        reference.mixing_matrices(name, N, **kwargs),
    )


def _schedule(kind):
    if kind == "constant":
        return 0.01, lambda t: 0.01
    # optax's own schedules count in float32.
    return lambda count: 0.02 * jnp.minimum(count, 4) / 4, lambda t: 0.02 * min(t, 4) / 4


def _case(key, topology_name, *, kind="constant", weight_decay=0.05):
    """The transform, its topology, and the oracle's trajectory of models [STEPS + 1, N, DIM]."""
    name, hyperparameters = lifts.ALGORITHMS[key]
    topology, matrices = _topology(topology_name)
    ours, theirs = dict(hyperparameters), dict(hyperparameters)
    x0 = X0
    if name == "slowmo":
        topology = jaxdec.topology.with_mean(topology, every=6)
        theirs["every"] = 6
    if name in ("slowmo", "allreduce"):
        x0 = np.broadcast_to(X0[0], X0.shape)
    rate, rate_of = _schedule(kind)
    gossip = jaxdec.Gossip(topology)
    tx = jaxdec.algorithms.by_name(
        name, gossip, learning_rate=rate, weight_decay=weight_decay, **ours
    )
    expected = reference.trajectory(
        name,
        lambda t: matrices[t % len(matrices)],
        x0,
        reference.least_squares_gradient(A, B),
        rate_of,
        STEPS,
        weight_decay=weight_decay,
        **theirs,
    )
    return tx, topology, x0, np.stack(expected)


@pytest.mark.parametrize("lift", lifts.LIFTS)
@pytest.mark.parametrize("topology", [*TOPOLOGIES, "random_matching"])
@pytest.mark.parametrize("key", lifts.ALGORITHMS)
def test_equals_oracle(key, topology, lift):
    with jax.enable_x64(True):
        tx, topology, x0, expected = _case(key, topology)
        models = lifts.run(tx, topology, lift, x0, (A, B), STEPS, lifts.promotion_of(key))
    assert models.dtype == np.float64
    for t in range(STEPS + 1):
        scale = np.abs(expected[t]).max()
        np.testing.assert_allclose(models[t], expected[t], rtol=0, atol=1e-10 * scale)


@pytest.mark.parametrize("key", lifts.ALGORITHMS)
def test_warmup_from_zero_equals_oracle(key):
    with jax.enable_x64(True):
        tx, topology, x0, expected = _case(key, "one_peer_exponential", kind="warmup")
        models = lifts.run(tx, topology, "simulate", x0, (A, B), STEPS)
    assert np.isfinite(models).all()
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


@pytest.mark.parametrize("key", lifts.ALGORITHMS)
def test_lifts_agree_in_float32(key):
    tx, topology, x0, expected = _case(key, "one_peer_exponential")
    data = (A.astype(np.float32), B.astype(np.float32))
    x0 = x0.astype(np.float32)
    simulated, meshed = (
        lifts.run(tx, topology, lift, x0, data, STEPS, lifts.promotion_of(key))
        for lift in lifts.LIFTS
    )
    assert simulated.dtype == np.float32
    scale = np.abs(expected).max()
    np.testing.assert_allclose(simulated, meshed, rtol=0, atol=1e-5 * scale)
    np.testing.assert_allclose(simulated, expected, rtol=0, atol=1e-4 * scale)


DECAYS = [key for key in lifts.ALGORITHMS if key.startswith("allreduce") or "adamw" in key]


@pytest.mark.parametrize("lift", lifts.LIFTS)
@pytest.mark.parametrize("key", DECAYS)
def test_matrices_alone_decay_when_asked(key, lift):
    """A kernel and a bias beside it are the oracle's with and without weight decay."""
    name, fields = lifts.ALGORITHMS[key]
    fields = {field: value for field, value in fields.items() if field != "clip_norm"}
    topology, matrices = _topology("one_peer_exponential")
    rng = np.random.default_rng(2)
    shapes = {"kernel": (2, 3), "bias": (3,)}
    x0 = {leaf: rng.standard_normal((N, *shape)) for leaf, shape in shapes.items()}
    if name == "allreduce":
        x0 = {leaf: np.broadcast_to(x[:1], x.shape) for leaf, x in x0.items()}
    grads = {leaf: rng.standard_normal((6, N, *shape)) for leaf, shape in shapes.items()}
    tx = jaxdec.algorithms.by_name(
        name, jaxdec.Gossip(topology), 0.1, weight_decay=0.5, decay="matrices", **fields
    )

    def step(x, state, g, *, phase):
        updates, state = tx.update(g, state, x, phase=phase)
        return optax.apply_updates(x, updates), state

    with jax.enable_x64(True):
        x = lifts.placed(x0, lift, N)
        state, step = lifts.lift(tx.init, lift, N)(x), lifts.lift(step, lift, N)
        for t in range(6):
            g = lifts.placed({leaf: grads[leaf][t] for leaf in shapes}, lift, N)
            x, state = step(x, state, g, phase=topology.phase(t))
    for leaf, weight_decay in (("kernel", 0.5), ("bias", 0.0)):
        expected = reference.trajectory(
            name,
            lambda t: matrices[t % len(matrices)],
            x0[leaf].reshape(N, -1),
            lambda X, t, leaf=leaf: grads[leaf][t].reshape(N, -1),
            lambda t: 0.1,
            6,
            weight_decay=weight_decay,
            **fields,
        )
        ours = np.asarray(x[leaf]).reshape(N, -1)
        np.testing.assert_allclose(ours, expected[-1], rtol=0, atol=1e-12)


GOSSIPING = [key for key in lifts.ALGORITHMS if not key.startswith("allreduce")]


@pytest.mark.parametrize("key", GOSSIPING)
def test_bfloat16_gradients_do_not_round_the_mixing(key):
    """At γ = 0 a step is gossip alone, in float32."""
    name, hyperparameters = lifts.ALGORITHMS[key]
    topology = jaxdec.topology.ring(N)
    if name == "slowmo":
        topology = jaxdec.topology.with_mean(topology, every=6)
    tx = jaxdec.algorithms.by_name(name, jaxdec.Gossip(topology), 0.0, **hyperparameters)
    x = X0.astype(np.float32)

    def step(x, g):
        return tx.update(g, tx.init(x), x, phase=0)[0]

    updates = lifts.lift(step, "simulate", N)(x, jnp.ones(x.shape, jnp.bfloat16))
    assert updates.dtype == np.float32
    ahead = 1 + hyperparameters["momentum"] if hyperparameters.get("nesterov") else 1
    expected = ahead * (topology.matrix(0) - np.eye(N)) @ x
    np.testing.assert_allclose(updates, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rate", [1e-30, 1e-41])
@pytest.mark.parametrize("key", ["qg_dmsgd", "slowmo"])
def test_a_rate_that_vanishes_in_the_dtype_of_parameters_is_zero(key, rate):
    name, hyperparameters = lifts.ALGORITHMS[key]
    dtype = jnp.float16 if rate == 1e-30 else jnp.float32
    topology = jaxdec.topology.with_mean(jaxdec.topology.ring(N), every=2)
    tx = jaxdec.algorithms.by_name(
        name, jaxdec.Gossip(topology), lambda count: jnp.float32(rate), **hyperparameters
    )

    def steps(x):
        state = tx.init(x)
        for phase in range(4):
            updates, state = tx.update(jnp.ones_like(x), state, x, phase=phase)
            x = x + updates
        return x, state

    assert all(
        np.isfinite(np.asarray(leaf, np.float64)).all()
        for leaf in jax.tree.leaves(lifts.lift(steps, "simulate", N)(jnp.asarray(X0, dtype)))
    )


def test_slowmo_at_a_vanished_rate_moves_towards_the_mean_and_keeps_its_momentum():
    topology = jaxdec.topology.with_mean(jaxdec.topology.ring(N), every=1)
    rates = jnp.asarray([0.5, 0.0])
    tx = jaxdec.algorithms.slowmo(
        jaxdec.Gossip(topology),
        lambda count: rates[count],
        momentum=0.0,
        slow_momentum=0.5,
        slow_learning_rate=0.25,
    )

    def steps(x):
        anchor, state = x, tx.init(x)
        updates, state = tx.update(jnp.ones_like(x), state, x, phase=0)
        kept = state.inner.slow_momentum
        x = x + updates
        updates, after = tx.update(jnp.ones_like(x), state, x, phase=0)
        return x, kept, after.inner.slow_momentum, after.inner.anchor, x + updates, anchor

    x, kept, u, anchor, end, _ = lifts.lift(steps, "simulate", N)(X0.astype(np.float32))
    np.testing.assert_array_equal(u, kept)
    mean = np.broadcast_to(np.mean(x, axis=0), x.shape)
    np.testing.assert_allclose(end, x + 0.25 * (mean - x), rtol=0, atol=1e-6)
    np.testing.assert_allclose(anchor, end, rtol=0, atol=1e-6)


def test_allreduce_averages_over_hosts_and_their_replicas():
    topology = jaxdec.topology.hierarchical(jaxdec.topology.ring(4), 2)
    gossip = jaxdec.Gossip(topology, local_axis="local")
    tx = jaxdec.algorithms.allreduce(gossip, 1.0, momentum=0.0)
    mesh = jaxdec.nodes.make_mesh(node=4, local=2)
    step = jaxdec.nodes.on_mesh(lambda g: tx.update(g, tx.init(g), g)[0], mesh, donate_argnums=())
    updates = step(jaxdec.nodes.shard(jnp.arange(8.0), mesh))
    np.testing.assert_allclose(updates, -3.5)


@pytest.mark.parametrize("lift", lifts.LIFTS)
@pytest.mark.parametrize("key", lifts.ALGORITHMS)
def test_no_recompilation_after_the_first_period_and_stable_types(key, lift):
    tx, topology, x0, _ = _case(key, "ring")
    x0 = lifts.placed(x0.astype(np.float32), lift, N)
    data = lifts.placed((A.astype(np.float32), B.astype(np.float32)), lift, N)
    traces = []

    def step(carry, data, *, phase):
        traces.append(phase)
        return lifts.least_squares_step(tx)(carry, data, phase=phase)

    step = lifts.lift(step, lift, N, donate_argnums=0)
    carry = (x0, lifts.lift(tx.init, lift, N)(x0))
    describe = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    before = describe(carry)
    for t in range(3 * topology.period):
        carry = step(carry, data, phase=topology.phase(t))
        assert describe(carry) == before
    assert sorted(traces) == list(topology.distinct_phases)


def test_traced_phase_equals_static_phase():
    tx, topology, x0, _ = _case("slowmo", "aer")
    data = (A.astype(np.float32), B.astype(np.float32))
    x0 = x0.astype(np.float32)
    static = lifts.run(tx, topology, "simulate", x0, data, STEPS)
    step = lifts.least_squares_step(tx)
    traced = lifts.lift(
        lambda carry, data, phase: step(carry, data, phase=phase),
        "simulate",
        N,
        in_axes=(0, 0, None),
    )
    carry = (x0, lifts.lift(tx.init, "simulate", N)(x0))
    for t in range(STEPS):
        carry = traced(carry, data, t)
    np.testing.assert_allclose(carry[0], static[-1], rtol=1e-6, atol=1e-6)


def test_accumulated_adam_of_window_one_is_optax_adamw():
    rng = np.random.default_rng(0)
    params = {"a": rng.standard_normal((3, 2)).astype(np.float32), "b": np.float32([1, -2])}
    gossip = jaxdec.Gossip(jaxdec.topology.isolated(1))
    ours = jaxdec.algorithms.accumulated_adamw(
        gossip, 0.01, window=1, b1=0.8, b2=0.99, weight_decay=0.1
    )
    theirs = optax.adamw(0.01, b1=0.8, b2=0.99, weight_decay=0.1)
    x, y, s, r = params, params, ours.init(params), theirs.init(params)
    for _ in range(25):
        grads = jax.tree.map(lambda p: rng.standard_normal(p.shape).astype(np.float32), params)
        u, s = jax.jit(ours.update)(grads, s, x)
        v, r = jax.jit(theirs.update)(grads, r, y)
        x, y = optax.apply_updates(x, u), optax.apply_updates(y, v)
        for left, right in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-7, atol=1e-7)


def test_accumulated_adam_equals_two_windows_and_a_half_by_hand():
    grads = [0.5, -0.2, 0.9, 0.1, -0.4, 0.3, 0.8, -0.6, 0.2, 0.7]
    b1, b2, eps, s, lr = 0.9, 0.99, 1e-3, 4, 0.1
    M1, V1 = 0.1 * sum(grads[:4]) / 4, 0.01 * (sum(grads[:4]) / 4) ** 2
    M2 = b1 * M1 + 0.1 * sum(grads[4:8]) / 4
    V2 = b2 * V1 + 0.01 * (sum(grads[4:8]) / 4) ** 2
    memory = [(0.0, 0.0)] * 4 + [(M1, V1)] * 4 + [(M2, V2)] * 2
    x, expected = 1.0, []
    for t, (g, (M, V)) in enumerate(zip(grads, memory, strict=True)):
        k = (1, 1, 1, 1, 2, 2, 2, 2, 3, 3)[t]
        m, v = (b1 * M + 0.1 * g) / (1 - b1**k), (b2 * V + 0.01 * g * g) / (1 - b2**k)
        x -= lr * m / (v**0.5 + eps)
        expected.append(x)
    with jax.enable_x64(True):
        tx = jaxdec.algorithms.accumulated_adamw(
            jaxdec.Gossip(jaxdec.topology.isolated(1)), lr, window=s, b1=b1, b2=b2, eps=eps
        )
        x = np.float64(1.0)
        state, models = tx.init(x), []
        for g in grads:
            updates, state = tx.update(np.float64(g), state, x)
            x = optax.apply_updates(x, updates)
            models.append(float(x))
    np.testing.assert_allclose(models, expected, rtol=1e-12)


def test_clipping_is_global_over_leaves_and_local_to_a_node():
    gossip = jaxdec.Gossip(jaxdec.topology.isolated(2))
    tx = jaxdec.algorithms.dsgd(gossip, 1.0, clip_norm=1.0)
    grads = {"a": np.float32([3.0, 0.3]), "b": np.float32([4.0, 0.4])}
    params = jax.tree.map(np.zeros_like, grads)
    step = lifts.lift(lambda g, x: tx.update(g, tx.init(x), x)[0], "simulate", 2)
    updates = step(grads, params)
    np.testing.assert_allclose(updates["a"], [-0.6, -0.3], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [-0.8, -0.4], rtol=1e-6)


def test_allreduce_clips_the_mean_gradient():
    gossip = jaxdec.Gossip(jaxdec.topology.complete(2))
    tx = jaxdec.algorithms.allreduce(gossip, 1.0, momentum=0.0, clip_norm=1.0)
    step = lifts.lift(lambda g, x: tx.update(g, tx.init(x), x)[0], "simulate", 2)
    updates = step(np.float32([10.0, -9.0]), np.zeros(2, np.float32))
    np.testing.assert_allclose(updates, -0.5, rtol=1e-6)  # clipped first: 0


def test_defaults_are_the_documented_ones():
    defaults = {
        name: {f: jaxdec.algorithms.default_of(name, f) for f in ("momentum", "b1", "b2", "window")}
        for name in ("accumulated_adamw", "decentralized_adamw", "decentlam")
    }
    assert defaults["accumulated_adamw"] == {
        "momentum": None,
        "b1": 0.9,
        "b2": 0.999,
        "window": 4,
    }
    assert defaults["decentralized_adamw"]["b2"] == 0.999
    assert defaults["decentlam"]["momentum"] == 0.9


def test_allreduce_adamw_has_the_defaults_of_optax():
    gossip = jaxdec.Gossip(jaxdec.topology.complete(1))
    ours = jaxdec.algorithms.allreduce(gossip, 0.1, optimizer="adamw")
    theirs = optax.adamw(0.1, weight_decay=0.0)
    grads = np.float32([[1.0, -2.0, 0.1]])

    def two_steps(tx, g):
        _, state = tx.update(g, tx.init(g), g)
        return tx.update(g * g, state, g)[0]

    left, right = (
        lifts.lift(functools.partial(two_steps, tx), "simulate", 1)(grads) for tx in (ours, theirs)
    )
    np.testing.assert_allclose(left, right, rtol=1e-6)


def test_extra_arguments_reach_the_inner_optimizer():
    def update(updates, state, params=None, *, factor, **extra):
        del params, extra
        return jax.tree.map(lambda g: factor * g, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    gossip = jaxdec.Gossip(jaxdec.topology.isolated(1))
    for order in ("awc", "atc"):
        tx = jaxdec.algorithms.decentralize(inner, gossip, order)
        updates, _ = tx.update(np.float32(1.0), tx.init(1.0), np.float32(0.0), factor=3.0)
        assert updates == 3.0


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("dsgd", {"clip_norm": -1.0}, "clip_norm=-1.0 must be above 0"),
        ("dsgd", {"weight_decay": float("nan")}, "weight_decay=nan"),
        ("accumulated_adamw", {"weight_decay": -1.0}, "weight_decay=-1.0"),
        ("decentralized_adamw", {"eps": -1.0}, "eps=-1.0"),
        ("dmsdg", {}, "did you mean dmsgd"),
        ("dsgd", {"momentum": 0.9}, "algorithm.momentum is set"),
        ("dmsgd", {"momentum": 1.0}, r"momentum=1.0 must be in \[0, 1\)"),
        ("dsgd", {"order": "act"}, 'write "awc" or "atc"'),
        ("slowmo", {}, "mean_every=12"),
        ("accumulated_adamw", {"window": 0}, "window=0 must be at least 1"),
        ("allreduce", {"optimizer": "sgd"}, "optimizer='sgd' is unknown"),
        ("allreduce", {"decay": "kernels"}, "decay='kernels' is unknown"),
        ("accumulated_adamw", {"decay": "matrix"}, 'write "all" or "matrices"'),
        ("allreduce", {"optimizer": "adamw", "momentum": 0.9}, "does not take momentum"),
    ],
)
def test_bad_fields_are_named(name, fields, message):
    gossip = jaxdec.Gossip(jaxdec.topology.ring(4))
    with pytest.raises(ValueError, match=message):
        jaxdec.algorithms.by_name(name, gossip, learning_rate=0.1, **fields)


def test_fields_left_none_are_not_passed():
    gossip = jaxdec.Gossip(jaxdec.topology.ring(4))
    jaxdec.algorithms.by_name("dsgd", gossip, learning_rate=0.1, momentum=None, order="awc")


def test_update_without_params_says_so():
    tx = jaxdec.algorithms.decentlam(jaxdec.Gossip(jaxdec.topology.ring(4)), 0.1)
    with pytest.raises(ValueError, match=r"call update\(grads, state, params\)"):
        tx.update(1.0, tx.init(1.0))
