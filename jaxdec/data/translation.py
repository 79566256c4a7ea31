"""Translation, German to English: sentence pairs as tokens of one vocabulary for both languages.

`prepare` reads the dictionary's sentences (see `ding`), splits them, trains a SentencePiece model
(BPE) on the training split and writes what `load` reads. Needs `pip install 'jaxdec[text]'`.
"""

import dataclasses
import functools
import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdec.data import ding, prepared
from jaxdec.data.buckets import BucketedNodeBatches

NAME = "trans_de_en"
NEEDS = "Debian's package trans-de-en, or --source=FILE of its dictionary; jaxdec[text]"
PAD, UNKNOWN, BEGIN, END = range(4)
SPLITS = ("train", "valid", "test")

Pairs = Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts of tokens, one behind the other.

    >>> texts = Texts.of([[5, 6, 3], [7, 3]])
    >>> texts.padded(np.array([1, 0]), 4, fill=0).tolist()
    [[7, 3, 0, 0], [5, 6, 3, 0]]
    """

    tokens: np.ndarray  # int32
    lengths: np.ndarray  # int [texts]

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> "Texts":
        lengths = np.array([len(text) for text in texts], np.int64)
        tokens = np.fromiter((token for text in texts for token in text), np.int32, lengths.sum())
        return cls(tokens, lengths)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] :][: self.lengths[index]]

    def padded(self, indices: np.ndarray, length: int, fill: int) -> np.ndarray:
        """Int32 [len(indices), length], each text followed by `fill`."""
        columns = np.arange(length)
        inside = columns < self.lengths[indices, np.newaxis]
        places = np.where(inside, self.starts[indices, np.newaxis] + columns, 0)
        return np.where(inside, self.tokens[places], np.int32(fill))


@dataclasses.dataclass(frozen=True)
class SentencePairs:
    """One split; each text ends with END.

    >>> pairs = SentencePairs(Texts.of([[5, 3]]), Texts.of([[6, 7, 3]]), shape=(3, 4))
    >>> batch = pairs.take(np.array([0]))
    >>> batch["inputs"]["source"].tolist(), batch["inputs"]["target"].tolist()
    ([[5, 3, 0]], [[2, 6, 7, 0]])
    >>> batch["labels"].tolist()
    [[6, 7, 3, -1]]
    """

    sources: Texts
    targets: Texts
    shape: tuple[int, int]  # tokens of a source and a target, padded, where `take` is told none

    def __len__(self) -> int:
        return len(self.sources.lengths)

    @property
    def groups(self) -> np.ndarray:
        """Tokens of the source: a partition that sorts by groups sorts by length."""
        return self.sources.lengths

    def take(
        self,
        indices: np.ndarray,
        rng: np.random.Generator | None = None,
        shape: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        """The examples, padded to `shape`.

        Args:
          indices: int [k].
          rng: unused; nothing is augmented.
          shape: (S, T), no shorter than these examples.

        Returns:
          "inputs": {"source": int32 [k, S], "target": int32 [k, T]}, padded with PAD, the target
          behind BEGIN; "labels": int32 [k, T], the token after each position of the target, −1
          where there is none.
        """
        del rng
        source_length, target_length = shape or self.shape
        labels = self.targets.padded(indices, target_length, fill=-1)
        begin = np.full((len(indices), 1), BEGIN, np.int32)
        target = np.where(labels < 0, np.int32(PAD), np.hstack([begin, labels[:, :-1]]))
        source = self.sources.padded(indices, source_length, fill=PAD)
        return {"inputs": {"source": source, "target": target}, "labels": labels}


@dataclasses.dataclass(frozen=True)
class Translation:
    """The prepared data set."""

    train: SentencePairs
    valid: SentencePairs
    test: SentencePairs
    references: dict[str, list[str]]  # of "valid" and "test": the targets as text
    tokenizer: Any  # sentencepiece.SentencePieceProcessor

    @property
    def input_shape(self) -> tuple[int, int]:
        """(S, T): tokens of the longest source and target."""
        return self.train.shape

    @property
    def classes(self) -> int:
        return self.tokenizer.vocab_size()

    def batches(
        self,
        parts: Sequence[np.ndarray],
        batch_size: int,
        seed: int,
        steps: int,
        nodes: Sequence[int] | None = None,
    ) -> BucketedNodeBatches:
        """The training batches; `batch_size` counts the padded tokens of a node's longer texts."""
        return BucketedNodeBatches(self.train, parts, batch_size, seed, steps, nodes=nodes)

    def text(self, tokens: np.ndarray) -> str:
        """The text of tokens up to the first END."""
        (ends,) = np.nonzero(tokens == END)
        return self.tokenizer.decode(tokens[: ends[0] if len(ends) else None].tolist())


def splits(data_dir: pathlib.Path) -> list[prepared.Split] | None:
    """What is prepared below `data_dir`; None: nothing is."""
    folder = data_dir / NAME
    if not folder.is_dir():
        return None
    try:
        pairs = json.loads((folder / "metadata.json").read_text())["pairs"]
        sizes = {
            split: sum(path.stat().st_size for path in folder.glob(f"{split}.*")) for split in pairs
        }
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise prepared.damaged(NAME, folder, data_dir, error) from error
    return [
        prepared.Split(split, f"{count:,} sentence pairs", sizes[split])
        for split, count in pairs.items()
    ]


