"""A labelled data set in memory, and the batches that nodes draw from it."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import SupportsIndex

import grain
import numpy as np

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Inputs [examples, ...] and labels int32 [examples], for training and for test."""

    train_inputs: np.ndarray
    train_labels: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray
    classes: int


class NodeBatches:
    """Step → batch, stacked over nodes: inputs [nodes, batch, ...], labels [nodes, batch].

    A pure function of (seed, step): nothing to checkpoint. Each node goes through its own part
    again and again, newly shuffled each time; batches run on across the ends of epochs.

    Args:
      data: the source.
      parts: [nodes] arrays of training example indices.
      batch_size: examples a node.
      seed: of the shuffles.
      steps: number of batches.

    >>> from jaxdec.data import load, split
    >>> data = load("digits")
    >>> parts = split("iid", data.train_labels, nodes=4, seed=0)
    >>> NodeBatches(data, parts, batch_size=16, seed=0, steps=2)[1]["inputs"].shape
    (4, 16, 8, 8)
    """

    def __init__(
        self, data: Dataset, parts: Sequence[np.ndarray], batch_size: int, seed: int, steps: int
    ):
        self._data = data
        self._parts = parts
        self._batch_size = batch_size
        self._seed = seed
        self._steps = steps
        self._epochs: dict[int, tuple[int, np.ndarray]] = {}  # node → its last epoch's order

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: SupportsIndex) -> Batch:
        first = int(step) * self._batch_size
        positions = np.arange(first, first + self._batch_size)
        chosen = np.stack([self._examples(node, positions) for node in range(len(self._parts))])
        return {
            "inputs": self._data.train_inputs[chosen],
            "labels": self._data.train_labels[chosen],
        }

    def _examples(self, node: int, positions: np.ndarray) -> np.ndarray:
        epochs, offsets = np.divmod(positions, len(self._parts[node]))
        return np.concatenate(
            [self._order(node, int(epoch))[offsets[epochs == epoch]] for epoch in np.unique(epochs)]
        )

    def _order(self, node: int, epoch: int) -> np.ndarray:
        known, order = self._epochs.get(node, (-1, np.empty(0, int)))
        if known != epoch:
            rng = np.random.default_rng([self._seed, node, epoch])
            order = rng.permutation(self._parts[node])
            self._epochs[node] = (epoch, order)
        return order


def prefetched(batches: NodeBatches, start: int = 0) -> Iterator[Batch]:
    """The batches from step `start` on, in order, made while the device computes."""
    dataset = grain.MapDataset.source(batches)[start:]
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))
