"""Partitions and batches: every example once, seeded, resumable."""

import jax
import numpy as np
import pytest

from jaxdec import data


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


@pytest.mark.parametrize(
    ("name", "alpha"),
    [
        ("iid", None),
        ("by_class", None),
        ("by_file", None),
        ("dirichlet", 0.1),
        ("dirichlet", 100.0),
    ],
)
@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_partitions_are_disjoint_and_complete(name, alpha, nodes, digits):
    parts = data.split(name, digits.train.groups, nodes, seed=0, alpha=alpha)
    assert len(parts) == nodes
    assert min(map(len, parts)) > 0
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1437))
    again = data.split(name, digits.train.groups, nodes, seed=0, alpha=alpha)
    for left, right in zip(parts, again, strict=True):
        np.testing.assert_array_equal(left, right)


def test_partitions_differ_by_seed(digits):
    first, other = (data.split("iid", digits.train.groups, 4, seed=seed)[0] for seed in (0, 1))
    assert not np.array_equal(np.sort(first), np.sort(other))


def test_no_test_image_is_trained_on(digits):
    train, test = (part.take(np.arange(len(part))) for part in (digits.train, digits.test))
    known = {image.tobytes() for image in train["inputs"]}
    assert not [image for image in test["inputs"] if image.tobytes() in known]
    assert len(test["inputs"]) + len(train["inputs"]) == 1797
    assert np.bincount(test["labels"]).min() >= 34


def _heterogeneity(labels, parts):
    """Mean total variation distance of the nodes' class shares from those of all."""
    shares = [np.bincount(labels[part], minlength=10) / len(part) for part in parts]
    return np.mean([np.abs(s - np.bincount(labels) / len(labels)).sum() / 2 for s in shares])


def test_partitions_order_by_heterogeneity(digits):
    labels = digits.train.groups
    found = [
        _heterogeneity(labels, data.split(name, labels, 8, seed=0, alpha=alpha))
        for name, alpha in [
            ("iid", None),
            ("dirichlet", 1.0),
            ("dirichlet", 0.1),
            ("by_class", None),
        ]
    ]
    assert found[0] < 0.15 < found[1] < found[2]
    assert found[3] > 0.7


def test_by_file_keeps_groups_whole_and_parts_even():
    sizes = np.random.default_rng(0).integers(1, 100, 60)
    groups = np.random.default_rng(1).permutation(np.repeat(np.arange(60), sizes))
    parts = data.split("by_file", groups, 8, seed=0)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(groups)))
    owners = [set(groups[part]) for part in parts]
    assert sum(map(len, owners)) == 60
    assert max(map(len, parts)) - min(map(len, parts)) < 0.02 * len(groups) / 8
    other = data.split("by_file", groups, 8, seed=1)
    assert [set(groups[part]) for part in other] != owners


def test_a_node_sees_each_of_its_examples_once_an_epoch(digits):
    parts = data.split("iid", digits.train.groups, 4, seed=0)
    numbered = data.ArrayExamples(np.arange(1437), digits.train.groups)
    batches = data.NodeBatches(numbered, parts, batch_size=50, seed=0, steps=1000)
    seen = np.concatenate([batches[step]["inputs"] for step in range(1000)], axis=1)
    for node, part in enumerate(parts):
        epochs = [
            seen[node, e * len(part) : (e + 1) * len(part)] for e in range(50_000 // len(part))
        ]
        for epoch in epochs:
            np.testing.assert_array_equal(np.sort(epoch), np.sort(part))
        assert not np.array_equal(epochs[0], epochs[1])


class NoisyPairs:
    """Inputs of two arrays, one of them noise where it is augmented."""

    groups = np.arange(100) % 10

    def __len__(self):
        return 100

    def take(self, indices, rng=None):
        noise = np.zeros(len(indices)) if rng is None else rng.random(len(indices))
        return {"inputs": {"index": indices, "noise": noise}, "labels": self.groups[indices]}


@pytest.mark.parametrize("start", [0, 1, 37])
def test_batches_from_a_step_on_equal_those_of_an_uninterrupted_stream(start):
    """Augmentation, shuffles and the ends of epochs included."""
    parts = data.split("iid", NoisyPairs.groups, 4, seed=0)

    def stream(start):
        batches = data.NodeBatches(NoisyPairs(), parts, batch_size=8, seed=0, steps=60)
        return list(data.prefetched(batches, start))

    whole, late = stream(0), stream(start)
    assert len(late) == 60 - start
    for expected, batch in zip(whole[start:], late, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, expected)


def test_augmentation_differs_by_seed_node_and_step():
    parts = data.split("iid", NoisyPairs.groups, 4, seed=0)
    noise = np.stack(
        [
            data.NodeBatches(NoisyPairs(), parts, 8, seed, steps=20)[step]["inputs"]["noise"]
            for seed in (0, 1)
            for step in range(20)
        ]
    )
    assert noise.shape == (40, 4, 8)
    assert len(np.unique(noise)) == noise.size


def test_batches_are_a_function_of_seed_and_step(digits):
    parts = data.split("iid", digits.train.groups, 4, seed=0)
    whole = data.NodeBatches(digits.train, parts, batch_size=16, seed=0, steps=60)
    late = data.prefetched(data.NodeBatches(digits.train, parts, 16, seed=0, steps=60), start=40)
    for step, batch in zip(range(40, 60), late, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, whole[step])
    other = data.NodeBatches(digits.train, parts, 16, seed=1, steps=60)
    assert not np.array_equal(other[0]["labels"], whole[0]["labels"])


@pytest.mark.parametrize(
    ("name", "nodes", "alpha", "message"),
    [
        ("idd", 4, None, "did you mean iid"),
        ("dirichlet", 4, None, "set data.alpha"),
        ("iid", 4, 0.1, "leave data.alpha unset"),
        ("dirichlet", 4, -1.0, "data.alpha=-1.0 must be positive"),
        ("dirichlet", 40, 1e-3, "write a larger alpha, or fewer nodes"),
        ("iid", 2000, None, "nodes=2000 is more than the 1437"),
        ("by_file", 11, None, "nodes=11 is more than the 10 groups"),
    ],
)
def test_bad_input_is_named(name, nodes, alpha, message, digits):
    with pytest.raises(ValueError, match=message):
        data.split(name, digits.train.groups, nodes, seed=0, alpha=alpha)
