"""ImageNet 2012: 1.28 million training and 50,000 validation photographs, in 1000 classes.

TFDS prepares it; images are decoded when taken, in float32 at 224 × 224.
Source: Russakovsky et al., arXiv 1409.0575; crops as in Szegedy et al., arXiv 1409.4842.
"""

import pathlib
import shutil

import numpy as np
from rich.progress import track

from jaxdec.data import images, prepared, records
from jaxdec.data.dataset import Batch, Dataset

NEEDS = (
    "TensorFlow: pip install 'jaxdec[tf]'; --source=FOLDER of ILSVRC2012_img_train.tar and "
    "ILSVRC2012_img_val.tar; training needs no TensorFlow"
)
NAME = "imagenet2012"
SPLITS = {"train": "train", "test": "validation"}  # the real test labels are not public
LABELS = "jaxdec_imagenet2012"  # a folder of the labels alone: partitions need them all at once
SIZE = 224
CENTRE = 224 / 256  # of the shorter side
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageNetExamples:
    """Photographs on disk, grouped by label.

    In training a random box of 8% to 100% of the area, mirrored every second time; in evaluation
    the centre, as after a resize of the shorter side to 256.
    """

    def __init__(self, source: records.Records, labels: np.ndarray, augment: bool):
        self._source = source
        self._augment = augment
        self.groups = labels

    def __len__(self) -> int:
        return len(self.groups)

    def take(self, indices: np.ndarray, rng: np.random.Generator | None = None) -> Batch:
        augment_rng = rng if self._augment else None
        pixels = [_cropped(record["image"], augment_rng) for record in self._source.take(indices)]
        return {
            "inputs": images.standardize(np.stack(pixels), MEAN, DEVIATION),
            "labels": self.groups[indices],
        }


def _cropped(encoded: bytes, rng: np.random.Generator | None) -> np.ndarray:
    image = images.opened(encoded)
    if rng is None:
        return images.cropped(image, images.central_box(image.height, image.width, CENTRE), SIZE)
    pixels = images.cropped(image, images.inception_box(image.height, image.width, rng), SIZE)
    return pixels[:, ::-1] if rng.random() < 0.5 else pixels


def prepare(data_dir: pathlib.Path, source: pathlib.Path | None) -> None:
    """Let TFDS write the set below `data_dir`, unless it is there, and the labels beside it."""
    shutil.rmtree(data_dir / LABELS, ignore_errors=True)  # those of a set that is no more
    if records.newest(NAME, data_dir) is None:
        if source is None:
            raise prepared.DataError(f"imagenet2012 cannot be downloaded; it needs {NEEDS}")
        records.prepare(NAME, data_dir, manual_dir=source)
    with prepared.whole(data_dir / LABELS) as folder:
        for split in SPLITS.values():
            found = records.Records(NAME, NAME, data_dir, split)
            labels = [
                found.take([index])[0]["label"]
                for index in track(range(len(found)), f"labels of {split}")
            ]
            np.save(folder / f"{split}.npy", np.array(labels, np.int32))


def splits(data_dir: pathlib.Path) -> list[prepared.Split] | None:
    """What is prepared."""
    if not (data_dir / LABELS).is_dir():
        return None
    return records.splits(NAME, NAME, data_dir, "images")


def load(data_dir: pathlib.Path, augment: bool = True) -> Dataset:
    """Both splits on disk; the test split is ImageNet's validation split.

    Args:
      data_dir: where the set was prepared.
      augment: in training, random boxes and mirrored images.
    """
    return Dataset(
        train=_examples(data_dir, "train", augment),
        test=_examples(data_dir, "test", augment=False),
        input_shape=(SIZE, SIZE, 3),
        classes=1000,
    )


def _examples(data_dir: pathlib.Path, split: str, augment: bool) -> ImageNetExamples:
    folder = data_dir / LABELS
    if not folder.is_dir():
        raise prepared.missing(NAME, data_dir)
    source = records.Records(NAME, NAME, data_dir, SPLITS[split])
    try:
        labels = np.load(folder / f"{SPLITS[split]}.npy")
    except (OSError, ValueError, EOFError) as error:
        raise prepared.damaged(NAME, folder, data_dir, error) from error
    if len(labels) != len(source):
        reason = f"{len(labels)} labels of {len(source)} images"
        raise prepared.damaged(NAME, folder, data_dir, reason)
    return ImageNetExamples(source, labels, augment)
