"""Convolutions in groups, and those that pad by themselves, give what autograd says, one sample and logit at a time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import errbar
from data import draw
from errbar._curvature.scores import ScoreDraws
from errbar._derivative.layerwise import LayerwiseRoute
from errbar._derivative.trace import UnlikeFirstBatchError
from errbar._model.batch import to_batch
from errbar._model.network import Network
from errbar._model.selection import select


class Same(nn.Conv2d):
    """Pads to as many places as there are steps, the odd one at the end, as other frameworks do."""

    def forward(self, x: Tensor) -> Tensor:
        around = []
        for size, kernel, stride in zip(x.shape[:-3:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            missing = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            around += [missing // 2, missing - missing // 2]
        return F.conv2d(F.pad(x, around), self.weight, self.bias, self.stride, 0, 1, self.groups)


class Named(nn.Conv2d):
    """Gives what it has by name, and leaves the padding to the convolution."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, bias=self.bias, weight=self.weight, padding=(1, 2), groups=self.groups)


class Standardised(nn.Conv2d):
    """The weight of the convolution is not its own."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, 1, 1, self.groups)


class Active(nn.Conv2d):
    """What it returns is not what the convolution returns, here for some inputs only."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x) + 50) - 50


class Twice(nn.Conv2d):
    """Two convolutions with one weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, self.weight, self.bias, padding=1), self.weight, self.bias, padding=1)


class Pair(nn.Conv2d):
    """Returns more than a tensor."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class First(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        return pair[0]


def seeded(*layers: nn.Module, outputs: int) -> nn.Module:
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(outputs, 3)).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1 / max(1, parameter[0].numel()) ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
    return model


def of(layer: nn.Module, outputs: int) -> nn.Module:
    return seeded(nn.Conv2d(2, 4, 1), nn.ReLU(inplace=True), layer, nn.ReLU(inplace=True), outputs=outputs)


# model, shape of an input, and how many convolutions are taken apart with factors and in groups
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "each channel alone": (lambda: of(nn.Conv2d(4, 4, 3, groups=4), 36), (2, 5, 5), 1, 1),
    "two for each channel": (lambda: of(nn.Conv2d(4, 8, 3, 2, 1, groups=4, bias=False), 72), (2, 5, 5), 1, 1),
    "two groups": (lambda: of(nn.Conv2d(4, 6, (3, 2), (1, 2), groups=2), 36), (2, 5, 5), 1, 1),
    "dilated": (lambda: of(nn.Conv2d(4, 4, 2, dilation=2, padding=1, groups=4), 100), (2, 5, 5), 1, 1),
    "circular": (lambda: of(nn.Conv2d(4, 4, 3, padding=1, groups=2, padding_mode="circular"), 100), (2, 5, 5), 1, 1),
    "sequences": (lambda: seeded(nn.Conv1d(4, 4, 3, groups=2), nn.Tanh(), outputs=12), (4, 5), 0, 1),
    "first": (lambda: seeded(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(inplace=True), outputs=36), (2, 5, 5), 0, 1),
    "same": (lambda: of(Same(4, 3, 3, 2), 27), (2, 6, 5), 2, 0),
    "same, in groups": (lambda: of(Same(4, 4, (3, 5), 2, groups=4), 36), (2, 6, 5), 1, 1),
    "named": (lambda: of(Named(4, 3, (3, 5)), 75), (2, 5, 5), 2, 0),
    "another weight": (lambda: of(Standardised(4, 3, 3), 75), (2, 5, 5), 1, 0),
    "activated": (lambda: of(Active(4, 3, 3), 27), (2, 5, 5), 1, 0),
    "twice": (lambda: of(Twice(4, 4, 3, bias=False), 100), (2, 5, 5), 1, 0),
    "a pair": (lambda: seeded(Pair(2, 3, 3), First(), nn.Tanh(), outputs=27), (2, 5, 5), 0, 0),
}


def by_autograd(model: nn.Module, x: Tensor) -> Tensor:
    rows = []
    for sample in x:
        logits = model(sample[None])[0]
        gradients = [torch.autograd.grad(logit, list(model.parameters()), retain_graph=True) for logit in logits]
        rows.append(torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in gradients]))
    return torch.stack(rows)


def planned(model: nn.Module, x: Tensor) -> tuple[Network, LayerwiseRoute]:
    network = Network(model)
    selection = select(network, (), last_layers=None, parameters="all")
    return network, LayerwiseRoute.plan(network, selection, to_batch(x))


@pytest.mark.parametrize("case", CASES)
def test_jacobians_are_those_of_autograd(case: str) -> None:
    make, shape, factors, groups = CASES[case]
    model, x = make(), draw(5, *shape)
    network, route = planned(model, x)
    assert len([layer for layer in route.layers if layer.patches is not None]) == factors
    assert len(route.grouped) == groups
    logits, derivative = route.differentiate(network, to_batch(x))
    truth = by_autograd(model, x)
    assert torch.equal(logits, model(x))
    assert (derivative.jacobian() - truth).abs().max() <= 1e-12 * truth.abs().max()


