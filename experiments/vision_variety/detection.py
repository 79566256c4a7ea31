"""A detection task small enough for two cores: digits on a canvas, found by a single-shot head.

A cell of an 8 × 8 grid answers for the digit whose centre lies in it: ten class logits, trained by
the focal loss (arXiv 1708.02002), and the box's centre in the cell and log side.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdec.data import load
from jaxdec.data.dataset import Batch
from jaxdec.models.cnn import PatchConv

SIDE, GRID, CLASSES = 32, 8, 10
STRIDE = SIDE // GRID
SIDES = (8, 16)  # of a digit
MOST = 3  # digits a canvas


@dataclasses.dataclass(frozen=True)
class Canvases:
    """Images, and what is on them."""

    images: np.ndarray  # float32 [N, SIDE, SIDE]
    classes: np.ndarray  # int32 [N, MOST]; −1: no digit
    boxes: np.ndarray  # float32 [N, MOST, 3]: centre x, centre y, side; pixels

    def __len__(self) -> int:
        return len(self.images)

    @property
    def groups(self) -> np.ndarray:
        """The class of each canvas's first digit."""
        return self.classes[:, 0]

    def take(self, index: np.ndarray, rng: np.random.Generator | None = None) -> Batch:
        """A batch: "inputs" [B, SIDE, SIDE], "classes" [B, GRID, GRID], "boxes" [B, GRID, GRID, 3].

        Class −1 is background. Boxes are the centre in its cell, in cells, and log(side/STRIDE).
        """
        del rng
        classes = np.full((len(index), GRID, GRID), -1, np.int32)
        boxes = np.zeros((len(index), GRID, GRID, 3), np.float32)
        for row, image in enumerate(index):
            for label, (x, y, side) in zip(self.classes[image], self.boxes[image], strict=True):
                if label >= 0:
                    i, j = int(y // STRIDE), int(x // STRIDE)
                    classes[row, i, j] = label
                    boxes[row, i, j] = x / STRIDE - j, y / STRIDE - i, np.log(side / STRIDE)
        return {"inputs": self.images[index], "classes": classes, "boxes": boxes}


def canvases(count: int, split: str, seed: int) -> Canvases:
    """One to three digits of scikit-learn's, of one size or twice that, none over another.

    Args:
      count: of canvases.
      split: "train" or "test": whose digits.
      seed: of the draw.
    """
    digits = load("digits")
    source = digits.train if split == "train" else digits.test
    examples = source.take(np.arange(len(source)))
    rng = np.random.default_rng(seed)
    images = np.zeros((count, SIDE, SIDE), np.float32)
    classes = np.full((count, MOST), -1, np.int32)
    boxes = np.zeros((count, MOST, 3), np.float32)
    for image in range(count):
        taken = np.zeros((SIDE, SIDE), bool)
        for slot in range(rng.integers(1, MOST + 1)):
            side = int(rng.choice(SIDES))
            top, left = rng.integers(0, SIDE - side + 1, 2)
            place = np.s_[top : top + side, left : left + side]
            if taken[place].any():
                continue
            drawn = rng.integers(len(source))
            scale = side // 8
            images[image][place] = np.kron(examples["inputs"][drawn], np.ones((scale, scale)))
            classes[image, slot] = examples["labels"][drawn]
            boxes[image, slot] = left + side / 2, top + side / 2, side
            taken[place] = True
    return Canvases(images, classes, boxes)


class Detector(nnx.Module):
    """Three convolutions and a head of CLASSES + 3 numbers a cell."""

    def __init__(self, channels: Sequence[int] = (16, 32, 64), *, rngs: nnx.Rngs):
        first, second, third = channels
        fields = {"dtype": jnp.float32, "rngs": rngs}
        self.convs = nnx.List(
            [
                PatchConv(1, first, 3, stride=2, **fields),
                PatchConv(first, second, 3, stride=2, **fields),
                PatchConv(second, third, 3, **fields),
            ]
        )
        self.head = nnx.Linear(third, CLASSES + 3, rngs=rngs)
        # As in the paper: at first every cell is background with probability 0.99.
        self.head.bias[...] = self.head.bias[...].at[:CLASSES].set(-np.log(99))

    def __call__(self, images_BxHxW: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = images_BxHxW[..., jnp.newaxis]
        for conv in self.convs:
            x = nnx.relu(conv(x))
        answer = self.head(x)
        return answer[..., :CLASSES], answer[..., CLASSES:]


def loss(logits: jax.Array, boxes: jax.Array, batch: Batch, gamma: float = 2.0) -> jax.Array:
    """Focal loss of the classes + L1 of the boxes, over the number of digits."""
    is_digit = batch["classes"] >= 0
    one_hot = jax.nn.one_hot(batch["classes"], CLASSES)  # none of −1
    p = jax.nn.sigmoid(logits)
    right = jnp.where(one_hot == 1, p, 1 - p)
    log_right = jax.nn.log_sigmoid(jnp.where(one_hot == 1, logits, -logits))
    weight = jnp.where(one_hot == 1, 0.25, 0.75)
    focal = -jnp.sum(weight * (1 - right) ** gamma * log_right)
    off = jnp.sum(jnp.abs(boxes - batch["boxes"]) * is_digit[..., jnp.newaxis])
    return (focal + off) / jnp.maximum(jnp.sum(is_digit), 1)


def detections(logits: np.ndarray, boxes: np.ndarray, most: int = 20) -> list[np.ndarray]:
    """Of each image its best guesses: rows (class, score, x, y, side), after suppression.

    Of guesses of one class that overlap by an IoU above 0.5, the best stays.
    """
    found = []
    for scores, box in zip(1 / (1 + np.exp(-logits)), boxes, strict=True):
        i, j, label = np.unravel_index(np.argsort(-scores, axis=None)[:most], scores.shape)
        x, y = (j + box[i, j, 0]) * STRIDE, (i + box[i, j, 1]) * STRIDE
        side = np.exp(box[i, j, 2]) * STRIDE
        kept: list[np.ndarray] = []
        for guess in np.stack([label, scores[i, j, label], x, y, side], axis=1):
            rivals = [other for other in kept if other[0] == guess[0]]
            if all(overlap(guess[2:], other[2:]) <= 0.5 for other in rivals):
                kept.append(guess)
        found.append(np.array(kept))
    return found


def overlap(box: np.ndarray, other: np.ndarray) -> float:
    """Intersection over union of two squares (x, y, side).

    >>> round(overlap(np.array([4.0, 4.0, 8.0]), np.array([8.0, 4.0, 8.0])), 3)
    0.333
    """
    low = np.maximum(box[:2] - box[2] / 2, other[:2] - other[2] / 2)
    high = np.minimum(box[:2] + box[2] / 2, other[:2] + other[2] / 2)
    shared = float(np.prod(np.maximum(high - low, 0)))
    return shared / (box[2] ** 2 + other[2] ** 2 - shared)


def mean_average_precision(found: Sequence[np.ndarray], truth: Canvases) -> float:
    """The mean over classes of the area under precision against recall, at an IoU of 0.5.

    A guess is right if it overlaps a digit of its class that no better guess has; precision at a
    recall is the best at it or beyond, as in PASCAL VOC since 2010.
    """
    areas = []
    for label in range(CLASSES):
        total = int(np.sum(truth.classes == label))
        if total == 0:
            continue
        guesses = [
            (*g[1:], image) for image, rows in enumerate(found) for g in rows if g[0] == label
        ]
        guesses.sort(key=lambda guess: -guess[0])
        taken = set()
        right = []
        for _, x, y, side, image in guesses:
            slots = np.flatnonzero(truth.classes[image] == label)
            ious = [overlap(np.array([x, y, side]), truth.boxes[image, slot]) for slot in slots]
            best = int(np.argmax(ious)) if len(ious) else -1
            hit = best >= 0 and ious[best] >= 0.5 and (image, slots[best]) not in taken
            right.append(hit)
            if hit:
                taken.add((image, slots[best]))
        hits = np.cumsum(right)
        precision = hits / np.arange(1, len(hits) + 1)
        envelope = np.maximum.accumulate(precision[::-1])[::-1]
        recall = np.concatenate([[0], hits / total])
        areas.append(float(np.sum(np.diff(recall) * envelope)))
    return float(np.mean(areas))
