"""Tracks: the recursion against formulas written out in batch, what it promises, and every way to misuse it."""

from __future__ import annotations

import functools
import itertools
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import errbar
from data import draw, shuffled_digits
from errbar import metrics
from errbar.experiments.views import views
from networks import perceptron, seeded, trained

CLASSES, FRAMES = 4, 5


@functools.cache
def posterior(seed: int = 0, classes: int = CLASSES) -> errbar.Posterior:
    x, y = draw(120, 6, seed=seed), torch.arange(120) % classes
    x = x + 2 * draw(classes, 6, seed=9)[y]
    model = trained(seeded(lambda: perceptron(6, 8, classes), seed), x, y, steps=80, lr=0.02)
    made = errbar.fit(model, [(x, y)], last_layers=2, prior=errbar.Prior(2.0))
    return made.with_calibration(temperature=1.4, covariance_scale=0.7)


@functools.cache
def films(count: int = 24, frames: int = FRAMES, noise: float = 0.6, seed: int = 3) -> tuple[list[Tensor], Tensor]:
    """Objects around the centres of their classes, and frames around the objects."""
    y = torch.arange(count) % CLASSES
    objects = 2 * draw(CLASSES, 6, seed=9)[y] + draw(count, 6, seed=seed)
    return list(objects[:, None] + noise * draw(count, frames, 6, seed=seed + 1)), y


def basis(classes: int = CLASSES) -> Tensor:
    """Any orthonormal basis of 1⊥: the result must not depend on which."""
    centring = torch.eye(classes, dtype=torch.float64) - 1 / classes
    return torch.linalg.eigh(centring)[1][:, 1:]


