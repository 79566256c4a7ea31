"""Each prepared set, from its sources to examples: whole, repeatable, or one clear error."""

import gzip
import hashlib
import io
import json
import pathlib
import shutil
import struct
import sys
import sysconfig
import time

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from jaxdec import data
from jaxdec.data import __main__ as command
from jaxdec.data import fashion_mnist, imagenet, outlines, stdlib, token_files, tokens

PREPARED = sorted(set(data.NAMES) - {"digits", "tokens"})


@pytest.fixture(autouse=True)
def _quiet():
    tfds.disable_progress_bar()


def _write_idx(folder, rng, monkeypatch):
    """Four small files as Fashion-MNIST's, and the arrays in them."""
    arrays, digests = {}, {}
    for prefix, count in (("train", 30), ("t10k", 20)):
        arrays[prefix] = rng.integers(0, 256, (count, 28, 28), np.uint8), np.arange(count) % 10
        for kind, array in zip(("images-idx3", "labels-idx1"), arrays[prefix], strict=True):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            content = header + array.astype(np.uint8).tobytes()
            name = f"{prefix}-{kind}-ubyte"
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            digests[name] = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(fashion_mnist, "SHA256", digests)
    return arrays


@pytest.fixture
def idx(tmp_path, monkeypatch):
    folder = tmp_path / "idx"
    folder.mkdir()
    return folder, _write_idx(folder, np.random.default_rng(0), monkeypatch)


def _encoded(rng, shape, kind):
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def _write_tfds(name, data_dir, splits, examples):
    """A set by TFDS's own specification of it, filled with `examples(split)`."""
    builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
    builder._split_generators = lambda dl_manager: {
        split: enumerate(examples(split)) for split in splits
    }
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(manual_dir=data_dir))


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    rng = np.random.default_rng(0)
    written = {}

    def examples(split):
        for index in range(40):
            png = _encoded(rng, (32, 32, 3), "PNG")
            written[np.asarray(Image.open(io.BytesIO(png))).tobytes()] = index % 10
            yield {"id": f"{split}_{index}", "image": png, "label": index % 10}

    _write_tfds("cifar10", folder, ("train", "test"), examples)
    return folder, written


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imagenet")
    rng = np.random.default_rng(0)

    def examples(split):
        for index in range(12):
            shade = rng.integers(0, 256, 3)
            buffer = io.BytesIO()
            Image.new("RGB", (80, 60), tuple(shade.tolist())).save(buffer, "JPEG", quality=95)
            label = int(shade[0])  # told by the picture
            yield {"file_name": f"{index}.JPEG", "image": buffer.getvalue(), "label": label}

    _write_tfds("imagenet2012", folder, ("train", "validation"), examples)
    return folder


@pytest.fixture
def sources(tmp_path):
    """Thirty Python files of known bytes, and some that are skipped."""
    folder = tmp_path / "sources"
    for index in range(30):
        path = folder / f"part{index % 3}" / f"f{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([index]) * 100)
    for skipped in ("test/x.py", "part1/tests/x.py", "idlelib/x.py", "_sysconfigdata_x.py"):
        (folder / skipped).parent.mkdir(exist_ok=True)
        (folder / skipped).write_bytes(b"\xff" * 100)
    (folder / "empty.py").touch()
    (folder / "notes.txt").write_text("no Python")
    return folder


@pytest.mark.parametrize("name", PREPARED)
def test_a_missing_set_is_named_at_once_with_what_prepares_it(name, tmp_path):
    start = time.perf_counter()
    with pytest.raises(ValueError, match="is not prepared in") as error:
        data.load(name, tmp_path)
    assert time.perf_counter() - start < 2
    assert f"data.name={name!r}" in str(error.value)
    assert f"python -m jaxdec.data prepare {name} --data_dir={tmp_path}" in str(error.value)


