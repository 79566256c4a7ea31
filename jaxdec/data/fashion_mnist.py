"""Fashion-MNIST: 60,000 and 10,000 grey images of clothes, 28 × 28, in ten classes.

Prepared without TensorFlow, unlike TFDS's own builder, whose name this one avoids.
Source: Xiao, Rasul & Vollgraf, arXiv 1708.07747.
"""

import gzip
import hashlib
import pathlib
import urllib.request
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from rich.progress import track

from jaxdec.data import prepared, records
from jaxdec.data.dataset import Dataset
from jaxdec.data.images import ImageExamples

NEEDS = "apt-get install dataset-fashion-mnist, or --source=FOLDER of its four files, or a network"
TFDS_NAME = "jaxdec_fashion_mnist"
DEBIAN = pathlib.Path("/usr/share/datasets/fashion-mnist")
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
MEAN, DEVIATION = (0.2860,), (0.3530,)  # of the training images in [0, 1]

# Of the contents: distributions compress them anew. MNIST's files have the same names.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


class JaxdecFashionMnist(tfds.core.GeneratorBasedBuilder):
    """The four idx files of a folder as a TFDS set."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, source: pathlib.Path, **kwargs: Any):
        super().__init__(**kwargs)
        self._source = source

    def _info(self) -> tfds.core.DatasetInfo:
        pixels = tfds.features.Tensor(
            shape=(28, 28, 1), dtype=np.uint8, encoding=tfds.features.Encoding.BYTES
        )
        return tfds.core.DatasetInfo(
            builder=self,
            description="Fashion-MNIST, from its idx files.",
            features=tfds.features.FeaturesDict(
                {"image": pixels, "label": tfds.features.ClassLabel(num_classes=10)}
            ),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, Any]]]:
        del dl_manager
        return {"train": self._generate_examples("train"), "test": self._generate_examples("t10k")}

    def _generate_examples(self, prefix: str) -> Iterator[tuple[int, Any]]:
        images = read_idx(self._source / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(self._source / f"{prefix}-labels-idx1-ubyte.gz")
        pairs = zip(images[..., np.newaxis], labels.tolist(), strict=True)
        for index, (image, label) in enumerate(track(pairs, prefix, total=len(labels))):
            yield index, {"image": image, "label": label}


def read_idx(path: pathlib.Path) -> np.ndarray:
    """The array of bytes in a gzipped idx file.

    Raises:
      DataError: the file is missing, truncated, corrupt, or not the one of Fashion-MNIST.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError as error:
        raise prepared.DataError(f"{path} does not exist; it needs {NEEDS}") from error
    except (EOFError, OSError, zlib.error) as error:
        raise prepared.DataError(f"{path} is truncated or corrupt ({error}); fetch it again") from (
            error
        )
    if hashlib.sha256(content).hexdigest() != SHA256[path.stem]:
        raise prepared.DataError(
            f"{path} does not hold Fashion-MNIST's bytes; fetch it again, from {URL}"
        )
    axes = content[3]
    shape = np.frombuffer(content, ">u4", count=axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def download(folder: pathlib.Path) -> None:
    """Fetch the four files and check them.

    Raises:
      DataError: there is no network, or what came is not what it should be.
    """
    for name in track(SHA256, "download"):
        try:
            with urllib.request.urlopen(f"{URL}/{name}.gz", timeout=30) as response:
                (folder / f"{name}.gz").write_bytes(response.read())
        except OSError as error:
            raise prepared.DataError(
                f"fashion_mnist: {URL}/{name}.gz did not download ({error}); it needs {NEEDS}"
            ) from error
        read_idx(folder / f"{name}.gz")


def prepare(data_dir: pathlib.Path, source: pathlib.Path | None) -> None:
    """Write the set below `data_dir`, from a folder, the Debian package, or the network."""
    if source is None and DEBIAN.is_dir():
        source = DEBIAN
    if source is None:
        downloads = data_dir / "downloads" / "fashion_mnist"
        if not downloads.is_dir():
            with prepared.whole(downloads) as folder:
                download(folder)
        source = downloads
    for name in SHA256:
        read_idx(source / f"{name}.gz")
    tfds.disable_progress_bar()
    JaxdecFashionMnist(
        source=source, data_dir=data_dir, file_format="array_record"
    ).download_and_prepare()


def splits(data_dir: pathlib.Path) -> list[prepared.Split] | None:
    """What is prepared."""
    return records.splits("fashion_mnist", TFDS_NAME, data_dir, "images")


def load(data_dir: pathlib.Path) -> Dataset:
    """Both splits in memory, standardised when taken; no augmentation."""
    return Dataset(
        train=_examples(data_dir, "train"),
        test=_examples(data_dir, "test"),
        input_shape=(28, 28, 1),
        classes=10,
    )


def _examples(data_dir: pathlib.Path, split: str) -> ImageExamples:
    source = records.Records("fashion_mnist", TFDS_NAME, data_dir, split)
    found = source.take(range(len(source)))
    pixels = b"".join(record["image"] for record in found)
    images = np.frombuffer(pixels, np.uint8).reshape(-1, 28, 28, 1)
    labels = np.array([record["label"] for record in found])
    return ImageExamples(images, labels, MEAN, DEVIATION)