@pytest.mark.parametrize("case", ["each channel alone", "same, in groups", "another weight"])
@pytest.mark.parametrize("structure", ["diag", "block", "kron"])
@pytest.mark.parametrize("fisher", ["ggn", "sampled"])
def test_the_information_on_the_diagonal(case: str, structure: str, fisher: str) -> None:
    """Σ_n Σ_k (J_nᵀ s_k)²: of parameters without factors in all structures, of all others in `diag` and `block`."""
    make, shape, _, _ = CASES[case]
    model, x = make(), draw(7, *shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.StructureNotice)
        information = errbar.collect(
            model, [x[:3], x[3:]], parameters="all", structure=structure, fisher=fisher, seed=3
        )
    J, f = by_autograd(model, x), torch.softmax(model(x), 1).detach()
    if fisher == "ggn":
        weight = torch.diag_embed(f) - f[:, :, None] * f[:, None, :]
    else:
        assert information.task.scores is not None
        scores = information.task.scores(to_batch(x), model(x).detach())[0]
        weight = scores[:, :, None] * scores[:, None, :]
    truth = torch.einsum("nmi,nml,nli->i", J, weight, J)
    where: Any = slice(None)
    if structure == "kron":
        spans = planned(model, x)[1].rest_spans
        where = spans.positions(x.device) if len(spans) else slice(0, 0)
    torch.testing.assert_close(information.dense().diagonal()[where], truth[where], rtol=1e-10, atol=1e-14)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "pictures": lambda: of(nn.BatchNorm2d(4), 100),
    "without shifts": lambda: of(nn.BatchNorm2d(4), 100),
    "scales and shifts of another size": lambda: of(nn.GroupNorm(2, 4), 100),
    "vectors": lambda: seeded(nn.Flatten(), nn.Linear(50, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), outputs=6),
    "first": lambda: seeded(nn.BatchNorm2d(2), nn.ReLU(inplace=True), outputs=50),
}


@pytest.mark.parametrize("case", NORMS)
def test_norms_by_one_combination_of_the_logits(case: str, no_jacobians: None) -> None:
    model, x = NORMS[case](), draw(5, 2, 5, 5)
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean, part.running_var = draw(part.num_features), draw(part.num_features).square() + 0.5
    network = Network(model)
    names = [name for name, value in model.named_parameters() if value.ndim == 1]
    if case == "without shifts":
        names.remove("2.bias")
    selection = select(network, (), last_layers=None, parameters=names)
    route = LayerwiseRoute.plan(network, selection, to_batch(x))
    draws = ScoreDraws(1, 0)
    logits, derivative = route.differentiate(network, to_batch(x), draws)
    every = dict(
        zip(
            dict(model.named_parameters()),
            by_autograd(model, x).split([value.numel() for value in model.parameters()], 2),
            strict=True,
        )
    )
    truth = torch.einsum("nm,nmi->ni", draws(to_batch(x), logits)[0], torch.cat([every[n] for n in selection.names], 2))
    assert torch.equal(logits, model(x))
    assert (derivative.jacobian()[:, 0] - truth).abs().max() <= 1e-12 * truth.abs().max()


@pytest.mark.parametrize("case", ["same", "same, in groups"])
def test_the_size_of_the_pictures_may_change(case: str) -> None:
    """What they pad follows from the size: it is seen in each pass."""
    make, shape, _, _ = CASES[case]
    body = list(make())[:-2]
    model = seeded(*body, nn.AdaptiveAvgPool2d(2), outputs=4 * (3 if case == "same" else 4))
    network, route = planned(model, draw(5, *shape))
    x = draw(4, 2, 9, 8, seed=1)
    truth = by_autograd(model, x)
    assert (route.differentiate(network, to_batch(x))[1].jacobian() - truth).abs().max() <= 1e-12 * truth.abs().max()


class Changing(nn.Conv2d):
    """Something else for batches of more than four samples."""

    def forward(self, x: Tensor) -> Tensor:
        output = F.conv2d(x, self.weight, self.bias)
        return output if len(x) <= 4 else 2 * output


def test_a_later_batch_that_is_computed_in_another_way_is_noticed() -> None:
    network, route = planned(of(Changing(4, 3, 3), 27), draw(4, 2, 5, 5))
    assert len(route.layers) == 3
    with pytest.raises(UnlikeFirstBatchError, match="Layer '2' ran with one input"):
        route.differentiate(network, to_batch(draw(6, 2, 5, 5)))


def test_kron_says_which_convolutions_have_no_factors() -> None:
    """Those that pad by themselves have; those in groups, and those that only look like convolutions, have not."""
    x = draw(4, 2, 6, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", errbar.StructureNotice)
        errbar.collect(CASES["same"][0](), [x], parameters="all", structure="kron")
    for case in ("same, in groups", "another weight"):
        model = CASES[case][0]()
        if case == "another weight":
            x = x[:, :, :5]
        with pytest.warns(errbar.StructureNotice, match="treats '2' as 'diag' does"):
            errbar.collect(model, [x], parameters="all", structure="kron")
        (option,) = errbar.plan(model, x, parameters="all", structure="kron").options
        assert option.diagonal == ("2",)


def test_files_keep_convolutions_in_groups(tmp_path: Any) -> None:
    model, x = CASES["same, in groups"][0](), draw(5, 2, 6, 5)
    posterior = errbar.fit(model, [x], parameters="all", structure="diag", prior=errbar.Prior(1.0))
    posterior.save(tmp_path / "posterior")
    loaded = errbar.load(tmp_path / "posterior", model)
    assert isinstance(loaded, errbar.Posterior)
    route = loaded.information.task.route
    assert route is not None
    assert route.by_layer is not None
    assert posterior.information.task.route == route
    assert torch.equal(loaded.logits(x).covariance, posterior.logits(x).covariance)
