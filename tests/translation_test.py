"""Sentence pairs from the dictionary's file to bucketed batches."""

import builtins
import hashlib
import itertools
import json
import re
import shutil

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds

from jaxdec.data import __main__ as command
from jaxdec.data import ding, outline, partition, records, translation, wmt14
from jaxdec.data.buckets import BucketedNodeBatches, least_padding
from jaxdec.data.translation import BEGIN, END, PAD, SentencePairs, Texts
from jaxdec.models import transformer

NOUNS = ["Hund", "Vogel", "Baum", "Nachbar", "Lehrer", "Apfel", "Brief", "Garten", "Schlüssel"]
VERBS = ["sieht", "hört", "findet", "sucht", "malt", "kennt"]


def dictionary(count=300):
    """Entries of a word and a sentence; more words, longer sentences."""
    lines = ["# Version :: test", "Aal {m} [zool.] | Aale {pl} :: eel | eels"]
    for number, (a, verb, b) in enumerate(itertools.product(NOUNS, VERBS, NOUNS)):
        if number == count:
            break
        often = " sehr" * (number % 7)
        lines.append(
            f"{a} {{m}} | Der {a} {verb}{often} den {b} {{n}} (immer). "
            f":: the {a} | The {a} does{' really' * (number % 7)} {verb} the {b} [Br.]."
        )
    return "\n".join(lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("translation")
    (root / "de-en").write_text(dictionary(), encoding="utf-8")
    ding.prepare(root / "data", root / "de-en", vocabulary=100)
    return root / "data"


@pytest.fixture(scope="module")
def data(folder):
    return ding.load(folder)


def texts_of(data, split):
    tokens = getattr(data, split)
    return [
        (data.text(tokens.sources[i]), data.text(tokens.targets[i])) for i in range(len(tokens))
    ]


@pytest.mark.parametrize(
    ("line", "pairs"),
    [
        ("Aal {m} | Aale {pl} :: eel | eels", []),
        ("Ja. | Ja, gern! :: Yes. | Yes, please!", [("Ja, gern!", "Yes, please!")]),
        ("Ist „er“ da (jetzt)? :: Isn’t he here [coll.]?", [('Ist "er" da?', "Isn't he here?")]),
        ("Er geht.; Er läuft. :: He goes.; He runs.", [("Er geht.", "He goes.")]),
        ("Er geht <gehen>. | Er :: He goes. | He", [("Er geht.", "He goes.")]),
        ("Er geht oder läuft. :: He walks/runs.", []),
        ("der Preis von etw. :: the price of sth.", []),
        ("Er geht. | Er GEHT! :: He goes. | He walks.", [("Er geht.", "He goes.")]),
        ("Er geht. | Er läuft. :: He goes. | He goes!", [("Er geht.", "He goes.")]),
        ("# Er geht. :: He goes.", []),
    ],
)
def test_sentences_are_taken_by_the_rule(line, pairs):
    assert ding.sentence_pairs(line) == pairs


def test_splits_are_complete_and_share_no_sentence(data):
    splits = {split: texts_of(data, split) for split in translation.SPLITS}
    assert [len(splits[split]) for split in translation.SPLITS] == [240, 30, 30]
    together = [pair for pairs in splits.values() for pair in pairs]
    assert sorted(together) == sorted(ding.sentence_pairs(dictionary()))
    for side in (0, 1):
        assert len({pair[side] for pair in together}) == 300
    for split in ("valid", "test"):
        assert data.references[split] == [english for _, english in splits[split]]


def test_the_tokenizer_sees_the_training_split_alone(folder, tmp_path, monkeypatch):
    seen = []
    train = translation._trained_tokenizer

    def spy(pairs, vocabulary):
        seen.extend(pairs)
        return train(pairs, vocabulary)

    monkeypatch.setattr(translation, "_trained_tokenizer", spy)
    again = ding.prepare(tmp_path, folder.parent / "de-en", vocabulary=100)
    assert seen == texts_of(ding.load(tmp_path), "train")
    # The same files, to the byte.
    for path in (folder / ding.NAME).iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_metadata_tells_the_source(folder):
    metadata = json.loads((folder / ding.NAME / "metadata.json").read_text())
    assert metadata == {
        "source_sha256": hashlib.sha256(dictionary().encode()).hexdigest(),
        "vocabulary": 100,
        "pairs": {"train": 240, "valid": 30, "test": 30},
        "dropped": 0,
    }


def test_model_and_data_pad_alike():
    assert transformer.PAD == translation.PAD


def test_examples_are_shifted_and_padded(data):
    batch = data.train.take(np.array([5, 0]))
    source, target = batch["inputs"]["source"], batch["inputs"]["target"]
    assert source.shape == (2, data.input_shape[0])
    assert target.shape == batch["labels"].shape == (2, data.input_shape[1])
    assert {leaf.dtype for leaf in jax.tree.leaves(batch)} == {np.dtype(np.int32)}
    for row, index in enumerate([5, 0]):
        wanted, answer = data.train.sources[index], data.train.targets[index]
        assert wanted[-1] == answer[-1] == END
        np.testing.assert_array_equal(
            source[row], np.pad(wanted, (0, source.shape[1] - len(wanted)))
        )
        rest = (0, target.shape[1] - len(answer))
        np.testing.assert_array_equal(
            batch["labels"][row], np.pad(answer, rest, constant_values=-1)
        )
        np.testing.assert_array_equal(target[row], np.pad([BEGIN, *answer[:-1]], rest))
    assert data.text(np.array([*data.train.targets[5], 7, 7])) == texts_of(data, "train")[5][1]
    assert data.classes == 100
    assert (data.train.groups == data.train.sources.lengths).all()


def test_a_broken_preparation_leaves_nothing(folder, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", broken)
    with pytest.raises(OSError, match="disk full"):
        ding.prepare(tmp_path, folder.parent / "de-en", vocabulary=100)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=f"jaxdec.data prepare trans_de_en --data_dir={tmp_path}"):
        ding.load(tmp_path)


def test_preparing_again_changes_nothing_and_another_is_refused(folder):
    source = folder.parent / "de-en"
    before = (folder / ding.NAME).stat().st_mtime_ns
    ding.prepare(folder, source, vocabulary=100)
    assert (folder / ding.NAME).stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="holds another preparation; remove it"):
        ding.prepare(folder, source, vocabulary=90)