def in_batch(weights: list[float], noise: Tensor | None = None, frames: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(Σ w_c P_c⁻¹)⁻¹ Σ w_c P_c⁻¹ ĝ_c and (Σ w_c P_c⁻¹)⁻¹ from the issue's formulas, in logits."""
    frames = films()[0][0] if frames is None else frames
    gaussian, E = posterior().logits(frames), basis()
    information, vector = torch.zeros(CLASSES - 1, CLASSES - 1).double(), torch.zeros(CLASSES - 1).double()
    for weight, mean, covariance in zip(weights, gaussian.mean, gaussian.covariance, strict=True):
        own = covariance if noise is None else covariance + noise
        precision = torch.linalg.inv(E.T @ own @ E)
        information += weight * precision
        vector += weight * precision @ (E.T @ mean)
    P = torch.linalg.inv(information)
    return E @ P @ vector, E @ P @ E.T


def assert_is(track: errbar.Track, mean: Tensor, covariance: Tensor, within: float = 1e-10) -> None:
    torch.testing.assert_close(track.logits.mean[0], mean, rtol=within, atol=within)
    torch.testing.assert_close(track.logits.covariance[0], covariance, rtol=within, atol=within)


def added(track: errbar.Track, frames: Tensor) -> errbar.Track:
    for frame in frames:
        track = track.add(frame[None])
    return track


# ------------------------------------------------------------------------------------------------------------- laws


def test_frames_are_fused_as_independent_gaussians() -> None:
    frames = films()[0][0]
    track = added(errbar.Track(posterior()), frames)
    fused = errbar.fuse([posterior().logits(frame[None]) for frame in frames])
    assert_is(track, fused.mean[0], fused.covariance[0])
    assert_is(track, *in_batch([1.0] * FRAMES))
    assert track.frames == FRAMES


def test_one_frame_is_the_prediction_of_it() -> None:
    x = films()[0][1][:1]
    track, own = errbar.Track(posterior()).add(x), posterior().predict(x, samples=500, seed=7)
    torch.testing.assert_close(track.predict(500, 7).pmf, own.pmf, rtol=0, atol=1e-8)
    torch.testing.assert_close(track.predict(500, 7).std, own.std, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    "options",
    [
        {"last_layers": 1, "fisher": "eta"},
        {"last_layers": 1, "structure": "kron"},
        {"last_layers": 1, "structure": "diag"},
        {"last_layers": 2, "structure": "block"},
        {"parameters": "all", "structure": "lowrank"},
    ],
)
def test_one_frame_is_the_prediction_of_it_whatever_the_form_of_the_covariance(options: dict[str, object]) -> None:
    x, y = torch.cat(films()[0]), films()[1].repeat_interleave(FRAMES)
    made = errbar.fit(posterior().model, [(x, y)], prior=errbar.Prior(2.0), **options)  # type: ignore[arg-type]
    for frame in (x[:1], made.logits(x[:1])):
        track = errbar.Track(made).add(frame)
        torch.testing.assert_close(track.predict(200, 7).pmf, made.predict(x[:1], 200, 7).pmf, rtol=0, atol=1e-8)
    # After a second frame nothing is left of that.
    fused = errbar.fuse([made.logits(x[:1]), made.logits(x[1:2])])
    assert_is(track.add(x[1:2]), fused.mean[0], fused.covariance[0], within=1e-9)
    torch.testing.assert_close(track.add(x[1:2]).predict(200, 7).pmf, fused.predict(200, 7).pmf, rtol=0, atol=1e-8)


def test_the_order_of_frames_does_not_matter_without_fading() -> None:
    frames = films()[0][2]
    options = {"noise": errbar.frame_noise(posterior(), films()[0]), "evidence": 0.3}
    reference = added(errbar.Track(posterior(), **options), frames).logits
    for order in itertools.islice(itertools.permutations(range(FRAMES)), 5, 120, 23):
        assert_is(
            added(errbar.Track(posterior(), **options), frames[list(order)]), reference.mean[0], reference.covariance[0]
        )


@pytest.mark.parametrize("memory", [0.95, 0.5])
def test_older_frames_fade_by_powers_of_the_memory(memory: float) -> None:
    frames = films()[0][0]
    weights = [memory ** (FRAMES - 1 - c) for c in range(FRAMES)]
    assert_is(added(errbar.Track(posterior(), memory=memory), frames), *in_batch(weights))
    backwards = added(errbar.Track(posterior(), memory=memory), frames.flip(0))
    assert not torch.allclose(backwards.logits.mean[0], in_batch(weights)[0], rtol=1e-4)


def test_noise_is_added_to_the_covariance_of_each_frame() -> None:
    noise = errbar.frame_noise(posterior(), films()[0])
    assert_is(added(errbar.Track(posterior(), noise=noise), films()[0][0]), *in_batch([1.0] * FRAMES, noise))


@pytest.mark.parametrize("memory", [1.0, 0.8])
def test_evidence_multiplies_the_logits_by_its_growth(memory: float) -> None:
    frames, rho = films()[0][0], 0.3
    weights = [memory ** (FRAMES - 1 - c) for c in range(FRAMES)]
    growth = sum(weights) / (1 + (sum(weights) - 1) * rho)
    mean, covariance = in_batch(weights)
    assert_is(
        added(errbar.Track(posterior(), memory=memory, evidence=rho), frames), growth * mean, growth**2 * covariance
    )
    assert_is(added(errbar.Track(posterior(), memory=memory, evidence=1.0), frames), mean, covariance)


def test_several_rows_are_several_frames_and_gaussians_are_as_good_as_inputs() -> None:
    frames = films()[0][0]
    for memory in (1.0, 0.7):
        one_by_one = added(errbar.Track(posterior(), memory=memory), frames)
        for whole in (frames, posterior().logits(frames), posterior().logits(frames).centered()):
            track = errbar.Track(posterior(), memory=memory).add(whole)
            assert track.frames == FRAMES
            assert_is(track, one_by_one.logits.mean[0], one_by_one.logits.covariance[0])


def test_adding_leaves_the_track_as_it_was() -> None:
    frames = films()[0][0]
    before = errbar.Track(posterior()).add(frames[:1])
    mean = before.logits.mean.clone()
    before.add(frames[1:2])
    assert before.frames == 1
    assert torch.equal(before.logits.mean, mean)


def test_a_common_shift_of_the_logits_changes_nothing() -> None:
    gaussian = posterior().logits(films()[0][0][:1])
    shifted = errbar.LogitGaussian(gaussian.mean + 5, gaussian.covariance + 3)
    plain = errbar.Track(posterior()).add(gaussian).logits
    assert_is(errbar.Track(posterior()).add(shifted), plain.mean[0], plain.covariance[0])


def test_a_float32_network_has_float32_results_and_fuses_like_fuse() -> None:
    x, y = draw(60, 6, dtype=torch.float32), torch.arange(60) % 3
    model = trained(seeded(lambda: perceptron(6, 5, 3), dtype=torch.float32), x, y, steps=30, lr=0.02)
    made = errbar.fit(model, [(x, y)], last_layers=1, prior=errbar.Prior(2.0))
    track = errbar.Track(made).add(x[:1]).add(x[1:2])
    fused = errbar.fuse([made.logits(x[:1]), made.logits(x[1:2])])
    assert track.logits.mean.dtype == torch.float32
    torch.testing.assert_close(track.logits.mean, fused.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(track.logits.covariance, fused.covariance, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------ noise


def test_frame_noise_is_the_scatter_within_sequences_of_any_length() -> None:
    sequences = [frames[: 2 + n % 4] for n, frames in enumerate(films()[0])] + [films()[0][0][:1]]
    total, freedom = torch.zeros(CLASSES, CLASSES).double(), 0
    for frames in sequences:
        logits = posterior().logits(frames).mean
        logits = logits - logits.mean(1, keepdim=True)
        for one in logits - logits.mean(0):
            total += torch.outer(one, one)
        freedom += len(frames) - 1
    torch.testing.assert_close(errbar.frame_noise(posterior(), iter(sequences)), total / freedom)


def test_the_noise_of_frames_is_that_of_calibrated_logits() -> None:
    soft = posterior().with_calibration(temperature=2.8, covariance_scale=0.0)
    torch.testing.assert_close(
        4 * errbar.frame_noise(soft, films()[0]), errbar.frame_noise(posterior(), films()[0]), rtol=1e-10, atol=1e-12
    )


def test_joint_fusion_takes_noise() -> None:
    frames = films()[0][0]
    noise, joint = errbar.frame_noise(posterior(), films()[0]), posterior().joint_logits(frames)
    R = joint.covariance + torch.einsum("ij,mn->imjn", torch.eye(FRAMES).double(), noise)
    expected, found = errbar.fuse_frames(errbar.JointLogits(joint.mean, R)), errbar.fuse_frames(joint, noise=noise)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-8, atol=1e-8)


def test_a_nearly_singular_joint_covariance_is_told_of() -> None:
    shared = torch.diag(torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64))
    blocks = torch.stack([torch.stack([shared, 0.99 * shared]), torch.stack([0.99 * shared, 0.9801001 * shared])])
    mean = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, -1.0]], dtype=torch.float64)
    joint = errbar.JointLogits(mean, blocks.permute(0, 2, 1, 3).contiguous())
    with pytest.warns(errbar.FusionNotice, match=r"nearly singular.*Use errbar.Track"):
        errbar.fuse_frames(joint)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errbar.fuse_frames(joint, noise=torch.eye(3, dtype=torch.float64))
        errbar.fuse_frames(joint.chosen([0]))
        errbar.fuse_frames(joint.chosen([0, 0]))  # copies are left out, and are no reason to worry


