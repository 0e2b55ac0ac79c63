"""`parameters="vectors"`: the last layer, and every parameter of at most one dimension."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import errbar


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 2)
        self.norm = nn.BatchNorm2d(2)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(8, 3)
        self.norm.weight.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(self.norm(self.convolution(x)).flatten(1))


def test_vectors_are_the_last_layer_and_all_of_one_dimension_or_none() -> None:
    torch.manual_seed(0)
    model = Network().double()
    x = torch.randn(20, 1, 3, 3, dtype=torch.float64)
    posterior = errbar.fit(model, [x], parameters="vectors")
    names = ("scale", "convolution.bias", "norm.weight", "norm.bias", "head.weight", "head.bias")
    assert posterior.information.parameter_names == names
    by_name = errbar.fit(model, [x], parameters=list(names))
    torch.testing.assert_close(posterior.predict(x).pmf, by_name.predict(x).pmf, rtol=0, atol=0)
