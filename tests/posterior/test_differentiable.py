"""`differentiable=True`: the graph from the inputs to the logits and the prediction, against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import errbar
from data import draw
from networks import mlp, seeded

STEP = 1e-5


def convolutional() -> nn.Module:
    """Convolution, norms over batches and layers, and layers that are used once."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 6),
        nn.LayerNorm(6),
        nn.Softplus(),
        nn.Linear(6, 4),
    )


class _Shifted(nn.Module):
    """A parameter of its own, which belongs to no layer, in front of a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(5))
        self.norm, self.out = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(x + self.shift)
        return self.out(torch.tanh(hidden))


FITS: list[tuple[Callable[[], nn.Module], int, dict[str, Any]]] = [
    (convolutional, 16, {"last_layers": 1}),
    (convolutional, 16, {"last_layers": 1, "fisher": "eta"}),
    (convolutional, 16, {"last_layers": 1, "structure": "kron"}),
    (convolutional, 16, {"last_layers": 2, "structure": "block"}),
    (convolutional, 16, {"parameters": "all"}),
    (convolutional, 16, {"parameters": "all", "structure": "kron"}),
    (convolutional, 16, {"parameters": "all", "structure": "diag"}),
    (convolutional, 16, {"parameters": "all", "structure": "lowrank", "rank": 10}),
    (convolutional, 16, {"parameters": "all", "structure": {"9": "dense", "*": "kron"}}),
    (mlp, 5, {"last_layers": 2}),
    (_Shifted, 5, {"parameters": "all"}),
    (_Shifted, 5, {"parameters": "all", "structure": "lowrank", "rank": 10}),
    (mlp, 5, {"last_layers": 1, "outputs": "labels"}),
    (convolutional, 16, {"parameters": "all", "structure": "kron", "outputs": "labels"}),
]


def _posterior(make: Callable[[], nn.Module], inputs: int, options: dict[str, Any]) -> errbar.Posterior:
    posterior = errbar.fit(seeded(make), [draw(20, inputs)], prior=errbar.Prior(1.0), **options)
    return posterior.with_calibration(temperature=1.3, covariance_scale=0.7, softening=0.2)


def _require_derivative(value: Callable[[Tensor], Tensor], x: Tensor, total: Tensor, given: Tensor) -> None:
    """The gradient of `total`, along one direction, against the central difference of `value` without a graph."""
    direction = draw(*x.shape, seed=9)
    (gradient,) = torch.autograd.grad(total, given)
    difference = float(value(x + STEP * direction) - value(x - STEP * direction)) / (2 * STEP)
    assert abs(float((gradient * direction).sum()) - difference) <= 1e-6 * abs(difference)


@pytest.mark.parametrize(("make", "inputs", "options"), FITS)
def test_gradients_are_those_of_finite_differences(
    make: Callable[[], nn.Module], inputs: int, options: dict[str, Any]
) -> None:
    # More inputs than 8, so that prediction takes the way of whole batches.
    posterior, x = _posterior(make, inputs, options), draw(9, inputs, seed=3)
    given = x.clone().requires_grad_()
    gaussian, plain = posterior.logits(given, differentiable=True), posterior.logits(x)
    assert torch.allclose(gaussian.mean, plain.mean, rtol=1e-12)
    assert torch.allclose(gaussian.covariance, plain.covariance, rtol=1e-9, atol=1e-12)
    weights, vector = draw(*plain.covariance.shape, seed=5), draw(*plain.mean.shape, seed=6)

    def of_logits(logits: errbar.LogitGaussian) -> Tensor:
        return (logits.covariance * weights).sum() + (logits.mean * vector).sum()

    def of_prediction(prediction: errbar.Prediction) -> Tensor:
        return (
            (prediction.pmf * vector).sum()
            + (prediction.covariance * weights).sum()
            + prediction.mutual_information.sum()
            + prediction.entropy.sum()
            + prediction.std.sum()
        )

    _require_derivative(lambda z: of_logits(posterior.logits(z)), x, of_logits(gaussian), given)
    prediction = posterior.predict(given, samples=40, differentiable=True)
    assert torch.allclose(prediction.pmf, posterior.predict(x, samples=40).pmf, rtol=1e-9)
    value = of_prediction(prediction)
    _require_derivative(lambda z: of_prediction(posterior.predict(z, samples=40)), x, value, given)


class _Tagger(nn.Module):
    """Tokens that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, 6)
        self.attention, self.norm = nn.MultiheadAttention(6, 2, batch_first=True), nn.LayerNorm(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.into(x))
        logits: Tensor = self.head(self.norm(hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]))
        return logits


