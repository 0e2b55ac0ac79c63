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


def test_gradient_of_a_gradient() -> None:
    posterior, x = _posterior(convolutional, 16, {"last_layers": 2}), draw(2, 16, seed=3)

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
    with pytest.raises(errbar.DataError, match="one batch of inputs"):
        posterior.predict(iter([draw(3, 5)]), differentiable=True)


def test_changed_weights_are_refused() -> None:
    posterior, x = _posterior(mlp, 5, {"last_layers": 1}), draw(3, 5).requires_grad_()
    with torch.no_grad():
        next(posterior.model.parameters()).add_(1.0)
    with pytest.raises(errbar.WeightsChangedError):
        posterior.logits(x, differentiable=True)