# --------------------------------------------------------------------------------------------------------- surprise


@pytest.mark.parametrize("with_noise", [False, True])
def test_surprise_is_the_distance_in_units_of_both_covariances(with_noise: bool) -> None:
    noise = errbar.frame_noise(posterior(), films()[0]) if with_noise else None
    frames, E = films()[0][0], basis()
    track = added(errbar.Track(posterior(), noise=noise, evidence=0.2), frames[:3])
    mean, covariance = in_batch([1.0] * 3, noise, frames[:3])
    x = posterior().logits(frames[3:4])
    S = E.T @ (covariance + x.covariance[0] + (0 if noise is None else noise)) @ E
    d = E.T @ (x.mean[0] - mean)
    assert track.surprise(frames[3:4]) == pytest.approx(float(d @ torch.linalg.inv(S) @ d), rel=1e-9)


def test_calibrated_surprises_have_the_mean_of_a_right_covariance_and_exact_shares() -> None:
    sequences, labels = films()
    track = errbar.calibrate_track(posterior(), sequences, labels, samples=50)
    found = []
    for frames in sequences:
        so_far = track.add(frames[:1])
        for c in range(1, FRAMES):
            found.append(so_far.surprise(frames[c : c + 1]))
            so_far = so_far.add(frames[c : c + 1])
    assert sum(found) / len(found) == pytest.approx(CLASSES - 1, rel=1e-9)
    so_far = track.add(sequences[0][:2])
    own = so_far.surprise(sequences[5][:1])
    share = sum(one >= own for one in found) / len(found)
    assert so_far.p_value(sequences[5][:1]) == pytest.approx(share, abs=1e-12)


