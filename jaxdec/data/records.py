"""Sets that TFDS prepared as array_record, read without TensorFlow."""

import functools
import importlib.util
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.proto import tf_example_pb2

from jaxdec.data import prepared


def newest(tfds_name: str, data_dir: pathlib.Path) -> pathlib.Path | None:
    """The folder of a set's newest prepared version; None: there is none."""
    versions = {
        tuple(map(int, path.parent.name.split("."))): path.parent
        for path in (data_dir / tfds_name).glob("*/dataset_info.json")
        if re.fullmatch(r"\d+\.\d+\.\d+", path.parent.name)  # others TFDS did not finish
    }
    return versions[max(versions)] if versions else None


class Records:
    """One split of a TFDS set, by index, as dicts of bytes (images stay encoded) and numbers.

    TFDS's own decoding takes ten times as long as parsing the records.

    Args:
      name: of the set in configs, for errors.
      tfds_name: of the set in TFDS.
      data_dir: where it was prepared.
      split: as TFDS calls it.

    Raises:
      DataError: the set is not prepared, prepared in another format, or damaged.
    """

    def __init__(self, name: str, tfds_name: str, data_dir: pathlib.Path, split: str):
        folder = newest(tfds_name, data_dir)
        if folder is None:
            raise prepared.missing(name, data_dir)
        self._damaged = functools.partial(prepared.damaged, name, folder, data_dir)
        builder = _builder(name, folder, data_dir)
        info = builder.info
        if info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
            raise prepared.DataError(
                f"data.name={name!r} is in {folder} as {info.file_format.value}, which has no "
                f"random access; prepare it in another folder than {data_dir}"
            )
        if split not in info.splits:
            raise self._damaged(f"it has no split {split}")
        self._source = builder.as_data_source(
            split=split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
        )
        lengths = np.array(info.splits[split].shard_lengths)
        firsts = np.cumsum(lengths) - lengths
        self.take(firsts[lengths > 0])  # so each file is known to be there, to its end

    def __len__(self) -> int:
        return len(self._source)

    def take(self, indices: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
        """The records at `indices`."""
        try:
            return [
                _parsed(record) for record in self._source.__getitems__(list(map(int, indices)))
            ]
        except Exception as error:  # RuntimeError of array_record, DecodeError of protobuf, ...
            raise self._damaged(error) from error


def _parsed(record: bytes) -> dict[str, Any]:
    """The first value of each feature, all there is of an image, a text or a label."""
    if not record:  # all that array_record says of a file cut at its first block
        raise ValueError("a record is empty")
    features = tf_example_pb2.Example.FromString(record).features.feature
    return {
        key: getattr(feature, feature.WhichOneof("kind")).value[0]
        for key, feature in features.items()
    }


def _builder(name: str, folder: pathlib.Path, data_dir: pathlib.Path) -> tfds.core.DatasetBuilder:
    try:
        return tfds.builder_from_directory(folder)
    except Exception as error:  # ParseError, DatasetInfoFileError, ...
        raise prepared.damaged(name, folder, data_dir, error) from error


def splits(
    name: str, tfds_name: str, data_dir: pathlib.Path, unit: str
) -> list[prepared.Split] | None:
    """The prepared splits of a TFDS set; None: it is not prepared."""
    folder = newest(tfds_name, data_dir)
    if folder is None:
        return None
    return [
        prepared.Split(split, f"{info.num_examples:,} {unit}", info.num_bytes)
        for split, info in _builder(name, folder, data_dir).info.splits.items()
    ]


def prepare(tfds_name: str, data_dir: pathlib.Path, manual_dir: pathlib.Path | None = None) -> None:
    """Let TFDS download a set of its own and write it as array_record.

    Raises:
      DataError: for want of TensorFlow, a network, or files in `manual_dir`.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise prepared.DataError(
            f"{tfds_name} is prepared by TFDS, which needs TensorFlow; run: "
            "pip install 'jaxdec[tf]'"
        )
    builder = tfds.builder(tfds_name, data_dir=data_dir, file_format="array_record")
    download = tfds.download.DownloadConfig(manual_dir=manual_dir)
    try:
        builder.download_and_prepare(download_config=download)
    except Exception as error:  # each part of TFDS raises another type
        reason = " ".join(str(error).split())
        raise prepared.DataError(f"TFDS could not prepare {tfds_name}: {reason}") from error
