"""Translation: sentence pairs as tokens of one vocabulary for both languages.

`write` trains a SentencePiece model (BPE) on the training split and writes what `load` reads; the
modules of the sets say where pairs come from. Needs `pip install 'jaxdec[text]'`.
"""

import array
import dataclasses
import functools
import io
import json
import pathlib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import numpy as np
from rich.progress import track

from jaxdec.data import prepared
from jaxdec.data.buckets import BucketedNodeBatches
from jaxdec.data.dataset import Dataset

PAD, UNKNOWN, BEGIN, END = range(4)
SPLITS = ("train", "valid", "test")
SIDES = ("source", "target")
LONGEST = 250  # tokens of a training text, END included
SAMPLE = 2_000_000  # sentences that a vocabulary is trained on, at most

Pairs = Iterable[tuple[str, str]]  # (source, target), more than once


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts of tokens, one behind the other.

    >>> texts = Texts.of([[5, 6, 3], [7, 3]])
    >>> texts.padded(np.array([1, 0]), 4, fill=0).tolist()
    [[7, 3, 0, 0], [5, 6, 3, 0]]
    """

    tokens: np.ndarray  # uint16
    lengths: np.ndarray  # int [texts]

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> "Texts":
        lengths = np.array([len(text) for text in texts], np.int64)
        tokens = np.fromiter((token for text in texts for token in text), np.uint16, lengths.sum())
        return cls(tokens, lengths)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] :][: self.lengths[index]].astype(np.int32)

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
class PairsDataset(Dataset):
    """Sentence pairs for training, in batches of similar length."""

    train: SentencePairs
    test: SentencePairs

    def batches(
        self,
        parts: Sequence[np.ndarray],
        batch_size: int,
        seed: int,
        steps: int,
        nodes: Sequence[int] | None = None,
        accumulate: int = 1,
    ) -> BucketedNodeBatches:
        """The training batches; `batch_size` counts the padded tokens of a node's longer texts."""
        return BucketedNodeBatches(
            self.train, parts, batch_size, seed, steps, nodes=nodes, accumulate=accumulate
        )


@dataclasses.dataclass(frozen=True)
class Translation(PairsDataset):
    """A prepared data set; its `input_shape` is (S, T), of the longest source and target."""

    valid: SentencePairs
    references: dict[str, list[str]]  # of "valid" and "test": the targets as text
    tokenizer: Any  # sentencepiece.SentencePieceProcessor

    def text(self, tokens: np.ndarray) -> str:
        """The text of tokens up to the first END."""
        (ends,) = np.nonzero(tokens == END)
        return self.tokenizer.decode(tokens[: ends[0] if len(ends) else None].tolist())


def splits(name: str, data_dir: pathlib.Path) -> list[prepared.Split] | None:
    """What is prepared of a set below `data_dir`; None: nothing is."""
    folder = data_dir / name
    if not folder.is_dir():
        return None
    try:
        pairs = json.loads((folder / "metadata.json").read_text())["pairs"]
        sizes = {
            split: sum(path.stat().st_size for path in folder.glob(f"{split}.*")) for split in pairs
        }
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise prepared.damaged(name, folder, data_dir, error) from error
    return [
        prepared.Split(split, f"{count:,} sentence pairs", sizes[split])
        for split, count in pairs.items()
    ]


def write(
    name: str,
    data_dir: pathlib.Path,
    languages: tuple[str, str],
    pairs: Mapping[str, Pairs],
    vocabulary: int,
    about: Mapping[str, Any],
) -> pathlib.Path:
    """Write a data set to data_dir/name, whole or not at all.

    The tokenizer sees the training split alone. Training pairs of which a text is empty, or longer
    than `LONGEST` tokens, are dropped, and counted in metadata.json. The same pairs and vocabulary
    give the same files.

    Args:
      name: of the set.
      data_dir: of all data sets.
      languages: of the sources and the targets.
      pairs: of each of `SPLITS`.
      vocabulary: number of tokens, special ones included; at most 65536.
      about: where the pairs come from; these and the vocabulary tell preparations apart.

    Returns:
      The folder. One that holds this very data set is left as it is.

    Raises:
      DataError: a vocabulary that the pairs cannot fill, a folder that holds another preparation,
        or sentencepiece is not installed.
    """
    folder = data_dir / name
    about = {**about, "vocabulary": vocabulary}
    if folder.exists():
        known = folder / "metadata.json"
        if known.is_file() and about.items() <= json.loads(known.read_text()).items():
            return folder
        raise prepared.DataError(
            f"{folder} holds another preparation; remove it, or name another data_dir"
        )
    model = _trained_tokenizer(pairs["train"], vocabulary)
    with prepared.whole(folder) as partial:
        (partial / "sentencepiece.model").write_bytes(model)
        counts = _write_pairs(partial, languages, pairs, model)
        metadata = json.dumps({**about, **counts}, indent=2)
        (partial / "metadata.json").write_text(metadata + "\n")
    return folder


