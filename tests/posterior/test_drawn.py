"""Logits by draws in place of P^g: their moments, what uses them, and that nothing of size M × M is made."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar import report
from errbar._calibration import held_out as calibration
from errbar._deciding.outliers import without_own_label
from errbar._distributions.covariance import DrawnCovariance, FactoredCovariance, FullCovariance, drawn
from errbar._posterior import posterior as posterior_module
from errbar._posterior.pushing import affordable_draws, keeps_draws, pushed_draws
from errbar.serve.compute import AnswerOptions, Predict, compute
from errbar.serve.service import served

CLASSES = 300


def network(classes: int = CLASSES) -> tuple[nn.Module, Tensor, Tensor]:
    """A small network, inputs, and labels drawn from what it says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, classes)).double()
    with torch.no_grad():
        model[2].weight.mul_(6)
    x = torch.randn(400, 6, dtype=torch.float64)
    with torch.no_grad():
        labels = torch.multinomial(torch.softmax(model(x), 1), 1)[:, 0]
    return model, x, labels


def fitted(structure: str = "diag", *, prior: float = 2.0, fisher: str = "sampled") -> errbar.Posterior:
    model, x, labels = network()
    return errbar.fit(
        model, [(x, labels)], parameters="vectors", fisher=fisher, structure=structure, prior=errbar.Prior(prior)
    )


def small(structure: str) -> tuple[errbar.Posterior, Tensor]:
    model, x, _ = network(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.StructureNotice)
        posterior = errbar.fit(model, [x[:40]], parameters="all", structure=structure, prior=errbar.Prior(2.0))
    return posterior.with_calibration(temperature=1.3, covariance_scale=0.7), x[:5]


@pytest.mark.parametrize("structure", ["dense", "block", "kron", "diag", "lowrank"])
def test_drawn_logits_have_the_moments_of_the_delta_method(structure: str) -> None:
    posterior, x = small(structure)
    samples = 4_000
    exact, ours = posterior.logits(x), posterior.drawn_logits(x, samples)
    scale = exact.variance.sqrt()
    limit = 6 / samples**0.5 * scale[:, :, None] * scale[:, None, :]
    torch.testing.assert_close(ours.mean, exact.mean)
    assert bool(((ours.covariance - exact.covariance).abs() <= limit).all())
    assert bool(((ours.variance - exact.variance).abs() <= limit.diagonal(dim1=1, dim2=2)).all())
    torch.testing.assert_close(ours.contrast_variance, exact.contrast_variance, rtol=0.1, atol=0)


def test_predictions_from_drawn_logits_are_those_of_predict() -> None:
    posterior = fitted().with_calibration(temperature=1.2, covariance_scale=0.5)
    x = network()[1][:3]
    expected = posterior.predict(x, samples=60, seed=4)
    drawn_logits = posterior.drawn_logits(x, 100, seed=4)
    ours = drawn_logits.predict(60, seed=9)
    torch.testing.assert_close(ours.pmf, expected.pmf, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ours.samples(), expected.samples(), rtol=1e-10, atol=1e-14)
    plain = posterior.with_calibration(temperature=1.0, covariance_scale=1.0).drawn_logits(x, 60, seed=4)
    again = plain.tempered(1.2).scaled(0.5).predict(60)
    torch.testing.assert_close(again.samples(), expected.samples(), rtol=1e-10, atol=1e-14)


def test_the_samples_are_softmax_of_the_mean_and_the_draws() -> None:
    posterior, x = small("dense")
    ours = posterior.drawn_logits(x, 7)
    assert isinstance(ours.form, DrawnCovariance)
    expected = torch.softmax(ours.mean[:, :, None] + ours.form.deviations, 1).mT
    torch.testing.assert_close(ours.predict(7).samples(), expected)
    torch.testing.assert_close(ours.predict(3).samples(), expected[:, :3])


def test_more_samples_than_were_drawn_have_the_covariance_of_the_draws() -> None:
    posterior, x = small("dense")
    ours = posterior.drawn_logits(x, 30)
    many, exact = ours.predict(20_000), errbar.LogitGaussian(ours.mean, ours.covariance).predict(20_000)
    limit = 6 * 2**0.5 * exact.standard_error
    assert bool(((many.pmf - exact.pmf).abs() <= limit).all())
    torch.testing.assert_close(many.std, exact.std, rtol=0.1, atol=1e-3)
    antithetic = ours.predict(1000, draws="antithetic")
    assert antithetic.sampler.samples == 1000
    assert bool(((antithetic.pmf - exact.pmf).abs() <= 6 * exact.std / 1000**0.5).all())


