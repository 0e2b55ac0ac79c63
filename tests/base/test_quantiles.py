"""Quantiles by sorting are those of torch, number for number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from errbar._base.quantiles import quantiles


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 4),
    count=st.integers(1, 1200),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_they_are_those_of_torch(dtype: torch.dtype, rows: int, count: int, shares: list[float], seed: int) -> None:
    values = drawn(rows, 3, count, seed=seed, dtype=dtype)
    expected = torch.quantile(values, torch.tensor(shares, dtype=dtype), dim=2).permute(1, 2, 0)
    torch.testing.assert_close(quantiles(values, shares), expected, rtol=0, atol=5e-8)


def test_by_hand() -> None:
    found = quantiles(torch.tensor([3.0, 1.0, 2.0, 10.0], dtype=torch.float64), [0, 0.5, 0.75, 1])
    assert found.tolist() == [1.0, 2.5, 4.75, 10.0]


def test_nan_stays_nan_in_its_row_alone() -> None:
    values = drawn(2, 3, 50)
    values[0, 1, 7] = torch.nan
    found = quantiles(values, [0.0, 0.1, 1.0])
    assert found.isnan().nonzero().tolist() == [[0, 1, 0], [0, 1, 1], [0, 1, 2]]
    expected = torch.quantile(values, torch.tensor([0.0, 0.1, 1.0]), dim=2).permute(1, 2, 0)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-8, equal_nan=True)


def test_values_are_left_as_they_are_and_may_lie_anywhere() -> None:
    values = drawn(40, 5).T
    before = values.clone()
    torch.testing.assert_close(quantiles(values, [0.3]), torch.quantile(before, 0.3, dim=1)[:, None], rtol=0, atol=5e-8)
    assert torch.equal(values, before)
    # Gradients are for those who ask for them.
    assert quantiles(values.requires_grad_(), [0.3]).requires_grad


def test_other_dtypes_are_sorted_by_torch() -> None:
    values = drawn(3, 101).to(torch.float16)
    assert quantiles(values, [0.5]).dtype == torch.float16
    assert torch.equal(quantiles(values, [0.5])[:, 0], values.median(1).values)


def test_more_numbers_than_torch_takes() -> None:
    values = torch.zeros(2**24 + 1)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.5)
    assert quantiles(values, [0.5]).tolist() == [0.0]
