"""Data sets by their shapes and sizes alone, for what lowers a step where no data are."""

import dataclasses

import numpy as np

from jaxdec.data.dataset import Batch, Dataset
from jaxdec.data.translation import LONGEST, PairsDataset, SentencePairs, Texts


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


@dataclasses.dataclass(frozen=True)
class PairsOutline:
    """What is known of a set of sentence pairs; lengths are drawn from a log-normal law."""

    train: int  # pairs
    test: int
    vocabulary: int
    median: int  # tokens of a text
    spread: float  # of the logarithm of a source's length

    def dataset(self) -> PairsDataset:
        """Both splits, all tokens zero; the same lengths each time."""
        rng = np.random.default_rng(0)
        train, test = (self._pairs(count, rng) for count in (self.train, self.test))
        return PairsDataset(train, test, input_shape=train.shape, classes=self.vocabulary)

    def _pairs(self, count: int, rng: np.random.Generator) -> SentencePairs:
        source = rng.normal(np.log(self.median), self.spread, count)
        target = source + rng.normal(0, 0.2, count)
        sides = [np.exp(log).astype(int).clip(2, LONGEST) for log in (source, target)]
        zeros = [Texts(np.broadcast_to(np.uint16(0), lengths.sum()), lengths) for lengths in sides]
        return SentencePairs(zeros[0], zeros[1], (int(sides[0].max()), int(sides[1].max())))


OUTLINES: dict[str, Outline | PairsOutline] = {
    "cifar10": Outline(50_000, 10_000, 10, (32, 32, 3)),
    "digits": Outline(1_437, 360, 10, (8, 8)),
    "fashion_mnist": Outline(60_000, 10_000, 10, (28, 28, 1)),
    "imagenet2012": Outline(1_281_167, 50_000, 1000, (224, 224, 3)),
    "stdlib": Outline(40_000, 3_500, 500, (256,), vocabulary=256),
    "tokens": Outline(1_000_000, 1_000, 1, (1024,), vocabulary=0),
    "trans_de_en": PairsOutline(15_672, 1_000, vocabulary=4_000, median=13, spread=0.42),
    "wmt14_en_de": PairsOutline(4_500_000, 3_003, vocabulary=37_000, median=24, spread=0.7),
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
