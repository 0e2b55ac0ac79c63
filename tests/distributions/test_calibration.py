"""T(x) = T √(1 + c v̄(x)), v̄ = tr(C P^g)/(M−1) with C = I − 11ᵀ/M: logits N(ĝ/T(x), T_c P^g/T(x)²)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import errbar
from errbar._distributions.covariance import (
    Covariance,
    DiagonalCovariance,
    FactoredCovariance,
    FullCovariance,
    JointCovariance,
)

CALIBRATION = errbar.Calibration(temperature=1.3, covariance_scale=0.6, softening=2.5)


def mean_contrast_variance(covariance: Tensor) -> np.ndarray:
    """tr(C P^g)/(M−1) of each input, from dense matrices."""
    classes = covariance.shape[1]
    centring = np.eye(classes) - np.ones((classes, classes)) / classes
    return np.array([np.trace(centring @ P) for P in covariance.double().numpy()]) / (classes - 1)


def forms(dtype: torch.dtype) -> dict[str, Covariance]:
    generator = torch.Generator().manual_seed(3)
    half = torch.randn(6, 4, 5, generator=generator, dtype=dtype)
    weights = torch.rand(6, 3, generator=generator, dtype=dtype)
    # The common shift of the logits, whose variance softmax does not see.
    shift = torch.linspace(0, 5, 6, dtype=dtype)[:, None, None] * torch.ones(4, 4, dtype=dtype)
    return {
        "full": FullCovariance(half @ half.mT + shift),
        "diagonal": DiagonalCovariance(torch.rand(6, 4, generator=generator, dtype=dtype)),
        "factored": FactoredCovariance(torch.randn(4, 3, generator=generator, dtype=dtype), weights),
    }


def means(dtype: torch.dtype) -> Tensor:
    return 3 * torch.randn(6, 4, generator=torch.Generator().manual_seed(4), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["full", "diagonal", "factored"])
def test_every_form_is_divided_by_the_temperature_of_its_input(name: str, dtype: torch.dtype) -> None:
    plain = errbar.LogitGaussian(means(dtype), forms(dtype)[name])
    T = 1.3 * np.sqrt(1 + 2.5 * mean_contrast_variance(plain.covariance))
    assert T.max() > 1.05 * T.min()
    calibrated = plain.calibrated(CALIBRATION)
    assert type(calibrated.form) is type(plain.form)
    assert calibrated.mean.dtype == calibrated.covariance.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(calibrated.mean, plain.mean.numpy() / T[:, None], rtol=tolerance)
    expected = 0.6 * plain.covariance.double().numpy() / T[:, None, None] ** 2
    np.testing.assert_allclose(calibrated.covariance, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["full", "diagonal", "factored"])
def test_without_softening_nothing_changes_in_the_last_bit(name: str) -> None:
    plain = errbar.LogitGaussian(means(torch.float32), forms(torch.float32)[name])
    before = plain.tempered(1.3).scaled(0.6)
    after = plain.calibrated(errbar.Calibration(1.3, 0.6))
    assert torch.equal(after.mean, before.mean)
    assert torch.equal(after.covariance, before.covariance)
    assert torch.equal(after.predict(50).pmf, before.predict(50).pmf)


def test_softening_takes_no_notice_of_what_softmax_cannot_see() -> None:
    form = forms(torch.float64)["full"]
    shifted = FullCovariance(form.matrix() + 7.0)
    mean = means(torch.float64)
    first = errbar.LogitGaussian(mean, form).calibrated(CALIBRATION)
    second = errbar.LogitGaussian(mean, shifted).calibrated(CALIBRATION)
    torch.testing.assert_close(first.mean, second.mean)
    torch.testing.assert_close(first.centered().covariance, second.centered().covariance)


def test_two_classes_in_closed_form() -> None:
    """One contrast (g₁ − g₂)/√2 of variance (a + b)/2 for P^g = diag(a, b)."""
    gaussian = errbar.LogitGaussian(torch.tensor([[2.0, 0.0]]), torch.tensor([[[1.0, 0.0], [0.0, 5.0]]]))
    calibrated = gaussian.calibrated(errbar.Calibration(2.0, 1.0, 1.0))
    T = 2 * math.sqrt(1 + 3)
    torch.testing.assert_close(calibrated.mean, torch.tensor([[2 / T, 0.0]]))
    torch.testing.assert_close(calibrated.variance, torch.tensor([[1 / T**2, 5 / T**2]]))


def test_temperatures_grow_with_the_variance_and_begin_at_the_common_one() -> None:
    T = CALIBRATION.temperatures(torch.tensor([0.0, 0.5, 2.0]))
    torch.testing.assert_close(T, 1.3 * torch.tensor([1.0, math.sqrt(2.25), math.sqrt(6)], dtype=torch.float64))


@pytest.mark.parametrize("with_root", [True, False])
def test_frames_are_divided_by_both_of_their_temperatures(with_root: bool) -> None:
    """R_ij = T_c J_i P J_jᵀ/(T(x_i) T(x_j))."""
    generator = torch.Generator().manual_seed(5)
    frames, classes = 3, 4
    jacobian = torch.randn(frames * classes, 9, generator=generator, dtype=torch.float64)
    half = torch.randn(9, 9, generator=generator, dtype=torch.float64)
    P = half @ half.T / 9
    whole = jacobian @ P @ jacobian.T
    R = ((whole + whole.T) / 2).reshape(frames, classes, frames, classes)
    mean = torch.randn(frames, classes, generator=generator, dtype=torch.float64)
    own = torch.stack([R[i, :, i] for i in range(frames)])
    T = torch.from_numpy(1.3 * np.sqrt(1 + 2.5 * mean_contrast_variance(own)))
    if with_root:
        basis = torch.linalg.qr(torch.cat([torch.ones(classes, 1), torch.eye(classes)[:, 1:]], 1).double())[0][:, 1:]
        root = torch.einsum("ma,cmk->cak", basis, (jacobian @ torch.linalg.cholesky(P)).reshape(frames, classes, 9))
        joint = errbar.JointLogits(mean, JointCovariance(R, root))
    else:
        joint = errbar.JointLogits(mean, R)
    calibrated = joint.calibrated(CALIBRATION)
    torch.testing.assert_close(calibrated.mean, mean / T[:, None])
    for i in range(frames):
        for j in range(frames):
            torch.testing.assert_close(calibrated.covariance[i, :, j], 0.6 * R[i, :, j] / (T[i] * T[j]))
    assert torch.equal(calibrated.covariance, calibrated.covariance.permute(2, 3, 0, 1))
    if with_root:
        made = calibrated.form.contrast_root
        assert made is not None
        expected = torch.einsum("ma,imjn,nb->iajb", basis, calibrated.covariance, basis)
        torch.testing.assert_close(torch.einsum("iak,jbk->iajb", made, made), expected)


def test_frames_without_softening_are_as_before_in_the_last_bit() -> None:
    generator = torch.Generator().manual_seed(6)
    half = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    joint = errbar.JointLogits(torch.randn(2, 3, generator=generator), (half @ half.T).reshape(2, 3, 2, 3))
    calibrated = joint.calibrated(errbar.Calibration(1.7, 0.4))
    assert torch.equal(calibrated.mean, joint.mean / 1.7)
    assert torch.equal(calibrated.covariance, joint.covariance * (0.4 / 1.7**2))


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "much", None])
def test_softening_is_zero_or_a_positive_finite_number(value: object) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"The softening is .*; expected zero or a positive finite number\."):
        errbar.Calibration(softening=value)  # type: ignore[arg-type]


def test_the_other_two_are_checked_as_well() -> None:
    with pytest.raises(errbar.ArgumentError, match=r"The temperature is 0; expected a positive finite number\."):
        errbar.Calibration(temperature=0)
    with pytest.raises(errbar.ArgumentError, match=r"The covariance scale is -1; expected zero or a positive finite"):
        errbar.Calibration(covariance_scale=-1)


def test_some_classes_alone_are_not_softened_by_their_own_variance() -> None:
    gaussian = errbar.LogitGaussian(means(torch.float64), forms(torch.float64)["full"])
    some = gaussian.of_classes(torch.tensor([[0, 2]] * 6))
    with pytest.raises(errbar.ArgumentError, match="softening needs the variance of all of them"):
        some.calibrated(CALIBRATION)
    assert some.calibrated(errbar.Calibration(1.3)).classes is not None
