"""Data that several tests use, each from an explicit seed."""

from __future__ import annotations

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers, drawn in float64."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def drawn_labels(pmf: Tensor, seed: int) -> Tensor:
    """y ~ f̂: what a perfectly calibrated PMF says of its labels."""
    return torch.multinomial(pmf, 1, generator=generator(seed))[:, 0]


def shuffled_digits(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The 1797 digits of scikit-learn, pixels from 0 to 1, and their labels, in random order."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=generator(0))
    # Multiples of 1/16 are exact in every dtype.
    return (torch.as_tensor(images) / 16).to(dtype)[order], torch.as_tensor(labels).long()[order]