def test_bad_sources_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"no .*missing; apt-get install trans-de-en"):
        ding.prepare(tmp_path, tmp_path / "missing")
    with pytest.raises(ValueError, match="vocabulary=4000 does not suit"):
        ding.prepare(tmp_path, folder.parent / "de-en")
    (tmp_path / "few").write_text("Er geht. :: He goes.")
    with pytest.raises(ValueError, match="holds 1 sentence pairs; at least 10"):
        ding.prepare(tmp_path, tmp_path / "few")
    assert [path.name for path in tmp_path.iterdir()] == ["few"]


def test_a_damaged_set_names_the_remedy(folder, tmp_path):
    broken = tmp_path / ding.NAME
    shutil.copytree(folder / ding.NAME, broken)
    (broken / "tokens.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"is damaged.*prepare it again: rm -r"):
        ding.load(tmp_path)


def test_a_missing_package_names_the_extra(folder, monkeypatch):
    import_module = builtins.__import__

    def without(name, *args, **kwargs):
        if name in ("sentencepiece", "sacrebleu"):
            raise ImportError(name)
        return import_module(name, *args, **kwargs)

    from jaxdec import translate

    monkeypatch.setattr(builtins, "__import__", without)
    for call in (lambda: ding.load(folder), lambda: translate.bleu(["a"], ["a"])):
        with pytest.raises((ValueError, ImportError), match=r"pip install 'jaxdec\[text\]'"):
            call()


def parallel():
    """(English, German) of each split; three training pairs are not for training."""
    pairs = [
        (f"The {a} does {verb} the {b}.", f"Der {a} {verb} den {b}\x85\u2028\r.")
        for a, verb, b in itertools.product(NOUNS, VERBS, NOUNS)
    ]
    bad = [("", "Nichts."), ("Nothing.", ""), ("The Hund. " * 100, "Der Hund.")]
    long = [("The Baum. " * 100, "Der Baum.")]
    return {
        "train": [*bad, *pairs[:200]],
        "valid": [*pairs[200:210], *long],
        "test": pairs[210:230],
    }


@pytest.fixture
def plain(tmp_path):
    """A folder of six files."""
    folder = tmp_path / "plain"
    folder.mkdir()
    for split, pairs in parallel().items():
        for language, texts in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            content = "".join(f"{text} \r\n" for text in texts)
            (folder / f"{split}.{language}").write_bytes(content.encode())
    return folder


def stripped(pairs):
    return [(source.strip(), target) for source, target in pairs]


def test_plain_files_are_the_splits_english_to_german(plain, tmp_path, capsys):
    wmt14.prepare(tmp_path, plain, vocabulary=100)
    data, wanted = wmt14.load(tmp_path), parallel()
    assert texts_of(data, "train") == wanted["train"][3:]
    for split in ("valid", "test"):  # all of them, however long
        assert texts_of(data, split) == stripped(wanted[split])
        assert data.references[split] == [german for _, german in wanted[split]]
    assert data.train.sources.lengths.max() <= 250 < data.valid.sources.lengths.max()
    metadata = json.loads((tmp_path / wmt14.NAME / "metadata.json").read_text())
    assert metadata == {
        "source_sha256": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in plain.iterdir()
        },
        "vocabulary": 100,
        "pairs": {"train": 200, "valid": 11, "test": 20},
        "dropped": 3,
    }
    assert command.main(["prepare", "wmt14_en_de", f"--data_dir={tmp_path}"]) == 0  # it is
    assert "200 sentence pairs" in capsys.readouterr().out


