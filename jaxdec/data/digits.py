"""scikit-learn's handwritten digits: 1797 images of 8 × 8, on every machine."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jaxdec.data.dataset import Dataset


def digits() -> Dataset:
    """A fixed stratified split: 1437 training and 360 test images, values in [0, 1].

    >>> data = digits()
    >>> data.train_inputs.shape, data.test_inputs.shape, data.classes
    ((1437, 8, 8), (360, 8, 8), 10)
    """
    raw = load_digits()
    inputs = (raw.images / 16).astype(np.float32)
    labels = raw.target.astype(np.int32)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=360, random_state=0, stratify=labels
    )
    return Dataset(inputs[train], labels[train], inputs[test], labels[test], classes=10)