def test_fashion_mnist_is_what_its_files_hold(idx, tmp_path):
    folder, arrays = idx
    fashion_mnist.prepare(tmp_path, folder)
    found = data.load("fashion_mnist", tmp_path)
    assert (found.input_shape, found.classes) == ((28, 28, 1), 10)
    for examples, prefix in ((found.train, "train"), (found.test, "t10k")):
        images, labels = arrays[prefix]
        batch = examples.take(np.arange(len(examples)))
        assert batch["inputs"].dtype == np.float32
        pixels = np.round((batch["inputs"][..., 0] * 0.3530 + 0.2860) * 255).astype(np.uint8)
        expected = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
        known = {image.tobytes(): k for image, k in zip(pixels, batch["labels"], strict=True)}
        assert known == expected  # TFDS shuffles as it writes


def test_fashion_mnist_downloads_where_nothing_else_is(idx, tmp_path, monkeypatch):
    folder, _ = idx
    monkeypatch.setattr(fashion_mnist, "DEBIAN", tmp_path / "none")
    monkeypatch.setattr(fashion_mnist, "URL", (tmp_path / "nowhere").as_uri())
    with pytest.raises(data.DataError, match=r"did not download.*--source=FOLDER"):
        fashion_mnist.prepare(tmp_path / "data", None)
    monkeypatch.setattr(fashion_mnist, "URL", folder.as_uri())
    good = (folder / "t10k-images-idx3-ubyte.gz").read_bytes()
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(good[:-9])
    with pytest.raises(data.DataError, match="truncated or corrupt"):
        fashion_mnist.prepare(tmp_path / "data", None)
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(good)  # what came before is not kept
    fashion_mnist.prepare(tmp_path / "data", None)
    assert len(data.load("fashion_mnist", tmp_path / "data").train) == 30


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "truncated or corrupt"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:99] + b"!" * 500),
            "truncated or corrupt",
        ),
        (lambda path: path.write_bytes(b""), "Fashion-MNIST's bytes"),
        (lambda path: path.write_bytes(gzip.compress(b"MNIST")), "Fashion-MNIST's bytes"),
        (lambda path: path.unlink(), "does not exist"),
    ],
)
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"])
def test_spoilt_sources_of_fashion_mnist_are_one_error(name, spoil, message, idx, tmp_path, capsys):
    folder, _ = idx
    spoil(folder / name)
    arguments = ["prepare", "fashion_mnist", f"--data_dir={tmp_path}", f"--source={folder}"]
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert name in error
    assert error.count("\n") == 1
    with pytest.raises(data.DataError, match="is not prepared"):
        data.load("fashion_mnist", tmp_path)


def test_cifar10_by_the_real_specification_without_tensorflow(cifar):
    folder, written = cifar
    found = data.load("cifar10", folder)
    assert (found.input_shape, found.classes) == ((32, 32, 3), 10)
    everything = np.arange(40)
    mean, deviation = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    for examples in (found.train, found.test):
        batch = examples.take(everything)
        pixels = np.round((batch["inputs"] * deviation + mean) * 255).astype(np.uint8)
        for image, label in zip(pixels, batch["labels"], strict=True):
            assert written[image.tobytes()] == label
        np.testing.assert_array_equal(examples.groups, batch["labels"])
    augmented = found.train.take(everything, np.random.default_rng(0))["inputs"]
    assert not np.array_equal(augmented, found.train.take(everything)["inputs"])
    for plain in (data.load("cifar10", folder, augment=False).train, found.test):
        np.testing.assert_array_equal(
            plain.take(everything, np.random.default_rng(0))["inputs"],
            plain.take(everything)["inputs"],
        )
    assert "tensorflow" not in sys.modules


def test_imagenet_by_the_real_specification_without_tensorflow(photographs, capsys):
    with pytest.raises(data.DataError, match="prepare imagenet2012"):  # TFDS's part alone
        data.load("imagenet2012", photographs)
    assert command.main(["prepare", "imagenet2012", f"--data_dir={photographs}"]) == 0
    assert "validation" in capsys.readouterr().out
    found = data.load("imagenet2012", photographs)
    assert (found.input_shape, found.classes) == ((224, 224, 3), 1000)
    chosen = np.array([7, 2, 11])
    for rng in (None, np.random.default_rng(0)):
        for examples in (found.train, found.test):
            batch = examples.take(chosen, rng)
            assert batch["inputs"].shape == (3, 224, 224, 3)
            assert batch["inputs"].dtype == np.float32
            red = (batch["inputs"][..., 0] * 0.229 + 0.485) * 255
            np.testing.assert_allclose(red.mean(axis=(1, 2)), batch["labels"], atol=3)
            np.testing.assert_array_equal(batch["labels"], examples.groups[chosen])
    assert "tensorflow" not in sys.modules


