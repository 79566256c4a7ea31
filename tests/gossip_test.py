"""Gossip: W x − x under both lifts, what it conserves, and what the compiled step moves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxdec
from tests import hlo, lifts

N = 8
GRAPHS = {
    "ring": jaxdec.topology.ring(N),
    "one_peer_exponential": jaxdec.topology.one_peer_exponential(N),
    "symmetric_one_peer": jaxdec.topology.one_peer_exponential(N, symmetric=True),
    "aer": jaxdec.topology.alternating_exponential_ring(N, local=2),
    "aer_idle": jaxdec.topology.alternating_exponential_ring(N),
    "random_matching": jaxdec.topology.random_matching(N, period=3),
    "complete": jaxdec.topology.complete(N),
    "star": jaxdec.topology.star(N),
    "grid": jaxdec.topology.grid(N),
    "base_k": jaxdec.topology.base_k(N, k=2),
    "isolated": jaxdec.topology.isolated(N),
    "lazy_one_peer_ring": jaxdec.topology.lazy(jaxdec.topology.one_peer_ring(N)),
    "with_mean": jaxdec.topology.with_mean(jaxdec.topology.ring(N), every=3),
}


def _tree(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {
        "kernel": rng.standard_normal((N, 5, 4)).astype(dtype),
        "bias": rng.standard_normal((N, 3)).astype(dtype),
        "scale": rng.standard_normal(N).astype(dtype),
    }


def _mixed(gossip, tree, lift, phase):
    def f(x, *, phase):
        return jax.tree.map(jnp.add, x, gossip(x, phase))

    return lifts.lift(f, lift, N)(lifts.placed(tree, lift, N), phase=phase)


@pytest.mark.parametrize("lift", lifts.LIFTS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_is_the_mixing_matrix(graph, lift):
    topology = GRAPHS[graph]
    tree = _tree()
    for phase in topology.distinct_phases:
        mixed = _mixed(jaxdec.Gossip(topology), tree, lift, phase)
        for name, leaf in tree.items():
            expected = np.tensordot(topology.matrix(phase), leaf.astype(np.float64), 1)
            np.testing.assert_allclose(mixed[name], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("lift", lifts.LIFTS)
def test_traced_phase_is_static_phase(lift):
    gossip = jaxdec.Gossip(GRAPHS["with_mean"])
    tree = lifts.placed(_tree(), lift, N)
    traced = lifts.lift(gossip, lift, N, in_axes=(0, None))
    static = lifts.lift(lambda x, *, phase: gossip(x, phase), lift, N)
    for phase in range(5):
        left, right = traced(tree, jnp.int32(phase)), static(tree, phase=phase)
        jax.tree.map(np.testing.assert_array_equal, left, right)


# Of more nodes than a mesh here has, with weights that are no powers of two.
LARGE = {
    "exponential_11": jaxdec.topology.exponential(11),
    "symmetric_exponential_13": jaxdec.topology.symmetric_exponential(13),
    "torus_3x4": jaxdec.topology.torus(12, rows=3),
    "torus_4x4": jaxdec.topology.torus(16),
    "erdos_renyi": jaxdec.topology.erdos_renyi(10),
}


# A round takes longer on a mesh: all nodes at once, in turn, and some of them idle.
MESHED = ("ring", "one_peer_exponential", "base_k")

# Of parameters, and on the wire.
FORMATS = {
    "float32": ("float32", None),
    "float32 by bfloat16": ("float32", "bfloat16"),
    "float32 by float16": ("float32", "float16"),
    "bfloat16": ("bfloat16", None),
    "bfloat16 by bfloat16": ("bfloat16", "bfloat16"),
}


@pytest.mark.parametrize(
    ("graph", "lift"),
    [(graph, "simulate") for graph in (*GRAPHS, *LARGE)] + [(graph, "mesh") for graph in MESHED],
)
def test_a_thousand_rounds(graph, lift):
    """Identical replicas stay identical to the bit; differing ones keep their mean.

    In every format, all in one program.
    """
    topology = (GRAPHS | LARGE)[graph]
    n = topology.n
    gossips = {
        name: jaxdec.Gossip(topology, wire_dtype=wire) for name, (_, wire) in FORMATS.items()
    }

    def rounds(xs):
        def body(t, xs):
            return {name: jax.tree.map(jnp.add, x, gossips[name](x, t)) for name, x in xs.items()}

        return jax.lax.fori_loop(0, 1000, body, xs)

    values = np.random.default_rng(2).standard_normal((n, 64))
    start = {
        name: {
            "same": np.broadcast_to(values[0], values.shape).astype(jnp.dtype(dtype)),
            "differing": values.astype(jnp.dtype(dtype)),
        }
        for name, (dtype, _) in FORMATS.items()
    }
    end = lifts.lift(rounds, lift, n)(lifts.placed(start, lift, n))
    start, end = jax.tree.map(lambda x: np.asarray(x, np.float64), (start, end))
    for name, after in end.items():
        before, same = start[name], after["same"]
        np.testing.assert_array_equal(same, np.broadcast_to(same[0], same.shape), name)
        if graph not in ("complete", "with_mean"):  # a psum of equal numbers rounds
            np.testing.assert_array_equal(same, before["same"], name)
        if FORMATS[name][0] == "float32":
            drift = after["differing"].mean(axis=0) - before["differing"].mean(axis=0)
            assert np.abs(drift).max() <= 1e-6 * np.abs(before["differing"]).max(), name


@pytest.mark.parametrize("lift", lifts.LIFTS)
@pytest.mark.parametrize(
    "topology",
    [jaxdec.topology.ring(3), jaxdec.topology.exponential(3), jaxdec.topology.base_k(4, k=3)],
    ids=lambda topology: topology.name,
)
def test_a_round_that_happens_to_be_a_mean_is_exchanged(topology, lift):
    """Only declared means lower to psum, whose sums may move identical replicas."""
    n = topology.n
    step = lifts.lift(lambda x, *, phase: jaxdec.Gossip(topology)(x, phase), lift, n)
    x = lifts.placed(np.ones((n, 4), np.float32), lift, n)
    text = step.lower(x, phase=0).as_text()
    assert "all_reduce" not in text
    if lift == "mesh":
        assert "collective_permute" in text


@pytest.mark.parametrize("lift", lifts.LIFTS)
@pytest.mark.parametrize("n", [5, 6, 7])
def test_exact_mean_of_identical_replicas_stays_near_for_any_n(n, lift):
    gossip = jaxdec.Gossip(jaxdec.topology.complete(n))
    rounds = lifts.lift(
        lambda x: jax.lax.fori_loop(0, 1000, lambda t, x: x + gossip(x, 0), x), lift, n
    )
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    after = np.asarray(rounds(lifts.placed(jaxdec.nodes.stack(x, n), lift, n)))
    np.testing.assert_array_equal(after, np.broadcast_to(after[0], after.shape))
    np.testing.assert_allclose(after[0], x, rtol=2e-6)


@pytest.mark.parametrize("graph", GRAPHS)
def test_each_round_contracts_disagreement(graph):
    topology = GRAPHS[graph]
    x = np.random.default_rng(3).standard_normal((N, 40))
    with jax.enable_x64(True):
        for phase in range(topology.period):
            before = np.linalg.norm(x - x.mean(axis=0))
            x = np.asarray(_mixed(jaxdec.Gossip(topology), x, "simulate", phase))
            rho = np.linalg.norm(topology.matrix(phase) - 1 / N, 2)
            assert np.linalg.norm(x - x.mean(axis=0)) <= rho * before + 1e-12


@pytest.mark.parametrize("lift", lifts.LIFTS)
@pytest.mark.parametrize("graph", ["ring", "complete", "star"])
def test_wire_format_enters_at_both_ends(graph, lift):
    topology = GRAPHS[graph]
    x = _tree()["kernel"]
    q = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    expected = x + np.tensordot(topology.matrix(0) - np.eye(N), q, 1)
    gossip = jaxdec.Gossip(topology, wire_dtype="bfloat16")
    np.testing.assert_allclose(_mixed(gossip, x, lift, 0), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lift", lifts.LIFTS)
@pytest.mark.parametrize("graph", ["aer", "star", "ring"])
def test_nan_of_a_node_reaches_its_receivers_only(graph, lift):
    topology = GRAPHS[graph]
    x = _tree()["kernel"]
    x[5] = np.nan
    mixed = np.asarray(_mixed(jaxdec.Gossip(topology), x, lift, 0))
    poisoned = np.isnan(mixed).all(axis=(1, 2))
    np.testing.assert_array_equal(poisoned, topology.matrix(0)[:, 5] > 0)
    assert np.isfinite(mixed[~poisoned]).all()


def test_bfloat16_stays_bfloat16_where_weights_differ_by_receiver():
    x = jnp.asarray(_tree()["kernel"], jnp.bfloat16)
    assert _mixed(jaxdec.Gossip(GRAPHS["star"]), x, "mesh", 0).dtype == jnp.bfloat16


def _hosts(f, lift, hosts, local):
    """`f` under the nested lift of hosts × local replicas, on stacked arrays [n, ...]."""
    if lift == "mesh":
        mesh = jaxdec.nodes.make_mesh(node=hosts, local=local)
        lifted = jaxdec.nodes.on_mesh(f, mesh, donate_argnums=())
        return lambda x: lifted(jaxdec.nodes.shard(x, mesh))

    def lifted(x):
        y = jax.vmap(jax.vmap(f, axis_name="local"), axis_name="node")(
            jax.tree.map(lambda a: a.reshape(hosts, local, *a.shape[1:]), x)
        )
        return jax.tree.map(lambda a: a.reshape(hosts * local, *a.shape[2:]), y)

    return jax.jit(lifted)


@pytest.mark.parametrize("lift", lifts.LIFTS)
@pytest.mark.parametrize("graph", ["aer", "ring", "with_mean"])
def test_local_axis_equals_the_flat_topology(graph, lift):
    topology = {
        "aer": GRAPHS["aer"],
        "ring": jaxdec.topology.hierarchical(jaxdec.topology.ring(4), 2),
        "with_mean": jaxdec.topology.with_mean(
            jaxdec.topology.hierarchical(jaxdec.topology.ring(4), 2), every=2
        ),
    }[graph]
    gossip = jaxdec.Gossip(topology, local_axis="local")
    tree = _tree()
    for phase in topology.distinct_phases:
        delta = _hosts(functools.partial(gossip, phase=phase), lift, 4, 2)(tree)
        for name, leaf in tree.items():
            expected = np.tensordot(topology.matrix(phase) - np.eye(N), leaf, 1)
            np.testing.assert_allclose(delta[name], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "wire", "width"),
    [("float32", None, 4), ("float32", "bfloat16", 2), ("bfloat16", None, 2)],
)
def test_bytes_sent_are_those_of_the_compiled_exchange(dtype, wire, width):
    x = jnp.zeros((N, 64), dtype)
    flat = jaxdec.Gossip(GRAPHS["ring"], wire_dtype=wire)
    hosts = jaxdec.Gossip(
        jaxdec.topology.hierarchical(jaxdec.topology.ring(4), 2),
        local_axis="local",
        wire_dtype=wire,
    )
    for gossip, mesh, size in [
        (flat, jaxdec.nodes.make_mesh(node=N), 2 * 64 * width),
        (hosts, jaxdec.nodes.make_mesh(node=4, local=2), 2 * 32 * width),
    ]:
        step = jaxdec.nodes.on_mesh(lambda x, *, phase, g=gossip: g(x, phase), mesh)
        text = step.lower(jaxdec.nodes.shard(x, mesh), phase=0).compile().as_text()
        assert hlo.collectives(text)["collective-permute"] == size
        assert gossip.bytes_sent(x[0], 0) == size
    idle = jaxdec.Gossip(GRAPHS["aer_idle"])  # half of the hosts rest
    assert idle.bytes_sent(jnp.zeros(64), 0) == 64 * 4 / 2


def test_bfloat16_leaves_are_summed_in_float32():
    x = jnp.asarray([256.0, *[1.0] * 7], jnp.bfloat16)
    mixed = np.asarray(_mixed(jaxdec.Gossip(GRAPHS["ring"]), x, "simulate", 0), np.float64)
    assert mixed[2] == 1.0
    assert mixed[1] == 86.0
    # In bfloat16 each third of a difference would be rounded on its own.
    y = jnp.asarray(_tree()["kernel"], jnp.bfloat16)
    exact = np.tensordot(GRAPHS["star"].matrix(0), np.asarray(y, np.float64), 1)
    delta = np.asarray(exact - np.asarray(y, np.float64))
    ours = jax.vmap(lambda y: jaxdec.Gossip(GRAPHS["star"])(y, 0), axis_name="node")(y)
    np.testing.assert_array_equal(
        np.asarray(ours, np.float64), np.asarray(jnp.asarray(delta, jnp.bfloat16), np.float64)
    )


def test_local_axis_sends_one_model_a_host():
    topology = jaxdec.topology.hierarchical(jaxdec.topology.one_peer_ring(4), 2)
    gossip = jaxdec.Gossip(topology, local_axis="local")
    mesh = jaxdec.nodes.make_mesh(node=4, local=2)
    step = jaxdec.nodes.on_mesh(lambda x, *, phase: gossip(x, phase), mesh)
    x = jaxdec.nodes.shard(jnp.zeros((N, 64), jnp.float32), mesh)
    moved = hlo.collectives(step.lower(x, phase=0).compile().as_text())
    assert moved["collective-permute"] == 64 * 4 // 2  # a device: half a model; a host: one


def test_local_axis_with_a_model_axis_moves_shards_where_they_lie():
    topology = jaxdec.topology.hierarchical(jaxdec.topology.one_peer_ring(2), 2)
    specs = {"kernel": P(None, "model"), "bias": P("model")}
    mesh = jaxdec.nodes.make_mesh(node=2, local=2, model=2)
    rng = np.random.default_rng(0)
    tree = {
        "kernel": rng.standard_normal((4, 6, 8)).astype(np.float32),
        "bias": rng.standard_normal((4, 8)).astype(np.float32),
    }
    gossip = jaxdec.Gossip(topology, local_axis="local", specs=specs)
    step = jaxdec.nodes.on_mesh(lambda x, *, phase: gossip(x, phase), mesh, donate_argnums=())
    x = jaxdec.nodes.shard(tree, mesh, specs)
    compiled = step.lower(x, phase=0).compile()
    bytes_of_model = (6 * 8 + 8) * 4
    moved = hlo.collectives(compiled.as_text())
    assert moved["collective-permute"] == bytes_of_model // 4
    assert "all-to-all" not in moved
    for name, leaf in tree.items():
        expected = np.tensordot(topology.matrix(0) - np.eye(4), leaf, 1)
        np.testing.assert_allclose(step(x, phase=0)[name], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_strict_promotion_holds_in_every_dtype(dtype, wire):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((N, 6)), dtype)
        for graph in ("ring", "star", "complete"):
            gossip = jaxdec.Gossip(GRAPHS[graph], wire_dtype=wire)
            assert _mixed(gossip, x, "simulate", 0).dtype == x.dtype
        assert jaxdec.nodes.mean(x).dtype == x.dtype
        topology = jaxdec.topology.hierarchical(jaxdec.topology.ring(4), 2)
        gossip = jaxdec.Gossip(topology, wire_dtype=wire, local_axis="local")
        delta = _hosts(functools.partial(gossip, phase=0), "simulate", 4, 2)(x)
        assert delta.dtype == x.dtype


@pytest.mark.parametrize("lift", lifts.LIFTS)
def test_an_empty_leaf_passes(lift):
    tree = {"empty": np.zeros((N, 0, 3), np.float32), "full": np.ones((N, 2), np.float32)}
    assert _mixed(jaxdec.Gossip(GRAPHS["ring"]), tree, lift, 0)["empty"].shape == (N, 0, 3)
    topology = jaxdec.topology.hierarchical(jaxdec.topology.ring(4), 2)
    gossip = jaxdec.Gossip(topology, local_axis="local")
    delta = _hosts(functools.partial(gossip, phase=0), lift, 4, 2)(tree)
    assert delta["empty"].shape == (N, 0, 3)


@pytest.mark.parametrize("lift", lifts.LIFTS)
def test_another_number_of_nodes_than_the_axis_has_is_named(lift):
    gossip = jaxdec.Gossip(jaxdec.topology.ring(4))
    with pytest.raises(ValueError, match=r"ring\(4\) has 4 nodes for the axis 'node'.*has 8"):
        _mixed(gossip, _tree(), lift, 0)
    topology = jaxdec.topology.hierarchical(jaxdec.topology.ring(4), 4)
    gossip = jaxdec.Gossip(topology, local_axis="local")
    with pytest.raises(ValueError, match=r"has 4 nodes for the axis 'local', which has 2"):
        _hosts(functools.partial(gossip, phase=0), lift, 4, 2)(_tree())


def test_key_and_specs_are_accepted():
    gossip = jaxdec.Gossip(GRAPHS["ring"], specs={"kernel": P(), "bias": P(), "scale": P()})
    step = lifts.lift(lambda x: gossip(x, 0, key=jax.random.key(0)), "simulate", N)
    expected = _mixed(jaxdec.Gossip(GRAPHS["ring"]), _tree(), "simulate", 0)
    found = jax.tree.map(jnp.add, _tree(), step(_tree()))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_local_mean_in_bfloat16_is_summed_in_float32():
    topology = jaxdec.topology.hierarchical(jaxdec.topology.isolated(1), 4)
    gossip = jaxdec.Gossip(topology, local_axis="local")
    x = jnp.asarray([[256.0], [1.0], [1.0], [1.0]], jnp.bfloat16)
    delta = _hosts(functools.partial(gossip, phase=0), "simulate", 1, 4)(x)
    exact = np.asarray(jnp.asarray(259 / 4 - np.asarray(x, np.float64), jnp.bfloat16), np.float64)
    np.testing.assert_array_equal(np.asarray(delta, np.float64), exact)


def test_bytes_of_an_exact_mean_between_hosts():
    topology = jaxdec.topology.hierarchical(jaxdec.topology.complete(4), 2)
    gossip = jaxdec.Gossip(topology, local_axis="local")
    assert gossip.bytes_sent(jnp.zeros(64), 0) == 2 * 3 / 4 * 64 * 4 / 2


STEP_GRAPHS = ("ring", "one_peer_exponential", "aer", "random_matching", "star")
PERMUTED_MODELS = {"da_dmsgd": 2}


def _compiled_step(key, topology, phase, params, *, wire=None, mesh=None, specs=None):
    """The optimized text of one training step of an algorithm on a mesh."""
    name, hyperparameters = lifts.ALGORITHMS[key]
    gossip = jaxdec.Gossip(topology, wire_dtype=wire)
    tx = jaxdec.algorithms.by_name(name, gossip, learning_rate=0.1, **hyperparameters)

    def step(state, x, *, phase):
        params, opt_state = state
        hidden = jnp.tanh(x @ params["kernel"] + params["bias"][None])
        grads = jax.tree.map(lambda p: jnp.mean(hidden) * p, params)
        updates, opt_state = tx.update(grads, opt_state, params, phase=phase)
        return optax.apply_updates(params, updates), opt_state

    mesh = jaxdec.nodes.make_mesh(node=N) if mesh is None else mesh
    n = mesh.shape["node"]
    params = jaxdec.nodes.shard(params, mesh, specs)
    state = (params, jaxdec.nodes.on_mesh(tx.init, mesh, donate_argnums=())(params))
    x = jaxdec.nodes.shard(jnp.ones((n, 2, 16)), mesh)
    step = jaxdec.nodes.on_mesh(step, mesh)
    return step.lower(state, x, phase=phase).compile().as_text()


def _params(n=N):
    return {"kernel": jnp.ones((n, 16, 8)), "bias": jnp.ones((n, 8))}


MODEL_BYTES = (16 * 8 + 8) * 4


@pytest.mark.parametrize("graph", STEP_GRAPHS)
@pytest.mark.parametrize("key", [k for k in lifts.ALGORITHMS if not k.startswith("allreduce")])
def test_step_holds_no_collective_but_gossip(key, graph):
    topology = GRAPHS[graph]
    if key == "slowmo":
        topology = jaxdec.topology.with_mean(topology, every=5)
    for phase in topology.distinct_phases:
        if topology.is_mean(phase):
            continue
        models = PERMUTED_MODELS.get(key, 1) * len(topology.rounds[phase])
        moved = hlo.collectives(_compiled_step(key, topology, phase, _params()))
        assert moved == ({"collective-permute": models * MODEL_BYTES} if models else {})


@pytest.mark.parametrize("key", ["decentlam", "accumulated_adamw"])
def test_bfloat16_wire_moves_half_the_bytes(key):
    topology = GRAPHS["ring"]
    text = _compiled_step(key, topology, 0, _params(), wire="bfloat16")
    assert hlo.collectives(text) == {"collective-permute": 2 * MODEL_BYTES // 2}


@pytest.mark.parametrize("key", ["decentlam", "accumulated_adamw", "dmsgd"])
def test_a_model_axis_of_two_halves_the_bytes_a_device(key):
    topology = jaxdec.topology.one_peer_exponential(4)
    mesh = jaxdec.nodes.make_mesh(node=4, model=2)
    specs = {"kernel": P(None, "model"), "bias": P("model")}
    text = _compiled_step(key, topology, 1, _params(4), mesh=mesh, specs=specs)
    moved = hlo.collectives(text)
    assert moved["collective-permute"] == MODEL_BYTES // 2
    # The model axis has collectives of its own (the forward pass); none spans the nodes.
    assert "all-gather" not in moved
    assert "reduce-scatter" not in moved


def test_exact_mean_is_one_all_reduce():
    text = _compiled_step("dsgd_awc", GRAPHS["complete"], 0, _params())
    assert set(hlo.collectives(text)) == {"all-reduce"}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: jaxdec.Gossip(GRAPHS["ring"], wire_dtype="int4"), ValueError, "wire_dtype='int4'"),
        (lambda: jaxdec.Gossip(GRAPHS["ring"], local_axis="local"), ValueError, "hierarchical"),
        (
            lambda: jax.vmap(
                lambda x: jaxdec.Gossip(GRAPHS["ring"])({"count": x}, 0), axis_name="node"
            )(jnp.arange(N)),
            TypeError,
            r"\['count'\] has dtype int32",
        ),
    ],
)
def test_bad_input_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
