"""CIFAR-10: 50,000 and 10,000 colour images, 32 × 32, in ten classes; TFDS prepares it.

Source: Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

import pathlib

import numpy as np

from jaxdec.data import prepared, records
from jaxdec.data.dataset import Dataset
from jaxdec.data.images import Augment, ImageExamples, crop_and_flip, opened

NEEDS = "a network and TensorFlow: pip install 'jaxdec[tf]'; training needs neither"
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images


def prepare(data_dir: pathlib.Path, source: pathlib.Path | None) -> None:
    """Let TFDS download the set and write it below `data_dir`."""
    if source is not None:
        raise prepared.DataError("cifar10 is downloaded; leave --source out")
    records.prepare("cifar10", data_dir)


def splits(data_dir: pathlib.Path) -> list[prepared.Split] | None:
    """What is prepared."""
    return records.splits("cifar10", "cifar10", data_dir, "images")


def load(data_dir: pathlib.Path, augment: bool = True) -> Dataset:
    """Both splits in memory, standardised when taken.

    Args:
      data_dir: where the set was prepared.
      augment: in training, shift images by up to 4 pixels and mirror every second one.
    """
    return Dataset(
        train=_examples(data_dir, "train", crop_and_flip if augment else None),
        test=_examples(data_dir, "test", None),
        input_shape=(32, 32, 3),
        classes=10,
    )


def _examples(data_dir: pathlib.Path, split: str, augment: Augment | None) -> ImageExamples:
    source = records.Records("cifar10", "cifar10", data_dir, split)
    found = source.take(range(len(source)))
    images = np.stack([np.asarray(opened(record["image"])) for record in found])
    labels = np.array([record["label"] for record in found])
    return ImageExamples(images, labels, MEAN, DEVIATION, augment)
