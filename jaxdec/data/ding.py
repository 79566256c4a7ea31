"""German sentences and their English translations, from the dictionary of dict.tu-chemnitz.de.

Debian's package trans-de-en installs its file, GPL-2.0-or-later. A line is an entry,
"German | German | … :: English | English | …": a headword and phrases that use it, the n-th German
item translated by the n-th English one. Most items are words; the sentences among them are taken:

1. notes in [], {}, <> and () are removed, and typographic quotes made plain;
2. of alternatives "A; B" the first is taken;
3. both sides must have two words and end in ., ! or ?;
4. neither may hold a slash (alternatives for single words) or an abbreviation that stands for
   any object or person (etw., jdm., sth., sb., …);
5. a pair of which a side came before is left out, capitals and punctuation ignored, so that
   splits share no sentence.
"""

import hashlib
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from jaxdec.data import prepared, translation

NAME = "trans_de_en"
NEEDS = "Debian's package trans-de-en, or --source=FILE of its dictionary; jaxdec[text]"
LANGUAGES = ("de", "en")
FILE = pathlib.Path("/usr/share/trans/de-en")

_NOTES = re.compile(r"\s*(\[[^\]]*\]|\{[^}]*\}|<[^>]*>|\([^)]*\))")
_QUOTES = str.maketrans({"’": "'", "‘": "'", "„": '"', "“": '"', "”": '"'})
_SENTENCE = re.compile(r"\S+\s[^/]*[.!?]")
_PLACEHOLDER = re.compile(r"\b(etw|jd[mns]?|sb|sth)\.")


def sentence_pairs(dictionary: str) -> list[tuple[str, str]]:
    """(German, English) by the rule above, in the order of the file.

    >>> sentence_pairs("je {adv} | Siehst du ihn {adv} je? :: ever | Do you ever see him?")
    [('Siehst du ihn je?', 'Do you ever see him?')]
    """
    pairs = []
    seen: tuple[set[str], set[str]] = (set(), set())
    for line in dictionary.splitlines():
        if line.startswith("#"):
            continue
        german, _, english = line.partition(" :: ")
        for items in zip(german.split(" | "), english.split(" | "), strict=False):
            pair = (_cleaned(items[0]), _cleaned(items[1]))
            keys = [_key(sentence) for sentence in pair]
            if not all(map(_is_sentence, pair)) or keys[0] in seen[0] or keys[1] in seen[1]:
                continue
            for known, key in zip(seen, keys, strict=True):
                known.add(key)
            pairs.append(pair)
    return pairs


def _cleaned(item: str) -> str:
    return _NOTES.sub("", item).translate(_QUOTES).split("; ")[0].strip()


def _is_sentence(text: str) -> bool:
    return bool(_SENTENCE.fullmatch(text)) and not _PLACEHOLDER.search(text)


def _key(sentence: str) -> str:
    return "".join(filter(str.isalnum, sentence.casefold()))


def divided(pairs: Sequence[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Train, valid and test, a fixed draw: 1000 pairs each for the last two, or a tenth if less."""
    order = np.random.default_rng(0).permutation(len(pairs))
    held_out = min(1000, len(pairs) // 10)
    ends = [len(pairs) - 2 * held_out, len(pairs) - held_out]
    parts = zip(translation.SPLITS, np.split(order, ends), strict=True)
    return {split: [pairs[index] for index in part] for split, part in parts}


def prepare(
    data_dir: pathlib.Path, source: pathlib.Path | None = None, vocabulary: int = 4000
) -> pathlib.Path:
    """Write the data set, from the dictionary of Debian's package or another; see `write`.

    Raises:
      DataError: no dictionary there, or one with too few sentences; and what `write` raises.
    """
    path = source or FILE
    if not path.is_file():
        raise prepared.DataError(
            f"there is no {path}; apt-get install trans-de-en, or name its file with --source=FILE"
        )
    content = path.read_bytes()
    pairs = sentence_pairs(content.decode())
    if len(pairs) < 10:
        raise prepared.DataError(
            f"{path} holds {len(pairs)} sentence pairs; at least 10 are needed"
        )
    about = {"source_sha256": hashlib.sha256(content).hexdigest()}
    return translation.write(NAME, data_dir, LANGUAGES, divided(pairs), vocabulary, about)


def splits(data_dir: pathlib.Path) -> list[prepared.Split] | None:
    """What is prepared."""
    return translation.splits(NAME, data_dir)


def load(data_dir: pathlib.Path) -> translation.Translation:
    """All splits in memory."""
    return translation.load(NAME, data_dir, LANGUAGES)
