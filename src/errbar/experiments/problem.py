"""What an experiment is about: data, the network and how it is trained, outliers and shifts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from errbar.experiments.shifts import Shift

PRIORS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Samples(NamedTuple):
    """Inputs (pictures have pixels in [0, 1]) and their labels."""

    x: Float[Tensor, "N ..."]
    y: Int[Tensor, " N"]

    def take(self, rows: Int[Tensor, " k"] | slice) -> Samples:
        return Samples(self.x[rows], self.y[rows])

    def to(self, device: torch.device) -> Samples:
        return Samples(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: Adam, and what is added to the gradient for each weight."""

    epochs: int
    batch_size: int
    learning_rate: float = 1e-4
    weight_decay: float = 1e-4
    dropout: float = 0.2
    bfloat16_on_gpu: bool = False


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything that does not depend on the seed of a run. Validation and test data share no input."""

    name: str
    train: Samples
    validation: Samples
    test: Samples
    network: Callable[[float], nn.Module]  # of the dropout rate
    recipe: Recipe
    members: int
    outliers: dict[str, Float[Tensor, "N ..."]] = field(default_factory=dict)
    shifts: tuple[Shift, ...] = ()
    class_names: tuple[str, ...] = ()
    dropout_samples: int = 50
    priors: tuple[float, ...] = PRIORS
    whole_network_samples: int = 10_000  # training samples for the information about a whole network

    @property
    def device(self) -> torch.device:
        return self.train.x.device


def halves(samples: Samples, seed: int = 0) -> tuple[Samples, Samples]:
    """Two halves by a seeded shuffle: validation and test."""
    order = torch.randperm(len(samples.y), generator=torch.Generator().manual_seed(seed)).to(samples.y.device)
    middle = len(order) // 2
    return samples.take(order[:middle]), samples.take(order[middle:])
