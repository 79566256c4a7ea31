"""What a data set is to a run, and the batches that nodes draw from it."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, SupportsIndex

import grain
import jax
import numpy as np

Batch = dict[str, Any]  # "inputs" and "labels": pytrees of arrays [examples, ...]

# Apart from the shuffles' [seed, node, epoch]: NumPy pads a seed with zeros, so not zero.
_AUGMENTATION = 1


class Examples(Protocol):
    """One split, by index."""

    @property
    def groups(self) -> np.ndarray:
        """Int [examples]: what a partition sorts by, a class or a source file."""
        ...

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray, rng: np.random.Generator | None = None) -> Batch:
        """The examples at `indices`: augmented as in training by `rng`, or as in evaluation."""
        ...


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Both splits, and what a model must know of them."""

    train: Examples
    test: Examples
    input_shape: tuple[int, ...]  # of one example
    classes: int  # outputs of the model; of a text, its vocabulary

    def batches(
        self,
        parts: Sequence[np.ndarray],
        batch_size: int,
        seed: int,
        steps: int,
        nodes: Sequence[int] | None = None,
        accumulate: int = 1,
    ) -> "Batches":
        """The training batches; `NodeBatches` says what of. `accumulate` divides `batch_size`."""
        del accumulate
        return NodeBatches(self.train, parts, batch_size, seed, steps, nodes)


class Batches(Protocol):
    """Step → batch, stacked over nodes; a pure function."""

    @property
    def distinct_shapes(self) -> int:
        """How many shapes batches have; each is compiled for each round of a topology."""
        ...

    def abstract(self, shape: int = 0) -> Batch:
        """One node's batch of one of them, as ShapeDtypeStructs; an example at most is read."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, step: SupportsIndex) -> Batch: ...


def abstract_batch(batch: Batch, rows: int) -> Batch:
    """The ShapeDtypeStructs of a batch that has so many examples.

    >>> abstract_batch({"labels": np.zeros(1)}, rows=4)
    {'labels': ShapeDtypeStruct(shape=(4,), dtype=float64)}
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)


class ArrayExamples:
    """Examples in memory, grouped by label, as they are.

    >>> ArrayExamples(np.arange(6.0).reshape(3, 2), np.array([0, 1, 0])).take(np.array([2]))
    {'inputs': array([[4., 5.]]), 'labels': array([0], dtype=int32)}
    """

    def __init__(self, inputs: np.ndarray, labels: np.ndarray):
        self._inputs = inputs
        self.groups = labels.astype(np.int32)

    def __len__(self) -> int:
        return len(self.groups)

    def take(self, indices: np.ndarray, rng: np.random.Generator | None = None) -> Batch:
        del rng
        return {"inputs": self._inputs[indices], "labels": self.groups[indices]}


class Reshuffled:
    """An endless sequence: `pool` again and again, newly shuffled each time.

    >>> Reshuffled(np.arange(3), seed=(0,)).take(first=2, count=5).tolist()
    [1, 2, 0, 1, 2]
    """

    def __init__(self, pool: np.ndarray, seed: Sequence[int]):
        self.pool = pool
        self._seed = seed
        self._order: tuple[int, np.ndarray] = (-1, pool)  # the last pass's

    def take(self, first: int, count: int) -> np.ndarray:
        passes, offsets = np.divmod(np.arange(first, first + count), len(self.pool))
        return np.concatenate(
            [self._pass(int(number))[offsets[passes == number]] for number in np.unique(passes)]
        )

    def _pass(self, number: int) -> np.ndarray:
        if self._order[0] != number:
            rng = np.random.default_rng([*self._seed, number])
            self._order = number, rng.permutation(self.pool)
        return self._order[1]


class EvenlySpaced:
    """So many examples of a split, from its beginning to its end; or all, if it has no more.

    >>> examples = ArrayExamples(np.arange(6), np.zeros(6))
    >>> EvenlySpaced(examples, 3).take(np.arange(3))["inputs"]
    array([0, 2, 4])
    """

    def __init__(self, examples: Examples, most: int):
        count = min(most, len(examples))
        self._examples = examples
        self._indices = np.arange(count) * len(examples) // count
        self.groups = examples.groups[self._indices]

    def __len__(self) -> int:
        return len(self._indices)

    def take(self, indices: np.ndarray, rng: np.random.Generator | None = None) -> Batch:
        return self._examples.take(self._indices[indices], rng)


class NodeBatches:
    """Step → batch, stacked over nodes: inputs [nodes, batch, ...], labels [nodes, batch, ...].

    A pure function of (seed, step), augmentation included: nothing to checkpoint. Each node goes
    through its own part again and again, newly shuffled each time; batches run on across the ends
    of epochs.

    Args:
      examples: the training split.
      parts: [nodes] arrays of example indices.
      batch_size: examples a node.
      seed: of the shuffles and the augmentation.
      steps: number of batches.
      nodes: whose batches to make, of all; None: all nodes'.

    >>> from jaxdec.data import load, split
    >>> train = load("digits").train
    >>> parts = split("iid", train.groups, nodes=4, seed=0)
    >>> NodeBatches(train, parts, batch_size=16, seed=0, steps=2)[1]["inputs"].shape
    (4, 16, 8, 8)
    """

    def __init__(
        self,
        examples: Examples,
        parts: Sequence[np.ndarray],
        batch_size: int,
        seed: int,
        steps: int,
        nodes: Sequence[int] | None = None,
    ):
        self._source = examples
        self._streams = [Reshuffled(part, (seed, node)) for node, part in enumerate(parts)]
        self._batch_size = batch_size
        self._seed = seed
        self._steps = steps
        self._nodes = range(len(parts)) if nodes is None else nodes
        self.distinct_shapes = 1

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: SupportsIndex) -> Batch:
        batches = [self._batch(node, int(step)) for node in self._nodes]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)

    def abstract(self, shape: int = 0) -> Batch:
        del shape  # there is one
        return abstract_batch(self._source.take(np.zeros(1, int)), self._batch_size)

    def _batch(self, node: int, step: int) -> Batch:
        chosen = self._streams[node].take(step * self._batch_size, self._batch_size)
        return self._source.take(
            chosen, np.random.default_rng([self._seed, node, step, _AUGMENTATION])
        )


def prefetched(batches: Batches, start: int = 0) -> Iterator[Batch]:
    """The batches from step `start` on, in order, made by threads while the device computes."""
    dataset = grain.MapDataset.source(batches)[start:]
    threads = min(16, os.cpu_count() or 1)  # decoding images takes them all
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(4, threads))
    return iter(dataset.to_iter_dataset(options))
