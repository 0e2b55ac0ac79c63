"""Patches of convolutions as columns, and squares by their lower triangle, against the plain formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from errbar._base.linalg import add_lower_square_, mirror_
from errbar._derivative.layers import Patches

FLOAT64 = torch.float64


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=FLOAT64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "padding": "same", "dilation": 2},
        {"kernel_size": (2, 3), "stride": (2, 1), "padding": (0, 2)},
        {"kernel_size": 3, "padding": 1, "padding_mode": "reflect", "stride": 2},
        {"kernel_size": 1},
        {"kernel_size": 1, "stride": 2},
        {"kernel_size": (3, 1), "dilation": (2, 1), "padding": (2, 0), "padding_mode": "circular"},
    ],
)
def test_the_convolution_is_the_product_of_its_weight_with_the_columns(options: dict[str, Any]) -> None:
    layer = nn.Conv2d(2, 5, **options, bias=False).double()
    x = drawn(3, 2, 6, 7)
    columns = Patches.of(layer).columns(x)
    by_product = (layer.weight.flatten(1) @ columns).unflatten(1, (3, -1)).transpose(0, 1)
    torch.testing.assert_close(by_product, layer(x).flatten(2), rtol=1e-12, atol=1e-12)


def test_so_it_is_over_one_dimension() -> None:
    layer = nn.Conv1d(2, 5, 3, stride=2, padding=1, bias=False).double()
    x = drawn(3, 2, 9)
    by_product = (layer.weight.flatten(1) @ Patches.of(layer).columns(x)).unflatten(1, (3, -1)).transpose(0, 1)
    torch.testing.assert_close(by_product, layer(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 128, 129, 300])
@pytest.mark.parametrize("dtype", [torch.float32, FLOAT64])
def test_squares_add_up_in_the_lower_triangle(size: int, dtype: torch.dtype) -> None:
    columns = drawn(size, 40).to(dtype)
    total = torch.zeros(size, size, dtype=FLOAT64)
    for part in columns.split(25, 1):
        add_lower_square_(total, part)
    expected = columns.double() @ columns.double().T
    tolerance = 1e-12 if dtype == FLOAT64 else 1e-5
    torch.testing.assert_close(mirror_(total), expected, rtol=tolerance, atol=40 * tolerance)
