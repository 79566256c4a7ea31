"""Translating by beam search, and how good the translations are: BLEU."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdec.data.translation import BEGIN, END, PAD, Texts, Translation
from jaxdec.models.transformer import Transformer

# (token [rows], position, cache) → logits [rows, classes], cache
Step = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
Search = Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]


class _Beams(NamedTuple):
    """B texts, K beams."""

    position: jax.Array  # int32, of the next token
    tokens: jax.Array  # int32 [B, K, T], what goes on
    log_probs: jax.Array  # float32 [B, K]; −inf: no beam
    cache: Any  # leaves [B·K, ...]
    best: jax.Array  # int32 [B, T], of what has ended the best, padded behind END
    score: jax.Array  # float32 [B], the best's
    ended: jax.Array  # int32 [B]


def beam_search(
    step: Step, cache: Any, limits_B: jax.Array, length: int, beam: int = 4, alpha: float = 0.6
) -> tuple[jax.Array, jax.Array]:
    """Search for the text of the highest score: log p(text) / ((5 + tokens) / 6)^α.

    A text ends with END, which counts as a token, and at its limit nothing else may come. At each
    position the 2K best continuations of K beams are ranked: those among the first K that end
    are kept if their score is the best yet, and the K best that do not end go on. A text is done
    when K have ended, or when no beam can beat the best any more. With one beam that is greedy
    decoding (GNMT's search, arXiv 1609.08144, without its coverage).

    Args:
      step: continues each row by its token; logits need not be normalized.
      cache: the step's, at the beginning; leaves [texts · beam, ...].
      limits_B: int32 [texts], most tokens of each, from 1 to `length`.
      length: the largest limit.
      beam: K.
      alpha: of the penalty, at least 0; the larger, the longer the texts.

    Returns:
      tokens int32 [texts, length], padded with PAD behind END, and their scores [texts].

    >>> logits = jnp.log(jnp.array([[0.0, 0.0, 0.0, 0.4, 0.6]]))  # END, or token 4
    >>> step = lambda token, position, cache: (jnp.repeat(logits, 2, axis=0), cache)
    >>> limits = jnp.array([3])
    >>> tokens, score = beam_search(step, None, limits, length=3, beam=2, alpha=0.0)
    >>> tokens.tolist(), round(float(jnp.exp(score[0])), 2)
    ([[3, 0, 0]], 0.4)
    """
    batch = len(limits_B)

    def penalty(tokens: jax.Array) -> jax.Array:
        return ((5.0 + tokens) / 6.0) ** alpha

    def done(beams: _Beams) -> jax.Array:
        # Scores are negative and the penalty grows: from here none ends better than at its limit.
        reachable = beams.log_probs.max(axis=1) / penalty(limits_B)
        return (beams.ended >= beam) | (beams.score >= reachable)

    def advance(beams: _Beams) -> _Beams:
        position = beams.position
        last = jnp.where(position > 0, beams.tokens[:, :, position - 1], BEGIN)
        logits, cache = step(last.reshape(-1), position, beams.cache)
        classes = logits.shape[-1]
        log_probs = nnx.log_softmax(logits).reshape(batch, beam, classes)
        at_limit = jnp.broadcast_to((position + 1 >= limits_B)[:, None, None], log_probs.shape)
        ends = jnp.broadcast_to(jnp.arange(classes) == END, log_probs.shape)
        log_probs = jnp.where(at_limit & ~ends, -jnp.inf, log_probs)
        log_probs = (log_probs + beams.log_probs[:, :, None]).reshape(batch, -1)
        ranked, chosen = jax.lax.top_k(log_probs, min(2 * beam, beam * classes))
        parents, tokens = chosen // classes, chosen % classes
        texts = jnp.take_along_axis(beams.tokens, parents[:, :, None], axis=1)
        texts = texts.at[:, :, position].set(tokens)

        first = jnp.broadcast_to(jnp.arange(ranked.shape[1]) < beam, ranked.shape)
        ending = first & (tokens == END) & (ranked > -jnp.inf) & ~done(beams)[:, None]
        scores = jnp.where(ending, ranked / penalty(position + 1), -jnp.inf)
        winner = scores.argmax(axis=1)[:, None]
        score = jnp.take_along_axis(scores, winner, axis=1)[:, 0]
        text = jnp.take_along_axis(texts, winner[:, :, None], axis=1)[:, 0]
        better = score > beams.score

        going = jnp.where(tokens == END, -jnp.inf, ranked)
        going, places = jax.lax.top_k(going, beam)
        parents = jnp.take_along_axis(parents, places, axis=1)
        rows = (parents + beam * jnp.arange(batch)[:, None]).reshape(-1)
        return _Beams(
            position + 1,
            jnp.take_along_axis(texts, places[:, :, None], axis=1),
            going,
            jax.tree.map(lambda x: x[rows], cache),
            jnp.where(better[:, None], text, beams.best),
            jnp.where(better, score, beams.score),
            beams.ended + ending.sum(axis=1),
        )

    only_first = jnp.where(jnp.arange(beam) == 0, 0.0, -jnp.inf)
    beams = _Beams(
        position=jnp.zeros((), jnp.int32),
        tokens=jnp.full((batch, beam, length), PAD, jnp.int32),
        log_probs=jnp.tile(only_first, (batch, 1)),
        cache=cache,
        best=jnp.full((batch, length), PAD, jnp.int32),
        score=jnp.full(batch, -jnp.inf),
        ended=jnp.zeros(batch, jnp.int32),
    )
    beams = jax.lax.while_loop(
        lambda beams: (beams.position < length) & ~done(beams).all(), advance, beams
    )
    return beams.best, beams.score


def searcher(model: Transformer, beam: int = 4, alpha: float = 0.6, extra: int = 50) -> Search:
    """The beam search of a model as (params, source_BxS) → (tokens_BxT, scores_B), jitted.

    Args:
      model: tells the architecture; it may be abstract, from `nnx.eval_shape`. Dropout is off.
      beam: texts that go on at a time.
      alpha: of the length penalty.
      extra: a translation has at most so many tokens more than its source; T = S + extra.
    """
    graph, _ = nnx.split(model, nnx.Param)

    @jax.jit
    def search(params: Any, source_BxS: jax.Array) -> tuple[jax.Array, jax.Array]:
        translator = nnx.merge(graph, params)
        translator.eval()
        length = source_BxS.shape[1] + extra
        seen_BxS = source_BxS != PAD
        memory = jnp.repeat(translator.encode(source_BxS), beam, axis=0)
        past, sources = translator.start(memory, length)
        seen = jnp.repeat(seen_BxS, beam, axis=0)

        def step(token: jax.Array, position: jax.Array, past: Any) -> tuple[jax.Array, Any]:
            return translator.step(token, position, past, sources, seen)

        return beam_search(step, past, seen_BxS.sum(axis=1) + extra, length, beam, alpha)

    return search


def translate(search: Search, params: Any, sources: Texts, rows: int = 64) -> list[np.ndarray]:
    """The tokens that a model answers each source with, padded behind END.

    Texts of similar length go together, padded to a multiple of 16 tokens: few shapes compile.

    Args:
      search: from `searcher`.
      params: of one model.
      sources: a split's.
      rows: searched at a time.
    """
    order = np.argsort(sources.lengths, kind="stable")
    answers: list[np.ndarray] = [np.empty(0)] * len(order)
    for first in range(0, len(order), rows):
        chosen = order[first : first + rows]
        length = -(-int(sources.lengths[chosen].max()) // 16) * 16
        # The last batch is filled with texts that it holds already.
        batch = sources.padded(np.resize(chosen, rows), length, fill=PAD)
        tokens, _ = jax.device_get(search(params, jnp.asarray(batch)))
        for index, answer in zip(chosen, tokens, strict=False):
            answers[index] = answer
    return answers


def evaluate(data: Translation, search: Search, params: Any, split: str = "test") -> float:
    """BLEU of one model's translations of "valid" or "test"."""
    sources = {"valid": data.valid, "test": data.test}[split].sources
    answers = translate(search, params, sources)
    return bleu([data.text(answer) for answer in answers], data.references[split])


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU in percent, by sacreBLEU with its defaults: tokenizer 13a, case kept.

    >>> round(bleu(["This is a small test."], ["This is a tiny test."]), 1)
    38.0
    """
    try:
        import sacrebleu
    except ImportError as error:
        raise ImportError("BLEU needs sacrebleu: pip install 'jaxdec[text]'") from error
    return sacrebleu.corpus_bleu(list(hypotheses), [list(references)]).score