def test_imagenet_boxes_and_flips_are_drawn_by_the_generator(photographs):
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (100, 1))).convert("RGB")
    buffer = io.BytesIO()
    ramp.save(buffer, "PNG")

    class Ramps:
        def take(self, indices):
            return [{"image": buffer.getvalue()} for _ in indices]

    examples = imagenet.ImageNetExamples(Ramps(), np.zeros(64, np.int32), augment=True)
    first, again, other = (
        examples.take(np.arange(64), np.random.default_rng(seed))["inputs"] for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    mirrored = first[:, 0, 0, 0] > first[:, 0, -1, 0]
    assert 20 < mirrored.sum() < 44
    assert len(np.unique(first[:, 0, 0, 0])) > 30


def test_photographs_are_decoded_by_threads_in_the_order_of_steps(photographs, tmp_path):
    shutil.copytree(photographs, tmp_path, dirs_exist_ok=True)
    command.main(["prepare", "imagenet2012", f"--data_dir={tmp_path}"])
    train = data.load("imagenet2012", tmp_path).train
    parts = data.split("iid", train.groups, 2, seed=0)
    batches = data.NodeBatches(train, parts, batch_size=2, seed=0, steps=8)
    for step, batch in zip(range(5, 8), data.prefetched(batches, start=5), strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, batches[step])


def test_old_labels_are_replaced(photographs, tmp_path):
    shutil.copytree(photographs, tmp_path, dirs_exist_ok=True)
    labels = tmp_path / imagenet.LABELS / "train.npy"
    imagenet.prepare(tmp_path, None)
    written = labels.read_bytes()
    labels.write_bytes(b"old")
    imagenet.prepare(tmp_path, None)
    assert labels.read_bytes() == written


@pytest.mark.parametrize(
    ("pattern", "spoil"),
    [
        ("imagenet2012/*/*-train.array_record*", lambda path: _truncate(path)),
        ("imagenet2012/*/*-validation.array_record*", lambda path: path.unlink()),
        ("jaxdec_imagenet2012/train.npy", lambda path: _truncate(path)),
        ("jaxdec_imagenet2012/validation.npy", lambda path: path.unlink()),
        ("jaxdec_imagenet2012/train.npy", lambda path: np.save(path, np.zeros(11, np.int32))),
    ],
)
def test_a_damaged_imagenet_is_seen_before_training(pattern, spoil, photographs, tmp_path):
    shutil.copytree(photographs, tmp_path, dirs_exist_ok=True)
    command.main(["prepare", "imagenet2012", f"--data_dir={tmp_path}"])
    (path,) = tmp_path.glob(pattern)
    spoil(path)
    with pytest.raises(data.DataError, match=r"damaged.*prepare it again: rm -r"):
        data.load("imagenet2012", tmp_path)


def _truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("spoil", [_truncate, lambda path: path.unlink()])
@pytest.mark.parametrize("pattern", ["*-train.array_record*", "*-test.array_record*"])
def test_damaged_records_say_to_prepare_again(spoil, pattern, cifar, tmp_path):
    shutil.copytree(cifar[0], tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / "cifar10").glob(f"*/{pattern}")
    spoil(path)
    with pytest.raises(data.DataError, match=r"damaged.*prepare it again: rm -r .*cifar10/3"):
        data.load("cifar10", tmp_path)


def test_a_flipped_byte_of_records_is_seen(cifar, tmp_path):
    shutil.copytree(cifar[0], tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / "cifar10").glob("*/*-train.array_record*")
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT", len(content) // 8) + 100] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(data.DataError, match="damaged"):
        data.load("cifar10", tmp_path)


def test_damaged_metadata_says_to_prepare_again(cifar, tmp_path, capsys):
    shutil.copytree(cifar[0], tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / "cifar10").glob("*/dataset_info.json")
    _truncate(path)
    with pytest.raises(data.DataError, match=r"damaged.*prepare it again"):
        data.load("cifar10", tmp_path)
    assert command.main(["prepare", "cifar10", f"--data_dir={tmp_path}"]) == 2
    assert command.main(["list", f"--data_dir={tmp_path}"]) == 0
    assert "damaged" in capsys.readouterr().out


def test_another_format_is_refused_without_deleting_it(cifar, tmp_path):
    shutil.copytree(cifar[0], tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / "cifar10").glob("*/dataset_info.json")
    path.write_text(path.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(data.DataError, match="as tfrecord, which has no random access"):
        data.load("cifar10", tmp_path)


def test_what_tfds_did_not_finish_does_not_count(cifar, tmp_path):
    shutil.copytree(cifar[0], tmp_path, dirs_exist_ok=True)
    (version,) = (tmp_path / "cifar10").iterdir()
    version.rename(version.with_name(f"incomplete.AB12CD_{version.name}"))
    with pytest.raises(data.DataError, match="is not prepared"):
        data.load("cifar10", tmp_path)


def test_stdlib_holds_each_file_in_one_split(sources, tmp_path):
    stdlib.prepare(tmp_path, sources)
    found = data.load("stdlib", tmp_path, context=9)
    assert (found.input_shape, found.classes) == ((9,), 256)
    seen = {}
    for name, examples in (("train", found.train), ("test", found.test)):
        batch = examples.take(np.arange(len(examples)))
        np.testing.assert_array_equal(batch["inputs"], batch["labels"])  # each file one byte
        np.testing.assert_array_equal(batch["inputs"].min(axis=1), batch["inputs"].max(axis=1))
        seen[name] = set(batch["inputs"][:, 0].tolist())
        for group in np.unique(examples.groups):
            assert len(np.unique(batch["inputs"][examples.groups == group])) == 1
    assert seen["train"] | seen["test"] == set(range(30))
    assert len(seen["train"]) == 28
    assert len(seen["test"]) == 2


def test_stdlib_is_the_same_each_time(sources, tmp_path):
    for folder in ("a", "b"):
        stdlib.prepare(tmp_path / folder, sources)
    first, again = (
        (tmp_path / folder / stdlib.FOLDER / tokens.METADATA).read_text() for folder in ("a", "b")
    )
    assert first == again
    about = json.loads(first)
    assert about["python"] == ".".join(map(str, sys.version_info[:3]))
    stream = (tmp_path / "a" / stdlib.FOLDER / "train.bin").read_bytes()
    assert about["splits"]["train"]["sha256"] == hashlib.sha256(stream).hexdigest()


def test_this_pythons_library_is_a_corpus():
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    files = stdlib.source_files(folder / "json")
    assert (
        sorted(files)
        == list(files)
        == [
            "__init__.py",
            "decoder.py",
            "encoder.py",
            "scanner.py",
            "tool.py",
        ]
    )
    assert b"class JSONDecoder" in files["decoder.py"].tobytes()


def test_windows_cover_a_file_in_order_and_stop_at_its_end():
    stream = np.arange(250, dtype=np.uint8)
    windows = tokens.Windows(stream, np.array([101, 105, 105, 250]), context=10)
    batch = windows.take(np.arange(len(windows)))
    np.testing.assert_array_equal(batch["labels"], batch["inputs"] + 1)
    assert batch["inputs"].dtype == batch["labels"].dtype == np.int32
    np.testing.assert_array_equal(batch["inputs"][:10].ravel(), np.arange(100))
    np.testing.assert_array_equal(batch["inputs"][10:].ravel(), np.arange(105, 245))
    np.testing.assert_array_equal(windows.groups, [0] * 10 + [3] * 14)


def test_by_file_gives_nodes_no_text_in_common(sources, tmp_path):
    stdlib.prepare(tmp_path, sources)
    train = data.load("stdlib", tmp_path, context=16).train
    parts = data.split("by_file", train.groups, 4, seed=0)
    read = [set(np.unique(train.take(part)["inputs"])) for part in parts]
    assert sum(map(len, read)) == len(set.union(*read)) == 28


@pytest.mark.parametrize("context", [0, -3, 100])
def test_a_context_that_fits_no_file_is_named(context, sources, tmp_path):
    stdlib.prepare(tmp_path, sources)
    with pytest.raises(data.DataError, match=f"data.context={context} (must be|.*most 99)"):
        data.load("stdlib", tmp_path, context=context)


@pytest.mark.parametrize("name", ["train.bin", "test.bin", tokens.METADATA])
@pytest.mark.parametrize("spoil", [_truncate, _flip, lambda path: path.unlink()])
def test_damaged_streams_say_to_prepare_again(name, spoil, sources, tmp_path):
    stdlib.prepare(tmp_path, sources)
    spoil(tmp_path / stdlib.FOLDER / name)
    with pytest.raises(data.DataError, match=r"damaged.*prepare it again: rm -r .*jaxdec_stdlib"):
        data.load("stdlib", tmp_path, context=9)


def test_a_kill_half_way_leaves_nothing_that_counts(sources, tmp_path, monkeypatch):
    def killed(folder, *args, **kwargs):
        (folder / "train.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokens, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            stdlib.prepare(tmp_path, sources)
    assert stdlib.splits(tmp_path) is None
    stdlib.prepare(tmp_path, sources)
    assert [split.holds for split in stdlib.splits(tmp_path)] == ["28 files", "2 files"]


def test_the_command_prepares_once_and_lists(sources, tmp_path, capsys):
    arguments = [f"--data_dir={tmp_path / 'data'}"]
    prepare = ["prepare", "stdlib", f"--source={sources}", *arguments]
    assert command.main(["list", *arguments]) == 0
    assert "kB" not in capsys.readouterr().out
    assert command.main(prepare) == 0
    assert "28 files" in capsys.readouterr().out
    (path,) = (tmp_path / "data").glob("*/train.bin")
    written = path.stat().st_mtime_ns
    assert command.main(prepare) == 0
    assert path.stat().st_mtime_ns == written
    assert command.main(["list", *arguments]) == 0
    listing = capsys.readouterr().out
    assert "3.0 kB" in listing
    assert "jaxdec[tf]" in listing
    assert all(name in listing for name in data.NAMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare"], "write prepare NAME"),
        (["prepare", "stdlb"], "did you mean stdlib"),
        (["prepare", "digits"], "nothing to prepare"),
        (["prepare", "tokens"], "data.folder of train.bin and test.bin"),
        (["prepare", "stdlib", "--source=nowhere"], "there is no --source=nowhere"),
        (["prepare", "imagenet2012"], "ILSVRC2012_img_train.tar"),
        (["prepare", "cifar10", "--source=."], "leave --source out"),
    ],
)
def test_bad_commands_are_one_line_and_exit_code_2(arguments, message, tmp_path, capsys):
    assert command.main([*arguments, f"--data_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def _write_tokens(folder, train=1000, test=100):
    """Two files of token ids below 500."""
    folder.mkdir(parents=True)
    written = {}
    for split, count in (("train", train), ("test", test)):
        written[split] = np.random.default_rng(count).integers(0, 500, count).astype("<u2")
        written[split].tofile(folder / f"{split}.bin")
    return written


@pytest.mark.parametrize("absolute", [False, True])
def test_token_files_are_read_as_windows_where_they_lie(absolute, tmp_path):
    written = _write_tokens(tmp_path / "owt")
    folder = str(tmp_path / "owt") if absolute else "owt"
    found = data.load("tokens", tmp_path, folder=folder, vocabulary=500, context=9)
    assert (found.input_shape, found.classes) == ((9,), 500)
    assert (len(found.train), len(found.test)) == (111, 11)
    assert not found.train.groups.any()
    batch = found.train.take(np.array([0, 110]))
    np.testing.assert_array_equal(batch["inputs"][1], written["train"][990:999])
    np.testing.assert_array_equal(batch["labels"][1], written["train"][991:1000])
    assert batch["inputs"].dtype == batch["labels"].dtype == np.int32


@pytest.mark.parametrize(
    ("spoil", "fields", "message"),
    [
        (lambda path: path.unlink(), {}, r"test.bin does not exist; it needs data.folder of"),
        (lambda path: path.write_bytes(b"abc"), {}, "has 3 bytes, an odd number"),
        (lambda path: path.write_bytes(b""), {}, r"has 0 tokens; .*data.context \+ 1 = 10"),
        (lambda path: None, {"context": 100}, "has 100 tokens; .* = 101"),
        (
            lambda path: np.full(99, 700, "<u2").tofile(path),
            {},
            "has the token id 700, and data.vocabulary=500; write at least 701",
        ),
        (lambda path: None, {"vocabulary": 70_000}, r"data.vocabulary=70000 must be in \[1, 655"),
        (lambda path: None, {"context": 0}, "data.context=0 must be at least 1"),
    ],
)
def test_token_files_that_cannot_be_used_are_one_error(spoil, fields, message, tmp_path):
    _write_tokens(tmp_path / "owt")
    spoil(tmp_path / "owt" / "test.bin")
    fields = {"folder": "owt", "vocabulary": 500, "context": 9, **fields}
    with pytest.raises(data.DataError, match=message):
        data.load("tokens", tmp_path, **fields)


def test_an_id_out_of_the_vocabulary_is_found_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_CHUNK", 64)
    _write_tokens(tmp_path / "owt")
    ids = np.fromfile(tmp_path / "owt" / "train.bin", "<u2")
    ids[700] = 500
    ids.tofile(tmp_path / "owt" / "train.bin")
    with pytest.raises(data.DataError, match=r"train.bin has the token id 500"):
        data.load("tokens", tmp_path, folder="owt", vocabulary=500, context=9)


def test_outlines_have_the_shapes_of_the_sets(cifar, photographs, idx, sources, tmp_path):
    fashion_mnist.prepare(tmp_path, idx[0])
    stdlib.prepare(tmp_path, sources)
    imagenet.prepare(photographs, None)
    _write_tokens(tmp_path / "owt")
    of_tokens = {"folder": "owt", "vocabulary": 500, "context": 9}
    fields = {"stdlib": {"context": 32}, "tokens": of_tokens}
    folders = {"cifar10": cifar[0], "imagenet2012": photographs}
    images_and_texts = [
        name for name, known in outlines.OUTLINES.items() if isinstance(known, outlines.Outline)
    ]
    for name in images_and_texts:
        given = fields.get(name, {})
        found, outline = (
            data.load(name, folders.get(name, tmp_path), **given),
            data.outline(name, **given),
        )
        assert outline.input_shape == found.input_shape
        assert outline.classes == found.classes
        for split in ("train", "test"):
            theirs, ours = (getattr(x, split).take(np.zeros(2, int)) for x in (found, outline))
            assert jax.tree.map(lambda x: (x.shape, x.dtype), ours) == jax.tree.map(
                lambda x: (x.shape, x.dtype), theirs
            )
    digits, outline = data.load("digits"), data.outline("digits")
    assert (len(outline.train), len(outline.test)) == (len(digits.train), len(digits.test))
    assert data.outline("stdlib").input_shape == (256,)  # the default of load


def test_every_set_has_an_outline():
    assert outlines.OUTLINES.keys() == data.NAMES.keys()


def test_outlines_take_the_fields_of_the_set():
    with pytest.raises(ValueError, match=r"data.context is set, but data 'cifar10' does not"):
        data.outline("cifar10", context=8)
    with pytest.raises(ValueError, match=r"data.folder is not set"):
        data.outline("tokens", vocabulary=8)


def test_fields_are_those_of_the_set(tmp_path):
    with pytest.raises(ValueError, match=r"data.context is set, but data 'cifar10' does not"):
        data.load("cifar10", tmp_path, context=8)
    with pytest.raises(ValueError, match="did you mean fashion_mnist"):
        data.load("fashion-mnist", tmp_path)
