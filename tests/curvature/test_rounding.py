"""What float32 products leave of the information, and that it is announced where it matters.

Products that are equal round alike, so that the errors of equal samples add up like the samples themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar._base import linalg
from errbar._curvature.dense import DenseSum


def alike(count: int, *, features: int = 10) -> Tensor:
    """The same input again and again."""
    return torch.randn(1, features, generator=torch.Generator().manual_seed(1)).expand(count, features)


def variance_error(posterior: errbar.Posterior, exact: errbar.Posterior) -> float:
    """The largest relative error of the variance of a combination of parameters."""
    lower = torch.linalg.cholesky(exact.covariance())
    half = torch.linalg.solve_triangular(lower, posterior.covariance(), upper=False)
    ratios = torch.linalg.eigvalsh(torch.linalg.solve_triangular(lower, half.mT, upper=False))
    return float((ratios - 1).abs().max())


@pytest.mark.parametrize("options", [{}, {"structure": "block"}, {"fisher": "eta"}])
def test_float32_rounding_that_adds_up_over_equal_samples_is_announced(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(10, 3)
    data = alike(100_000).split(4096)
    information = errbar.collect(model, data, last_layers=1, **options)
    exact = errbar.fit(model, data, last_layers=1, precision="float64", **options)
    with pytest.warns(UserWarning, match=r"Rounding of float32 products has changed the information by about \d+% of"):
        posterior = errbar.condition(information, errbar.Prior(1.0))
    assert variance_error(posterior, exact) > 0.01
    # Beside a prior that is large enough for float32, or in float64, there is nothing to announce.
    strong = errbar.Prior(1e4)
    assert variance_error(errbar.condition(information, strong), exact.with_prior(strong)) < 0.01


def test_the_rounding_that_is_announced_is_that_of_the_sums() -> None:
    """The estimate from one vector is near the real error, and adds up and scales as the information does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    half = errbar.collect(model, alike(40_000, features=5).split(4096), last_layers=2)
    information = half + half * 0.5
    exact = errbar.collect(model, alike(40_000, features=5).split(4096), last_layers=2, precision="float64")
    assert isinstance(information.total, DenseSum)
    assert information.total.error is not None
    truth = (information.dense() - 1.5 * exact.dense()) @ linalg.signs(75, torch.device("cpu"))
    torch.testing.assert_close(information.total.error, truth, rtol=1e-3, atol=1e-3 * float(truth.abs().max()))


def test_float32_rounding_of_samples_that_differ_is_small_and_not_announced() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(10, 3), torch.randn(50_000, 10)
    for prior in (1.0, 1e-3):
        posterior = errbar.fit(model, x.split(4096), last_layers=1, prior=errbar.Prior(prior))
        exact = errbar.fit(model, x.split(4096), last_layers=1, prior=errbar.Prior(prior), precision="float64")
        assert variance_error(posterior, exact) < 1e-5
