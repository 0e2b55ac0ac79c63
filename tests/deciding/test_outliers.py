"""Scores for inputs that the training data say little about, and for labels that are hard to believe."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import errbar
from data import draw, drawn_labels
from errbar import Prior, metrics

PRIOR = 0.5


def train(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    """The posterior mode under N(0, 1/PRIOR): all gradients vanish there."""
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        value = nn.functional.cross_entropy(model(x), y, reduction="sum") + PRIOR / 2 * penalty
        value.backward()
        return value

    optimiser.step(loss)
    return model


@functools.cache
def blobs() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Three clusters, 10 of 150 labels flipped: a trained model, inputs, labels, which are flipped."""
    centres = torch.tensor([[3.0, 0.0], [-2.0, 2.5], [-2.0, -2.5]], dtype=torch.float64)
    truth = torch.arange(150) % 3
    x = centres[truth] + 0.7 * draw(150, 2, seed=1)
    flipped = torch.zeros(150, dtype=torch.bool)
    flipped[torch.randperm(150, generator=torch.Generator().manual_seed(2))[:10]] = True
    y = torch.where(flipped, (truth + 1) % 3, truth)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return train(model, x, y), x, y, flipped


@functools.cache
def blobs_posterior(fisher: str = "ggn") -> errbar.Posterior:
    model, x, y, _ = blobs()
    return errbar.fit(model, [(x, y)], last_layers=2, prior=Prior(PRIOR), fisher=fisher)


def test_scores_come_in_the_order_and_number_of_the_data() -> None:
    _, x, y, _ = blobs()
    posterior = blobs_posterior()
    whole = errbar.outlier_scores(posterior, [(x, y)], samples=200)
    parts = errbar.outlier_scores(posterior, [(x[i : i + 40], y[i : i + 40]) for i in range(0, 150, 40)], samples=200)
    for name in ("mutual_information", "contrast_variance", "label_suspicion"):
        scores = getattr(whole, name)
        assert scores.shape == (150,)
        assert scores.dtype == torch.float64
        assert bool((scores >= 0).all())
        torch.testing.assert_close(getattr(parts, name), scores, rtol=1e-6, atol=1e-9)
        order = errbar.rank_outliers(posterior, [(x, y)], by=name, samples=200)
        assert torch.equal(order, whole.ranking(name))
        assert sorted(order.tolist()) == list(range(150))
        assert bool((scores[order].diff() <= 0).all())


def test_scores_are_those_of_the_prediction() -> None:
    _, x, y, _ = blobs()
    posterior = blobs_posterior()
    scores = errbar.outlier_scores(posterior, [(x, y)], samples=300, seed=4, leave_out=False)
    prediction = posterior.predict(x, samples=300, seed=4)
    torch.testing.assert_close(scores.mutual_information, prediction.mutual_information)
    torch.testing.assert_close(scores.label_suspicion, -prediction.pmf[torch.arange(150), y].log())
    P = posterior.logits(x).centered().covariance
    torch.testing.assert_close(scores.contrast_variance, P.diagonal(dim1=1, dim2=2).sum(1) / 2)


def test_labels_are_needed_for_their_own_score_only() -> None:
    _, x, _, _ = blobs()
    scores = errbar.outlier_scores(blobs_posterior(), [x], samples=50)
    assert scores.label_suspicion is None
    assert scores.mutual_information.shape == (150,)


def test_an_input_far_away_scores_higher_than_the_training_inputs() -> None:
    """Along a decision boundary, far from all data: the class there depends on which parameters are right."""
    _, x, _, _ = blobs()
    posterior = blobs_posterior()
    known = errbar.outlier_scores(posterior, [x], samples=500)
    direction = torch.tensor([[1.0, 1.6]], dtype=torch.float64)
    far = errbar.outlier_scores(posterior, [8 * direction, -8 * direction], samples=500)
    assert float(far.contrast_variance.min()) > float(known.contrast_variance.quantile(0.95))
    assert float(far.mutual_information.max()) > float(known.mutual_information.quantile(0.95))
    mixed = torch.cat([x[:20], 8 * direction, x[20:40]])
    ranking = errbar.rank_outliers(posterior, [mixed], by="contrast_variance", samples=200)
    assert 20 in ranking[:3].tolist()


@pytest.mark.parametrize("fisher", ["ggn", "eta"])
def test_flipped_labels_are_suspicious(fisher: str) -> None:
    _, x, y, flipped = blobs()
    posterior = blobs_posterior(fisher)
    scores = errbar.outlier_scores(posterior, [(x, y)], samples=500)
    assert scores.label_suspicion is not None
    assert metrics.auroc(scores.label_suspicion, flipped) > 0.9


def test_held_out_data_can_be_scored() -> None:
    """With the default, which takes data to be part of the fit: an answer, or an error that says what to do."""
    _, x, y, _ = blobs()
    posterior = blobs_posterior().with_prior(Prior(1e-3))
    far, labels = 4 * x[:20] + 1.0, y[:20]
    scores = errbar.outlier_scores(posterior, [(far, labels)], samples=50, leave_out=False)
    assert scores.label_suspicion is not None
    assert bool(scores.label_suspicion.isfinite().all())
    try:
        errbar.outlier_scores(posterior, [(far, labels)], samples=50)
    except errbar.ErrbarError as error:
        message = str(error)
    else:
        message = "leave_out"
    assert "leave_out" in message


