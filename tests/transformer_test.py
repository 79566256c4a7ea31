"""The encoder-decoder: size, masks, dropout, decoding step by step, beam search, BLEU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxdec import translate
from jaxdec.data.translation import BEGIN, END, PAD, SentencePairs, Texts
from jaxdec.models.transformer import Transformer, sinusoids
from tests import lifts

CLASSES = 13
KEY = functools.partial(jax.random.key, impl="unsafe_rbg")  # quicker to compile


def construct(**fields):
    fields = {**dict(layers=1, heads=2, width=16, mlp=24, dropout=0.0), **fields}
    return Transformer((7, 6), CLASSES, **fields, rngs=nnx.Rngs(KEY(0)))


@functools.cache
def state_of_the_small_model():
    return nnx.state(jax.jit(construct)())


def build(**fields):
    """The small model, with these fields and always the same parameters."""
    model = nnx.eval_shape(functools.partial(construct, **fields))
    return nnx.merge(nnx.graphdef(model), state_of_the_small_model())


def texts(seed=0, rows=3):
    """Sources of 7 tokens, a token shorter from row to row, the last empty; targets; labels."""
    rng = np.random.default_rng(seed)
    source = rng.integers(4, CLASSES, (rows, 7))
    for row in range(rows):
        source[row, 7 - row :] = PAD
    source[-1] = PAD
    target = rng.integers(4, CLASSES, (rows, 6))
    labels = np.hstack([target[:, 1:], np.full((rows, 1), END)])
    return {"source": jnp.asarray(source, jnp.int32), "target": jnp.asarray(target, jnp.int32)}, (
        jnp.asarray(labels, jnp.int32)
    )


def compiled(f):
    """Jitted with little optimization: these programs run once or twice."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


def call(model, inputs, **kwargs):
    graph, state = nnx.split(model)
    return compiled(lambda inputs: nnx.merge(graph, state)(inputs, **kwargs))(inputs)


def cross_entropy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return jnp.sum(losses * (labels >= 0)) / jnp.sum(labels >= 0)


@pytest.mark.parametrize(
    ("fields", "parameters", "published"),
    [
        ({}, 63_045_632, 65e6),
        (dict(heads=16, width=1024, mlp=4096), 214_171_648, 213e6),
    ],
    ids=["base", "big"],
)
def test_sizes_follow_the_formula_and_round_near_the_published(fields, parameters, published):
    model = nnx.eval_shape(
        lambda: Transformer((256, 256), 37_000, **fields, dtype="bfloat16", rngs=nnx.Rngs(0))
    )
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    V, L, D, F = 37_000, 6, model.embed.features, model.encoder[0].mlp.up.out_features
    counted = sum(leaf.size for leaf in leaves)
    assert counted == parameters == V * D + L * (12 * D**2 + 4 * D * F + 2 * F + 12 * D)
    assert counted == pytest.approx(published, rel=0.031)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}


def test_sinusoids_are_the_papers():
    found = sinusoids(jnp.arange(50), 16)
    for t, i in itertools.product((0, 1, 17, 49), range(8)):
        angle = t / 10_000 ** (2 * i / 16)
        np.testing.assert_allclose(found[t, 2 * i], np.sin(angle), atol=1e-5)
        np.testing.assert_allclose(found[t, 2 * i + 1], np.cos(angle), atol=1e-5)


def test_it_starts_at_a_uniform_guess_with_normalized_layers():
    model = jax.jit(functools.partial(construct, width=64, heads=4))()
    assert np.std(model.embed.embedding[...]) == pytest.approx(1 / 8, rel=0.1)
    square = model.decoder[0].cross.key_value.kernel[...]
    assert np.abs(square).max() == pytest.approx(np.sqrt(6 / 128), rel=0.01)
    inputs, _ = texts()
    memory = compiled(lambda source: model.encode(source))(inputs["source"])
    # Post-norm: what leaves the stack is normalized, with no norm of its own.
    np.testing.assert_allclose(memory.mean(-1), 0.0, atol=1e-5)
    np.testing.assert_allclose(memory.std(-1), 1.0, atol=1e-3)


