"""Models: published sizes, dtypes, gradients, batch statistics, attention, both lifts."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from jaxdec.models.cnn import Cnn, PatchConv
from jaxdec.models.efficientnet import EfficientNetB0
from jaxdec.models.gpt import Gpt, rotate
from jaxdec.models.mobilenet import MobileNetV2
from jaxdec.models.resnet import ResNet, ResNet20
from jaxdec.models.vgg import Vgg16
from tests import lifts

IMAGENET, CIFAR, TEXT = ((224, 224, 3), 1000), ((32, 32, 3), 10), ((1024,), 50_257)

# Trainable parameters, and millions of multiplications an image, as published: by torchvision
# (ResNet, MobileNetV2, EfficientNet), transformers (GPT-2), and the widely used CIFAR versions
# (ResNet-20 and -18, VGG-16). The last two rows are ours, counted by hand.
PUBLISHED: list[tuple[Any, Any, int, dict[str, Any], int, int | None]] = [
    (ResNet20, *CIFAR, {}, 269_722, 41),
    (ResNet20, *CIFAR, dict(count=9), 853_018, 125),  # ResNet-56
    (ResNet, *IMAGENET, dict(depth=18), 11_689_512, 1_814),
    (ResNet, *IMAGENET, dict(depth=34), 21_797_672, 3_664),
    (ResNet, *IMAGENET, dict(depth=50), 25_557_032, 4_089),
    (ResNet, *CIFAR, dict(depth=18, small_input=True), 11_173_962, 555),
    (Vgg16, *CIFAR, {}, 14_728_266, 313),
    (MobileNetV2, *IMAGENET, {}, 3_504_872, 301),
    (MobileNetV2, *IMAGENET, dict(width_factor=0.5), 1_968_680, 97),
    (EfficientNetB0, *IMAGENET, {}, 5_288_548, 386),
    (EfficientNetB0, (240, 240, 3), 1000, dict(depth_factor=1.1), 7_794_184, 687),  # B1
    (Gpt, *TEXT, {}, 124_439_808, None),
    (Gpt, *TEXT, dict(layers=24, heads=16, width=1024), 354_823_168, None),  # medium
    (Gpt, *TEXT, dict(style="llama"), 123_551_232, None),
    (Cnn, (28, 28), 10, {}, 206_922, None),
]

# Small versions of every model that keep each kind of layer: factory, input shape, fields.
SMALL: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "cnn": (Cnn, (12, 11), dict(channels=(4, 8), dense=8)),
    "resnet20": (ResNet20, (8, 8, 3), dict(width=4, count=1)),
    "resnet50": (ResNet, (33, 32), dict(width=2, zero_scale=False)),
    "vgg16": (Vgg16, (32, 32, 3), dict(width_factor=1 / 16)),
    "mobilenet": (MobileNetV2, (16, 16, 3), dict(width_factor=0.25, small_input=True)),
    "efficientnet": (EfficientNetB0, (32, 32), dict(width_factor=0.25, depth_factor=0.3)),
    "gpt2": (Gpt, (6,), dict(layers=2, heads=2, width=16)),
    "llama": (Gpt, (6,), dict(layers=2, heads=2, width=16, style="llama")),
}
WITH_STATISTICS = [name for name in SMALL if "net" in name or "vgg" in name]
CLASSES = 11

# The loss of the step test below as torchvision 0.28 and transformers 5 compute it in train mode
# from the same parameters.
REFERENCE = {
    "resnet50": 2.303899,
    "mobilenet": 2.570399,
    "efficientnet": 2.515686,
    "gpt2": 3.409644,
    "llama": 3.200572,
}


def build(name: str, **fields: Any) -> nnx.Module:
    """The small model, with these fields; the caller's own copy."""
    return filled(functools.partial(construct, name, **fields))


