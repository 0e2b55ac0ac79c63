"""Draws of the parameters that are pushed forward, against J P Jᵀ."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar._derivative.forward import pushed_forward
from errbar._derivative.full import jacobians
from errbar._model.batch import Batch
from errbar._posterior import pushing
from errbar._posterior.pushing import pushed_deviations

CLASSES = 4


class Attention(nn.Module):
    """A transformer layer over tokens, whose fused kernels have no forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


class Branching(nn.Module):
    """A branch that depends on the data, which cannot be mapped over directions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.head(torch.tanh(hidden) if bool((hidden < 1e9).all()) else hidden)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, CLASSES)
    )


def images() -> Tensor:
    return torch.randn(6, 1, 3, 4, dtype=torch.float64)


CASES = {
    "convolutional": (convolutional, images),
    "attention": (Attention, lambda: torch.randint(0, 11, (6, 5))),
    "recurrent": (Recurrent, lambda: torch.randn(6, 4, 3, dtype=torch.float64)),
    "branching": (Branching, lambda: torch.randn(6, 6, dtype=torch.float64)),
}


def case(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, draw = CASES[name]
    return build().double().eval(), draw()


@pytest.mark.parametrize("name", CASES)
def test_pushing_forward_is_the_product_with_the_jacobian(name: str) -> None:
    model, x = case(name)
    task = errbar.fit(model, [x], parameters="all").information.task
    directions = torch.randn(5, task.selection.n_parameters, dtype=torch.float64)
    with torch.no_grad():
        pushed = pushed_forward(task.network, task.selection, Batch((x,)), directions)
    expected = torch.einsum("bmn,kn->kbm", jacobians(task.network, task.selection, Batch((x,))).detach(), directions)
    torch.testing.assert_close(pushed, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("structure", ["dense", "block", "kron", "diag", "lowrank"])
def test_pushed_draws_have_the_moments_of_the_delta_method(structure: str) -> None:
    model, x = case("convolutional")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.StructureNotice)
        posterior = errbar.fit(model, [x], parameters="all", structure=structure, prior=errbar.Prior(2.0))
    samples = 20_000
    task = posterior.information.task
    deviations = pushed_deviations(task, posterior.factor, Batch((x,)), samples, seed=0)
    exact = posterior.logits(x).covariance
    measured = deviations @ deviations.mT / samples
    scale = exact.diagonal(dim1=1, dim2=2).sqrt()
    limit = 6 / samples**0.5
    assert bool(((measured - exact).abs() <= limit * scale[:, :, None] * scale[:, None, :]).all())
    assert bool((deviations.mean(2).abs() <= limit * scale).all())


def test_how_many_draws_are_made_at_a_time_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = case("convolutional")
    posterior = errbar.fit(model, [x], parameters="all")
    task = posterior.information.task
    whole = pushed_deviations(task, posterior.factor, Batch((x,)), 20, seed=3)
    most = 0
    original = pushing.pushed_forward

    def counted(network: object, selection: object, batch: object, directions: Tensor) -> Tensor:
        nonlocal most
        most = max(most, len(directions))
        return original(network, selection, batch, directions)  # type: ignore[arg-type]

    monkeypatch.setattr(pushing, "pushed_forward", counted)
    monkeypatch.setattr(pushing, "PUSHED_BYTES", {"cpu": 3 * 8 * task.selection.n_parameters})
    parts = pushed_deviations(task, posterior.factor, Batch((x[:1],)), 20, seed=3)
    assert most <= 3
    torch.testing.assert_close(parts, whole[:1], rtol=1e-10, atol=1e-12)


def many_classes() -> tuple[errbar.Posterior, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 200)).double()
    x = torch.randn(30, 5, dtype=torch.float64)
    posterior = errbar.fit(
        model, [x], parameters="vectors", fisher="sampled", structure="diag", prior=errbar.Prior(3.0)
    )
    return posterior.with_calibration(temperature=1.4, covariance_scale=0.6), x[:4]


def test_predictions_by_pushing_and_by_the_covariance_of_logits_agree() -> None:
    posterior, x = many_classes()
    assert not pushing.keeps_draws(posterior.information.task, 400)
    assert pushing.keeps_draws(posterior.information.task, 200)
    pushed = posterior.predict(x, samples=200)
    exact = posterior.predict(x, samples=20_000)
    limit = 6 * exact.std / 200**0.5
    assert bool(((pushed.pmf - exact.pmf).abs() <= limit + 1e-9).all())
    torch.testing.assert_close(pushed.std.sum(1), exact.std.sum(1), rtol=0.2, atol=0)
    torch.testing.assert_close(pushed.mutual_information, exact.mutual_information, rtol=0.3, atol=1e-4)
    assert pushed.covariance.shape == (4, 200, 200)


def test_pushed_predictions_do_not_depend_on_the_batch_and_take_streams() -> None:
    posterior, x = many_classes()
    together = posterior.predict(x, samples=50).pmf
    torch.testing.assert_close(posterior.predict(x[1:2], samples=50).pmf, together[1:2], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(posterior.predict(iter(x.split(3)), samples=50).pmf, together, rtol=1e-10, atol=1e-12)


def test_without_covariance_a_pushed_prediction_is_softmax() -> None:
    posterior, x = many_classes()
    certain = posterior.with_calibration(covariance_scale=0.0)
    expected = torch.softmax(certain.logits(x).mean, 1)
    torch.testing.assert_close(certain.predict(x, samples=20).pmf, expected)
