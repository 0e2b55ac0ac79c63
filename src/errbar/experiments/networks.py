"""The networks of the paper's experiments.

They share their last layers: fully connected layers of width 100, 40 and 10. The parameters of the last two of them,
100·40 + 40 + 40·10 + 10 = 4450, are the θ_r whose covariance is computed (section "Classification setup").
Widths that the paper leaves open are the defaults here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from errbar.errors import ArgumentError


def paper_network(
    inputs: int,
    hidden: tuple[int, ...] = (256, 150),
    dropout: float = 0.0,
    classes: int = 10,
    head: tuple[int, int] = (100, 40),
) -> nn.Sequential:
    """Fully connected layers with ReLU, five of them unless said otherwise: `inputs` – hidden – head – `classes`.

    With `dropout` > 0 every hidden layer is followed by dropout at that rate, as MC dropout needs it.

    >>> network = paper_network(64)
    >>> sum(parameter.numel() for layer in (network[-1], network[-3]) for parameter in layer.parameters())
    4450
    """
    _require_rate(dropout)
    widths = (inputs, *hidden, *head)
    layers: list[nn.Module] = []
    for width, next_width in pairwise(widths):
        layers += [nn.Linear(width, next_width), nn.ReLU()]
        if dropout > 0.0:
            layers.append(nn.Dropout(dropout))
    layers.append(nn.Linear(widths[-1], classes))
    return nn.Sequential(*layers)


def convolutional_network(
    classes: int = 10,
    widths: tuple[int, int, int, int, int, int] = (128, 128, 256, 256, 512, 512),
    dropout: float = 0.0,
) -> nn.Sequential:
    """Six convolutional and four fully connected layers for pictures of 32 × 32, in the manner of LeNet-5.

    Convolutions of 3 × 3 with batch normalisation and ReLU, halved in size after each second one; then
    256 – 100 – 40 – `classes`. With `dropout` > 0 it follows each halving and each hidden fully connected layer.
    """
    _require_rate(dropout)

    def dropped() -> list[nn.Module]:
        return [nn.Dropout(dropout)] if dropout > 0.0 else []

    layers: list[nn.Module] = []
    for number, (channels, width) in enumerate(pairwise((3, *widths))):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        if number % 2:
            layers += [nn.MaxPool2d(2), *dropped()]
    layers.append(nn.Flatten())
    for inputs, width in pairwise((widths[-1] * 16, 256, 100, 40)):
        layers += [nn.Linear(inputs, width), nn.ReLU(), *dropped()]
    layers.append(nn.Linear(40, classes))
    return nn.Sequential(*layers)


def small_convolutional_network(classes: int = 10) -> nn.Sequential:
    """For pictures of 32 × 32 in colour where labels are few and trainings many: the mean of each 2 × 2 pixels, three
    convolutions of 3 × 3 with batch normalisation, ReLU and halving, then 64 – `classes`."""
    layers: list[nn.Module] = [nn.AvgPool2d(2)]
    for channels, width in pairwise((3, 16, 32, 64)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, classes))


class Normalise(nn.Module):
    """Pixels in [0, 1] to zero mean and unit variance of each channel: the first module of a network for pictures."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])

    def forward(self, pixels: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        return (pixels - self.mean) / self.std


def _require_rate(dropout: float) -> None:
    if not 0.0 <= dropout < 1.0:
        raise ArgumentError(f"dropout is a rate in [0, 1); got {dropout}.")