def test_a_frame_of_another_object_is_stranger() -> None:
    sequences, labels = films(noise=0.2)
    track = errbar.calibrate_track(posterior(), sequences, labels, samples=50)
    so_far = track.add(sequences[0][:3])
    assert so_far.surprise(sequences[1][3:4]) > so_far.surprise(sequences[0][3:4])
    assert so_far.p_value(sequences[1][3:4]) < so_far.p_value(sequences[0][3:4])


# ------------------------------------------------------------------------------------------------------- the choice


def test_the_comparison_is_the_nll_over_all_prefixes() -> None:
    sequences, labels = films()
    track = errbar.calibrate_track(posterior(), sequences, labels, samples=300, seed=1)
    assert track.comparison is not None
    for name, options in {
        "precision-weighted": {},
        "memory 0.8": {"memory": 0.8},
        "evidence 0.25": {"evidence": 0.25},
    }.items():
        losses = []
        for frames, label in zip(sequences, labels, strict=True):
            so_far = errbar.Track(posterior(), **options)
            for frame in frames:
                so_far = so_far.add(frame[None])
                losses.append(-float(so_far.predict(300, 1).pmf[0, label].log()))
        assert track.comparison[name] == pytest.approx(sum(losses) / len(losses), rel=1e-9)


def test_noise_is_scored_on_sequences_that_it_was_not_estimated_on() -> None:
    sequences, labels = films()
    track = errbar.calibrate_track(posterior(), sequences, labels, samples=300, seed=1)
    losses = []
    for number, (frames, label) in enumerate(zip(sequences, labels, strict=True)):
        so_far = errbar.Track(posterior(), noise=errbar.frame_noise(posterior(), sequences[1 - number % 2 :: 2]))
        for frame in frames:
            so_far = so_far.add(frame[None])
            losses.append(-float(so_far.predict(300, 1).pmf[0, label].log()))
    assert track.comparison is not None
    assert track.comparison["noise"] == pytest.approx(sum(losses) / len(losses), rel=1e-9)


def test_what_is_chosen_is_the_default_unless_another_is_clearly_better() -> None:
    sequences, labels = films()
    few = errbar.calibrate_track(posterior(), sequences[:2], labels[:2], samples=50)
    assert (few.noise, few.memory, few.evidence, few.frames) == (None, 1.0, None, 0)
    # Objects that become another after two frames: only what forgets the first ones can be right.
    changing = [torch.cat([sequences[(n + 1) % 24][:2], frames, frames]) for n, frames in enumerate(sequences)]
    fading = errbar.calibrate_track(posterior(), changing, labels, samples=50)
    assert fading.memory < 1
    assert fading.comparison is not None
    assert f"memory {fading.memory:g}" in repr(fading)
    assert next(iter(fading.comparison)) == f"memory {fading.memory:g}"
    assert fading.comparison[f"memory {fading.memory:g}"] == min(fading.comparison.values())


def test_evidence_is_chosen_where_frames_agree_and_the_posterior_doubts() -> None:
    doubtful = posterior().with_calibration(temperature=6.0, covariance_scale=0.05)
    track = errbar.calibrate_track(doubtful, *films(count=60), samples=100)
    assert track.evidence is not None
    assert track.evidence < 1


# ------------------------------------------------------------------------------------------------------------ files


def test_a_saved_track_is_as_large_after_many_frames_as_after_one(tmp_path: Path) -> None:
    sequences, labels = films()
    empty = errbar.calibrate_track(posterior(), sequences, labels, samples=50)
    one = empty.add(sequences[0][:1])
    many = one.add(posterior().logits(torch.cat(sequences * 84)[:9_999]))
    assert many.frames == 10_000
    one.save(tmp_path / "one"), many.save(tmp_path / "many")
    assert (tmp_path / "one").stat().st_size == (tmp_path / "many").stat().st_size