def test_drawn_logits_of_streams_follow_one_another() -> None:
    posterior, x = small("dense")
    together = posterior.drawn_logits(x, 9)
    parts = posterior.drawn_logits(iter(x.split(2)), 9)
    torch.testing.assert_close(parts.covariance, together.covariance)


def test_the_number_of_draws_that_are_kept() -> None:
    assert affordable_draws(10, 1000) == affordable_draws(100, 1000) == 1000
    assert affordable_draws(300, 1000) == 333
    assert affordable_draws(1000, 1000) == affordable_draws(10_000, 1000) == 100
    assert affordable_draws(1000, 20) == 20
    task = fitted().information.task
    assert keeps_draws(task, 333)
    assert not keeps_draws(task, 1000)
    assert pushed_draws(task, 1000) == 333
    last = errbar.fit(network()[0], [network()[1]], last_layers=1, structure="kron").information.task
    assert not keeps_draws(last, 10)
    assert pushed_draws(last, 1000) == 1000


@pytest.mark.parametrize("name", ["samples", "seed"])
def test_draws_that_make_no_sense_are_refused(name: str) -> None:
    posterior, x = small("dense")
    with pytest.raises(errbar.ArgumentError, match=f"{name} is -1; expected a whole number"):
        posterior.drawn_logits(x, **{name: -1})


