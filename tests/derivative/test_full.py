"""Jacobians of what no layer holds: each sample by itself, all of them mapped over at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import errbar
from data import draw
from errbar._derivative.full import jacobians, pulled_back
from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar._model.selection import select

CLASSES = 3
SIZES = (1, 2, 3, 4)


class Slopes(nn.Module):
    """A PReLU that no module holds; torch's rule for mapping its derivative confuses samples and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.3, -0.2, 0.7, 0.1]))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.prelu(x, self.slope))


def slopes() -> nn.Module:
    torch.manual_seed(0)
    return Slopes().double()


def by_autograd(model: Slopes, x: Tensor) -> Tensor:
    """∂g_m/∂slope_i = w_mi min(x_i, 0)."""
    return model.head.weight.detach() * x.clamp_max(0)[:, None]


@pytest.mark.parametrize("size", SIZES)
def test_as_many_samples_as_classes_are_differentiated_as_any_others(size: int) -> None:
    model, x = slopes(), draw(size, 4)
    network = Network(model)
    selection = select(network, (), last_layers=None, parameters=["slope"])
    expected = by_autograd(model, x)  # type: ignore[arg-type]
    torch.testing.assert_close(jacobians(network, selection, Batch((x,))).detach(), expected, rtol=1e-12, atol=1e-12)
    for count in SIZES:
        vectors = draw(size, count, CLASSES, seed=1)
        products = pulled_back(network, selection, Batch((x,)), vectors).detach()
        torch.testing.assert_close(products, vectors @ expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fisher", ["ggn", "sampled"])
def test_an_input_has_the_same_error_bars_in_a_batch_of_as_many_as_there_are_classes(fisher: str) -> None:
    model, x = slopes(), draw(CLASSES, 4)
    posterior = errbar.fit(model, [draw(30, 4, seed=1)], parameters="all", fisher=fisher)
    alone = torch.cat([posterior.logits(one).covariance for one in x.split(1)])
    torch.testing.assert_close(posterior.logits(x).covariance, alone, rtol=1e-10, atol=1e-12)
