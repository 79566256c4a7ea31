"""Partitions and batches: every example once, seeded, resumable."""

import itertools

import numpy as np
import pytest

from jaxdec import data


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


@pytest.mark.parametrize(
    ("name", "alpha"), [("iid", None), ("by_class", None), ("dirichlet", 0.1), ("dirichlet", 100.0)]
)
@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_partitions_are_disjoint_and_complete(name, alpha, nodes, digits):
    parts = data.split(name, digits.train_labels, nodes, seed=0, alpha=alpha)
    assert len(parts) == nodes
    assert min(map(len, parts)) > 0
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1437))
    again = data.split(name, digits.train_labels, nodes, seed=0, alpha=alpha)
    for left, right in zip(parts, again, strict=True):
        np.testing.assert_array_equal(left, right)


def test_partitions_differ_by_seed(digits):
    first, other = (data.split("iid", digits.train_labels, 4, seed=seed)[0] for seed in (0, 1))
    assert not np.array_equal(np.sort(first), np.sort(other))


def test_no_test_image_is_trained_on(digits):
    train = {image.tobytes() for image in digits.train_inputs}
    shared = [image for image in digits.test_inputs if image.tobytes() in train]
    assert len(shared) == 0
    assert len(digits.test_inputs) + len(digits.train_inputs) == 1797
    assert np.bincount(digits.test_labels).min() >= 34


def _heterogeneity(labels, parts):
    """Mean total variation distance of the nodes' class shares from those of all."""
    shares = [np.bincount(labels[part], minlength=10) / len(part) for part in parts]
    return np.mean([np.abs(s - np.bincount(labels) / len(labels)).sum() / 2 for s in shares])


def test_partitions_order_by_heterogeneity(digits):
    labels = digits.train_labels
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


def test_a_node_sees_each_of_its_examples_once_an_epoch(digits):
    parts = data.split("iid", digits.train_labels, 4, seed=0)
    dataset = data.Dataset(
        np.arange(1437), digits.train_labels, digits.test_inputs, digits.test_labels, 10
    )
    batches = data.NodeBatches(dataset, parts, batch_size=50, seed=0, steps=1000)
    seen = np.concatenate([batches[step]["inputs"] for step in range(1000)], axis=1)
    for node, part in enumerate(parts):
        epochs = [
            seen[node, e * len(part) : (e + 1) * len(part)] for e in range(50_000 // len(part))
        ]
        for epoch in epochs:
            np.testing.assert_array_equal(np.sort(epoch), np.sort(part))
        assert not np.array_equal(epochs[0], epochs[1])


def test_batches_are_a_function_of_seed_and_step(digits):
    parts = data.split("iid", digits.train_labels, 4, seed=0)
    whole = data.NodeBatches(digits, parts, batch_size=16, seed=0, steps=60)
    late = data.prefetched(data.NodeBatches(digits, parts, 16, seed=0, steps=60), start=40)
    for step, batch in zip(range(40, 60), late, strict=True):
        np.testing.assert_array_equal(batch["inputs"], whole[step]["inputs"])
        np.testing.assert_array_equal(batch["labels"], whole[step]["labels"])
    other = data.NodeBatches(digits, parts, 16, seed=1, steps=60)
    assert not np.array_equal(other[0]["labels"], whole[0]["labels"])


def test_prefetched_keeps_the_order(digits):
    parts = data.split("iid", digits.train_labels, 2, seed=0)
    batches = data.NodeBatches(digits, parts, batch_size=8, seed=0, steps=30)
    for step, batch in enumerate(itertools.islice(data.prefetched(batches), 30)):
        np.testing.assert_array_equal(batch["labels"], batches[step]["labels"])


@pytest.mark.parametrize(
    ("name", "nodes", "alpha", "message"),
    [
        ("idd", 4, None, "did you mean iid"),
        ("dirichlet", 4, None, "set data.alpha"),
        ("iid", 4, 0.1, "leave data.alpha unset"),
        ("dirichlet", 4, -1.0, "data.alpha=-1.0 must be positive"),
        ("dirichlet", 40, 1e-3, "write a larger alpha, or fewer nodes"),
        ("iid", 2000, None, "nodes=2000 is more than the 1437"),
    ],
)
def test_bad_input_is_named(name, nodes, alpha, message, digits):
    with pytest.raises(ValueError, match=message):
        data.split(name, digits.train_labels, nodes, seed=0, alpha=alpha)
