"""`posterior.softening`: T(x) = T √(1 + c v̄(x)) on every way from a posterior to probabilities."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar._posterior import posterior as posteriors
from errbar._posterior.pushing import pushed_deviations

T, SCALE, C = 1.3, 0.6, 2.5
CLASSES = 4


def fitted(structure: str = "dense", last_layers: int = 2, fisher: str = "ggn") -> tuple[errbar.Posterior, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    x = torch.randn(40, 5, dtype=torch.float64)
    labels = torch.arange(40) % CLASSES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.StructureNotice)
        options = {"last_layers": last_layers, "structure": structure, "fisher": fisher}
        posterior = errbar.fit(model, [(x[:30], labels[:30])], **options)  # type: ignore[arg-type]
    return posterior, x[30:]


def softened(posterior: errbar.Posterior) -> errbar.Posterior:
    return posterior.with_calibration(temperature=T, covariance_scale=SCALE, softening=C)


def temperatures(covariance: Tensor) -> Tensor:
    """T √(1 + c tr(C P^g)/(M−1)), C = I − 11ᵀ/M."""
    classes = covariance.shape[-1]
    centring = torch.eye(classes, dtype=torch.float64) - 1 / classes
    return T * (1 + C * torch.einsum("mn,bnm->b", centring, covariance.double()) / (classes - 1)).sqrt()


@pytest.mark.parametrize("last_layers", [1, 2])
@pytest.mark.parametrize(
    ("structure", "fisher"),
    [("dense", "ggn"), ("dense", "eta"), ("block", "ggn"), ("kron", "ggn"), ("diag", "ggn"), ("lowrank", "ggn")],
)
def test_logits_of_every_structure(structure: str, fisher: str, last_layers: int) -> None:
    posterior, x = fitted(structure, last_layers, fisher)
    plain = posterior.logits(x)
    each = temperatures(plain.covariance)
    logits = softened(posterior).logits(x)
    torch.testing.assert_close(logits.mean, plain.mean / each[:, None])
    torch.testing.assert_close(logits.covariance, SCALE * plain.covariance / each[:, None, None] ** 2)


@pytest.mark.parametrize("structure", ["dense", "kron", "diag", "lowrank"])
def test_softening_of_zero_changes_no_bit(structure: str) -> None:
    posterior, x = fitted(structure)
    before = posterior.unrounded_logits(x).tempered(T).scaled(SCALE)
    zero = posterior.with_calibration(temperature=T, covariance_scale=SCALE, softening=0.0)
    after = zero.unrounded_logits(x)
    assert torch.equal(after.mean, before.mean)
    assert torch.equal(after.covariance, before.covariance)
    assert torch.equal(zero.predict(x, 100).pmf, before.predict(100).pmf)


@pytest.mark.parametrize("structure", ["dense", "block", "kron", "diag", "lowrank"])
def test_top_classes_are_rows_and_columns_of_all(structure: str) -> None:
    posterior, x = fitted(structure)
    posterior = softened(posterior)
    whole, some = posterior.logits(x), posterior.logits(x, top=2)
    assert some.classes is not None
    assert torch.equal(some.classes, whole.mean.argsort(dim=1, descending=True)[:, :2])
    rows = torch.arange(len(x))[:, None]
    torch.testing.assert_close(some.mean, whole.mean[rows, some.classes])
    expected = whole.covariance[rows[:, :, None], some.classes[:, :, None], some.classes[:, None, :]]
    torch.testing.assert_close(some.covariance, expected)


@pytest.mark.parametrize("structure", ["dense", "kron", "diag", "lowrank"])
def test_joint_logits(structure: str) -> None:
    """R_ij = T_c J_i P J_jᵀ/(T(x_i) T(x_j))."""
    posterior, x = fitted(structure)
    plain = posterior.joint_logits(x)
    each = temperatures(plain.covariance.diagonal(dim1=0, dim2=2).permute(2, 0, 1))
    joint = softened(posterior).joint_logits(x)
    torch.testing.assert_close(joint.mean, plain.mean / each[:, None])
    products = each[:, None, None, None] * each[None, None, :, None]
    torch.testing.assert_close(joint.covariance, SCALE * plain.covariance / products)
    single = softened(posterior).logits(x)
    torch.testing.assert_close(joint.marginals().mean, single.mean)
    torch.testing.assert_close(joint.marginals().covariance, single.covariance)
    assert bool(torch.isfinite(errbar.fuse_frames(joint).mean).all())


def test_draws_pushed_forward_use_the_variance_of_these_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = fitted()
    posterior = softened(posterior)
    monkeypatch.setattr(posteriors, "keeps_draws", lambda task, samples: True)
    samples = posterior.predict(x, 150, seed=3).samples()

    task = posterior.information.task
    batch = posterior._prepared(x)[1]
    d = pushed_deviations(task, posterior.factor, batch, 150, 3)
    centred = d - d.mean(1, keepdim=True)
    variance = centred.square().sum(1).mean(1) / (CLASSES - 1)
    each = T * (1 + C * variance).sqrt()
    logits = (task.network.logits(batch)[:, :, None] + math.sqrt(SCALE) * d) / each[:, None, None]
    torch.testing.assert_close(samples, torch.softmax(logits, 1).mT)


def test_draws_pushed_forward_agree_with_the_gaussian(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = fitted()
    posterior = softened(posterior)
    exact = posterior.predict(x, 20_000, draws="sobol").pmf
    monkeypatch.setattr(posteriors, "keeps_draws", lambda task, samples: True)
    drawn = posterior.predict(x, 4000)
    # Four standard errors; those of v̄ are no larger than those of the draws themselves.
    assert float((drawn.pmf - exact).abs().max()) < 8 * float(drawn.std.max()) / math.sqrt(4000)


def test_drawn_parameters_are_softened_by_the_same_temperature() -> None:
    """With T_c = 0 every draw is θ̂, and the PMF is softmax(ĝ/T(x)) exactly."""
    posterior, x = fitted()
    each = temperatures(posterior.logits(x).covariance)
    certain = softened(posterior).with_calibration(covariance_scale=0.0)
    expected = torch.softmax(posterior.logits(x).mean / each[:, None], 1)
    torch.testing.assert_close(certain.predict_by_parameters(x, 3).pmf, expected)
    torch.testing.assert_close(certain.predict(x).pmf, expected)


def test_everything_that_makes_a_posterior_of_another_keeps_it() -> None:
    posterior, x = fitted()
    posterior = softened(posterior)
    data = [(x, torch.arange(len(x)) % CLASSES)]
    made = {
        "with_prior": posterior.with_prior(errbar.Prior(3.0)),
        "update": posterior.update(data),
        "update by refactorising": posterior.update(data * 30),
        "forget": posterior.update(data).forget(data),
        "to": posterior.to("cpu"),
        "copy": copy.copy(posterior),
        "deepcopy": copy.deepcopy(posterior),
        "pickle": pickle.loads(pickle.dumps(posterior)),
        "with_calibration": posterior.with_calibration(),
    }
    for name, other in made.items():
        assert other.calibration == errbar.Calibration(T, SCALE, C), name


def test_calibration_is_read_and_removed() -> None:
    posterior, x = fitted()
    assert posterior.softening == 0
    assert posterior.calibration == errbar.Calibration()
    assert softened(posterior).calibration == errbar.Calibration(T, SCALE, C)
    plain = softened(posterior).uncalibrated()
    assert plain.calibration == errbar.Calibration()
    assert torch.equal(plain.logits(x).covariance, posterior.logits(x).covariance)


@pytest.mark.parametrize("value", [-1.0, math.nan, "much"])
def test_softening_that_is_no_number_from_zero_is_refused(value: object) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"The softening is .*; expected zero or a positive finite number\."):
        fitted()[0].with_calibration(softening=value)  # type: ignore[arg-type]


def test_outlier_scores_are_of_the_softened_logits() -> None:
    posterior, x = fitted()
    posterior = softened(posterior)
    found = errbar.outlier_scores(posterior, [x], leave_out=False, samples=200)
    torch.testing.assert_close(found.contrast_variance, posterior.logits(x).contrast_variance)
    torch.testing.assert_close(found.mutual_information, posterior.predict(x, 200).mutual_information)
