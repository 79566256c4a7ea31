"""Image examples: decoding, augmentation and standardisation, in NumPy and Pillow."""

import io
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from jaxdec.data.dataset import Batch

Augment = Callable[[np.ndarray, np.random.Generator], np.ndarray]
Box = tuple[float, float, float, float]  # left, upper, right, lower


def standardize(
    images: np.ndarray, mean: Sequence[float], deviation: Sequence[float]
) -> np.ndarray:
    """Bytes [..., channels] → float32, (x / 255 − mean) / deviation of each channel.

    >>> standardize(np.array([[0], [255]], np.uint8), mean=[0.5], deviation=[0.25]).tolist()
    [[-2.0], [2.0]]
    """
    scale = 1 / np.asarray(deviation, np.float32)
    standardized = images * (scale / 255)
    standardized -= np.asarray(mean, np.float32) * scale  # in place: a temporary costs as much
    return standardized


def crop_and_flip(images: np.ndarray, rng: np.random.Generator, pad: int = 4) -> np.ndarray:
    """Shift each image by up to `pad` pixels over black, and mirror every second one.

    Args:
      images: [examples, height, width, channels].
      rng: of the shifts and flips.
      pad: of each side, before a crop of the former size.
    """
    count, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    crops = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    top, left = rng.integers(0, 2 * pad + 1, (2, count))
    chosen = np.moveaxis(crops[np.arange(count), top, left], 1, -1)
    mirrored = np.flatnonzero(rng.integers(0, 2, count))
    chosen[mirrored] = chosen[mirrored, :, ::-1]
    return chosen


class ImageExamples:
    """Images in memory as bytes, standardised when taken; grouped by label.

    Args:
      images: uint8 [examples, height, width, channels].
      labels: int [examples].
      mean: of each channel, of values in [0, 1].
      deviation: of each channel.
      augment: of the bytes, in training; None: never.

    >>> examples = ImageExamples(np.zeros((3, 2, 2, 1), np.uint8), np.arange(3), [0.5], [0.5])
    >>> examples.take(np.array([0, 2]))["inputs"][:, 0, 0, 0].tolist()
    [-1.0, -1.0]
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        mean: Sequence[float],
        deviation: Sequence[float],
        augment: Augment | None = None,
    ):
        self._images = images
        self._mean, self._deviation = mean, deviation
        self._augment = augment
        self.groups = labels.astype(np.int32)

    def __len__(self) -> int:
        return len(self.groups)

    def take(self, indices: np.ndarray, rng: np.random.Generator | None = None) -> Batch:
        images = self._images[indices]
        if rng is not None and self._augment is not None:
            images = self._augment(images, rng)
        return {
            "inputs": standardize(images, self._mean, self._deviation),
            "labels": self.groups[indices],
        }


def opened(encoded: bytes) -> Image.Image:
    """A JPEG or PNG as an RGB image."""
    return Image.open(io.BytesIO(encoded)).convert("RGB")


def cropped(image: Image.Image, box: Box, size: int) -> np.ndarray:
    """The box of an image at size × size: uint8 [size, size, 3]."""
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))


def inception_box(height: int, width: int, rng: np.random.Generator) -> Box:
    """A random box of 8% to 100% of the area and an aspect of 3/4 to 4/3.

    The largest centred square, where ten draws did not fit. (Szegedy et al., arXiv 1409.4842.)
    """
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1.0)
        aspect = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = np.sqrt(area * aspect), np.sqrt(area / aspect)
        if w <= width and h <= height:
            left, upper = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, upper, left + w, upper + h
    return central_box(height, width, 1.0)


def central_box(height: int, width: int, share: float) -> Box:
    """The centred square whose side is a share of the shorter side.

    >>> central_box(200, 100, share=0.5)
    (25.0, 75.0, 75.0, 125.0)
    """
    side = min(height, width) * share
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side
