"""Data sets, their partition over nodes, and batches stacked over nodes.

`python -m jaxdec.data list` shows the sets, and `prepare` writes those that must be.
"""

import os
from collections.abc import Callable
from typing import Any

from jaxdec import registry
from jaxdec.data import (
    cifar10,
    digits,
    ding,
    fashion_mnist,
    imagenet,
    stdlib,
    token_files,
    wmt14,
)
from jaxdec.data.dataset import (
    ArrayExamples,
    Batch,
    Batches,
    Dataset,
    EvenlySpaced,
    Examples,
    NodeBatches,
    prefetched,
)
from jaxdec.data.outlines import OUTLINES
from jaxdec.data.partition import split
from jaxdec.data.prepared import DataError, root
from jaxdec.data.translation import Translation

NAMES: dict[str, Callable[..., Any]] = {
    "cifar10": cifar10.load,
    "digits": digits.load,
    "fashion_mnist": fashion_mnist.load,
    "imagenet2012": imagenet.load,
    "stdlib": stdlib.load,
    "trans_de_en": ding.load,
    "tokens": token_files.load,
    "wmt14_en_de": wmt14.load,
}


def load(name: str, data_dir: str | os.PathLike[str] | None = None, **fields: Any) -> Dataset:
    """The data set that a config names. Never downloads.

    Args:
      name: a key of `NAMES`.
      data_dir: where it was prepared; by default $TFDS_DATA_DIR, or ~/tensorflow_datasets.
      **fields: the set's own: `context` of texts, `augment` of images, `folder` and `vocabulary`
        of tokens.

    Raises:
      ValueError: an unknown name, or a field that the name does not take.
      DataError: a ValueError too: the set is not prepared, or damaged.

    >>> load("digits").classes
    10
    """
    return registry.lookup("data", NAMES, name, fields, given=1)(root(data_dir), **fields)


def outline(name: str, **fields: Any) -> Dataset:
    """The shapes and sizes of a set, its examples zeros; nothing is read, whether prepared or not.

    Args:
      name: a key of `NAMES`.
      **fields: as of `load`.

    Raises:
      ValueError: an unknown name, or a field that the name does not take.

    >>> outline("imagenet2012").input_shape
    (224, 224, 3)
    """
    registry.lookup("data", NAMES, name, fields, given=1)
    shapes = {field: fields[field] for field in ("context", "vocabulary") if field in fields}
    return OUTLINES[name].dataset(**shapes)


__all__ = [
    "NAMES",
    "ArrayExamples",
    "Batch",
    "Batches",
    "DataError",
    "Dataset",
    "EvenlySpaced",
    "Examples",
    "NodeBatches",
    "Translation",
    "load",
    "outline",
    "prefetched",
    "split",
]
