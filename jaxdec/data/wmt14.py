"""WMT14, English to German: 4.5 million sentence pairs; newstest2013 is valid, newstest2014 test.

From plain files, one sentence a line, or from TFDS's `wmt14_translate/de-en`. Both languages share
a vocabulary of 37,000, as in "Attention is all you need" (arXiv 1706.03762).
Source: Bojar et al., "Findings of the 2014 workshop on statistical machine translation".
"""

import dataclasses
import hashlib
import importlib
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxdec.data import prepared, records, translation

NAME = "wmt14_en_de"
LANGUAGES = ("en", "de")
FILES = "train.en, train.de, valid.en, valid.de, test.en, test.de"
NEEDS = (
    "--source=FOLDER of train, valid and test, each .en and .de, a sentence a line; or a network "
    "and TensorFlow: pip install 'jaxdec[tf]'; jaxdec[text]"
)
TFDS_NAME = "wmt14_translate/de-en"
TFDS_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
_CHUNK = 1000  # records read at a time


@dataclasses.dataclass(frozen=True)
class FilePairs:
    """Pairs of the lines of two files."""

    source: pathlib.Path
    target: pathlib.Path

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return zip(translation.lines(self.source), translation.lines(self.target), strict=True)


@dataclasses.dataclass(frozen=True)
class RecordPairs:
    """Pairs of a split that TFDS wrote."""

    records: records.Records

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for first in range(0, len(self.records), _CHUNK):
            last = min(first + _CHUNK, len(self.records))
            for record in self.records.take(range(first, last)):
                source, target = (record[language].decode().strip() for language in LANGUAGES)
                yield source, target


def prepare(
    data_dir: pathlib.Path, source: pathlib.Path | None = None, vocabulary: int = 37_000
) -> pathlib.Path:
    """Write the data set, from a folder of plain files or by TFDS; see `translation.write`.

    Raises:
      DataError: a file is missing, empty, or not parallel to its other side; or TFDS cannot
        prepare the set; and what `translation.write` raises.
    """
    about, pairs = _of_tfds(data_dir) if source is None else _of_files(source)
    return translation.write(NAME, data_dir, LANGUAGES, pairs, vocabulary, about)


def _of_files(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, FilePairs]]:
    """The SHA-256 of each file, and the pairs, once all files are there and parallel."""
    paths = {
        split: [folder / f"{split}.{language}" for language in LANGUAGES]
        for split in translation.SPLITS
    }
    for path in itertools.chain(*paths.values()):
        if not path.is_file() or path.stat().st_size == 0:
            what = "is empty" if path.is_file() else "is no file"
            raise prepared.DataError(f"{path} {what}; --source needs {FILES}: a sentence a line")
    for source, target in paths.values():
        counts = _count(source), _count(target)
        if counts[0] != counts[1]:
            raise prepared.DataError(
                f"{source} has {counts[0]:,} lines, and {target} {counts[1]:,}; each line must "
                "translate the same line of the other: write both again"
            )
    digests = {path.name: _sha256(path) for path in itertools.chain(*paths.values())}
    return {"source_sha256": digests}, {split: FilePairs(*paths[split]) for split in paths}


def _count(path: pathlib.Path) -> int:
    try:
        return sum(1 for _ in translation.lines(path))
    except UnicodeDecodeError as error:
        raise prepared.DataError(f"{path} is no UTF-8 text ({error}); convert it") from error


def _sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_tfds(data_dir: pathlib.Path) -> tuple[dict[str, Any], dict[str, RecordPairs]]:
    """The version, and the pairs, which TFDS downloads and writes below `data_dir` at first."""
    if records.newest(TFDS_NAME, data_dir) is None:
        importlib.import_module("tensorflow_datasets.translate.wmt14")  # so that TFDS knows it
        try:
            records.prepare(TFDS_NAME, data_dir)
        except prepared.DataError as error:
            raise prepared.DataError(f"{error}; or write --source=FOLDER of {FILES}") from error
    version = records.newest(TFDS_NAME, data_dir)
    pairs = {
        split: RecordPairs(records.Records(NAME, TFDS_NAME, data_dir, theirs))
        for split, theirs in TFDS_SPLITS.items()
    }
    return {"tfds": f"{TFDS_NAME}/{version.name if version else None}"}, pairs


def splits(data_dir: pathlib.Path) -> list[prepared.Split] | None:
    """What is prepared."""
    return translation.splits(NAME, data_dir)


def load(data_dir: pathlib.Path) -> translation.Translation:
    """All splits in memory, about a gigabyte."""
    return translation.load(NAME, data_dir, LANGUAGES)
