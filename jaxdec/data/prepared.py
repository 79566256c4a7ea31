"""Where prepared data sets lie, whole or not at all, and the errors of those that don't."""

import contextlib
import os
import pathlib
import shlex
import tempfile
from collections.abc import Iterator
from typing import NamedTuple


class DataError(ValueError):
    """A data set that cannot be prepared or read; the message names it, its folder, the remedy."""


class Split(NamedTuple):
    """What `python -m jaxdec.data` shows of a prepared split."""

    name: str
    holds: str  # "60,000 images"
    bytes: int


def root(data_dir: str | os.PathLike[str] | None) -> pathlib.Path:
    """The folder of all prepared sets; by default that of TFDS, so that its own sets are found.

    >>> root("data")
    PosixPath('data')
    """
    given = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return pathlib.Path(given).expanduser()


def command(name: str, data_dir: pathlib.Path) -> str:
    """What prepares a set.

    >>> command("stdlib", pathlib.Path("my data"))
    "python -m jaxdec.data prepare stdlib --data_dir='my data'"
    """
    return f"python -m jaxdec.data prepare {name} --data_dir={shlex.quote(str(data_dir))}"


def missing(name: str, data_dir: pathlib.Path) -> DataError:
    """The error of a set that is not prepared."""
    return DataError(
        f"data.name={name!r} is not prepared in {data_dir}; run: {command(name, data_dir)}"
    )


def damaged(name: str, folder: pathlib.Path, data_dir: pathlib.Path, reason: object) -> DataError:
    """The error of a set whose files are not as they were prepared."""
    return DataError(
        f"data.name={name!r} in {folder} is damaged ({' '.join(str(reason).split())}); prepare it "
        f"again: rm -r {shlex.quote(str(folder))} && {command(name, data_dir)}"
    )


@contextlib.contextmanager
def whole(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new folder to write into, which becomes `folder` once all is written.

    Until then it lies beside it under another name, so a kill half way leaves nothing that counts.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="incomplete.", dir=folder.parent) as parent:
        partial = pathlib.Path(parent, folder.name)
        partial.mkdir()
        yield partial
        partial.rename(folder)
