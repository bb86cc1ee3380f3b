"""Perturbations: share of the batch, normalisation, ranges; inputs are not changed."""

import math
import pickle

import pytest
import torch

from doublehead.data import FAMILIES, Normalise, perturb
from doublehead.data.perturb import BROAD, Broad, GaussianNoise, Perturb, Shifts
from samples import refused

NORMALISE = Normalise((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def images(n=60, size=8):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("make", [GaussianNoise, Broad, lambda **k: Broad(max_sigma=0.15, **k), Shifts])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_share_of_the_batch_and_input_untouched(make, share):
    clean = images()
    kept = clean.clone()
    out = make(share=share)(clean)
    assert torch.equal(clean, kept)
    changed = (out != clean).flatten(1).any(1)
    n = round(share * 60)
    assert not changed[n:].any()
    assert changed[:n].float().mean() >= 0.9 if n else True
    assert out.min() >= 0
    assert out.max() <= 1


def test_noise_has_a_uniform_deviation():
    grey = torch.full((4000, 1, 16, 16), 0.5)
    sigma = (GaussianNoise(0.15, share=1.0)(grey) - 0.5).flatten(1).std(1)
    # Uniform in 0..0.15: mean 0.075, deviation 0.0433; clipping at 3.3 sigma and more hardly matters.
    assert sigma.mean().item() == pytest.approx(0.075, abs=0.003)
    assert sigma.std().item() == pytest.approx(0.15 / math.sqrt(12), abs=0.003)
    assert sigma.max() < 0.18
    assert GaussianNoise()(grey.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("function", BROAD, ids=lambda f: f.__name__)
@pytest.mark.parametrize("size", [8, 6, 7])
def test_each_perturbation_keeps_shape_and_changes_pixels(function, size):
    clean = images(12, size)
    out = function(clean)
    assert out.shape == clean.shape
    assert torch.isfinite(out).all()
    if not (function is perturb.shuffle_patches and size == 7):  # 7 cannot be cut evenly: left as it is
        assert (out - clean).abs().mean() > 0.01


def test_patches_are_moved_not_changed():
    clean = images(5)
    out = perturb.shuffle_patches(clean)
    for before, after in zip(clean, out):
        cut = (p.unfold(1, 2, 2).unfold(2, 2, 2).permute(1, 2, 0, 3, 4) for p in (before, after))
        rows = [sorted(map(tuple, patches.reshape(16, -1).tolist())) for patches in cut]
        assert rows[0] == rows[1]


def test_posterised_images_have_few_levels():
    out = perturb.posterise(images(200))
    levels = torch.tensor([len(image.unique()) for image in out])
    assert levels.min() == 2
    assert levels.max() == 6


def test_erased_rectangle_is_one_grey_and_the_rest_is_kept():
    clean = images(300, 20)
    out = perturb.erase(clean)
    changed = (out != clean).all(1)  # (B, H, W)
    rows, columns = changed.any(2).sum(1), changed.any(1).sum(1)
    assert torch.equal(changed.flatten(1).sum(1), rows * columns)  # a full rectangle
    assert 5 <= rows.min() <= 7
    assert 13 <= rows.max() <= 15
    assert all(len(o[:, c].unique()) == 1 for o, c in zip(out, changed))


def test_rotation_by_the_largest_angle(monkeypatch):
    draws, ranges = iter([torch.tensor(math.pi / 2), torch.tensor(0.0), torch.tensor(1.0)]), []

    def uniform(pixels, low, high):
        ranges.append((low, high))
        return next(draws).view(1, 1, 1, 1)

    monkeypatch.setattr(perturb, "_uniform", uniform)
    clean = images(1)
    torch.testing.assert_close(perturb.rotate_shear_scale(clean), clean.rot90(1, (2, 3)), atol=1e-5, rtol=0)
    assert ranges == [(-math.radians(30), math.radians(30)), (-0.3, 0.3), (0.7, 1.3)]


def test_every_perturbation_gets_its_turn():
    used = []
    functions = [lambda p, i=i: used.append((i, len(p))) or p for i in range(3)]
    Perturb(functions, share=0.5)(images(12))
    assert sorted(used) == [(0, 2), (1, 2), (2, 2)]
    used.clear()
    for _ in range(30):
        Perturb(functions, share=0.5)(images(2))  # one image: one of the three, by chance
    assert len(used) == 30
    assert {i for i, _ in used} == {0, 1, 2}


@pytest.fixture
def called(monkeypatch):
    """The families that were called for, with their severities and how many images each got."""
    calls = []
    real = perturb.corrupt

    def corrupt(pixels, family, severity):
        calls.append((family, severity, len(pixels)))
        return real(pixels, family, severity)

    monkeypatch.setattr(perturb, "corrupt", corrupt)
    return calls


@pytest.mark.parametrize("left_out", [(), *((family,) for family in FAMILIES), FAMILIES[:-1]])
def test_families_left_out_are_never_called(called, left_out):
    for _ in range(3):
        Shifts(share=1.0, leave_out=left_out)(images(2 * len(FAMILIES)))
    assert {family for family, _, _ in called} == set(FAMILIES) - set(left_out)
    assert sum(n for _, _, n in called) == 3 * 2 * len(FAMILIES)


def test_shifts_of_all_severities(called):
    for _ in range(40):
        Shifts(share=0.5, leave_out=FAMILIES[1:])(images(4))
    assert {severity for _, severity, _ in called} == {1, 2, 3, 4, 5}
    assert {n for _, _, n in called} == {2}  # half of four


def test_grey_images_get_every_shift_but_saturation(called):
    clean = images(24, 28)[:, :1]
    out = Shifts(share=1.0, normalise=Normalise((0.3,), (0.35,)))(clean)
    assert out.shape == clean.shape
    assert torch.isfinite(out).all()
    assert (out != clean).flatten(1).any(1).all()
    assert {family for family, _, _ in called} == set(FAMILIES) - {"saturate"}
    again = pickle.loads(pickle.dumps(Shifts(share=1.0)))
    again(clean)
    assert "saturate" not in {family for family, _, _ in called}
    only = [family for family in FAMILIES if family != "saturate"]
    refused("leave_out must .* 1 channels", Shifts(leave_out=only), clean)


def test_shifts_follow_the_seed_and_the_normalisation():
    clean = images(26)
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outs.append(Shifts(share=1.0)(clean))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    # Whole grey levels may fall to either side of a rounding: JPEG compression and pixelation are left out of it.
    rounds = ("jpeg_compression", "pixelate", "shot_noise")
    torch.manual_seed(5)
    plain = Shifts(share=1.0, leave_out=rounds)(clean)
    torch.manual_seed(5)
    normalised = Shifts(share=1.0, normalise=NORMALISE, leave_out=rounds)(NORMALISE(clean))
    torch.testing.assert_close(NORMALISE.undo(normalised), plain, atol=1e-4, rtol=0)


def test_bad_arguments_are_named():
    for call, message in (
        (lambda: Shifts(leave_out=["rain", "contrast", "fog"]), "leave_out must .* got fog, rain"),
        (lambda: Shifts(leave_out=FAMILIES), "functions must"),
        (lambda: Shifts()({"pixel_values": images()}), r"images must be a tensor \(B, C, H, W\), got dict"),
        (lambda: GaussianNoise(share=1.5), r"share must lie in 0..1, got 1.5"),
        (lambda: GaussianNoise(-1), "max_sigma must be >= 0, got -1"),
        (lambda: Perturb(()), "functions must"),
        (lambda: Broad()(images().byte()), r"images must be floating \(B, C, H, W\), got torch.uint8"),
    ):
        refused(message, call, error=(TypeError, ValueError))
