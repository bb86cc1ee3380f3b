"""Batches from image files: decoding, crops, workers, resume, sharing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from doublehead.data import FileBatches, ImageFiles, Normalise

pillow = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder, files = tmp_path_factory.mktemp("images"), []
    for i in range(12):
        row, column = np.mgrid[: 20 + i, :24]
        pixels = np.stack([row * 6, column * 8, np.full_like(row, 20 * i)], -1).astype(np.uint8)
        files.append(folder / f"{i}.png")
        pillow.fromarray(pixels).save(files[-1])
    return ImageFiles(tuple(files), np.arange(12))


def images_of(batches):
    return torch.cat([x for x, _ in batches])


def test_evaluation_takes_the_centre(samples):
    batches = FileBatches(samples, 5, size=14)
    images = images_of(batches)
    assert images.shape == (12, 3, 14, 14)
    assert len(batches) == 3
    with pillow.open(samples.files[3]) as image:  # 24 x 23: the central 7/8 of the shorter side
        side = 23 * 224 / 256
        box = ((24 - side) / 2, (23 - side) / 2, (24 + side) / 2, (23 + side) / 2)
        expected = np.asarray(image.resize((14, 14), pillow.Resampling.BILINEAR, box=box))
    np.testing.assert_allclose(images[3].permute(1, 2, 0).numpy(), expected / 255, atol=1e-6)
    assert torch.cat([y for _, y in batches]).tolist() == list(range(12))


def test_normalised(samples):
    normalise = Normalise((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    plain, normalised = (
        FileBatches(samples, 12, size=8),
        FileBatches(samples, 12, size=8, normalise=normalise),
    )
    torch.testing.assert_close(images_of(normalised), normalise(images_of(plain)))


def test_training_crops_differ_by_epoch_and_belong_to_their_image(samples):
    batches = FileBatches(samples, 4, train=True, size=8)
    epochs = []
    for _ in range(2):
        x, y = (torch.cat(parts) for parts in zip(*batches))
        assert sorted(y.tolist()) == list(range(12))
        torch.testing.assert_close(x[:, 2], (y * 20 / 255).view(-1, 1, 1).expand_as(x[:, 2]).float())
        epochs.append(x[y.argsort()])
    assert not torch.equal(*epochs)
    # Columns grow from left to right, unless the image was mirrored.
    slope = torch.cat(epochs)[:, 1].diff(dim=2).mean((1, 2))
    assert (slope > 0).any()
    assert (slope < 0).any()


def test_each_image_has_a_crop_of_its_own(samples):
    same = ImageFiles(samples.files[:1] * 6, np.zeros(6, np.int64))
    x, _ = next(iter(FileBatches(same, 6, train=True, size=8)))
    assert len({image.numpy().tobytes() for image in x}) == 6


def test_workers_do_not_change_what_comes_out(samples):
    alone = list(FileBatches(samples, 4, train=True, size=8, seed=5))
    helped = list(FileBatches(samples, 4, train=True, size=8, seed=5, workers=2))
    for (x, y), (x2, y2) in zip(alone, helped, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)


def test_resume_and_shards(samples):
    batches = FileBatches(samples, 4, train=True, size=8)
    stream = iter(batches)
    next(stream)
    again = FileBatches(samples, 4, train=True, size=8)
    again.load_state_dict(batches.state_dict())
    for (x, _), (x2, _) in zip(stream, again, strict=True):
        assert torch.equal(x, x2)
    parts = [FileBatches(samples, 2, train=True, size=8).shard(rank, 2) for rank in range(2)]
    for (x, _), (x0, _), (x1, _) in zip(FileBatches(samples, 4, train=True, size=8), *parts, strict=True):
        assert torch.equal(x, torch.cat([x0, x1]))


def test_global_generator_is_left_alone(samples):
    before = torch.get_rng_state()
    list(FileBatches(samples, 4, train=True, size=8))
    assert torch.equal(before, torch.get_rng_state())


def test_a_damaged_image_is_named(samples, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(samples.files[0].read_bytes()[:60])
    with pytest.raises(ValueError, match=r"broken.png is truncated or damaged"):
        list(FileBatches(ImageFiles((broken,), np.array([0])), 1, size=8))
