"""Frames and classifiers put together: each method against a small computation of its own."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import Tensor, nn

import errbar
from data import generator
from errbar import metrics
from errbar._fusion.fuse import with_frame_noise
from errbar.experiments import sequences
from errbar.experiments.views import rotated, views
from networks import trained

SIDE, CLASSES, FRAMES = 4, 3, 4


@functools.cache
def pictures() -> tuple[Tensor, Tensor]:
    """Noisy pictures of 4 × 4 pixels around one pattern for each class."""
    pattern = torch.rand(CLASSES, 1, SIDE, SIDE, generator=generator(0), dtype=torch.float64)
    labels = torch.arange(90) % CLASSES
    grain = 0.25 * torch.randn(90, 1, SIDE, SIDE, generator=generator(1), dtype=torch.float64)
    return (pattern[labels] + grain).clamp(0, 1), labels


@functools.cache
def posterior(seed: int = 0) -> errbar.Posterior:
    x, y = pictures()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    trained(model, x, y, steps=60, lr=0.02)
    made = errbar.fit(model, [(x, y)], last_layers=2, prior=errbar.Prior(1.0))
    return made.with_calibration(temperature=1.3, covariance_scale=0.8)


@functools.cache
def frames() -> tuple[Tensor, Tensor]:
    x, y = pictures()
    return views(x[:12], FRAMES, degrees=10.0, pixels=0.3, noise=0.1, seed=2), y[:12]


def test_the_first_frames_of_a_sequence_are_a_slice_of_all_of_them() -> None:
    sequence = frames()[0][0]
    whole = sequences.joint_logits(posterior(), sequence)
    for count in range(1, FRAMES + 1):
        own, cut = posterior().joint_logits(sequence[:count]), sequences.first_frames(whole, count)
        torch.testing.assert_close(cut.mean, own.mean)
        torch.testing.assert_close(cut.covariance, own.covariance)


def test_each_method_is_what_its_name_says() -> None:
    x, y = frames()
    noise = errbar.frame_noise(posterior(), x)
    chosen = errbar.Track(posterior(), memory=0.5)
    found = sequences.study(posterior(), x, y, noise=noise, correlation=0.25, chosen=chosen, samples=200, seed=5)
    single = [posterior().logits(x[:, c]) for c in range(FRAMES)]
    pmfs = [gaussian.predict(200, 5).pmf for gaussian in single]
    for c in range(FRAMES):
        joints = [posterior().joint_logits(sequence[: c + 1]) for sequence in x]
        noisy = [
            errbar.JointLogits(j.mean, j.covariance + torch.einsum("ij,mn->imjn", torch.eye(c + 1).double(), noise))
            for j in joints
        ]
        product = torch.stack(pmfs[: c + 1]).prod(0)
        independent = errbar.fuse(single[: c + 1])
        expected = {
            "latest": pmfs[c],
            "first": pmfs[0],
            "mean of PMFs": torch.stack(pmfs[: c + 1]).mean(0),
            "product of PMFs": product / product.sum(1, keepdim=True),
            "independent": independent.predict(200, 5).pmf,
            "covariance intersection": independent.scaled(c + 1).predict(200, 5).pmf,
            "mean of logits": torch.stack([one.mean for one in single[: c + 1]]).mean(0).softmax(1),
            "track": independent.predict(200, 5).pmf,
            "chosen track": torch.cat([chosen.add(sequence[: c + 1]).predict(200, 5).pmf for sequence in x]),
            "joint": torch.cat([errbar.fuse_frames(joint).predict(200, 5).pmf for joint in joints]),
            "joint with frame noise": torch.cat([errbar.fuse_frames(joint).predict(200, 5).pmf for joint in noisy]),
        }
        growth = (c + 1) / (1 + c * 0.25)
        for name in sequences.AVERAGES:
            expected[f"scaled {name}"] = (growth * expected[name].log()).softmax(1)
        assert set(found["methods"]) == set(expected)
        for method, pmf in expected.items():
            row = {name: values[c] for name, values in found["methods"][method].items()}
            assert row["accuracy"] == pytest.approx(metrics.accuracy(pmf, y))
            assert row["nll"] == pytest.approx(metrics.nll(pmf, y), rel=1e-5)
            assert row["brier"] == pytest.approx(metrics.brier(pmf, y), rel=1e-5)
            assert row["ece"] == pytest.approx(metrics.ece(pmf, y), rel=1e-5)
            assert row["confidence"] == pytest.approx(float(pmf.amax(1).mean()), rel=1e-5)


def test_a_study_is_json_and_does_not_depend_on_the_size_of_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = frames()
    whole = sequences.study(posterior(), x, y, samples=100)
    assert "joint with frame noise" not in whole["methods"]
    monkeypatch.setattr(sequences, "_GROUP", 5)
    parts = sequences.study(posterior(), 255 * x, y, samples=100, prepare=lambda pixels: pixels / 255)
    assert json.loads(json.dumps(whole, allow_nan=False)) == whole
    for method, rows in whole["methods"].items():
        for name, values in rows.items():
            assert parts["methods"][method][name] == pytest.approx(values)


def test_identical_frames_say_what_one_says() -> None:
    sequence = frames()[0][3, :1].expand(FRAMES, -1, -1, -1)
    found = sequences.gaussians([sequences.joint_logits(posterior(), sequence)])
    single = found["first"][0].centered()
    for method in ("joint", "covariance intersection", "latest"):
        for gaussian in found[method]:
            torch.testing.assert_close(gaussian.centered().mean, single.mean, rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(gaussian.centered().covariance, single.covariance, rtol=1e-6, atol=1e-8)
    # As if independent, C copies of one frame are C times as sure.
    torch.testing.assert_close(found["independent"][-1].covariance * FRAMES, single.covariance)


def test_with_much_noise_the_frames_are_averaged_as_if_independent() -> None:
    joint = sequences.joint_logits(posterior(), frames()[0][1])
    noise = 1e7 * torch.eye(CLASSES, dtype=torch.float64)
    fused = sequences.gaussians([joint], noise)["joint with frame noise"][-1].centered()
    alone = [with_frame_noise(sequences.first_frames(joint, c + 1), noise).marginals() for c in range(FRAMES)]
    independent = errbar.fuse([gaussian[c : c + 1] for c, gaussian in enumerate(alone)]).centered()
    torch.testing.assert_close(fused.mean, independent.mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(fused.covariance, independent.covariance, rtol=1e-4, atol=0)
    average = joint.mean.mean(0, keepdim=True)
    torch.testing.assert_close(fused.mean, average - average.mean(), rtol=0, atol=1e-4)


def test_noise_keeps_the_weights_of_near_copies_small() -> None:
    """Two frames whose logits differ by more than R allows: alone R extrapolates beyond both of them."""
    shared = torch.diag(torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64))
    blocks = torch.stack([torch.stack([shared, 0.99 * shared]), torch.stack([0.99 * shared, 0.9801001 * shared])])
    mean = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, -1.0]], dtype=torch.float64)
    joint = errbar.JointLogits(mean, blocks.permute(0, 2, 1, 3).contiguous())
    with pytest.warns(errbar.FusionNotice, match="extrapolates"):
        wild = errbar.fuse_frames(joint).mean.abs().max()
    tame = errbar.fuse_frames(joint, noise=torch.eye(3, dtype=torch.float64)).mean
    assert float(wild) > 50
    torch.testing.assert_close(tame, mean.mean(0, keepdim=True), rtol=0, atol=0.05)


def test_frame_noise_is_the_scatter_within_sequences() -> None:
    x, _ = frames()
    noise = errbar.frame_noise(posterior(), x)
    logits = torch.stack([posterior().logits(sequence).centered().mean for sequence in x])
    expected = sum(torch.cov(sequence.mT) for sequence in logits) / len(x)
    torch.testing.assert_close(noise, expected)
    assert float(torch.linalg.eigvalsh(noise)[0]) > -1e-12
    still = x[:, :1].expand(-1, FRAMES, -1, -1, -1)
    assert float(errbar.frame_noise(posterior(), still).abs().max()) < 1e-12
    with pytest.raises(errbar.DataError, match="needs one or more of two or more frames"):
        errbar.frame_noise(posterior(), x[:, :1])


def test_the_correlation_of_frames_is_the_share_that_they_have_in_common() -> None:
    """Logits drawn as μ_y + b + e_c with a known ρ, through a network that passes them on."""
    objects, length, truth = 3000, 5, 0.3
    labels = torch.arange(objects) % CLASSES
    draw = torch.randn(objects, length + 1, CLASSES, generator=generator(8), dtype=torch.float64)
    own = torch.eye(CLASSES, dtype=torch.float64)[labels][:, None]
    logits = own + truth**0.5 * draw[:, :1] + (1 - truth) ** 0.5 * draw[:, 1:]
    identity = nn.Sequential(nn.Flatten(), nn.Linear(CLASSES, CLASSES)).double()
    with torch.no_grad():
        identity[1].weight.copy_(torch.eye(CLASSES))
        identity[1].bias.zero_()
    x = logits.reshape(objects, length, 1, 1, CLASSES)
    passing = errbar.fit(identity, [(x[:90, 0], labels[:90])], last_layers=1, prior=errbar.Prior(1.0))
    assert sequences.frame_correlation(passing, x, labels) == pytest.approx(truth, abs=0.03)
    # That model is where scaling is right: it beats the average, and the product, of the frames' PMFs.
    pmf = logits.softmax(2).transpose(0, 1)
    average = (pmf.log().cumsum(0) / torch.arange(1, length + 1)[:, None, None]).softmax(2)
    nll = {rho: metrics.nll(sequences.scaled(average, rho)[-1], labels) for rho in (0.0, truth, 1.0)}
    assert nll[truth] < min(nll[0.0], nll[1.0])
    torch.testing.assert_close(sequences.scaled(average, 1.0), average)
    product = pmf.log().sum(0).softmax(1)
    torch.testing.assert_close(sequences.scaled(average, 0.0)[-1], product)
    with pytest.raises(errbar.DataError, match="more sequences than classes"):
        sequences.frame_correlation(passing, x[:3], labels[:3])


def test_decisions_are_taken_at_the_first_frame_that_is_sure_enough() -> None:
    certainty = torch.tensor([[0.95, 0.5, 0.5, 0.2], [0.3, 0.95, 0.5, 0.2], [0.99, 0.99, 0.91, 0.2]])
    label = torch.tensor([[0, 1, 1, 2], [1, 0, 1, 2], [1, 1, 0, 2]])
    found = sequences.decisions(certainty, label, torch.tensor([0, 1, 0, 1]), 0.9)
    assert found == {"frames": 9 / 4, "decided": 0.75, "error_of_all": 0.5, "error": pytest.approx(1 / 3)}
    none = sequences.decisions(certainty, label, torch.tensor([0, 1, 0, 1]), 0.999)
    assert none == {"frames": 3.0, "decided": 0.0, "error_of_all": 0.5}


def test_two_classifiers_are_scored_alone_and_together() -> None:
    x, y = pictures()
    pair = [posterior(0), posterior(1)]
    found = sequences.two_classifiers(pair, x, y, samples=100, seed=3)
    each = [one.logits(x) for one in pair]
    pmfs = [gaussian.predict(100, 3).pmf for gaussian in each]
    expected = {
        "classifier 1": pmfs[0],
        "classifier 2": pmfs[1],
        "mean of PMFs": (pmfs[0] + pmfs[1]) / 2,
        "mean of logits": ((each[0].mean + each[1].mean) / 2).softmax(1),
        "fused": errbar.fuse(each).predict(100, 3).pmf,
    }
    assert set(found) == set(expected)
    for name, pmf in expected.items():
        assert found[name]["nll"] == pytest.approx(metrics.nll(pmf, y), rel=1e-6)
    with pytest.raises(errbar.ArgumentError, match="expected two classifiers or more"):
        sequences.two_classifiers(pair[:1], x, y)


def test_sequences_need_a_label_each() -> None:
    x, y = frames()
    with pytest.raises(errbar.DataError, match="a label for each sequence"):
        sequences.study(posterior(), x, y[:-1])
    with pytest.raises(errbar.ArgumentError, match=r"correlation is 1\.5"):
        sequences.study(posterior(), x, y, correlation=1.5)


def test_views_depend_on_their_seed_and_stay_the_picture() -> None:
    x = torch.rand(3, 2, 5, 8, generator=generator(4))
    again = [views(x, 4, degrees=5.0, pixels=1.0, noise=0.1, seed=seed) for seed in (1, 1, 2)]
    assert again[0].shape == (3, 4, 2, 5, 8)
    assert torch.equal(again[0], again[1])
    assert not torch.equal(again[0], again[2])
    still = views(x, 4, degrees=0.0, pixels=0.0, noise=0.0, seed=1)
    torch.testing.assert_close(still, x[:, None].expand(-1, 4, -1, -1, -1), rtol=0, atol=1e-5)
    grain = views(torch.full((4, 1, 32, 32), 0.5), 4, degrees=0.0, pixels=0.0, noise=0.1, seed=1)
    assert float(grain.std()) == pytest.approx(0.1, rel=4 / (2 * grain.numel()) ** 0.5 + 1e-3)


def test_a_picture_is_turned_anticlockwise_about_its_centre() -> None:
    x = torch.rand(2, 1, 6, 6, generator=generator(5), dtype=torch.float64)
    torch.testing.assert_close(rotated(x, 90.0), torch.rot90(x, 1, (2, 3)))
    wide = torch.rand(2, 1, 4, 7, generator=generator(6), dtype=torch.float64)
    torch.testing.assert_close(rotated(wide, 180.0), wide.flip(2, 3))
    # Odd sizes put the centre on a pixel: two to the right of it goes to two above it, also where width ≠ height.
    point = torch.zeros(1, 1, 5, 9, dtype=torch.float64)
    point[0, 0, 2, 6] = 1.0
    expected = torch.zeros_like(point)
    expected[0, 0, 0, 4] = 1.0
    torch.testing.assert_close(rotated(point, 90.0), expected)


def test_views_say_what_is_wrong_with_their_arguments() -> None:
    x = torch.rand(1, 1, 4, 4)
    with pytest.raises(errbar.DataError, match=r"Divide bytes by 255"):
        rotated((255 * x).byte(), 10.0)
    with pytest.raises(errbar.ArgumentError, match="frames is 0"):
        views(x, 0, degrees=1.0, pixels=1.0, noise=0.0, seed=0)
    with pytest.raises(errbar.ArgumentError, match="noise is -1"):
        views(x, 2, degrees=1.0, pixels=1.0, noise=-1.0, seed=0)