@pytest.mark.parametrize("kind", ["plain", "options", "calibrated"])
def test_a_saved_track_goes_on_as_if_nothing_had_happened(kind: str, tmp_path: Path) -> None:
    sequences, labels = films()
    noise = errbar.frame_noise(posterior(), sequences)
    track = {
        "plain": lambda: errbar.Track(posterior()),
        "options": lambda: errbar.Track(posterior(), noise=noise, memory=0.9, evidence=0.4),
        "calibrated": lambda: errbar.calibrate_track(posterior(), sequences, labels, samples=50),
    }[kind]()
    path = tmp_path / "track.safetensors"
    track.add(sequences[0][:3]).save(path)
    posterior().save(tmp_path / "posterior")
    again = errbar.load(tmp_path / "posterior", posterior().model)
    read = errbar.Track.load(path, again)
    for frame in sequences[0][3:]:
        read = read.add(frame[None])
    whole = added(track, sequences[0])
    assert_is(read, whole.logits.mean[0], whole.logits.covariance[0])
    assert (read.frames, repr(read)) == (FRAMES, repr(whole))
    assert read.surprise(sequences[1][:1]) == pytest.approx(whole.surprise(sequences[1][:1]), rel=1e-9)
    if kind == "calibrated":
        assert read.p_value(sequences[1][:1]) == whole.p_value(sequences[1][:1])


def test_files_that_are_no_tracks_or_of_another_posterior_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "track"
    errbar.Track(posterior()).add(films()[0][0][:1]).save(path)
    with pytest.raises(errbar.MismatchError, match="track of another posterior"):
        errbar.Track.load(path, posterior(seed=1))
    with pytest.raises(errbar.FileError, match=r"holds a track.*errbar.Track.load"):
        errbar.load(path, posterior().model)
    posterior().save(tmp_path / "posterior")
    with pytest.raises(errbar.FileError, match=r"not a track; expected a file that Track.save wrote"):
        errbar.Track.load(tmp_path / "posterior", posterior())
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(errbar.DamagedFileError, match="damaged"):
        errbar.Track.load(path, posterior())


# --------------------------------------------------------------------------------------------------------- mistakes


def test_an_empty_track_says_nothing() -> None:
    empty = errbar.Track(posterior())
    for ask in (lambda: empty.logits, empty.predict, lambda: empty.surprise(films()[0][0][:1])):
        with pytest.raises(errbar.DataError, match="no frames yet; expected at least one"):
            ask()


def test_gaussians_of_others_are_refused() -> None:
    track, x = errbar.Track(posterior()).add(films()[0][0][:1]), films()[0][0][:1]
    with pytest.raises(errbar.MismatchError, match="The frame has 3 classes, and the track 4"):
        track.add(posterior(classes=3).logits(x))
    others = [posterior(seed=1), posterior().uncalibrated(), posterior().with_prior(errbar.Prior(7.0))]
    for other in others:
        for ask in (track.add, track.surprise):
            with pytest.raises(errbar.MismatchError, match="fingerprint of another posterior"):
                ask(other.logits(x))
    with pytest.raises(errbar.MismatchError, match="some classes alone"):
        track.add(posterior().logits(x, top=2))
    # A Gaussian of the user's own carries none, and one that was changed is no longer the posterior's.
    assert track.add(errbar.LogitGaussian(torch.zeros(1, 4), torch.eye(4)[None])).frames == 2
    assert track.add(posterior(seed=1).logits(x).scaled(2.0)).frames == 2
    assert track.frames == 1


def test_the_fingerprint_stays_with_copies_of_a_posterior(tmp_path: Path) -> None:
    posterior().save(tmp_path / "posterior")
    again = errbar.load(tmp_path / "posterior", posterior().model)
    assert again.fingerprint == posterior().fingerprint
    assert posterior().logits(films()[0][0]).rounded()[1:2].origin == posterior().fingerprint
    assert posterior().update([(films()[0][0], torch.zeros(FRAMES).long())]).fingerprint != posterior().fingerprint