# ------------------------------------------------------------------------------------------------ what uses them


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything of size M × M for an input fails."""

    made = FullCovariance.__init__

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a matrix of M × M was made")

    def small_alone(self: FullCovariance, values: Tensor) -> None:
        assert values.shape[-1] < 10, "a matrix of M × M was made"
        made(self, values)

    monkeypatch.setattr(FullCovariance, "__init__", small_alone)
    monkeypatch.setattr(DrawnCovariance, "matrix", refuse)
    monkeypatch.setattr(FactoredCovariance, "matrix", refuse)


def _predict(posterior: errbar.Posterior, x: Tensor, labels: Tensor) -> None:
    prediction = posterior.predict(x[:4], samples=100)
    assert prediction.interval()[0].shape == prediction.risk(0.1).shape == prediction.std.shape == (4, CLASSES)
    assert bool((prediction.mutual_information > 0).all())


def _calibrate(posterior: errbar.Posterior, x: Tensor, labels: Tensor) -> None:
    assert errbar.calibrate(posterior, [(x[:50], labels[:50])]).temperature > 0


def _choose_prior(posterior: errbar.Posterior, x: Tensor, labels: Tensor) -> None:
    held_out = [(x[:20], labels[:20])]
    errbar.choose_prior(posterior.information, held_out, by="nll", precisions=[1.0, 10.0], samples=50)


def _outliers(posterior: errbar.Posterior, x: Tensor, labels: Tensor) -> None:
    scores = errbar.outlier_scores(posterior, [(x[:20], labels[:20])])
    assert scores.label_suspicion is not None
    assert bool((scores.label_suspicion > 0).all() & (scores.contrast_variance > 0).all())


def _report(posterior: errbar.Posterior, x: Tensor, labels: Tensor) -> None:
    assessed = report.assess(posterior, [(x[:30], labels[:30])], outliers=[10 * x[:10]])
    assert "333 draws per input" in str(assessed.provenance)


def _service(posterior: errbar.Posterior, x: Tensor, labels: Tensor) -> None:
    member = served("one", posterior, reference=[x[:20]])
    options = AnswerOptions(samples=100, include=frozenset({"outlier", "points"}))
    other = AnswerOptions(samples=50, seed=3)
    first, second = compute([Predict(member, x[:2], options), Predict(member, x[2:3], other)])
    expected = posterior.predict(x[:2], samples=100)
    torch.testing.assert_close(torch.tensor([answer["pmf"] for answer in first]).double(), expected.pmf)
    torch.testing.assert_close(
        torch.tensor(second[0]["pmf"]).double(), posterior.predict(x[2:3], samples=50, seed=3).pmf[0]
    )
    assert first[0]["outlier"] is not None
    assert len(first[0]["points"]["logits"]) == 100


USES: dict[str, Callable[[errbar.Posterior, Tensor, Tensor], None]] = {
    "predict": _predict,
    "calibrate": _calibrate,
    "choose_prior": _choose_prior,
    "outliers": _outliers,
    "report": _report,
    "service": _service,
}


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("use", USES)
def test_nothing_of_the_size_of_the_classes_squared_is_made(use: str) -> None:
    _, x, labels = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.CalibrationWarning)
        USES[use](fitted(), x, labels)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("use", ["predict", "calibrate", "outliers"])
def test_nor_with_a_factored_last_layer(use: str) -> None:
    model, x, labels = network()
    posterior = errbar.fit(model, [(x, labels)], last_layers=1, structure="kron", prior=errbar.Prior(2.0))
    assert isinstance(posterior.unrounded_logits(x[:2]).form, FactoredCovariance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.CalibrationWarning)
        USES[use](posterior, x, labels)


def test_the_service_gives_the_covariance_of_logits_when_asked() -> None:
    posterior, (_, x, _) = fitted(), network()
    options = AnswerOptions(samples=100, include=frozenset({"logits"}))
    ((answer,),) = compute([Predict(served("one", posterior), x[:1], options)])
    expected = posterior.logits(x[:1]).centered().covariance[0]
    torch.testing.assert_close(torch.tensor(answer["logits"]["covariance"]).double(), expected)


def test_calibration_by_draws_ends_near_that_by_the_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, (_, x, labels) = fitted(prior=0.5), network()
    held_out = [(x[:60], labels[:60])]
    by_draws = errbar.calibrate(posterior, held_out, samples=150)
    for module in (posterior_module, calibration):
        monkeypatch.setattr(module, "keeps_draws", lambda task, samples: False)
    by_covariance = errbar.calibrate(posterior, held_out, samples=150)
    assert by_draws.temperature == pytest.approx(by_covariance.temperature, rel=0.1)
    pmfs = [one.predict(x[300:], samples=300).pmf for one in (by_draws, by_covariance)]
    nll = [errbar.metrics.nll(pmf, labels[300:]) for pmf in pmfs]
    assert nll[0] == pytest.approx(nll[1], abs=0.02)


@pytest.mark.parametrize("fisher", ["ggn", "eta"])
def test_leaving_an_input_out_by_draws_is_as_by_their_covariance(fisher: Any) -> None:
    model, x, labels = network(5)
    posterior = errbar.fit(model, [(x, labels)], last_layers=2, fisher=fisher, prior=errbar.Prior(5.0))
    ours, own = posterior.drawn_logits(x[:6], 60), labels[:6]
    exact = without_own_label(errbar.LogitGaussian(ours.mean, ours.covariance), own, fisher)
    without = without_own_label(ours, own, fisher)
    assert isinstance(without.form, DrawnCovariance)
    torch.testing.assert_close(without.covariance, exact.covariance, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(without.mean, exact.mean, rtol=1e-9, atol=1e-12)


def test_an_input_that_was_not_in_the_fit_cannot_be_left_out_by_draws() -> None:
    posterior, (_, x, labels) = fitted(prior=1e-3), network()
    with pytest.raises(errbar.DataError, match="more information than the whole fit"):
        errbar.outlier_scores(posterior, [(1e3 * x[:3], labels[:3])])


def test_suspicions_by_draws_rank_as_those_by_the_covariance() -> None:
    posterior, (_, x, labels) = fitted(), network()
    labels = labels.clone()
    labels[:5] = (labels[:5] + 150) % CLASSES
    exact = posterior.unrounded_logits(x[:100])
    without = without_own_label(exact, labels[:100], "sampled")
    likely = -torch.log_softmax(without.mean, 1).gather(1, labels[:100, None])[:, 0]
    scores = errbar.outlier_scores(posterior, [(x[:100], labels[:100])])
    assert scores.label_suspicion is not None
    order = torch.stack([likely, scores.label_suspicion]).argsort(1).argsort(1).double()
    assert float(torch.corrcoef(order)[0, 1]) > 0.95


def test_draws_of_a_covariance_have_its_moments() -> None:
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    form = FactoredCovariance(basis, torch.rand(3, 4, dtype=torch.float64), rotation=basis.T)
    samples = 4_000
    ours, exact = drawn(form, samples, seed=0), form.matrix()
    scale = form.variance().sqrt()
    assert bool(((ours.matrix() - exact).abs() <= 6 / samples**0.5 * scale[:, :, None] * scale[:, None, :]).all())
    assert drawn(ours, 3, seed=1) is ours


def test_more_held_out_draws_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, (_, x, labels) = fitted(), network()
    needed = 333 * CLASSES * 8
    monkeypatch.setattr(errbar._base.memory, "available_bytes", lambda device: 70 * needed)
    with pytest.raises(
        errbar.SizeError, match=r"Holding 333 draws of 300 logits for 60 inputs or more needs .* Use fewer"
    ):
        errbar.calibrate(posterior, [(x[start : start + 20], labels[start : start + 20]) for start in range(0, 60, 20)])
