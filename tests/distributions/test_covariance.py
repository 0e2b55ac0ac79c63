"""A LogitGaussian has a covariance object: full, diagonal or factored, and the same Gaussian in each form."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import Tensor

import errbar
from errbar._distributions.covariance import (
    Covariance,
    DiagonalCovariance,
    DrawnCovariance,
    FactoredCovariance,
    FullCovariance,
)

FORMS = ["full", "diagonal", "factored", "drawn"]
ROWS, CLASSES, DRAWS = 3, 4, 6


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(form: str) -> Covariance:
    weights = draw(ROWS, CLASSES, seed=1).square()
    if form == "full":
        half = draw(ROWS, CLASSES, CLASSES, seed=2)
        return FullCovariance(half @ half.mT)
    if form == "diagonal":
        return DiagonalCovariance(weights)
    if form == "drawn":
        return DrawnCovariance(draw(ROWS, CLASSES, DRAWS, seed=5))
    return FactoredCovariance(torch.linalg.qr(draw(CLASSES, CLASSES, seed=3))[0], weights)


def gaussian(form: str) -> errbar.LogitGaussian:
    return errbar.LogitGaussian(draw(ROWS, CLASSES), covariance(form))


def same(first: errbar.LogitGaussian, second: errbar.LogitGaussian) -> None:
    torch.testing.assert_close(first.mean, second.mean, rtol=0, atol=0)
    torch.testing.assert_close(first.covariance, second.covariance, rtol=1e-12, atol=1e-12)
    assert first.rank == second.rank


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_gaussian_of_its_matrix(form: str) -> None:
    ours = gaussian(form)
    assert isinstance(ours.form, Covariance)
    whole = errbar.LogitGaussian(ours.mean, ours.covariance)
    for value in ("variance", "contrast_variance"):
        torch.testing.assert_close(getattr(ours, value), getattr(whole, value), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.mean_field_pmf(), whole.mean_field_pmf(), rtol=1e-12, atol=1e-12)
    for first, second in (
        (ours.tempered(1.7), whole.tempered(1.7)),
        (ours.scaled(0.3), whole.scaled(0.3)),
        (ours.centered(), whole.centered()),
        (ours[1:], whole[1:]),
    ):
        same(first, second)
    root, jitter = ours.form.sampling_root(torch.float64)
    square = root.whole() if root.whole().ndim == 3 else torch.diag_embed(root.whole())
    same(errbar.LogitGaussian(ours.mean, square @ square.mT).centered(), whole.centered())
    assert jitter == 0.0


@pytest.mark.parametrize("form", FORMS)
def test_copies_of_every_form_are_alike(form: str) -> None:
    ours = gaussian(form)
    for other in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours), copy.copy(ours)):
        assert type(other.form) is type(ours.form)
        same(other, ours)
        assert other != ours


@pytest.mark.parametrize("form", FORMS)
def test_a_gaussian_can_be_shown_and_replaced_by_the_arguments_it_is_made_of(form: str) -> None:
    ours = gaussian(form)
    assert repr(ours) == f"LogitGaussian: {len(ours)} inputs, {ours.mean.shape[1]} classes, float64 on cpu"
    same(dataclasses.replace(ours, rank=2), errbar.LogitGaussian(ours.mean, ours.covariance, 2))
    wider = dataclasses.replace(ours, covariance=2 * ours.covariance)
    same(wider, ours.scaled(2.0))
    with pytest.raises(errbar.CovarianceError, match="The covariance of the logits"):
        dataclasses.replace(ours, covariance=-ours.covariance)


@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("first", FORMS)
def test_parts_of_one_form_keep_it_and_others_are_joined_in_full(first: str, second: str) -> None:
    one, other = gaussian(first), gaussian(second)
    if first == second == "factored":
        other = one[1:]  # a basis that is equal need not be the same
    joined = errbar.LogitGaussian.concatenated([one, other])
    assert type(joined.form) is (type(one.form) if first == second else FullCovariance)
    for rows, part in ((slice(ROWS), one), (slice(ROWS, None), other)):
        same(joined[rows], part)


def test_factored_parts_of_different_bases_are_joined_in_full() -> None:
    one, other = gaussian("factored"), gaussian("factored")
    joined = errbar.LogitGaussian.concatenated([one, other])
    assert isinstance(joined.form, FullCovariance)
    same(joined[ROWS:], other)