def load(name: str, data_dir: pathlib.Path, languages: tuple[str, str]) -> Translation:
    """What `write` wrote.

    Raises:
      DataError: it is not there, or damaged, or sentencepiece is not installed.
    """
    folder = data_dir / name
    if not folder.is_dir():
        raise prepared.missing(name, data_dir)
    try:
        return _read(folder, languages)
    except prepared.DataError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
        raise prepared.damaged(name, folder, data_dir, error) from error


def lines(path: pathlib.Path) -> Iterator[str]:
    r"""The lines of a text without what surrounds them; only \n ends one."""
    with open(path, encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.strip()


def _read(folder: pathlib.Path, languages: tuple[str, str]) -> Translation:
    with np.load(folder / "tokens.npz") as arrays:
        texts = {
            (split, side): Texts(
                arrays[f"{split}_{side}_tokens"], arrays[f"{split}_{side}_lengths"]
            )
            for split in SPLITS
            for side in SIDES
        }
    longest = [max(int(texts[split, side].lengths.max()) for split in SPLITS) for side in SIDES]
    shape = longest[0], longest[1]
    splits = {
        split: SentencePairs(texts[split, "source"], texts[split, "target"], shape)
        for split in SPLITS
    }
    references = {
        split: list(lines(folder / f"{split}.{languages[1]}.txt")) for split in ("valid", "test")
    }
    tokenizer = _sentencepiece().SentencePieceProcessor(
        model_file=str(folder / "sentencepiece.model")
    )
    return Translation(
        **splits,
        input_shape=shape,
        classes=tokenizer.vocab_size(),
        references=references,
        tokenizer=tokenizer,
    )


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
            input_sentence_size=SAMPLE,
            shuffle_input_sentence=True,  # a sample of all, by a fixed seed
            pad_id=PAD,
            unk_id=UNKNOWN,
            bos_id=BEGIN,
            eos_id=END,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise prepared.DataError(
            f"{vocabulary=} does not suit these sentences, of which there are too few: {reason}"
        ) from error
    return model.getvalue()


def _write_pairs(
    folder: pathlib.Path, languages: tuple[str, str], splits: Mapping[str, Pairs], model: bytes
) -> dict[str, Any]:
    """The texts and tokens of all splits to files; how many pairs were written and dropped."""
    tokenizer = _sentencepiece().SentencePieceProcessor(model_proto=model)
    arrays: dict[str, Any] = {}
    dropped = 0
    for split, pairs in splits.items():
        # Millions of texts: 2 bytes a token, and not a list's 8.
        tokens = {side: array.array("H") for side in SIDES}
        lengths = {side: array.array("L") for side in SIDES}
        source_path, target_path = (folder / f"{split}.{language}.txt" for language in languages)
        with _new(source_path) as sources, _new(target_path) as targets:
            for pair in track(pairs, split):
                encoded = [tokenizer.encode(text, add_eos=True) for text in pair]
                if split == "train" and not all(1 < len(text) <= LONGEST for text in encoded):
                    dropped += 1
                    continue
                sources.write(f"{pair[0]}\n")
                targets.write(f"{pair[1]}\n")
                for side, text in zip(SIDES, encoded, strict=True):
                    tokens[side].extend(text)
                    lengths[side].append(len(text))
        for side in SIDES:
            arrays[f"{split}_{side}_tokens"] = np.asarray(tokens[side])
            arrays[f"{split}_{side}_lengths"] = np.asarray(lengths[side], np.int64)
    np.savez(folder / "tokens.npz", **arrays)
    counts = {split: len(arrays[f"{split}_source_lengths"]) for split in splits}
    return {"pairs": counts, "dropped": dropped}


def _new(path: pathlib.Path) -> TextIO:
    return open(path, "w", encoding="utf-8", newline="\n")


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise prepared.DataError(
            "translation needs sentencepiece: pip install 'jaxdec[text]'"
        ) from error
    return sentencepiece