def test_no_target_token_changes_the_logits_before_it():
    model, (inputs, _) = build(), texts()
    apply = compiled(lambda inputs: model(inputs))
    logits = apply(inputs)
    for t in range(6):
        changed = inputs["target"].at[:, t].set((inputs["target"][:, t] + 1) % CLASSES)
        difference = np.abs(apply({**inputs, "target": changed}) - logits).max((0, 2))
        assert (difference[:t] == 0).all()
        assert (difference[t:] > 1e-6).all()


def test_padding_changes_neither_logits_nor_gradients():
    model, (inputs, labels) = build(), texts()
    inputs["source"] = inputs["source"].at[-1, 0].set(4)  # an empty text has nothing to keep
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 5))), inputs)
    padded_labels = jnp.pad(labels, ((0, 0), (0, 5)), constant_values=-1)
    graph, params = nnx.split(model)

    def gradients(inputs, labels):
        def loss(params):
            logits = nnx.merge(graph, params)(inputs)
            return cross_entropy(logits, labels), logits

        grads, logits = compiled(jax.grad(loss, has_aux=True))(params)
        return logits[:, :6], grads

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        gradients(inputs, labels),
        gradients(padded, padded_labels),
    )


def test_every_gradient_is_finite_and_not_zero_and_remat_keeps_less():
    inputs, labels = texts()

    def loss(graph, params):
        return cross_entropy(nnx.merge(graph, params)(inputs), labels)

    grads, kept = [], []
    for remat in (False, True):
        graph, params = nnx.split(build(remat=remat))
        f = functools.partial(loss, graph)
        grads.append(compiled(jax.grad(f))(params))
        residuals = jax.eval_shape(functools.partial(jax.vjp, f), params)[1]
        kept.append(sum(leaf.size for leaf in jax.tree.leaves(residuals)))
    for path, gradient in jax.tree.leaves_with_path(grads[0]):
        assert np.isfinite(gradient).all(), jax.tree_util.keystr(path)
        assert np.abs(gradient).max() > 1e-8, jax.tree_util.keystr(path)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, *grads)
    assert kept[1] < 0.6 * kept[0]


def test_bfloat16_is_near_float32():
    inputs, _ = texts()
    exact, rounded = (call(build(dtype=dtype), inputs) for dtype in ("float32", "bfloat16"))
    assert rounded.dtype == jnp.float32
    assert 1e-5 < np.abs(exact - rounded).max() / np.abs(exact).max() < 0.05


