"""When two results are the same: to the last bit, or within a tolerance of the largest entry."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Float64 algebra by another formula.
ALGEBRA = 1e-8
# Sums of float64 numbers in another order; products of float32 numbers in other blocks.
ROUNDING, FLOAT32_ROUNDING = 1e-9, 1e-6


def float64(value: Any) -> Tensor:
    """A tensor, an array or a number; a number would be a float32 tensor otherwise."""
    return value.detach().double() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)


def assert_close(actual: Any, expected: Any, tolerance: float = ALGEBRA, subject: str = "") -> None:
    """Every entry within `tolerance` of the largest one expected; shapes equal, nothing NaN; None only for None."""
    if expected is None:
        assert actual is None, subject
        return
    actual, expected = (float64(value) for value in (actual, expected))
    assert actual.shape == expected.shape, subject
    scale = float(expected.abs().max())
    error = float((actual - expected).abs().max())
    assert error <= tolerance * scale, f"{subject}: {error:.3g} off, scale {scale:.3g}"


def assert_same_bits(values: list[Any]) -> None:
    for value in values[1:]:
        if isinstance(value, Tensor):
            assert torch.equal(value, values[0])
        else:
            assert value == values[0]
