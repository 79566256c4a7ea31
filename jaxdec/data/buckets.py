"""Batches of sentence pairs of similar length: little padding, few shapes to compile."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

import jax
import numpy as np

from jaxdec.data.dataset import Batch, Reshuffled, abstract_batch

if TYPE_CHECKING:
    from jaxdec.data.translation import SentencePairs


class Shape(NamedTuple):
    """Of one node's batch."""

    rows: int
    source: int  # tokens of a row
    target: int


class BucketedNodeBatches:
    """Step → batch, stacked over nodes: leaves of `SentencePairs.take` behind an axis of nodes.

    A pure function of (seed, step): nothing to checkpoint. Examples are sorted into buckets by
    their longer text, cut where the least padding is left. A step has one bucket, the same on all
    nodes, and with it one of `shapes`.

    An epoch, `steps_per_epoch` long, has as many steps of each bucket as its examples fill on the
    average node, rounded up, in an order drawn anew. In each bucket a node goes through its own
    examples again and again, newly shuffled each time; batches run on across the ends. So a node
    sees the examples of one bucket equally often, to one time, and each about once an epoch: more
    often where the rounding adds a good part to few steps, or where other nodes hold more of that
    bucket.

    Args:
      examples: the source.
      parts: [nodes] arrays of example indices.
      tokens: of a node's batch at most: its rows times the length of their longer text, padded.
      seed: of the shuffles.
      steps: number of batches.
      buckets: at most so many shapes; each is compiled for each round of the topology.
      nodes: whose batches to make, of all; None: all nodes'.
      accumulate: equal parts that a batch is taken in: its rows are a multiple of it.

    Raises:
      ValueError: too few tokens for the longest example, or a node without examples of a bucket.

    >>> from jaxdec.data.translation import SentencePairs, Texts
    >>> texts = Texts.of([[5, 3], [5, 6, 3], [5, 3], [5, 6, 5, 6, 5, 6, 3]] * 10)
    >>> pairs = SentencePairs(texts, texts, shape=(7, 7))
    >>> parts = [np.arange(20), np.arange(20, 40)]
    >>> batches = BucketedNodeBatches(pairs, parts, tokens=15, seed=0, steps=100, buckets=2)
    >>> batches.shapes
    (Shape(rows=5, source=3, target=3), Shape(rows=2, source=7, target=7))
    >>> batches.bucket(0), batches[0]["labels"].shape
    (1, (2, 2, 7))
    >>> batches.steps_per_epoch, f"{batches.padding:.3f}"
    (6, '0.115')
    """

    def __init__(
        self,
        examples: "SentencePairs",
        parts: Sequence[np.ndarray],
        tokens: int,
        seed: int,
        steps: int,
        buckets: int = 4,
        nodes: Sequence[int] | None = None,
        accumulate: int = 1,
    ):
        self._examples = examples
        self._seed = seed
        self._steps = steps
        self._nodes = range(len(parts)) if nodes is None else nodes
        used = np.concatenate(parts)
        sources, targets = examples.sources.lengths, examples.targets.lengths
        longer = np.maximum(sources, targets)
        bounds = least_padding(longer[used], buckets)
        if tokens < accumulate * bounds[-1]:
            parts_of = f" in each of {accumulate=} parts" if accumulate > 1 else ""
            raise ValueError(
                f"{tokens=} of a node's batch cannot hold the longest example{parts_of}; "
                f"write at least {accumulate * bounds[-1]}"
            )
        bucket = np.full(len(examples), -1)
        bucket[used] = np.searchsorted(bounds, longer[used])
        members = [np.flatnonzero(bucket == b) for b in range(len(bounds))]
        self.shapes = tuple(
            Shape(
                tokens // (accumulate * bound) * accumulate,
                int(sources[chosen].max()),
                int(targets[chosen].max()),
            )
            for bound, chosen in zip(bounds, members, strict=True)
        )
        self._streams = [
            [
                Reshuffled(np.sort(part[bucket[part] == b]), (seed, b, node))
                for node, part in enumerate(parts)
            ]
            for b in range(len(bounds))
        ]
        for bound, streams in zip(bounds, self._streams, strict=True):
            for node, stream in enumerate(streams):
                if len(stream.pool) == 0:
                    raise ValueError(
                        f"node {node} has no example for the bucket of up to {bound} tokens; "
                        f"write fewer than {buckets=}, or partition by iid"
                    )
        self._steps_of = [
            -(-len(chosen) // (len(parts) * shape.rows))
            for chosen, shape in zip(members, self.shapes, strict=True)
        ]
        self._means = [float((sources[chosen] + targets[chosen]).mean()) for chosen in members]
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, int))  # the last epoch's

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: SupportsIndex) -> Batch:
        bucket, before = self._place(int(step))
        rows, *shape = self.shapes[bucket]
        streams = [self._streams[bucket][node] for node in self._nodes]
        chosen = [stream.take(before * rows, rows) for stream in streams]
        batch = self._examples.take(np.concatenate(chosen), shape=(shape[0], shape[1]))
        return jax.tree.map(lambda x: x.reshape(len(chosen), rows, *x.shape[1:]), batch)

    @property
    def distinct_shapes(self) -> int:
        return len(self.shapes)

    def abstract(self, shape: int = 0) -> Batch:
        rows, source, target = self.shapes[shape]
        none = self._examples.take(np.empty(0, int), shape=(source, target))
        return abstract_batch(none, rows)

    def bucket(self, step: int) -> int:
        """Which of `shapes` a step has."""
        return self._place(step)[0]

    @property
    def steps_per_epoch(self) -> int:
        return sum(self._steps_of)

    @property
    def padding(self) -> float:
        """The share of tokens, of sources and targets, that are padding."""
        rows = [n * shape.rows for n, shape in zip(self._steps_of, self.shapes, strict=True)]
        padded = np.dot(rows, [shape.source + shape.target for shape in self.shapes])
        return float(1 - np.dot(rows, self._means) / padded)

    def _place(self, step: int) -> tuple[int, int]:
        """A step's bucket, and how many steps had it before."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            every = np.repeat(np.arange(len(self.shapes)), self._steps_of)
            self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(every)
        order = self._order[1]
        bucket = int(order[within])
        return bucket, epoch * self._steps_of[bucket] + int(np.sum(order[:within] == bucket))


def least_padding(lengths: np.ndarray, buckets: int) -> list[int]:
    """Upper bounds of at most so many buckets that pad these texts by the fewest tokens.

    >>> least_padding(np.array([2, 2, 2, 3, 9, 9, 10]), 2)
    [3, 10]
    """
    values, counts = np.unique(lengths, return_counts=True)
    until = np.concatenate([[0], np.cumsum(counts)])
    # cost[j]: tokens of the texts as long as the first j values; each turn adds a bucket, which
    # starts behind the first i. `cuts` keeps the best i for each j.
    cost = np.concatenate([[0.0], until[1:] * values])
    cuts = []
    for _ in range(min(buckets, len(values)) - 1):
        added = (until[1:] - until[:-1, np.newaxis]) * values
        start = np.arange(len(values))
        total = np.where(start[:, np.newaxis] <= start, cost[:-1, np.newaxis] + added, np.inf)
        cuts.append(total.argmin(axis=0))
        cost = np.concatenate([[0.0], total.min(axis=0)])
    bounds = [len(values)]
    for cut in reversed(cuts):
        if bounds[-1] > 0:
            bounds.append(int(cut[bounds[-1] - 1]))
    return [int(values[bound - 1]) for bound in reversed(bounds) if bound > 0]
