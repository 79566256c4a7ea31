"""Token streams on disk, and their windows as examples of a language model.

A stream is the files of one split, one after another, in `SPLIT.bin`; `metadata.json` says where
each file ends and what the bytes must be.
"""

import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxdec.data import prepared
from jaxdec.data.dataset import Batch, Dataset

METADATA = "metadata.json"


class Windows:
    """Windows of one stream, grouped by the file they come from.

    Inputs are `context` tokens and labels the tokens after each. Windows of a file follow one
    another without overlap and never run on into the next file, so nodes that get whole files
    share no text; the fewer than `context` + 1 tokens left at a file's end are not used.

    Args:
      tokens: [tokens], the stream.
      ends: [files], where each file ends in it.
      context: tokens of an example.

    >>> windows = Windows(np.arange(10), ends=np.array([5, 10]), context=2)
    >>> windows.groups
    array([0, 0, 1, 1])
    >>> windows.take(np.array([3]))
    {'inputs': array([[7, 8]], dtype=int32), 'labels': array([[8, 9]], dtype=int32)}
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray, context: int):
        begins = np.concatenate([[0], ends[:-1]])
        counts = np.maximum(ends - begins - 1, 0) // context
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self._tokens = tokens
        self._span = np.arange(context + 1)
        self._starts = np.repeat(begins, counts) + within * context
        self.groups = np.repeat(np.arange(len(ends)), counts)

    def __len__(self) -> int:
        return len(self._starts)

    def take(self, indices: np.ndarray, rng: np.random.Generator | None = None) -> Batch:
        del rng  # text is not augmented
        window = self._tokens[self._starts[indices][:, None] + self._span].astype(np.int32)
        return {"inputs": window[:, :-1], "labels": window[:, 1:]}


def write(
    folder: pathlib.Path,
    splits: Mapping[str, Iterable[tuple[str, np.ndarray]]],
    **about: Any,
) -> None:
    """Write streams and their metadata.

    Args:
      folder: an empty one, see `prepared.whole`.
      splits: the files of each split: a name, and tokens of one dtype for all.
      **about: more metadata, such as what the text was.
    """
    found = {}
    for split, files in splits.items():
        names, ends, digest, end = [], [], hashlib.sha256(), 0
        with open(folder / f"{split}.bin", "wb") as stream:
            for name, tokens in files:
                content = tokens.tobytes()
                stream.write(content)
                digest.update(content)
                end += len(tokens)
                names.append(name)
                ends.append(end)
        found[split] = {
            "dtype": str(tokens.dtype),
            "sha256": digest.hexdigest(),
            "files": names,
            "ends": ends,
        }
    (folder / METADATA).write_text(json.dumps({**about, "splits": found}, indent=1))


def splits(name: str, folder: pathlib.Path, data_dir: pathlib.Path) -> list[prepared.Split] | None:
    """The prepared splits of a folder; None: it is not prepared."""
    if not folder.is_dir():
        return None
    return [
        prepared.Split(split, f"{len(about['files']):,} files", _bytes(about))
        for split, about in _about(name, folder, data_dir).items()
    ]


def load(
    name: str, folder: pathlib.Path, data_dir: pathlib.Path, context: int, vocabulary: int
) -> Dataset:
    """The windows of both streams of a folder.

    Raises:
      DataError: the folder is not there or is damaged, or the context fits no file.
    """
    if context < 1:
        raise prepared.DataError(f"data.context={context} must be at least 1")
    if not folder.is_dir():
        raise prepared.missing(name, data_dir)
    about = _about(name, folder, data_dir)
    windows = {}
    for split in ("train", "test"):
        try:
            tokens = _stream(folder / f"{split}.bin", about[split])
        except (OSError, ValueError) as error:
            raise prepared.damaged(name, folder, data_dir, error) from error
        ends = np.array(about[split]["ends"])
        windows[split] = Windows(tokens, ends, context)
        if len(windows[split]) == 0:
            longest = np.diff(ends, prepend=0).max() - 1
            raise prepared.DataError(
                f"data.context={context} is longer than every {split} file of {name!r}; write at "
                f"most {longest}"
            )
    return Dataset(windows["train"], windows["test"], input_shape=(context,), classes=vocabulary)


def _about(name: str, folder: pathlib.Path, data_dir: pathlib.Path) -> dict[str, Any]:
    """What was written of each split."""
    try:
        return json.loads((folder / METADATA).read_text())["splits"]
    except (OSError, ValueError, KeyError) as error:
        raise prepared.damaged(name, folder, data_dir, error) from error


def _bytes(about: Mapping[str, Any]) -> int:
    return about["ends"][-1] * np.dtype(about["dtype"]).itemsize


def _stream(path: pathlib.Path, about: Mapping[str, Any]) -> np.ndarray:
    """The tokens in a file, left on disk, once they are what was written."""
    size = path.stat().st_size
    if size != _bytes(about):
        raise ValueError(f"{path.name} has {size:,} bytes of {_bytes(about):,}")
    with open(path, "rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != about["sha256"]:
            raise ValueError(f"{path.name} does not hold the bytes that were written")
    return np.memmap(path, about["dtype"], mode="r")
