"""Augmentation and standardisation against plain loops, and the geometry of crops."""

import io

import numpy as np
import pytest
from PIL import Image

from jaxdec.data import images


def test_crop_and_flip_gives_windows_of_the_padded_image():
    originals = np.random.default_rng(0).integers(1, 256, (500, 6, 5, 3), np.uint8)
    before = originals.copy()
    augmented = images.crop_and_flip(originals, np.random.default_rng(1), pad=2)
    np.testing.assert_array_equal(originals, before)
    found = []
    for original, image in zip(originals, augmented, strict=True):
        padded = np.pad(original, ((2, 2), (2, 2), (0, 0)))
        found += [
            (top, left, flip)
            for top in range(5)
            for left in range(5)
            for flip in (1, -1)
            if np.array_equal(image[:, ::flip], padded[top : top + 6, left : left + 5])
        ]
    assert len(found) == 500
    assert len(set(found)) == 50


def test_images_are_augmented_in_training_only():
    raw = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3), np.uint8)
    mean, deviation = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    examples = images.ImageExamples(
        raw, np.arange(8), mean, deviation, lambda x, rng: 255 - x if rng.random() < 2 else x
    )
    chosen = np.array([5, 2])
    plain, augmented = examples.take(chosen), examples.take(chosen, np.random.default_rng(0))
    for batch, pixels in ((plain, raw[chosen]), (augmented, 255 - raw[chosen])):
        expected = (pixels.astype(np.float64) / 255 - mean) / deviation
        assert batch["inputs"].dtype == np.float32
        np.testing.assert_allclose(batch["inputs"], expected, atol=1e-6)
        np.testing.assert_array_equal(batch["labels"], [5, 2])


@pytest.mark.parametrize(("height", "width"), [(300, 400), (400, 300), (224, 224)])
def test_inception_boxes_keep_to_their_area_and_aspect(height, width):
    rng = np.random.default_rng(0)
    boxes = np.array([images.inception_box(height, width, rng) for _ in range(2000)])
    left, upper, right, lower = boxes.T
    assert left.min() >= 0
    assert upper.min() >= 0
    assert right.max() <= width
    assert lower.max() <= height
    share = (right - left) * (lower - upper) / (height * width)
    aspect = (right - left) / (lower - upper)
    assert 0.08 <= share.min() < 0.1
    assert 0.8 < share.max() <= 1
    assert 3 / 4 - 1e-9 <= aspect.min() < 0.76
    assert 1.32 < aspect.max() <= 4 / 3 + 1e-9


def test_no_box_fits_a_thin_image_but_its_centre():
    assert images.inception_box(10, 1000, np.random.default_rng(0)) == (495, 0, 505, 10)


def test_evaluation_sees_the_centre_of_a_resize_to_256():
    y, x = np.mgrid[:300, :400]
    smooth = np.stack([y / 2, x / 2, (x + y) / 4], axis=-1).astype(np.uint8)
    image = Image.fromarray(smooth)
    found = images.cropped(image, images.central_box(300, 400, 224 / 256), 224)
    resized = image.resize((round(400 * 256 / 300), 256), Image.Resampling.BILINEAR)
    left = (resized.width - 224) // 2
    expected = np.asarray(resized)[16:240, left : left + 224]
    assert found.shape == (224, 224, 3)
    assert np.abs(found.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_all_photographs_become_rgb(mode):
    buffer = io.BytesIO()
    Image.new(mode, (20, 10)).save(buffer, "JPEG")
    assert np.asarray(images.opened(buffer.getvalue())).shape == (10, 20, 3)