def newton_without(model: nn.Linear, x: Tensor, y: Tensor, index: int) -> Tensor:
    """One Newton step of the log-posterior without one sample, from θ̂, by autograd and an explicit Hessian."""
    keep = torch.arange(len(x)) != index
    theta = torch.cat([model.weight.reshape(-1), model.bias]).detach()

    def loss(vector: Tensor) -> Tensor:
        weight, bias = vector[: model.weight.numel()].reshape(model.weight.shape), vector[model.weight.numel() :]
        penalty = PRIOR / 2 * vector.square().sum()
        return nn.functional.cross_entropy(x[keep] @ weight.T + bias, y[keep], reduction="sum") + penalty

    gradient = torch.func.grad(loss)(theta)
    hessian = torch.func.jacrev(torch.func.grad(loss))(theta)
    moved = theta - torch.linalg.solve(hessian, gradient)
    weight, bias = moved[: model.weight.numel()].reshape(model.weight.shape), moved[model.weight.numel() :]
    return x[index : index + 1] @ weight.T + bias


@functools.cache
def linear_problem() -> tuple[nn.Linear, Tensor, Tensor]:
    """Multinomial logistic regression: the Hessian is the Fisher information, and the delta method is exact."""
    x = draw(25, 3, seed=7)
    y = drawn_labels(torch.softmax(2 * x, 1), seed=8)
    torch.manual_seed(9)
    model = nn.Linear(3, 3, dtype=torch.float64)
    train(model, x, y)
    return model, x, y


@pytest.mark.parametrize("calibration", [(1.0, 1.0), (1.7, 0.4)])
def test_suspicion_is_that_of_a_fit_without_the_sample(calibration: tuple[float, float]) -> None:
    model, x, y = linear_problem()
    posterior = errbar.fit(model, [(x, y)], last_layers=1, prior=Prior(PRIOR))
    temperature, scale = calibration
    if calibration != (1.0, 1.0):
        posterior = posterior.with_calibration(temperature=temperature, covariance_scale=scale)
    scores = errbar.outlier_scores(posterior, [(x, y)], samples=400, seed=3)
    assert scores.label_suspicion is not None
    for index in range(len(x)):
        keep = torch.arange(len(x)) != index
        rest = errbar.fit(model, [(x[keep], y[keep])], last_layers=1, prior=Prior(PRIOR))
        forgotten = posterior.forget([(x[index : index + 1], y[index : index + 1])])
        torch.testing.assert_close(forgotten.covariance(), rest.covariance(), rtol=1e-8, atol=1e-10)
        covariance = rest.logits(x[index : index + 1]).covariance
        mean = newton_without(model, x, y, index)
        without = errbar.LogitGaussian(mean, covariance).tempered(temperature).scaled(scale)
        expected = -without.predict(400, 3).pmf[0, y[index]].log()
        assert float(scores.label_suspicion[index]) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("fisher", ["ggn", "eta"])
def test_leaving_a_sample_out_takes_out_the_information_that_the_fit_put_in(fisher: str) -> None:
    """With either Fisher: P without the sample is that of `forget`, and the mean moves by P₋ (f − e_y)."""
    model, x, y = linear_problem()
    posterior = errbar.fit(model, [(x, y)], last_layers=1, prior=Prior(PRIOR), fisher=fisher)
    scores = errbar.outlier_scores(posterior, [(x, y)], samples=400, seed=3)
    assert scores.label_suspicion is not None
    for index in range(len(x)):
        one = slice(index, index + 1)
        plain, forgotten = posterior.logits(x[one]), posterior.forget([(x[one], y[one])]).logits(x[one])
        error = torch.softmax(plain.mean, 1) - nn.functional.one_hot(y[one], 3)
        mean = plain.mean + (forgotten.covariance @ error[..., None])[..., 0]
        expected = -errbar.LogitGaussian(mean, forgotten.covariance).predict(400, 3).pmf[0, y[index]].log()
        assert float(scores.label_suspicion[index]) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("leave_out", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_labels_that_the_model_holds_impossible_have_finite_suspicions(dtype: torch.dtype, leave_out: bool) -> None:
    """Logits of 0 and 1000: the PMF of a wrong label is zero in any precision, and its logarithm is −1000 or so."""
    model = nn.Linear(4, 4, dtype=dtype)
    model.weight.data = 1000 * torch.eye(4, dtype=dtype)
    model.bias.data.zero_()
    truth = torch.arange(200) % 4
    x = torch.eye(4, dtype=dtype)[truth] * (1 + torch.arange(200) / 1000)[:, None].to(dtype)
    flipped = torch.arange(200) < 39
    y = torch.where(flipped, (truth + 1) % 4, truth)
    posterior = errbar.fit(model, [(x / 1000, truth)], last_layers=1, prior=Prior(100.0))
    scores = errbar.outlier_scores(posterior, [(x[:120], y[:120]), (x[120:], y[120:])], leave_out=leave_out)
    assert scores.label_suspicion is not None
    assert bool(scores.label_suspicion.isfinite().all())
    assert bool((scores.label_suspicion >= 0).all())
    # The error bars are small beside such logits: the suspicion is their difference, and the surest mistake is first.
    torch.testing.assert_close(
        scores.label_suspicion[flipped].double(), 1000 * x[flipped].amax(1).double(), rtol=1e-2, atol=0
    )
    assert scores.ranking("label_suspicion")[0] == 38
    false, true = metrics.roc(scores.label_suspicion, flipped)
    area = torch.trapezoid(torch.tensor(true, dtype=torch.float64), torch.tensor(false, dtype=torch.float64))
    assert float(area) == metrics.auroc(scores.label_suspicion, flipped) == 1
