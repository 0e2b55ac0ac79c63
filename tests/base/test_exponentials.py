"""Exponentials without subnormal numbers, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from errbar._base.linalg import exp_without_subnormals_, softmax_without_subnormals_

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponentials_are_exact_or_zero_where_they_would_be_subnormal(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    exponents = torch.cat([torch.linspace(-800, 80, 100_001, dtype=dtype), torch.tensor([-torch.inf], dtype=dtype)])
    exact = np.exp(exponents.double().numpy().astype(np.longdouble))
    found = exp_without_subnormals_(exponents.clone()).double().numpy()
    zero = found == 0
    assert (exact[zero] <= 1.02 * tiny).all()
    assert (found[~zero] >= tiny).all()
    # An exponent of 80 is rounded to half a unit in its last place, and so many times that is the error of exp.
    np.testing.assert_allclose(found[~zero], exact[~zero].astype(float), rtol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
def test_softmax_is_that_of_numpy(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(7, 5, 40, generator=generator, dtype=torch.float64)).to(dtype)
    exact = logits.double().numpy()
    exact = np.exp(exact - exact.max(1, keepdims=True))
    exact /= exact.sum(1, keepdims=True)
    found = softmax_without_subnormals_(logits.clone())
    np.testing.assert_allclose(found, exact, rtol=0, atol=200 * torch.finfo(dtype).eps)
    torch.testing.assert_close(found.sum(1), torch.ones(7, 40, dtype=dtype))
