"""Texts that were tokenized elsewhere: a folder of train.bin and test.bin, uint16 token ids.

The format that nanoGPT's preparation scripts write (there test.bin is called val.bin): OpenWebText
in GPT-2's tokens, for one.
"""

import pathlib

import numpy as np

from jaxdec.data import prepared
from jaxdec.data.dataset import Dataset
from jaxdec.data.tokens import Windows

NAME = "tokens"
NEEDS = (
    "data.folder of train.bin and test.bin (nanoGPT's val.bin): uint16 token ids, prepared by you"
)
_CHUNK = 2**26  # tokens looked at at a time


def load(data_dir: pathlib.Path, folder: str, vocabulary: int, context: int = 1024) -> Dataset:
    """Windows of token ids, read from disk as they are taken: inputs [context], labels the next.

    Each file is read once here, to see that its ids are in the vocabulary: seconds for gigabytes.
    A file is one stream, so the windows of a split are one group.

    Args:
      data_dir: of all prepared sets.
      folder: of the two files, below it or absolute.
      vocabulary: number of token ids, up to 65536.
      context: tokens of an example.

    Raises:
      DataError: a file is missing, no longer than the context, not whole, or has other ids.
    """
    if context < 1:
        raise prepared.DataError(f"data.context={context} must be at least 1")
    if not 1 <= vocabulary <= 2**16:
        raise prepared.DataError(
            f"data.vocabulary={vocabulary} must be in [1, 65536], as uint16 ids are"
        )
    train, test = (
        _windows(data_dir / folder / f"{split}.bin", vocabulary, context)
        for split in ("train", "test")
    )
    return Dataset(train, test, input_shape=(context,), classes=vocabulary)


def _windows(path: pathlib.Path, vocabulary: int, context: int) -> Windows:
    if not path.is_file():
        raise prepared.DataError(f"data.name={NAME!r}: {path} does not exist; it needs {NEEDS}")
    size = path.stat().st_size
    if size % 2:
        raise prepared.DataError(
            f"{path} has {size:,} bytes, an odd number, so it does not hold whole uint16 ids; "
            "copy or write it again"
        )
    if size // 2 <= context:
        raise prepared.DataError(
            f"{path} has {size // 2:,} tokens; an example takes data.context + 1 = {context + 1}"
        )
    tokens = np.memmap(path, "<u2", mode="r")
    starts = range(0, len(tokens), _CHUNK) if vocabulary < 2**16 else ()
    highest = max((int(tokens[start : start + _CHUNK].max()) for start in starts), default=0)
    if highest >= vocabulary:
        raise prepared.DataError(
            f"{path} has the token id {highest}, and data.vocabulary={vocabulary}; write at least "
            f"{highest + 1}, or tokenize the text with a smaller vocabulary"
        )
    return Windows(tokens, np.array([len(tokens)]), context)