def test_a_vocabulary_of_a_sample_is_the_same_each_time(plain, tmp_path, monkeypatch):
    wmt14.prepare(tmp_path / "all", plain, vocabulary=100)
    monkeypatch.setattr(translation, "SAMPLE", 150)
    for folder in ("a", "b"):
        wmt14.prepare(tmp_path / folder, plain, vocabulary=100)
    every, first, again = (
        (tmp_path / folder / wmt14.NAME / "tokens.npz").read_bytes() for folder in ("all", "a", "b")
    )
    assert first == again != every


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), r"/valid.de is no file; --source needs train.en, train.de, "),
        (lambda path: path.write_bytes(b""), r"/valid.de is empty; --source needs train.en, "),
        (
            lambda path: path.write_text("Einer.\nZwei."),
            r"/valid.en has 11 lines, and .*/valid.de 2; each line must translate the same line",
        ),
        (lambda path: path.write_bytes(b"\xff\n"), r"/valid.de is no UTF-8 text .*; convert it"),
        (lambda path: None, r"vocabulary=37000 does not suit these sentences, .* too few"),
    ],
)
def test_bad_plain_files_are_one_error(spoil, message, plain, tmp_path, capsys):
    spoil(plain / "valid.de")
    data_dir = tmp_path / "data"
    arguments = ["prepare", "wmt14_en_de", f"--data_dir={data_dir}", f"--source={plain}"]
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1
    assert not data_dir.exists()