def filled(factory: Any) -> nnx.Module:
    """Kernels from NumPy, scaled by their inputs: to compile each one's own draw takes long."""
    rng = np.random.default_rng(0)

    def fill(path, leaf):
        if path[-1] in ("kernel", "embedding"):
            values = rng.standard_normal(leaf.shape) / np.sqrt(np.prod(leaf.shape[:-1]))
        else:
            values = np.full(leaf.shape, path[-1] in ("scale", "var"))
        return leaf.replace(jnp.asarray(values, leaf.dtype))

    graph, state = nnx.split(nnx.eval_shape(factory))
    return nnx.merge(graph, nnx.map_state(fill, state))


def construct(name, **fields):
    factory, shape, defaults = SMALL[name]
    return factory(shape, CLASSES, **{**defaults, **fields}, rngs=nnx.Rngs(0))


def inputs(name: str, *leading: int, seed: int = 0) -> jax.Array:
    factory, shape, _ = SMALL[name]
    rng = np.random.default_rng(seed)
    if factory is Gpt:
        return jnp.asarray(rng.integers(0, CLASSES, (*leading, *shape)), jnp.int32)
    return jnp.asarray(rng.standard_normal((*leading, *shape)), jnp.float32)


def labels(name: str, *leading: int) -> jax.Array:
    factory, shape, _ = SMALL[name]
    shape = (*leading, *shape) if factory is Gpt else leading
    return jnp.asarray(np.random.default_rng(1).integers(0, CLASSES, shape), jnp.int32)


def cross_entropy(logits, labels):
    chosen = jnp.take_along_axis(nnx.log_softmax(logits), labels[..., jnp.newaxis], axis=-1)
    return -jnp.mean(chosen)


def loss_and_statistics(graph, params, rest, batch, labels, key=None):
    """A node's loss as a pure function of its state, the way the trainer uses models."""
    model = nnx.merge(graph, params, rest, copy=True)
    logits = model(batch) if key is None else model(batch, rngs=key)
    return cross_entropy(logits, labels), nnx.state(model, nnx.BatchStat)


def gradients(model, batch, labels):
    """(loss, statistics), gradients."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    f = functools.partial(loss_and_statistics, graph)
    return compiled(jax.value_and_grad(f, has_aux=True))(params, rest, batch, labels)


def call(model, batch):
    """Logits, the model left as it was."""
    graph, state = nnx.split(model)
    return compiled(lambda batch: nnx.merge(graph, state, copy=True)(batch))(batch)


def compiled(f):
    """Jitted with little optimization: these programs run once or twice."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


def flat(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


@pytest.mark.parametrize(
    ("factory", "shape", "classes", "fields", "parameters", "millions"),
    PUBLISHED,
    ids=[f"{row[0].__name__}-{row[-2]}" for row in PUBLISHED],
)
def test_sizes_are_the_published(factory, shape, classes, fields, parameters, millions):
    """In bfloat16: its products are, its parameters and logits are not."""
    model = nnx.eval_shape(
        lambda: factory(shape, classes, **fields, dtype="bfloat16", rngs=nnx.Rngs(0))
    )
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == parameters
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((params, rest))}
    assert dtypes == {jnp.dtype(jnp.float32)}

    batch = jax.ShapeDtypeStruct((1, *shape), jnp.int32 if factory is Gpt else jnp.float32)
    jaxpr, logits = jax.make_jaxpr(
        lambda params, rest, batch: nnx.merge(graph, params, rest, copy=True)(batch),
        return_shape=True,
    )(params, rest, batch)
    assert logits.shape == ((1, *shape, classes) if factory is Gpt else (1, classes))
    assert logits.dtype == jnp.float32
    found = list(products(jaxpr.jaxpr))
    assert {x.aval.dtype for product in found for x in product.invars} == {jnp.dtype(jnp.bfloat16)}
    if millions is not None:
        assert round(sum(map(multiplications, found)) / 1e6) == millions


