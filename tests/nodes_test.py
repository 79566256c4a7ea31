"""The lifts: axes, static phase, donation, meshes and placement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxdec
from tests import lifts


@pytest.mark.parametrize("lift", lifts.LIFTS)
def test_axes_are_prefix_trees_and_none_is_replicated(lift):
    def f(x, tree, shared):
        return {"sum": x + tree["a"].sum() + shared, "shared": shared * 2}

    lifted = lifts.lift(
        f, lift, 4, in_axes=(0, {"a": 1}, None), out_axes={"sum": 0, "shared": None}
    )
    x, a = np.arange(4.0, dtype=np.float32), np.ones((3, 4), np.float32)
    result = lifted(x, {"a": a}, np.float32(10))
    np.testing.assert_allclose(result["sum"], x + 13)
    assert result["shared"] == 20


@pytest.mark.parametrize("lift", lifts.LIFTS)
def test_axes_may_be_a_list(lift):
    lifted = lifts.lift(lambda x, y: x + y, lift, 4, in_axes=[0, None])
    np.testing.assert_allclose(lifted(np.arange(4.0), 1.0), np.arange(4) + 1)


@pytest.mark.parametrize("axes", [{"in_axes": -1}, {"in_axes": (0, -2)}, {"out_axes": -1}], ids=str)
def test_axes_from_the_end_are_refused_on_a_mesh(axes):
    with pytest.raises(ValueError, match=r"(in|out)_axes=.* counts from the end"):
        lifts.lift(lambda x, y: x, "mesh", 4, **axes)


@pytest.mark.parametrize("lift", lifts.LIFTS)
def test_out_axes_place_the_node_axis(lift):
    lifted = lifts.lift(lambda x: x, lift, 4, out_axes=1)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(lifted(x), x.T)


@pytest.mark.parametrize("lift", lifts.LIFTS)
def test_the_state_is_donated_and_nothing_else(lift):
    lifted = lifts.lift(lambda state, x: state + x, lift, 4, donate_argnums=0)
    state, x = (lifts.placed(np.ones((4, 2), np.float32), lift, 4) for _ in range(2))
    result = lifted(state, x)
    assert state.is_deleted()
    assert not x.is_deleted()
    np.testing.assert_array_equal(result, 2)


def test_the_first_argument_is_donated_by_default():
    mesh = jaxdec.nodes.make_mesh(node=4)
    for lifted in (
        jaxdec.nodes.simulate(lambda x: x + 1),
        jaxdec.nodes.on_mesh(lambda x: x + 1, mesh),
    ):
        state = jaxdec.nodes.shard(jnp.ones((4, 2)), mesh)
        lifted(state)
        assert state.is_deleted()


@pytest.mark.parametrize("lift", lifts.LIFTS)
def test_phase_is_static(lift):
    seen = []

    def f(x, *, phase):
        seen.append(phase)
        return x * phase

    lifted = lifts.lift(f, lift, 2)
    for phase in (1, 2, 1, 2):
        np.testing.assert_array_equal(lifted(np.ones(2, np.float32), phase=phase), phase)
    assert seen == [1, 2]


def test_randomness_is_the_same_under_both_lifts():
    def draw(key, step):
        key = jax.random.fold_in(jax.random.fold_in(key, step), jax.lax.axis_index("node"))
        return jax.random.normal(key, (3,))

    key = jax.random.key(0)
    draws = [
        lifts.lift(draw, lift, 4, in_axes=(None, None))(key, 7)
        if lift == "mesh"
        else jax.vmap(draw, in_axes=(None, None), axis_name="node", axis_size=4)(key, 7)
        for lift in lifts.LIFTS
    ]
    np.testing.assert_array_equal(*draws)
    assert len(np.unique(draws[0])) == 12


def test_simulate_composes_with_a_further_vmap():
    gossip = jaxdec.Gossip(jaxdec.topology.ring(4))
    step = jaxdec.nodes.simulate(lambda x, *, phase: x + gossip(x, phase), donate_argnums=())
    x = np.random.default_rng(0).standard_normal((3, 4, 2)).astype(np.float32)
    together = jax.vmap(lambda x: step(x, phase=0))(x)
    for seed in range(3):
        np.testing.assert_allclose(together[seed], step(x[seed], phase=0), rtol=1e-6)


def test_stack_and_mean():
    tree = {"a": jnp.arange(3.0), "b": jnp.asarray(2.0, jnp.bfloat16)}
    stacked = jaxdec.nodes.stack(tree, 4)
    assert stacked["a"].shape == (4, 3)
    assert stacked["b"].shape == (4,)
    mean = jaxdec.nodes.mean(stacked)
    assert mean["b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(mean["a"], tree["a"])


def test_mean_of_bfloat16_is_summed_in_float32():
    x = jnp.asarray([1.0, *[2**-8] * 256], jnp.bfloat16)
    assert jaxdec.nodes.mean(x) == jnp.asarray(2 / 257, jnp.bfloat16)


def test_meshes_and_placement():
    mesh = jaxdec.nodes.make_mesh(node=2, local=2, model=2)
    assert dict(mesh.shape) == {"node": 2, "local": 2, "model": 2}
    x = jaxdec.nodes.shard(jnp.zeros((4, 6)), mesh, P("model"))
    assert x.sharding.spec == P(("node", "local"), "model")
    assert jaxdec.nodes.make_mesh(node=3).axis_names == ("node",)


def test_a_local_axis_numbers_replicas_host_by_host():
    mesh = jaxdec.nodes.make_mesh(node=2, local=2)

    def f(x):
        host, device = jax.lax.axis_index("node"), jax.lax.axis_index("local")
        return x + 10 * host + device

    lifted = jaxdec.nodes.on_mesh(f, mesh, donate_argnums=())
    x = jaxdec.nodes.shard(jnp.zeros(4, jnp.int32), mesh)
    np.testing.assert_array_equal(lifted(x), [0, 1, 10, 11])


def test_bad_meshes_are_named():
    with pytest.raises(ValueError, match="needs 16 devices, 8 are here"):
        jaxdec.nodes.make_mesh(node=16)
    with pytest.raises(ValueError, match="use make_mesh"):
        jaxdec.nodes.on_mesh(lambda x: x, jax.make_mesh((2,), ("data",)))