def prepare(
    data_dir: str | pathlib.Path, source: str | pathlib.Path | None = None, vocabulary: int = 4000
) -> pathlib.Path:
    """Write the data set to data_dir/trans_de_en, whole or not at all.

    1000 pairs each, or a tenth if that is less, are drawn for "valid" and "test"; the tokenizer
    sees neither. The same source and vocabulary give the same files.

    Args:
      data_dir: of all data sets.
      source: the dictionary; by default that of Debian's package trans-de-en.
      vocabulary: number of tokens, special ones included.

    Returns:
      The folder. One that holds this very data set is left as it is.

    Raises:
      ValueError: no dictionary there, one without sentences, a vocabulary that it cannot fill, or
        a folder that holds another preparation.
    """
    path = pathlib.Path(source or ding.FILE)
    if not path.is_file():
        raise prepared.DataError(
            f"there is no {path}; apt-get install trans-de-en, or name its file with --source=FILE"
        )
    content = path.read_bytes()
    pairs = ding.sentence_pairs(content.decode())
    parts = _split(pairs)
    metadata = {
        "source_sha256": hashlib.sha256(content).hexdigest(),
        "vocabulary": vocabulary,
        "pairs": {split: len(chosen) for split, chosen in parts.items()},
    }
    folder = pathlib.Path(data_dir) / NAME
    if folder.exists():
        known = folder / "metadata.json"
        if known.is_file() and json.loads(known.read_text()) == metadata:
            return folder
        raise ValueError(f"{folder} holds another preparation; remove it, or name another data_dir")
    if min(map(len, parts.values())) == 0:
        raise ValueError(f"{path} holds {len(pairs)} sentence pairs; at least 10 are needed")
    model = _trained_tokenizer(parts["train"], vocabulary)
    with prepared.whole(folder) as partial:
        _write(partial, parts, model)
        (partial / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return folder


def load(data_dir: str | pathlib.Path) -> Translation:
    """What `prepare` wrote.

    Raises:
      ValueError: it is not there.
    """
    folder = pathlib.Path(data_dir) / NAME
    if not folder.is_dir():
        raise prepared.missing(NAME, pathlib.Path(data_dir))
    try:
        return _read(folder)
    except prepared.DataError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
        raise prepared.damaged(NAME, folder, pathlib.Path(data_dir), error) from error


def _read(folder: pathlib.Path) -> Translation:
    with np.load(folder / "tokens.npz") as arrays:
        texts = {
            (split, side): Texts(
                arrays[f"{split}_{side}_tokens"], arrays[f"{split}_{side}_lengths"]
            )
            for split in SPLITS
            for side in ("source", "target")
        }
    longest = [
        max(int(texts[split, side].lengths.max()) for split in SPLITS)
        for side in ("source", "target")
    ]
    splits = {
        split: SentencePairs(
            texts[split, "source"], texts[split, "target"], shape=(longest[0], longest[1])
        )
        for split in SPLITS
    }
    references = {
        split: (folder / f"{split}.en.txt").read_text(encoding="utf-8").splitlines()
        for split in ("valid", "test")
    }
    tokenizer = _sentencepiece().SentencePieceProcessor(
        model_file=str(folder / "sentencepiece.model")
    )
    return Translation(**splits, references=references, tokenizer=tokenizer)


def _split(pairs: Pairs) -> dict[str, Pairs]:
    order = np.random.default_rng(0).permutation(len(pairs))
    held_out = min(1000, len(pairs) // 10)
    ends = [len(pairs) - 2 * held_out, len(pairs) - held_out]
    parts = zip(SPLITS, np.split(order, ends), strict=True)
    return {split: [pairs[index] for index in part] for split, part in parts}


def _trained_tokenizer(pairs: Pairs, vocabulary: int) -> bytes:
    model = io.BytesIO()
    try:
        _sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=(text for pair in pairs for text in pair),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary,
            character_coverage=1.0,
            normalization_rule_name="identity",
            pad_id=PAD,
            unk_id=UNKNOWN,
            bos_id=BEGIN,
            eos_id=END,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(f"{vocabulary=} does not suit these sentences: {error}") from error
    return model.getvalue()


def _write(folder: pathlib.Path, splits: dict[str, Pairs], model: bytes) -> None:
    (folder / "sentencepiece.model").write_bytes(model)
    tokenizer = _sentencepiece().SentencePieceProcessor(model_proto=model)
    arrays: dict[str, Any] = {}
    for split, pairs in splits.items():
        for side, language, texts in zip(
            ("source", "target"), ("de", "en"), zip(*pairs, strict=True), strict=True
        ):
            lines = "".join(f"{text}\n" for text in texts)
            (folder / f"{split}.{language}.txt").write_text(lines, encoding="utf-8")
            encoded = Texts.of(tokenizer.encode(list(texts), add_eos=True))
            arrays[f"{split}_{side}_tokens"] = encoded.tokens
            arrays[f"{split}_{side}_lengths"] = encoded.lengths
    np.savez(folder / "tokens.npz", **arrays)


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise prepared.DataError(
            "translation needs sentencepiece: pip install 'jaxdec[text]'"
        ) from error
    return sentencepiece