def products(jaxpr):
    """Every convolution and matrix product of a jaxpr."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("conv_general_dilated", "dot_general"):
            yield equation
        for sub in jaxprs_in_params(equation.params):
            yield from products(sub)


def multiplications(product):
    (left, right), (out,) = product.invars, product.outvars
    if product.primitive.name == "dot_general":
        ((contracted, _), _) = product.params["dimension_numbers"]
        return out.aval.size * math.prod(left.aval.shape[axis] for axis in contracted)
    outputs = right.aval.shape[product.params["dimension_numbers"].rhs_spec[0]]
    return out.aval.size * right.aval.size // outputs


@pytest.mark.parametrize("name", ["cnn", "resnet20", "gpt2", "llama"])
def test_bfloat16_is_near_float32(name):
    batch = inputs(name, 4)
    exact, rounded = (call(build(name, dtype=dtype), batch) for dtype in ("float32", "bfloat16"))
    error = np.abs(exact - rounded).max() / np.abs(exact).max()
    assert 1e-5 < error < 0.05


@pytest.mark.parametrize("name", SMALL)
def test_a_step_reaches_every_parameter_and_statistic(name):
    model = build(name)
    before = flat(nnx.state(model, nnx.BatchStat))
    (loss, statistics), grads = gradients(model, inputs(name, 4), labels(name, 4))
    assert np.isfinite(loss)
    assert name not in REFERENCE or loss == pytest.approx(REFERENCE[name], rel=1e-4)
    for path, gradient in flat(grads).items():
        assert np.isfinite(gradient).all(), path
        # Batch norm takes away what a bias before it adds.
        assert np.abs(gradient).max() > 1e-8 or "['conv']['bias']" in path, path
    for path, statistic in flat(statistics).items():
        assert np.isfinite(statistic).all(), path
        assert not np.array_equal(statistic, before[path]), path
    assert bool(before) == (name in WITH_STATISTICS)


@pytest.mark.parametrize("name", WITH_STATISTICS)
def test_statistics_pass_through_in_eval_mode(name):
    model = nnx.eval_shape(functools.partial(construct, name))
    graph = nnx.graphdef(model)
    model.eval()
    evaluation, rest = nnx.split(model)
    model.train()
    assert nnx.graphdef(model) == graph != evaluation

    def after(rest, batch):
        called = nnx.merge(evaluation, rest, copy=True)
        called(batch)
        return nnx.state(called, nnx.BatchStat)

    jaxpr = jax.make_jaxpr(after)(rest, inputs(name, 2)).jaxpr
    assert jaxpr.outvars
    assert set(jaxpr.outvars) <= set(jaxpr.invars)


def test_in_eval_mode_an_example_is_alone():
    model, batch = build("resnet20"), inputs("resnet20", 4)
    assert np.abs(call(model, batch)[:2] - call(model, batch[:2])).max() > 1e-2
    model.eval()
    np.testing.assert_allclose(call(model, batch)[:2], call(model, batch[:2]), atol=1e-5)


def test_batch_norm_follows_the_batch():
    model = build("resnet20")
    batch = inputs("resnet20", 16)
    convolved = model.stem.conv(batch)
    model.stem(batch)
    np.testing.assert_allclose(
        model.stem.norm.mean[...], 0.1 * convolved.mean((0, 1, 2)), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        model.stem.norm.var[...], 0.9 + 0.1 * convolved.var((0, 1, 2)), rtol=1e-4
    )


@pytest.mark.parametrize(
    ("name", "fields", "tolerance"),
    [
        ("resnet20", {}, 1e-4),
        ("gpt2", dict(layers=1, dropout=0.3, remat=True), 1e-4),
        ("llama", dict(remat=True, dtype="bfloat16"), 1e-2),
    ],
)
def test_both_lifts_give_the_same_step(name, fields, tolerance):
    """Nodes with other parameters, statistics, dropout and data, in a step of gradient descent."""
    n = 3
    graph, params, rest = nnx.split(build(name, **fields), nnx.Param, ...)

    def stacked(tree):
        return jax.tree.map(lambda x: jnp.stack([x * (1 + i / 4) for i in range(n)]), tree)

    def node_step(params, rest, key, batch, labels):
        key = key if "dropout" in fields else None
        f = functools.partial(loss_and_statistics, graph, batch=batch, labels=labels, key=key)
        (loss, rest), grads = jax.value_and_grad(f, has_aux=True)(params, rest)
        return loss, rest, jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)

    keys = jax.random.split(jax.random.key(0), n)
    args = (stacked(params), stacked(rest), keys, inputs(name, n, 2), labels(name, n, 2))
    simulated, on_mesh = (
        flat(compiled(functools.partial(lifts.lift(node_step, lift, n)))(*args))
        for lift in lifts.LIFTS
    )
    for path, value in simulated.items():
        assert np.abs(value[0] - value[1]).max() > 1e-6, path
        np.testing.assert_allclose(
            value, on_mesh[path], rtol=tolerance, atol=tolerance, err_msg=path
        )


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 2), (2, 2)])
def test_patch_convolution_is_a_convolution(kernel, stride):
    fields = dict(dtype=jnp.float32)
    patch = filled(lambda: PatchConv(3, 4, kernel, stride, **fields, rngs=nnx.Rngs(0)))
    oracle = nnx.Conv(
        3,
        4,
        (kernel, kernel),
        strides=stride,
        padding=kernel // 2,
        kernel_init=nnx.initializers.zeros,
        rngs=nnx.Rngs(0),
    )
    oracle.kernel[...] = patch.linear.kernel.reshape(kernel, kernel, 3, 4)
    patch.linear.bias[...] = oracle.bias[...] = jnp.arange(4.0)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 10, 3)), jnp.float32)
    np.testing.assert_allclose(call(patch, x), call(oracle, x), rtol=1e-4, atol=1e-5)


def test_cnn_under_vmap_has_no_convolution():
    graph, params = nnx.split(build("cnn"))
    apply = jax.grad(lambda params, batch: nnx.merge(graph, params)(batch).sum())
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    text = jax.jit(jax.vmap(apply)).lower(stacked, inputs("cnn", 2, 4)).as_text()
    assert "dot_general" in text
    assert "convolution" not in text


@pytest.mark.parametrize("name", ["cnn", "resnet50"])
def test_a_missing_channel_axis_is_added(name):
    model, batch = build(name), inputs(name, 2)
    np.testing.assert_array_equal(call(model, batch), call(model, batch[..., jnp.newaxis]))


@pytest.mark.parametrize("zero_scale", [False, True])
def test_residuals_start_at_the_identity(zero_scale):
    @jax.jit
    def scales():
        model = construct("resnet50", zero_scale=zero_scale)
        return [[layer.norm.scale[...] for layer in r.layers] for r in model.residuals]

    for first, second, last in scales():
        assert (first == 1).all()
        assert (second == 1).all()
        assert (last == (0 if zero_scale else 1)).all()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_future_does_not_change_the_past(name):
    model, tokens = build(name), inputs(name, 2)
    apply = compiled(lambda tokens: model(tokens))
    logits = apply(tokens)
    for t in range(1, tokens.shape[1]):
        changed = tokens.at[:, t].set((tokens[:, t] + 1) % CLASSES)
        difference = np.abs(apply(changed) - logits).max((0, 2))
        assert (difference[:t] == 0).all()
        assert (difference[t:] > 1e-6).all()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_positions_matter(name, monkeypatch):
    """With one block, only positions tell the order of the tokens before the last."""
    model, tokens = build(name, layers=1), jnp.asarray([[1, 2, 3, 4, 5, 6]])
    swapped = tokens[:, jnp.asarray([1, 0, 2, 3, 4, 5])]

    def difference():
        logits = call(model, jnp.concatenate([tokens, swapped]))
        return np.abs(logits[0, -1] - logits[1, -1]).max()

    assert difference() > 1e-3
    if name == "gpt2":
        model.positions.embedding[...] *= 0
    else:
        monkeypatch.setattr("jaxdec.models.gpt.rotate", lambda x: x)
    assert difference() < 1e-5


def test_rotary_products_see_only_the_distance():
    q, k = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8)), jnp.float32)
    at = [rotate(jnp.broadcast_to(x, (1, 12, 1, 8)))[0, :, 0] for x in (q, k)]
    products = np.asarray(at[0] @ at[1].T)
    for distance in range(-11, 12):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert np.ptp(products) > 0.1
    assert rotate(jnp.ones((1, 2, 1, 8), jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_remat_gives_the_same_gradients_and_keeps_less(name):
    batch, target = inputs(name, 2), labels(name, 2)
    (_, grads), (_, again) = (gradients(build(name, remat=r), batch, target) for r in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), grads, again)

    def kept(remat):
        graph, params = nnx.split(build(name, remat=remat))
        f = functools.partial(jax.vjp, lambda params: nnx.merge(graph, params)(batch))
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(f, params)[1]))

    assert kept(True) < 0.6 * kept(False)


def test_gpt_starts_as_gpt2():
    rngs = nnx.Rngs(jax.random.key(0, impl="unsafe_rbg"))  # quicker to compile
    model = Gpt((64,), 500, layers=2, heads=4, width=128, rngs=rngs)
    block = model.blocks[1]
    for kernel in (model.embed.embedding, model.positions.embedding, block.qkv.kernel):
        assert np.std(kernel[...]) == pytest.approx(0.02, rel=0.03)
    for linear in (block.attention_out, block.down):
        assert np.std(linear.kernel[...]) == pytest.approx(0.02 / 2, rel=0.03)
    logits = call(model, jnp.zeros((2, 64), jnp.int32))
    assert cross_entropy(logits, jnp.ones((2, 64), jnp.int32)) == pytest.approx(
        np.log(500), rel=0.1
    )


def test_dropout_follows_its_key_and_leaves_no_key_in_the_state():
    model, tokens = build("gpt2", dropout=0.5), inputs("gpt2", 2)
    kinds = {type(leaf) for leaf in jax.tree.leaves(nnx.state(model), is_leaf=_is_variable)}
    assert kinds == {nnx.Param}
    apply = compiled(lambda key: model(tokens, rngs=key))
    first, again, other = (apply(jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01
    streams = compiled(lambda key: model(tokens, rngs=nnx.Rngs(dropout=key)))
    assert np.abs(first - streams(jax.random.key(0))).max() > 0.01
    with pytest.raises(ValueError, match="pass rngs="):
        model(tokens)
    model.eval()
    np.testing.assert_array_equal(call(model, tokens), call(build("gpt2"), tokens))


def _is_variable(x):
    return isinstance(x, nnx.Variable)


def test_a_shorter_text_fits_and_a_longer_one_is_refused():
    model, tokens = build("gpt2"), inputs("gpt2", 2)
    shorter = call(model, tokens[:, :4])
    np.testing.assert_allclose(shorter, call(model, tokens)[:, :4], atol=1e-6)
    with pytest.raises(ValueError, match="12 tokens do not fit"):
        model(jnp.tile(tokens, (1, 2)))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("cnn", dict(dtype="bf16"), "dtype='bf16' is unknown; use float32 or bfloat16"),
        ("resnet50", dict(depth=20), "depth=20 must be one of 18, 34, 50"),
        ("cnn", dict(kernel=4), "kernel=4 must be odd"),
        ("gpt2", dict(style="gpt3"), "style='gpt3' is unknown; choices: gpt2, llama"),
        ("gpt2", dict(heads=3), "width=16 must be a multiple of heads=3"),
        ("llama", dict(heads=16), "width=16 must be an even multiple of heads=16"),
    ],
)
def test_wrong_fields_are_named(name, fields, message):
    with pytest.raises(ValueError, match=message):
        construct(name, **fields)


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match="must be \\(tokens,\\)"):
        Gpt((8, 8), 10, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="its sides must be at least 32"):
        Vgg16((28, 28), 10, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="must be \\(height, width"):
        Cnn((784,), 10, rngs=nnx.Rngs(0))
