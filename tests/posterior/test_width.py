"""The warning of a posterior that is far too wide as it is: where the data are known by heart, and not elsewhere."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import errbar
from data import generator, shuffled_digits
from networks import perceptron, seeded, trained

Batches = list[tuple[Tensor, Tensor]]


def batches(x: Tensor, y: Tensor) -> Batches:
    return list(zip(x.split(100), y.split(100), strict=True))


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    return shuffled_digits(torch.float32)


@pytest.fixture(scope="module")
def by_heart(digits: tuple[Tensor, Tensor]) -> nn.Module:
    """A network of seven layers after 1200 steps on 500 digits, all of which it knows."""
    x, y = digits
    network = seeded(lambda: perceptron(64, *[32] * 6, 10), dtype=torch.float32)
    return trained(network, x[:500], y[:500], steps=1200, lr=3e-3).eval()


def accuracy(pmf: Tensor, y: Tensor) -> float:
    return float((pmf.argmax(1) == y).double().mean())


def test_a_network_that_knows_its_data_by_heart_is_warned_of(
    by_heart: nn.Module, digits: tuple[Tensor, Tensor]
) -> None:
    x, y = digits
    with pytest.warns(errbar.PosteriorWarning) as caught:
        posterior = errbar.fit(by_heart, batches(x[:500], y[:500]), parameters="all", structure="kron")
    (warning,) = caught
    with torch.no_grad():
        logits = by_heart(x)
    nll = float(nn.functional.cross_entropy(logits[:500].double(), y[:500]))
    label = posterior.predict(x[:100], 1000).label
    different = int((label != logits[:100].argmax(1)).sum())
    assert nll < 0.01
    assert different > 5
    assert str(warning.message) == (
        f"The posterior is far too wide as it is: the network knows its training data by heart (mean NLL {nll:.2g}), "
        "so they hold hardly any information, and its most probable class is not the network's for "
        f"{different} of 100 training inputs. Do not use its PMFs and error bars before errbar.calibrate has fitted T "
        "and T_c to held-out data, or let errbar.autofit choose."
    )
    # What the warning is about: the accuracy falls, and calibration brings it back.
    test_x, test_y = x[800:], y[800:]
    of_network = accuracy(logits[800:], test_y)
    assert accuracy(posterior.predict(test_x).pmf, test_y) < of_network - 0.1
    mended = errbar.calibrate(posterior, batches(x[500:800], y[500:800]))
    assert accuracy(mended.predict(test_x).pmf, test_y) > of_network - 0.02


def test_without_labels_the_entropy_tells(by_heart: nn.Module, digits: tuple[Tensor, Tensor]) -> None:
    x = digits[0][:500]
    sentence = r"knows its training data by heart \(mean entropy 0\.00\d+\)|\(mean entropy \d\.?\d*e-\d+\)"
    with pytest.warns(errbar.PosteriorWarning, match=sentence):
        errbar.fit(by_heart, [x], last_layers=1, prior=errbar.Prior(1e4))


def test_a_strong_prior_agrees_with_the_network_and_the_data_are_known_by_heart_all_the_same(
    by_heart: nn.Module, digits: tuple[Tensor, Tensor]
) -> None:
    x, y = digits
    with pytest.warns(errbar.PosteriorWarning) as caught:
        errbar.fit(by_heart, batches(x[:500], y[:500]), last_layers=1, prior=errbar.Prior(1e4))
    assert "by heart" in str(caught[0].message)
    assert "most probable class" not in str(caught[0].message)


def noisy_problem(samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Two classes that overlap, and the network that made their labels: nothing is known by heart."""
    x = torch.randn(samples, 4, generator=generator(1))
    network = seeded(lambda: perceptron(4, 6, 3), dtype=torch.float32)
    with torch.no_grad():
        y = torch.multinomial(torch.softmax(network(x), 1), 1, generator=generator(2))[:, 0]
    return network, x, y


@pytest.mark.parametrize(
    "options", [{"last_layers": 1}, {"last_layers": 2}, {"parameters": "all", "structure": "diag"}]
)
def test_a_sound_posterior_gives_no_warning(options: dict[str, Any]) -> None:
    network, x, y = noisy_problem(2000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errbar.fit(network, batches(x, y), **options)


def test_a_weak_prior_that_flips_classes_is_warned_of_without_being_by_heart() -> None:
    network, x, y = noisy_problem(60)
    with pytest.warns(errbar.PosteriorWarning) as caught:
        errbar.fit(network, [(x, y)], last_layers=2, prior=errbar.Prior(1e-4))
    assert "The posterior is far too wide as it is: its most probable class is not" in str(caught[0].message)


def test_data_that_can_be_read_only_once_are_compared_too(by_heart: nn.Module, digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    with pytest.warns(errbar.PosteriorWarning, match="of 100 training inputs"):
        errbar.fit(by_heart, iter(batches(x[:500], y[:500])), last_layers=2, prior=errbar.Prior(0.01))


def test_only_t_and_t_c_of_one_are_uncalibrated() -> None:
    network, x, y = noisy_problem(200)
    posterior = errbar.fit(network, batches(x, y), last_layers=1)
    assert not posterior.is_calibrated
    assert posterior.with_calibration(temperature=1.1).is_calibrated
    assert posterior.with_calibration(covariance_scale=0.0).is_calibrated
