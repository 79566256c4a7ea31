"""Data sets, their partition over nodes, and batches stacked over nodes.

`python -m jaxdec.data list` shows the sets, and `prepare` writes those that must be.
"""

import os
from collections.abc import Callable
from typing import Any

from jaxdec import registry
from jaxdec.data import cifar10, digits, fashion_mnist, imagenet, stdlib, translation
from jaxdec.data.dataset import (
    ArrayExamples,
    Batch,
    Batches,
    Dataset,
    Examples,
    NodeBatches,
    prefetched,
)
from jaxdec.data.partition import split
from jaxdec.data.prepared import DataError, root
from jaxdec.data.translation import Translation

NAMES: dict[str, Callable[..., Any]] = {
    "cifar10": cifar10.load,
    "digits": digits.load,
    "fashion_mnist": fashion_mnist.load,
    "imagenet2012": imagenet.load,
    "stdlib": stdlib.load,
    "trans_de_en": translation.load,
}


def load(name: str, data_dir: str | os.PathLike[str] | None = None, **fields: Any) -> Dataset:
    """The data set that a config names. Never downloads.

    Args:
      name: a key of `NAMES`.
      data_dir: where it was prepared; by default $TFDS_DATA_DIR, or ~/tensorflow_datasets.
      **fields: the set's own: `context` of texts, `augment` of images.

    Raises:
      ValueError: an unknown name, or a field that the name does not take.
      DataError: a ValueError too: the set is not prepared, or damaged.

    >>> load("digits").classes
    10
    """
    return registry.lookup("data", NAMES, name, fields, given=1)(root(data_dir), **fields)


__all__ = [
    "NAMES",
    "ArrayExamples",
    "Batch",
    "Batches",
    "DataError",
    "Dataset",
    "Examples",
    "NodeBatches",
    "Translation",
    "load",
    "prefetched",
    "split",
]
