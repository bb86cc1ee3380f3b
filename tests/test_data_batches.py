"""Batches of all kinds: order, crops against a slow reference, resume, parts of processes."""

import numpy as np
import pytest
import torch

from doublehead import data
from doublehead.data import DeviceBatches, FileBatches, ImageFiles, Images, Normalise
from doublehead.data.trees import parse_tree
from samples import refused

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (50, 6, 5, 3)).astype(np.uint8)
SAMPLES = Images(IMAGES, np.arange(50))  # each label names its image


def labels_of(batches):
    return [y.tolist() for _, y in batches]


def flat(lists):
    return [label for labels in lists for label in labels]


def test_evaluation_gives_every_image_in_order_in_0_to_1():
    batches = DeviceBatches(SAMPLES, 16)
    images = torch.cat([x for x, _ in batches])
    assert flat(labels_of(batches)) == list(range(50))
    assert len(batches) == 4
    expected = IMAGES.transpose(0, 3, 1, 2) / 255
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-6)


def test_normalised_values():
    normalise = Normalise((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    x, _ = next(iter(DeviceBatches(SAMPLES, 50, normalise=normalise)))
    expected = (IMAGES / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
    np.testing.assert_allclose(x.numpy(), expected.transpose(0, 3, 1, 2), atol=1e-5)
    torch.testing.assert_close(normalise(torch.from_numpy(IMAGES).permute(0, 3, 1, 2) / 255), x)


@pytest.mark.parametrize("channels_last", [False, True])
def test_layout_and_type(channels_last):
    how = {"augment": data.CropFlip(1), "channels_last": channels_last}
    x, y = next(iter(DeviceBatches(SAMPLES, 8, train=True, **how)))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert x.is_contiguous(memory_format=layout)
    assert x.shape == (8, 3, 6, 5)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64


def test_training_shuffles_anew_and_drops_the_last_batch():
    batches = DeviceBatches(SAMPLES, 16, train=True)
    first, second = labels_of(batches), labels_of(batches)
    assert len(first) == len(batches) == 3
    assert len(set(flat(first))) == 48  # no image twice
    assert first != second
    assert first != labels_of(DeviceBatches(SAMPLES, 16, train=True, seed=1))
    assert first == labels_of(DeviceBatches(SAMPLES, 16, train=True))


def all_crops(image, padding):
    """Every crop of one image, plain and flipped, as bytes -> (top, left, flipped)."""
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    h, w, _ = image.shape
    found = {}
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[top : top + h, left : left + w]
            found[crop.tobytes()] = (top, left, False)
            found[crop[:, ::-1].tobytes()] = (top, left, True)
    return found


def test_crops_and_flips_are_those_of_a_slow_reference():
    batches = DeviceBatches(SAMPLES, 10, train=True, augment=data.CropFlip(2))
    seen = []
    for _ in range(20):
        for x, y in batches:
            pixels = (x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
            for crop, label in zip(pixels, y.tolist()):
                seen.append(all_crops(IMAGES[label], 2)[np.ascontiguousarray(crop).tobytes()])
    tops, lefts, flips = (np.array(column) for column in zip(*seen))  # 1,000 draws
    assert np.bincount(tops, minlength=5).min() > 130  # 200 expected; below 130 is 5.5 deviations away
    assert np.bincount(lefts, minlength=5).min() > 130
    assert 400 < flips.sum() < 600
    assert abs(np.corrcoef(tops, lefts)[0, 1]) < 0.15


def test_without_flip_nothing_is_flipped():
    for x, y in DeviceBatches(SAMPLES, 10, train=True, augment=data.CropFlip(0, flip=False)):
        np.testing.assert_allclose(x.permute(0, 2, 3, 1).numpy(), IMAGES[y.numpy()] / 255, atol=1e-6)


def test_chunks_do_not_show(monkeypatch):
    def take():
        batches = DeviceBatches(SAMPLES, 8, train=True, augment=data.CropFlip(2))
        return [torch.cat([x.flatten(1), y[:, None]], 1) for x, y in batches]

    together = take()
    monkeypatch.setattr("doublehead.data.batches.CHUNK_IMAGES", 8)
    assert all(torch.equal(a, b) for a, b in zip(take(), together, strict=True))


def test_normalise_from_images():
    normalise = Normalise.of(IMAGES)
    np.testing.assert_allclose(normalise.mean, (IMAGES / 255).mean((0, 1, 2)), rtol=1e-9)
    np.testing.assert_allclose(normalise.std, (IMAGES / 255).std((0, 1, 2)), rtol=1e-9)
    images = torch.rand(2, 3, 4, 4)
    torch.testing.assert_close(normalise.undo(normalise(images)), images)
    for level in range(256):  # a channel without variance, whose computed one may be below 0
        assert Normalise.of(np.full((7, 1, 1, 1), level, np.uint8)).std == (1e-3,)


def test_bad_arguments_are_named():
    grey = Normalise((0.5,), (1.0,))
    for call, message in (
        (lambda: DeviceBatches(SAMPLES, 0), r"batch_size must be at least 1, got 0"),
        (lambda: DeviceBatches(SAMPLES, 51, train=True), r"batch_size .* 50 samples .* got 51"),
        (lambda: DeviceBatches(SAMPLES, 4, normalise=grey), r"normalise must have 3 channels, got 1"),
        (lambda: DeviceBatches(SAMPLES, 4).shard(2, 2), r"rank must lie in 0..1, got 2"),
        (lambda: Normalise((0.5,), (0.0,)), r"std must be positive, got \(0.0,\)"),
        (lambda: Normalise((0.5, 0.5), (1.0,)), "mean and std must"),
        (lambda: grey(torch.zeros(3, 2, 2)), r"images must have 1 channels, got shape \(3, 2, 2\)"),
    ):
        refused(message, call)


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    pillow = pytest.importorskip("PIL.Image")
    folder, files = tmp_path_factory.mktemp("images"), []
    for i in range(12):
        row, column = np.mgrid[: 20 + i, :24]
        pixels = np.stack([row * 6, column * 8, np.full_like(row, 20 * i)], -1).astype(np.uint8)
        files.append(folder / f"{i}.png")
        pillow.fromarray(pixels).save(files[-1])
    return ImageFiles(tuple(files), np.arange(12))


def images_of(batches):
    return torch.cat([x for x, _ in batches])


def test_files_in_evaluation_are_cropped_at_the_centre_and_normalised(samples):
    batches = FileBatches(samples, 5, size=14)
    images = images_of(batches)
    assert images.shape == (12, 3, 14, 14)
    assert len(batches) == 3
    pillow = pytest.importorskip("PIL.Image")
    with pillow.open(samples.files[4]) as image:  # 24 x 24: to 16 x 16, of which the central 14 x 14
        expected = np.asarray(image.resize((16, 16), pillow.Resampling.BILINEAR))[1:15, 1:15]
    np.testing.assert_allclose(images[4].permute(1, 2, 0).numpy(), expected / 255, atol=1e-6)
    assert torch.cat([y for _, y in batches]).tolist() == list(range(12))
    normalise = Normalise((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    found = images_of(FileBatches(samples, 12, size=14, normalise=normalise))
    torch.testing.assert_close(found, normalise(images))


def test_crops_of_files_differ_by_epoch_and_belong_to_their_image(samples):
    batches = FileBatches(samples, 4, train=True, size=8)
    epochs = []
    for _ in range(2):
        x, y = (torch.cat(parts) for parts in zip(*batches))
        assert sorted(y.tolist()) == list(range(12))
        torch.testing.assert_close(x[:, 2], (y * 20 / 255).view(-1, 1, 1).expand_as(x[:, 2]).float())
        epochs.append(x[y.argsort()])
    assert not torch.equal(*epochs)
    # Pixels grow from left to right, unless the image was flipped.
    slope = torch.cat(epochs)[:, 1].diff(dim=2).mean((1, 2))
    assert (slope > 0).any()
    assert (slope < 0).any()


def test_each_file_has_its_own_crop(samples):
    same = ImageFiles(samples.files[:1] * 6, np.zeros(6, np.int64))
    x, _ = next(iter(FileBatches(same, 6, train=True, size=8)))
    assert len({image.numpy().tobytes() for image in x}) == 6


def test_reading_files_seeds_no_gpu(samples, monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the GPU was seeded"))
    assert len(list(FileBatches(samples, 4, train=True, size=8))) > 0


def test_workers_do_not_change_the_batches(samples):
    alone = list(FileBatches(samples, 4, train=True, size=8, seed=5))
    helped = list(FileBatches(samples, 4, train=True, size=8, seed=5, workers=2))
    torch.testing.assert_close(alone, helped, rtol=0, atol=0)


# --- what all kinds of batches have in common

TEXTS = data.Texts(tuple("a " * (1 + i % 7) for i in range(23)), np.arange(23))
TREES = data.Trees(tuple(parse_tree(f"(1 (2 a) ({i % 5} b))") for i in range(23)), np.arange(23))
WORDS = data.Vocabulary("ab")


@pytest.fixture(params=["images", "files", "texts", "trees"])
def make(request, samples):
    """Batches of one kind, with all that is drawn at random where they are for training."""

    def make(batch_size=4, train=True, **options):
        options |= {"train": train, "seed": 7}
        if request.param == "images":
            return DeviceBatches(SAMPLES, batch_size, augment=data.CropFlip(1) if train else None, **options)
        if request.param == "files":
            return FileBatches(samples, batch_size, size=8, **options)
        if request.param == "texts":
            return data.TextBatches(TEXTS, WORDS, batch_size, max_length=3, crop=train, **options)
        return data.TreeBatches(TREES, WORDS, batch_size, **options)

    return make


def plain(batch):
    x, y = batch
    return (x.words if isinstance(x, data.TreeBatch) else x).tolist(), y.tolist()


def stream(batches):
    while True:
        yield from map(plain, batches)


def test_resume_is_exact_and_leaves_the_global_generator_alone(make):
    n, before = len(make()), torch.get_rng_state()
    for taken in (0, 1, n - 1, n, n + 1, 2 * n):
        undisturbed, stopped, resumed = make(), make(), make()
        whole, part = stream(undisturbed), stream(stopped)
        for _ in range(taken):
            next(whole), next(part)
        resumed.load_state_dict(stopped.state_dict())
        assert resumed.state_dict() == stopped.state_dict()
        rest = stream(resumed)
        assert [next(rest) for _ in range(n + 2)] == [next(whole) for _ in range(n + 2)]
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("world_size", [1, 2, 3, 60])
def test_evaluation_shards_see_each_sample_once(make, world_size):
    whole = make(train=False)
    shards = [whole.shard(rank, world_size) for rank in range(world_size)]
    parts = [[plain(batch)[1] for batch in shard] for shard in shards]
    labels = [label for part in parts for batch in part for label in batch]
    assert len(labels) == whole.n
    assert labels == flat(plain(batch)[1] for batch in whole)
    assert [len(part) for part in parts] == [len(shard) for shard in shards]  # of some it may be none
    if isinstance(whole, DeviceBatches):
        assert shards[0].pixels.data_ptr() == whole.pixels.data_ptr()  # not a copy


def test_training_shards_deal_out_the_larger_batch(make):
    alone, halves = make(), [make(2).shard(rank, 2) for rank in range(2)]
    for _ in range(2):
        for one, left, right in zip(alone, *halves, strict=True):
            assert plain(one)[1] == plain(left)[1] + plain(right)[1]
            if isinstance(one[0], torch.Tensor) and one[0].is_floating_point():
                assert torch.equal(one[0], torch.cat([left[0], right[0]]))


def test_a_damaged_image_file_is_named(samples, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(samples.files[0].read_bytes()[:60])
    refused("broken.png", list, FileBatches(ImageFiles((broken,), np.array([0])), 1, size=8))