def _segmenter() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.GLU(1), nn.InstanceNorm2d(3), nn.Conv2d(3, 3, 1)
    )


POSITIONS: list[tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = [
    (_Tagger, (5, 3), {"last_layers": 1}),
    (_Tagger, (5, 3), {"last_layers": 1, "fisher": "eta", "structure": "kron"}),
    (_Tagger, (5, 3), {"parameters": "all", "fisher": "sampled"}),
    (_segmenter, (1, 4, 5), {"last_layers": 1, "structure": "diag"}),
    (_segmenter, (1, 4, 5), {"parameters": "vectors", "fisher": "sampled"}),
    (_segmenter, (1, 4, 5), {"parameters": "all", "fisher": "sampled", "structure": "kron"}),
]


@pytest.mark.parametrize("softening", [0.0, 0.2])
@pytest.mark.parametrize(("make", "shape", "options"), POSITIONS)
def test_gradients_of_positions_are_those_of_finite_differences(
    make: Callable[[], nn.Module], shape: tuple[int, ...], options: dict[str, Any], softening: float
) -> None:
    model = seeded(make)
    posterior = errbar.fit(model, [draw(6, *shape)], prior=errbar.Prior(1.0), outputs="positions", **options)
    posterior = posterior.with_calibration(temperature=1.3, covariance_scale=0.7, softening=softening)
    x = draw(3, *shape, seed=3)
    given = x.clone().requires_grad_()
    with torch.no_grad():  # as if by mistake
        logits, prediction = (
            posterior.logits(given, differentiable=True),
            posterior.predict(given, 40, differentiable=True),
        )
    plain, expected = posterior.logits(x), posterior.predict(x, 40)
    assert torch.allclose(logits.covariance, plain.covariance, rtol=1e-9, atol=1e-12)
    assert torch.allclose(prediction.pmf, expected.pmf, rtol=1e-9)
    weights, vector = draw(*plain.covariance.shape, seed=5), draw(*plain.mean.shape, seed=6)

    def of_logits(value: errbar.LogitGaussian) -> Tensor:
        return (value.covariance * weights).sum() + (value.mean * vector).sum() + value.variance.square().sum()

    def of_prediction(value: errbar.Prediction) -> Tensor:
        total = (value.pmf * vector).sum() + (value.covariance * weights).sum()
        return total + value.mutual_information.sum() + value.entropy.sum() + value.std.sum()

    _require_derivative(lambda z: of_logits(posterior.logits(z)), x, of_logits(logits), given)
    value = of_prediction(prediction)
    _require_derivative(lambda z: of_prediction(posterior.predict(z, 40)), x, value, given)
    assert not posterior.predict(given, 40).pmf.requires_grad
    assert not posterior.logits(given).mean.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_of_positions_are_those_of_the_formula() -> None:
    """P^g = (I ⊗ h̃)ᵀ P (I ⊗ h̃) of each token, h̃ = (h, 1), written out for autograd."""
    model = seeded(_Tagger)
    posterior = errbar.fit(model, [draw(6, 5, 3)], last_layers=1, outputs="positions").with_calibration(temperature=2.0)
    P = posterior.covariance()
    x = draw(2, 5, 3, seed=3).requires_grad_()
    assert isinstance(model, _Tagger)
    hidden = torch.tanh(model.into(x))
    hidden = hidden + model.attention(hidden, hidden, hidden, need_weights=False)[0]
    centred = hidden - hidden.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + model.norm.eps).sqrt()
    features = normal * model.norm.weight + model.norm.bias
    J = torch.cat([torch.kron(torch.eye(4), features.reshape(10, 1, 6)), torch.eye(4).expand(10, 4, 4)], 2)
    expected = (J @ P @ J.mT / 4).reshape(2, 5, 4, 4)
    actual = posterior.logits(x, differentiable=True)
    assert torch.allclose(actual.covariance, expected, rtol=1e-9)
    weights, vector = draw(2, 5, 4, 4, seed=5), draw(2, 5, 4, seed=6)
    totals = [
        (covariance * weights).sum() + (mean * vector).sum()
        for covariance, mean in ((actual.covariance, actual.mean), (expected, model.head(features) / 2))
    ]
    gradients = [torch.autograd.grad(total, x, retain_graph=True)[0] for total in totals]
    assert torch.allclose(*gradients, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(("make", "inputs"), [(convolutional, 16), (_Shifted, 5)])
def test_gradient_of_a_gradient(make: Callable[[], nn.Module], inputs: int) -> None:
    # A derivative of P^g by parameters in front of a layer norm, differentiated twice, is the third of that norm.
    posterior, x = _posterior(make, inputs, {"parameters": "all"}), draw(2, inputs, seed=3)

    def slope(z: Tensor) -> Tensor:
        given = z.clone().requires_grad_()
        total = posterior.logits(given, differentiable=True).variance.sum()
        return torch.autograd.grad(total, given)[0].square().sum()

    given = x.clone().requires_grad_()
    total = posterior.logits(given, differentiable=True).variance.sum()
    (gradient,) = torch.autograd.grad(total, given, create_graph=True)
    _require_derivative(slope, x, gradient.square().sum(), given)


def test_logits_of_the_top_classes() -> None:
    posterior, x = _posterior(convolutional, 16, {"last_layers": 2}).uncalibrated(), draw(3, 16, seed=3)
    given = x.clone().requires_grad_()
    total = posterior.logits(given, top=2, differentiable=True).covariance.sum()
    _require_derivative(lambda z: posterior.logits(z, top=2).covariance.sum(), x, total, given)


def test_an_x_that_was_computed_and_inputs_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(5, 3)

        def forward(self, pixels: Tensor) -> Tensor:
            result: Tensor = self.out(pixels)
            return result

    posterior = errbar.fit(seeded(Named), [{"pixels": draw(20, 5)}], last_layers=1)
    start = draw(3, 5, seed=3).requires_grad_()
    posterior.predict({"pixels": 2 * start}, differentiable=True).mutual_information.sum().backward()
    assert start.grad is not None
    assert bool((start.grad != 0).all())


def test_the_model_keeps_no_gradients_and_the_default_no_graph() -> None:
    model = seeded(mlp, dtype=torch.float32)
    posterior = errbar.fit(model, [draw(20, 5).float()], last_layers=2)
    x = draw(3, 5, seed=3).float().requires_grad_()
    for value in (posterior.logits(x).mean, posterior.logits(x).covariance, posterior.predict(x).pmf):
        assert not value.requires_grad
    assert not posterior.predict(x).mutual_information.requires_grad
    # As if by mistake: what the user has switched off does not cut the graph.
    with torch.no_grad():
        prediction = posterior.predict(x, differentiable=True)
    prediction.mutual_information.sum().backward()
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_inputs_without_a_gradient_are_refused() -> None:
    posterior = _posterior(mlp, 5, {"last_layers": 1})
    for call in (posterior.logits, posterior.predict):
        with pytest.raises(errbar.ArgumentError, match=r"none requires a gradient; expected x.requires_grad_\(\)"):
            call(draw(3, 5), differentiable=True)  # type: ignore[operator]
    tagger = errbar.fit(seeded(_Tagger), [draw(6, 5, 3)], last_layers=1, outputs="positions")
    with pytest.raises(errbar.ArgumentError, match="none requires a gradient"):
        tagger.logits(draw(3, 5, 3), differentiable=True)
    with pytest.raises(errbar.DataError, match="one batch of inputs"):
        posterior.predict(iter([draw(3, 5)]), differentiable=True)


def test_changed_weights_are_refused() -> None:
    posterior, x = _posterior(mlp, 5, {"last_layers": 1}), draw(3, 5).requires_grad_()
    with torch.no_grad():
        next(posterior.model.parameters()).add_(1.0)
    with pytest.raises(errbar.WeightsChangedError, match="weights"):
        posterior.logits(x, differentiable=True)
