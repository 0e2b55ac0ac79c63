"""Small networks that several tests use: built from a seed, and trained in a few steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn


def seeded(make: Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A network in evaluation mode whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(dtype).eval()


def trained(
    model: nn.Module, x: Tensor, y: Tensor, *, steps: int, lr: float, weight_decay: float = 0.0, scale: float = 1.0
) -> nn.Module:
    """The model itself after steps of Adam on the cross-entropy of all samples, its logits multiplied by `scale`."""
    optimiser = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(scale * model(x), y).backward()
        optimiser.step()
    return model


def perceptron(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths, with the activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def mlp() -> nn.Module:
    """Three linear layers, with an activation in place before the last."""
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(inplace=True), nn.Linear(6, 4))


def one_logit() -> nn.Module:
    """A binary classifier with a single output."""
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