def test_a_certain_frame_is_refused_unless_there_is_noise() -> None:
    certain, x = posterior().with_calibration(covariance_scale=0.0), films()[0][0][:1]
    with pytest.raises(errbar.SingularCovarianceError, match=r"covariance of frame 0 is singular.*give noise="):
        errbar.Track(certain).add(x)
    assert errbar.Track(certain, noise=errbar.frame_noise(certain, films()[0])).add(x).frames == 1
    with pytest.raises(errbar.SingularCovarianceError, match=r"covariance of a frame is singular.*Calibrate"):
        errbar.calibrate_track(certain, *films())


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"memory": 0.0}, errbar.ArgumentError, "memory is 0.0; expected .* above 0 and up to 1"),
        ({"memory": 1.5}, errbar.ArgumentError, "memory is 1.5"),
        ({"memory": True}, errbar.ArgumentError, "memory is True"),
        ({"evidence": -0.1}, errbar.ArgumentError, "evidence is -0.1; expected the correlation ρ .* from 0 to 1"),
        ({"noise": torch.eye(3)}, errbar.MismatchError, r"noise has shape \(3, 3\); expected Σ_e of shape \(4, 4\)"),
        ({"noise": 0.3}, errbar.MismatchError, "noise has shape float"),
        ({"noise": -torch.eye(4)}, errbar.CovarianceError, "Σ_e, is not positive semi-definite"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        errbar.Track(posterior(), **options)  # type: ignore[arg-type]


def test_mistakes_with_sequences() -> None:
    sequences, labels = films()
    single = [frames[:1] for frames in sequences]
    with pytest.raises(errbar.ArgumentError, match="Expected a Posterior"):
        errbar.Track(posterior().model)  # type: ignore[arg-type]
    for ask in (lambda: errbar.frame_noise(posterior(), single), lambda: errbar.frame_noise(posterior(), [])):
        with pytest.raises(errbar.DataError, match="two or more frames each"):
            ask()
    with pytest.raises(errbar.DataError, match="two or more frames each"):
        errbar.calibrate_track(posterior(), single, labels)
    with pytest.raises(errbar.DataError, match="no sequences"):
        errbar.calibrate_track(posterior(), [], [])
    with pytest.raises(errbar.LabelError, match="Labels are missing"):
        errbar.calibrate_track(posterior(), sequences, None)
    with pytest.raises(errbar.LabelError, match=r"expected \(24,\)"):
        errbar.calibrate_track(posterior(), sequences, labels[:-1])
    with pytest.raises(errbar.ArgumentError, match=r"shape \(5, 6\); expected \(objects, frames"):
        errbar.frame_noise(posterior(), sequences[0])
    with pytest.raises(errbar.ArgumentError, match="sequences is a int"):
        errbar.frame_noise(posterior(), 3)  # type: ignore[arg-type]
    track = errbar.Track(posterior()).add(sequences[0][:1])
    with pytest.raises(errbar.DataError, match="There are 5 frames; expected one"):
        track.surprise(sequences[0])
    with pytest.raises(errbar.ArgumentError, match=r"no held-out frames to compare with.*errbar.calibrate_track"):
        track.p_value(sequences[0][:1])


# --------------------------------------------------------------------------------------------------------- it works


def test_four_views_of_150_digits_are_at_least_as_good_as_one() -> None:
    x, y = shuffled_digits()
    model = trained(seeded(lambda: perceptron(64, 32, 10)), x[:600], y[:600], steps=150, lr=0.01)
    seen = views(x[600:1000].reshape(-1, 1, 8, 8), 4, degrees=8.0, pixels=0.4, noise=0.1, seed=0).flatten(2)
    made = errbar.fit(model, [(x[:600], y[:600])], last_layers=2, prior=errbar.Prior(10.0))
    made = errbar.calibrate(made, [(seen[150:, 0], y[750:1000])])
    single = made.predict(seen[:150, 0]).pmf
    fused = torch.cat([errbar.Track(made).add(frames).predict().pmf for frames in seen[:150]])
    truth = y[600:750]
    assert metrics.accuracy(fused, truth) >= metrics.accuracy(single, truth)
    assert metrics.nll(fused.clamp_min(1e-12), truth) <= metrics.nll(single.clamp_min(1e-12), truth)
