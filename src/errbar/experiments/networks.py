"""The networks of the paper's experiments.

They share their end: fully connected layers of width 100, 40 and 10. The parameters of the last two of them,
100·40 + 40 + 40·10 + 10 = 4450, are the θ_r whose covariance is computed (section "Classification setup").
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from errbar.errors import ArgumentError


def paper_network(
    inputs: int, hidden: tuple[int, int] = (256, 150), dropout: float = 0.0, classes: int = 10
) -> nn.Sequential:
    """Five fully connected layers with ReLU: `inputs` – hidden – 100 – 40 – `classes`.

    With `dropout` > 0 every hidden layer is followed by dropout at that rate, as MC dropout needs it.

    >>> network = paper_network(64)
    >>> sum(parameter.numel() for layer in (network[-1], network[-3]) for parameter in layer.parameters())
    4450
    """
    if not 0.0 <= dropout < 1.0:
        raise ArgumentError(f"dropout is a rate in [0, 1); got {dropout}.")
    widths = (inputs, *hidden, 100, 40)
    layers: list[nn.Module] = []
    for width, next_width in pairwise(widths):
        layers += [nn.Linear(width, next_width), nn.ReLU()]
        if dropout > 0.0:
            layers.append(nn.Dropout(dropout))
    layers.append(nn.Linear(widths[-1], classes))
    return nn.Sequential(*layers)
