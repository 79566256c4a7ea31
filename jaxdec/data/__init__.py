"""Data sets, their partition over nodes, and batches stacked over nodes."""

from collections.abc import Callable

from jaxdec import registry
from jaxdec.data.dataset import Batch, Dataset, NodeBatches, prefetched
from jaxdec.data.digits import digits
from jaxdec.data.partition import split

NAMES: dict[str, Callable[[], Dataset]] = {"digits": digits}


def load(name: str) -> Dataset:
    """The data set that a config names.

    Raises:
      ValueError: an unknown name.

    >>> load("digits").classes
    10
    """
    return registry.lookup("data", NAMES, name, {}, given=0)()


__all__ = [
    "NAMES",
    "Batch",
    "Dataset",
    "NodeBatches",
    "digits",
    "load",
    "prefetched",
    "split",
]
