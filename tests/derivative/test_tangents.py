"""Forward mode written out layer by layer, against the products with Jacobians."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import errbar
from errbar._derivative.forward import _written_out
from errbar._derivative.full import jacobians
from errbar._derivative.tangents import NoRuleError
from errbar._model.batch import Batch


class Residual(nn.Module):
    """Two ways that are added, multiplied and put together, with padding and pooling as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.deep = nn.Conv2d(4, 4, 3, groups=4)
        self.gate, self.head = nn.Conv2d(4, 4, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(F.pad(x, (1, 1, 0, 1)))))
        y = self.deep(F.pad(x, (1, 1, 1, 1)))
        y += x
        y = y * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1))) - 0.5 * x
        return self.head(torch.cat([y.mean((2, 3)), F.avg_pool2d(x, 2).flatten(2).sum(2)], 1))


class Sliced(nn.Module):
    """Every second pixel beside new channels, rows and columns that change places, and one row of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        narrow = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        return self.head(torch.tanh(narrow.transpose(-1, 2)[:, :, -1]).flatten(1)[:, 4:20])


def layers(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(*parts)


NETWORKS = {
    "residual": Residual,
    "sliced": Sliced,
    "in place": lambda: layers(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)
    ),
    "groups": lambda: layers(
        nn.Conv2d(2, 4, 3, groups=2, stride=2),
        nn.GELU(),
        nn.Conv2d(4, 6, 1, groups=2, bias=False),
        nn.BatchNorm2d(6),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3, bias=False),
    ),
    "linear": lambda: layers(
        nn.Flatten(), nn.Linear(40, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 5), nn.LeakyReLU(), nn.Linear(5, 3)
    ),
}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = NETWORKS[name]().double().eval()
    for part in model.modules():
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2.0)
            part.weight.data.normal_()
            part.bias.data.normal_()
    return model


def along(model: nn.Module, x: Tensor, parameters: str | list[str]) -> tuple[Tensor, Tensor]:
    """Derivatives along some directions: written out, and by the Jacobians."""
    task = errbar.fit(model, [x], parameters=parameters, structure="diag").information.task
    directions = torch.randn(3, task.selection.n_parameters, dtype=torch.float64)
    batch = Batch((x,))
    ours = _written_out(
        lambda values: task.network.logits(batch, values),
        task.selection.values(task.network.module),
        task.selection.unflatten(directions),
    )
    whole = jacobians(task.network, task.selection, batch).detach()
    return ours, torch.einsum("bmn,kn->kbm", whole, directions)


@pytest.mark.parametrize("parameters", ["all", "vectors"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("size", [1, 4])
def test_each_operation_is_differentiated_as_by_its_jacobian(name: str, parameters: str, size: int) -> None:
    ours, expected = along(network(name), torch.randn(size, 2, 5, 4, dtype=torch.float64), parameters)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("parameters", [["norm.weight"], ["norm.bias"], ["deep.bias"], ["head.weight"], ["gate"]])
def test_single_parameters_too(parameters: list[str]) -> None:
    ours, expected = along(network("residual"), torch.randn(3, 2, 5, 4, dtype=torch.float64), parameters)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


class Mixing(nn.Module):
    """What no rule covers: a weight that is also used outside of its layer, and samples in another order."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.scale = kind, nn.Linear(40, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.flatten(1))
        if self.kind == "product":
            return y * self.scale
        if self.kind == "weight":
            return y + self.layer.weight.norm()
        if self.kind == "part of the samples":
            return torch.cat([y[:1], y[1:]])
        return y.flip(0).flip(0)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("product", "a parameter outside of the layers"),
        ("weight", "vector_norm.* has no rule"),
        ("order", "flip.* has no rule"),
        ("part of the samples", "a part of the samples"),
    ],
)
def test_what_has_no_rule_says_so_and_is_left_to_the_general_way(kind: str, what: str) -> None:
    torch.manual_seed(0)
    model, x = Mixing(kind).double(), torch.randn(4, 2, 5, 4, dtype=torch.float64)
    with pytest.raises(NoRuleError, match=what):
        along(model, x, "all")
    posterior = errbar.fit(model, [x], parameters="all", prior=errbar.Prior(3.0))
    samples = 2_000
    ours, exact = posterior.drawn_logits(x, samples), posterior.logits(x)
    scale = exact.variance.sqrt()
    limit = 6 / samples**0.5 * scale[:, :, None] * scale[:, None, :]
    assert bool(((ours.covariance - exact.covariance).abs() <= limit).all())
