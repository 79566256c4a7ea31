"""scikit-learn's handwritten digits: 1797 images of 8 × 8, on every machine."""

import pathlib

import numpy as np

from jaxdec.data.dataset import ArrayExamples, Dataset


def load(data_dir: pathlib.Path) -> Dataset:
    """A fixed stratified split: 1437 training and 360 test images, values in [0, 1].

    >>> data = load(pathlib.Path())
    >>> len(data.train), len(data.test), data.input_shape, data.classes
    (1437, 360, (8, 8), 10)
    """
    from sklearn.datasets import load_digits  # takes over a second, which other sets need not pay
    from sklearn.model_selection import train_test_split

    del data_dir  # scikit-learn brings them
    raw = load_digits()
    inputs = (raw.images / 16).astype(np.float32)
    train, test = train_test_split(
        np.arange(len(inputs)), test_size=360, random_state=0, stratify=raw.target
    )
    return Dataset(
        train=ArrayExamples(inputs[train], raw.target[train]),
        test=ArrayExamples(inputs[test], raw.target[test]),
        input_shape=(8, 8),
        classes=10,
    )