def test_without_tensorflow_there_are_plain_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records.importlib.util, "find_spec", lambda name: None)
    assert command.main(["prepare", "wmt14_en_de", f"--data_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'jaxdec[tf]'; or write --source=FOLDER of train.en, train.de" in error
    assert error.count("\n") == 1


def test_wmt14_by_the_real_specification_of_tfds(tmp_path, monkeypatch):
    wanted = parallel()

    def fake(name, data_dir):
        builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
        builder._split_generators = lambda dl_manager: {
            theirs: enumerate({"en": en, "de": de} for en, de in wanted[ours] if en and de)
            for ours, theirs in (("train", "train"), ("valid", "validation"), ("test", "test"))
        }
        builder.download_and_prepare()

    monkeypatch.setattr(records, "prepare", fake)
    monkeypatch.setattr(wmt14, "_CHUNK", 7)
    wmt14.prepare(tmp_path, vocabulary=100)
    data = wmt14.load(tmp_path)
    for split, dropped in (("train", 3), ("valid", 0), ("test", 0)):  # TFDS shuffles
        assert sorted(texts_of(data, split)) == sorted(stripped(wanted[split][dropped:]))
    metadata = json.loads((tmp_path / wmt14.NAME / "metadata.json").read_text())
    assert metadata["tfds"] == "wmt14_translate/de-en/1.0.0"
    assert metadata["dropped"] == 1


@pytest.mark.parametrize(("name", "classes"), [("trans_de_en", 4000), ("wmt14_en_de", 37_000)])
def test_an_outline_gives_batches_as_the_sets_do(name, classes, data):
    outlined, again = outline(name), outline(name)
    np.testing.assert_array_equal(outlined.train.sources.lengths, again.train.sources.lengths)
    assert outlined.classes == classes
    batches = [
        found.batches(partition.iid(found.train.groups, 2, seed=0), 2000, 0, steps=9)
        for found in (outlined, data)
    ]
    assert batches[0].distinct_shapes == 4
    for shape in range(4):
        ours, theirs = (each.abstract(shape) for each in batches)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        assert {leaf.dtype for leaf in jax.tree.leaves(ours)} == {np.dtype(np.int32)}
        rows, source, target = batches[0].shapes[shape]
        assert ours["inputs"]["source"].shape == (rows, source)
        assert ours["labels"].shape == (rows, target)
    assert jax.tree.map(np.shape, batches[0][0]) == jax.tree.map(
        lambda x: (2, *x.shape), batches[0].abstract(batches[0].bucket(0))
    )


def numbered(count, seed=0, longest=12):
    """Pairs whose first source token is their number."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest + 1, (count, 2))
    sources = [[100 + i, *[5] * (s - 2), END] for i, (s, _) in enumerate(lengths)]
    targets = [[*[6] * (t - 1), END] for _, t in lengths]
    return SentencePairs(Texts.of(sources), Texts.of(targets), shape=(longest, longest))


def test_an_epoch_visits_each_example_of_a_node_about_once():
    pairs, nodes = numbered(1200), 3
    parts = np.array_split(np.random.default_rng(1).permutation(1200), nodes)
    batches = BucketedNodeBatches(pairs, parts, tokens=60, seed=0, steps=10**6)
    epochs = 5
    counts = np.zeros((nodes, 1200), int)
    for step in range(epochs * batches.steps_per_epoch):
        batch = batches[step]
        for node in range(nodes):
            np.add.at(counts[node], batch["inputs"]["source"][node, :, 0] - 100, 1)
    for node, part in enumerate(parts):
        assert counts[node].sum() == counts[node, part].sum()
        seen = counts[node, part]
        assert seen.mean() == pytest.approx(epochs, rel=0.15)
        bucket = np.searchsorted([max(shape[1:]) for shape in batches.shapes], longer(pairs)[part])
        for b in range(len(batches.shapes)):
            assert np.ptp(seen[bucket == b]) <= 1


def longer(pairs):
    return np.maximum(pairs.sources.lengths, pairs.targets.lengths)


def test_each_step_has_one_of_few_shapes_that_holds_about_the_tokens():
    pairs = numbered(900, longest=40)
    parts = np.array_split(np.arange(900), 2)
    batches = BucketedNodeBatches(pairs, parts, tokens=200, seed=0, steps=10**6)
    assert len(batches.shapes) == 4
    real = padded = 0
    seen = []
    for step in range(batches.steps_per_epoch):
        rows, source, target = batches.shapes[batches.bucket(step)]
        batch = batches[step]
        assert batch["inputs"]["source"].shape == (2, rows, source)
        assert batch["inputs"]["target"].shape == batch["labels"].shape == (2, rows, target)
        assert 200 - max(source, target) < rows * max(source, target) <= 200
        real += (batch["inputs"]["source"] != PAD).sum() + (batch["labels"] >= 0).sum()
        padded += batch["inputs"]["source"].size + batch["labels"].size
        assert (batch["labels"] == END).sum() == 2 * rows  # no text is cut
        seen.append(batches.bucket(step))
    assert 1 - real / padded == pytest.approx(batches.padding, abs=0.02)
    one = BucketedNodeBatches(pairs, parts, tokens=200, seed=0, steps=1, buckets=1)
    assert batches.padding < one.padding - 0.1
    assert seen != sorted(seen)


def test_batches_are_a_function_of_seed_and_step():
    pairs, parts = numbered(200), np.array_split(np.arange(200), 2)

    def batches(seed=0):
        return BucketedNodeBatches(pairs, parts, tokens=24, seed=seed, steps=300)

    whole, late = batches(), batches()
    backwards = {step: late[step] for step in reversed(range(300))}
    for step in range(300):
        jax.tree.map(np.testing.assert_array_equal, whole[step], backwards[step])
    schedules = [[b.bucket(step) for step in range(300)] for b in (whole, batches(seed=1))]
    assert schedules[0] != schedules[1]
    orders = [
        next(b[step]["inputs"]["source"][:, :, 0] for step in range(300) if b.bucket(step) == 0)
        for b in (whole, batches(seed=1))
    ]
    assert not np.array_equal(*orders)
    first, second = (
        schedules[0][e * whole.steps_per_epoch :][: whole.steps_per_epoch] for e in (0, 1)
    )
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("buckets", [1, 2, 3, 4, 9])
def test_bounds_leave_the_least_padding(buckets):
    """Among all choices of bounds."""
    for seed in range(5):
        lengths = np.random.default_rng(seed).geometric(0.2, 30)
        values = np.unique(lengths)

        def padded(bounds, lengths=lengths):
            return np.asarray(bounds)[np.searchsorted(bounds, lengths)].sum()

        bounds = least_padding(lengths, buckets)
        assert len(bounds) == min(buckets, len(values))
        choices = itertools.combinations(values[:-1], len(bounds) - 1)
        assert padded(bounds) == min(padded([*chosen, values[-1]]) for chosen in choices)


def test_what_no_batch_can_hold_is_named():
    pairs = numbered(100)
    parts = np.array_split(np.argsort(longer(pairs)), 2)
    with pytest.raises(ValueError, match="node 1 has no example for the bucket of up to 7"):
        BucketedNodeBatches(pairs, parts, tokens=60, seed=0, steps=1)
    parts = np.array_split(np.arange(100), 2)
    with pytest.raises(ValueError, match=r"tokens=11 .* write at least 12"):
        BucketedNodeBatches(pairs, parts, tokens=11, seed=0, steps=1)
    with pytest.raises(ValueError, match=r"in each of accumulate=3 parts; write at least 36"):
        BucketedNodeBatches(pairs, parts, tokens=35, seed=0, steps=1, accumulate=3)


def test_rows_divide_over_the_parts_of_an_accumulated_batch():
    pairs = numbered(200)
    parts = [np.arange(100), np.arange(100, 200)]
    plain = BucketedNodeBatches(pairs, parts, tokens=60, seed=0, steps=1)
    parted = BucketedNodeBatches(pairs, parts, tokens=60, seed=0, steps=1, accumulate=4)
    for one, other in zip(plain.shapes, parted.shapes, strict=True):
        assert other == one._replace(rows=one.rows // 4 * 4)
    assert any(shape.rows % 4 for shape in plain.shapes)
