"""The Python standard library's own source text, byte by byte: a corpus on every machine.

It differs from one Python version to the next; metadata.json has the version and the hashes.
"""

import pathlib
import platform
import sysconfig

import numpy as np
from rich.progress import track

from jaxdec.data import prepared, tokens
from jaxdec.data.dataset import Dataset

NEEDS = "nothing: Python's own source files; or --source=FOLDER of others"
FOLDER = "jaxdec_stdlib"
TEST_SHARE = 0.08  # of the bytes
# Tests and the programs IDLE and turtledemo, a second copy of pip, and what is not the library's.
SKIPPED = {
    "__pycache__",
    "dist-packages",
    "ensurepip",
    "idle_test",
    "idlelib",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}


def source_files(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Path below `folder` → bytes of each Python file that is neither skipped nor empty, sorted.

    Python's own build settings (_sysconfigdata) are left out: they differ between machines.
    """
    paths = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*.py")
        if not SKIPPED.intersection(path.relative_to(folder).parts[:-1])
        and not path.name.startswith("_sysconfigdata")
    }
    contents = {
        name: np.frombuffer(paths[name].read_bytes(), np.uint8)
        for name in track(sorted(paths), "stdlib")
    }
    return {name: content for name, content in contents.items() if len(content)}


def divide(sizes: np.ndarray) -> np.ndarray:
    """Which files are for test: bool [files], a fixed draw of at most 8% of the bytes.

    >>> divide(np.full(25, 10)).sum()
    np.int64(2)
    """
    test = np.zeros(len(sizes), bool)
    room = TEST_SHARE * sizes.sum()
    for file in np.random.default_rng(0).permutation(len(sizes)):
        if sizes[file] <= room:
            test[file] = True
            room -= sizes[file]
    return test


def prepare(data_dir: pathlib.Path, source: pathlib.Path | None) -> None:
    """Write the corpus below `data_dir`, from this Python's library or another folder."""
    source = source or pathlib.Path(sysconfig.get_path("stdlib"))
    files = source_files(source)
    test = divide(np.array([len(content) for content in files.values()], int))
    if not test.any():
        raise prepared.DataError(
            f"stdlib: {source} holds {len(files)} Python files, too few to keep "
            f"{TEST_SHARE:.0%} of the bytes for test; write --source=FOLDER of more"
        )
    with prepared.whole(data_dir / FOLDER) as folder:
        tokens.write(
            folder,
            {
                "train": [pair for pair, held in zip(files.items(), test, strict=True) if not held],
                "test": [pair for pair, held in zip(files.items(), test, strict=True) if held],
            },
            python=platform.python_version(),
            source=str(source),
        )


def splits(data_dir: pathlib.Path) -> list[prepared.Split] | None:
    """What is prepared."""
    return tokens.splits("stdlib", data_dir / FOLDER, data_dir)


def load(data_dir: pathlib.Path, context: int = 256) -> Dataset:
    """Windows of bytes: inputs [context], labels the next bytes; groups are source files.

    Args:
      data_dir: where the set was prepared.
      context: bytes of an example.
    """
    return tokens.load("stdlib", data_dir / FOLDER, data_dir, context, vocabulary=256)