def test_dropout_follows_its_key_in_train_mode_alone():
    model, (inputs, _) = build(dropout=0.5), texts()
    apply = compiled(lambda key: model(inputs, rngs=key))
    first, again, other = (apply(KEY(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01
    with pytest.raises(ValueError, match="pass rngs="):
        model(inputs)
    model.eval()
    np.testing.assert_array_equal(call(model, inputs), call(build(), inputs))
    np.testing.assert_array_equal(call(model, inputs, rngs=KEY(0)), call(build(), inputs))


def test_every_dropout_draws_by_its_own_key(monkeypatch):
    model = nnx.eval_shape(lambda: construct(layers=2, dropout=0.5))
    inputs, _ = texts()
    keys = []

    def record(drop, x, *, rngs):
        keys.append(jax.random.key_data(rngs))
        return x

    def recorded(params, key):
        nnx.merge(graph, params)(inputs, rngs=key)
        return jnp.stack(keys)

    graph, params = nnx.split(model)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    monkeypatch.setattr(nnx.Dropout, "__call__", record)
    found = compiled(recorded)(params, jax.random.key(0))
    # Two embeddings, two sublayers in each layer of the encoder, three in the decoder.
    assert len(np.unique(found, axis=0)) == len(found) == 2 + 2 * 2 + 2 * 3


def test_both_lifts_give_the_same_logits():
    """Of nodes with other parameters and other texts."""
    n = 2
    graph, params = nnx.split(build(remat=True))
    stacked = jax.tree.map(lambda x: jnp.stack([x * (1 + i / 4) for i in range(n)]), params)
    inputs = jax.tree.map(lambda *x: jnp.stack(x), *[texts(seed)[0] for seed in range(n)])

    def node_logits(params, inputs):
        return nnx.merge(graph, params)(inputs)

    simulated, on_mesh = (
        compiled(functools.partial(lifts.lift(node_logits, lift, n)))(stacked, inputs)
        for lift in lifts.LIFTS
    )
    assert np.abs(simulated[0] - simulated[1]).max() > 1e-3
    np.testing.assert_allclose(simulated, on_mesh, rtol=1e-4, atol=1e-4)


def test_decoding_step_by_step_is_decoding_at_once():
    model, (inputs, _) = jax.jit(functools.partial(construct, layers=2))(), texts()

    @compiled
    def stepwise(inputs):
        past, sources = model.start(model.encode(inputs["source"]), length=9)
        seen = inputs["source"] != PAD

        def step(past, position):
            token = inputs["target"][:, position]
            logits, past = model.step(token, position, past, sources, seen)
            return past, logits

        logits_TxBxV = jax.lax.scan(step, past, jnp.arange(6))[1]
        return jnp.swapaxes(logits_TxBxV, 0, 1)

    np.testing.assert_allclose(stepwise(inputs), call(model, inputs), atol=1e-5)


def toy(seed, classes=5, length=4):
    """log p(token | position, number of the text + sum of its tokens so far); END is rarer."""
    table = np.random.default_rng(seed).normal(size=(length, classes * length, classes)) * 2
    table[:, :, END] -= 2
    return table - np.log(np.exp(table).sum(-1, keepdims=True))


@functools.partial(jax.jit, static_argnames="beam")
def search_toy(table, limits, beam, alpha):
    def step(token, position, total):
        total += jnp.where(position > 0, token, 0)
        return table[position, total] + 3.0, total  # not normalized

    totals = jnp.repeat(jnp.arange(len(limits)), beam)
    return translate.beam_search(step, totals, limits, 4, beam, alpha)


def every_text(table, number, limit, alpha):
    """Text → score, of each that ends with END within the limit."""
    scores = {}
    others = [token for token in range(table.shape[-1]) if token != END]
    for count in range(limit):
        for before in itertools.product(others, repeat=count):
            text = (*before, END)
            log_probs = [table[t, number + sum(text[:t]), token] for t, token in enumerate(text)]
            scores[text] = sum(log_probs) / ((5 + len(text)) / 6) ** alpha
    return scores


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_a_beam_wide_enough_finds_the_best_of_all_texts(alpha):
    """4³ beams: no text is dropped. Four texts with other limits, searched together."""
    limits, lengths = jnp.array([4, 3, 1, 4]), set()
    for seed in range(10):
        table = toy(seed)
        found = search_toy(jnp.asarray(table, jnp.float32), limits, 64, alpha)
        for number, (tokens, score) in enumerate(zip(*found, strict=True)):
            scores = every_text(table, number, int(limits[number]), alpha)
            best = max(scores, key=scores.__getitem__)
            assert tuple(tokens[: len(best)].tolist()) == best
            assert (tokens[len(best) :] == PAD).all()
            assert score == pytest.approx(scores[best], rel=1e-4)
            lengths.add(len(best))
    assert lengths == {1, 2, 3, 4}


def test_one_beam_is_greedy_whatever_its_companions():
    limits, early = [4, 3, 1, 4], 0
    for seed in range(40):
        table = toy(seed)
        # So large an α that a search which went on with its companions' would find better.
        found, _ = search_toy(jnp.asarray(table, jnp.float32), jnp.array(limits), 1, 8.0)
        for number, (tokens, limit) in enumerate(zip(found, limits, strict=True)):
            text: list[int] = []
            while END not in text:
                best = int(table[len(text), number + sum(text)].argmax())
                text.append(END if len(text) + 1 == limit else best)
            early += len(text) < limit
            assert tokens.tolist() == text + [PAD] * (4 - len(text))
    assert early > 5


def test_a_wider_beam_is_seldom_worse_and_longer_texts_win_by_alpha():
    scores, lengths = [], []
    for seed in range(20):
        table = jnp.asarray(toy(seed), jnp.float32)
        for beam, alpha in ((1, 0.6), (4, 0.6), (4, 3.0)):
            tokens, score = search_toy(table, jnp.array([4]), beam, alpha)
            scores.append(float(score[0]))
            lengths.append(int((tokens == END).argmax()) + 1)
    scores, lengths = np.reshape(scores, (20, 3)), np.reshape(lengths, (20, 3))
    assert (scores[:, 1] >= scores[:, 0] - 1e-6).mean() >= 0.9
    assert (scores[:, 1] > scores[:, 0] + 1e-3).any()
    assert lengths[:, 2].mean() > lengths[:, 1].mean()


def test_one_beam_of_a_model_is_its_greedy_text():
    model, (inputs, _) = build(), texts(rows=4)
    model.embed.embedding[...] = model.embed.embedding[...].at[END].multiply(1.5)  # it does end
    params = nnx.state(model, nnx.Param)
    search = translate.searcher(model, beam=1, extra=5)
    tokens, _ = search(params, inputs["source"])
    apply = compiled(lambda inputs: model(inputs))
    for row, source in enumerate(inputs["source"]):
        limit = int((source != PAD).sum()) + 5
        text = [BEGIN]
        while len(text) <= limit and text[-1] != END:
            target = jnp.zeros((1, 13), jnp.int32).at[0, : len(text)].set(jnp.array(text))
            logits = apply({"source": source[jnp.newaxis], "target": target})
            best = int(logits[0, len(text) - 1].argmax())
            text.append(END if len(text) == limit else best)
        assert tokens[row, : len(text) - 1].tolist() == text[1:]
        assert (tokens[row, len(text) - 1 :] == PAD).all()


def test_an_overfitted_model_translates_back():
    """Reversal of digits, of up to 6: trained on all, translated by beam search, BLEU 100."""
    rng = np.random.default_rng(0)
    forward = [rng.integers(4, CLASSES, rng.integers(2, 7)).tolist() for _ in range(24)]
    pairs = SentencePairs(
        Texts.of([[*text, END] for text in forward]),
        Texts.of([[*text[::-1], END] for text in forward]),
        shape=(7, 7),
    )
    batch = jax.tree.map(jnp.asarray, pairs.take(np.arange(24)))
    model = jax.jit(functools.partial(construct, width=32, mlp=64))()
    graph, params = nnx.split(model)
    tx = optax.adam(3e-3)

    def loss(params):
        return cross_entropy(nnx.merge(graph, params)(batch["inputs"]), batch["labels"])

    def step(_, carry):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    params, _ = jax.jit(lambda params: jax.lax.fori_loop(0, 400, step, (params, tx.init(params))))(
        params
    )
    search = translate.searcher(model, beam=4, extra=3)
    answers = translate.translate(search, params, pairs.sources, rows=16)
    spoken = [" ".join(map(str, a[: a.tolist().index(END)])) for a in answers]
    wanted = [" ".join(map(str, text[::-1])) for text in forward]
    assert spoken == wanted
    assert translate.bleu(spoken, wanted) == pytest.approx(100)


def test_bleu_is_that_of_the_corpus_with_punctuation_apart():
    """Of six tokens all but the last are right: n-gram precisions 5/6, 4/5, 3/4 and 2/3."""
    assert translate.bleu(["a b c d e."], ["a b c d e!"]) == pytest.approx(100 * (1 / 3) ** 0.25)
    both = translate.bleu(["a b c d e.", "v w x y z!"], ["a b c d e!", "v w x y z!"])
    precisions = np.array([11 / 12, 9 / 10, 7 / 8, 5 / 6])
    assert both == pytest.approx(100 * precisions.prod() ** 0.25)


@pytest.mark.parametrize(
    ("shape", "fields", "message"),
    [
        ((7,), {}, r"input_shape=\(7,\) must be \(source tokens, target tokens\)"),
        ((7, 6), dict(heads=3), "width=16 must be even and a multiple of heads=3"),
        ((7, 6), dict(heads=1, width=15), "width=15 must be even"),
        ((7, 6), dict(dtype="fp8"), "dtype='fp8' is unknown"),
    ],
)
def test_wrong_fields_are_named(shape, fields, message):
    fields = {**dict(layers=1, heads=2, width=16, mlp=8), **fields}
    with pytest.raises(ValueError, match=message):
        Transformer(shape, CLASSES, **fields, rngs=nnx.Rngs(0))
