"""Data sets by their shapes and sizes alone, for what lowers a step where no data are."""

import dataclasses

import numpy as np

from jaxdec.data.dataset import Batch, Dataset


@dataclasses.dataclass(frozen=True)
class Outline:
    """What is known of a set without its files."""

    train: int  # examples; of a text, which depends on its context, about so many
    test: int
    groups: int  # classes, or source files
    shape: tuple[int, ...] = ()  # of an image; of a text: its default context
    vocabulary: int | None = None  # of a text; 0: the field of that name

    def dataset(self, context: int | None = None, vocabulary: int | None = None) -> Dataset:
        """Both splits with examples of zeros."""
        is_text = self.vocabulary is not None
        shape = self.shape if context is None else (context,)
        classes = self.vocabulary or vocabulary or self.groups
        train, test = (
            BlankExamples(count, self.groups, shape, is_text) for count in (self.train, self.test)
        )
        return Dataset(train, test, input_shape=shape, classes=classes)


OUTLINES = {
    "cifar10": Outline(50_000, 10_000, 10, (32, 32, 3)),
    "digits": Outline(1_437, 360, 10, (8, 8)),
    "fashion_mnist": Outline(60_000, 10_000, 10, (28, 28, 1)),
    "imagenet2012": Outline(1_281_167, 50_000, 1000, (224, 224, 3)),
    "stdlib": Outline(40_000, 3_500, 500, (256,), vocabulary=256),
    "tokens": Outline(1_000_000, 1_000, 1, (1024,), vocabulary=0),
}


class BlankExamples:
    """Examples of zeros.

    >>> BlankExamples(4, 2, (8, 8), is_text=False).take(np.array([0, 3]))["inputs"].shape
    (2, 8, 8)
    """

    def __init__(self, count: int, groups: int, shape: tuple[int, ...], is_text: bool):
        self._shape = shape
        self._is_text = is_text
        self.groups = np.arange(count) % groups

    def __len__(self) -> int:
        return len(self.groups)

    def take(self, indices: np.ndarray, rng: np.random.Generator | None = None) -> Batch:
        del rng
        inputs_shape = (len(indices), *self._shape)
        labels_shape = inputs_shape if self._is_text else inputs_shape[:1]
        inputs = np.zeros(inputs_shape, np.int32 if self._is_text else np.float32)
        return {"inputs": inputs, "labels": np.zeros(labels_shape, np.int32)}
