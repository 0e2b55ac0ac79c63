"""Values say in a few lines what they are, and a prediction can be taken apart by its inputs."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar import LogitGaussian, Prediction
from errbar._distributions.sampling import GivenSampler
from errbar.errors import ArgumentError, MissingExtraError


def _gaussian(inputs: int) -> LogitGaussian:
    draws = torch.Generator().manual_seed(0)
    root = torch.randn(inputs, 4, 4, generator=draws, dtype=torch.float64)
    return LogitGaussian(torch.randn(inputs, 4, generator=draws, dtype=torch.float64), root @ root.mT)


@pytest.fixture
def prediction() -> Prediction:
    return _gaussian(6).predict(samples=200)


@pytest.fixture(scope="module")
def posterior() -> errbar.Posterior:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    x, y = torch.randn(20, 3).double(), torch.arange(20) % 2
    return errbar.fit(model, [(x, y)], last_layers=2, prior=errbar.Prior(3.0)).with_calibration(
        temperature=0.83, covariance_scale=0.11
    )


# ------------------------------------------------------------------------------------------------------- some inputs


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(3, 5), [3, 4]),
        (slice(None, None, -2), [5, 3, 1]),
        (2, [2]),
        (-1, [5]),
        ([4, 0, 0], [4, 0, 0]),
        (torch.tensor([1, 5]), [1, 5]),
        (torch.tensor([True, False, False, True, False, False]), [0, 3]),
        ([False] * 6, []),
        ([], []),
    ],
)
def test_some_inputs_of_a_prediction_keep_their_samples(prediction: Prediction, rows: Any, expected: list[int]) -> None:
    part = prediction[rows]
    assert len(part) == len(expected)
    pairs: list[tuple[Tensor, Tensor]] = [
        (part.pmf, prediction.pmf),
        (part.std, prediction.std),
        (part.covariance, prediction.covariance),
        (part.risk(0.3), prediction.risk(0.3)),
        (part.interval()[1], prediction.interval()[1]),
        (part.samples(), prediction.samples()),
    ]
    for chosen, whole in pairs:
        torch.testing.assert_close(chosen, whole[torch.tensor(expected, dtype=torch.long)])


def test_samples_that_were_given_are_chosen_too() -> None:
    values = torch.rand(3, 2, 5, dtype=torch.float64).softmax(1)
    part = Prediction.from_sampler(GivenSampler(values))[1]
    torch.testing.assert_close(part.samples(), values[1:2].mT)


def test_a_prediction_is_walked_through_input_by_input(prediction: Prediction) -> None:
    labels = [int(one.label) for one in prediction]
    assert labels == prediction.label.tolist()


@pytest.mark.parametrize("rows", [6, -7, [0, 6], 1.0, "first", torch.tensor([True]), torch.zeros(2, 2).long(), None])
def test_inputs_that_are_not_there_are_refused(prediction: Prediction, rows: Any) -> None:
    with pytest.raises(ArgumentError, match=r"A prediction of 6 inputs was indexed with .*; expected a slice"):
        prediction[rows]


# ------------------------------------------------------------------------------------------------------------- in words


def test_a_prediction_shows_its_first_inputs_in_five_lines(prediction: Prediction) -> None:
    opening, headings, *rows = repr(prediction).splitlines()
    assert opening == "Prediction: 6 inputs, 4 classes, 200 samples"
    assert headings.split() == ["input", "class", "probability", "95", "%"]
    assert len(rows) == 3
    lower, upper = prediction.interval()
    for row, line in enumerate(rows):
        label = int(prediction.label[row])
        numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line)]
        shown = [v[row, label] for v in (prediction.pmf, prediction.std, lower, upper)]
        assert numbers == pytest.approx([row, label, *map(float, shown)], abs=6e-4)


def test_what_has_no_inputs_or_no_numbers_is_shown_too(prediction: Prediction) -> None:
    assert repr(prediction[[]]) == "Prediction: 0 inputs, 4 classes, 200 samples"
    unknown = Prediction.from_sampler(GivenSampler(torch.full((1, 2, 3), torch.nan)))
    assert "nan ± nan" in repr(unknown)
    assert 'width="nan' not in unknown._repr_html_()


def test_a_notebook_shows_bars_of_the_most_probable_classes(prediction: Prediction) -> None:
    page = prediction._repr_html_()
    assert page.count("<svg") == 6 * 4
    widths = [float(width) for width in re.findall(r'<rect width="([\d.]+)" height="12" fill="#0072B2"', page)]
    expected = 120 * prediction.pmf.sort(1, descending=True).values.flatten()
    assert widths == pytest.approx(expected.tolist(), abs=0.06)
    assert "http" not in page
    assert "and 4 more inputs" in _gaussian(12).predict(samples=10)._repr_html_()


def test_a_posterior_and_its_information_are_one_line(posterior: errbar.Posterior) -> None:
    about = "32 parameters of 2 layers (dense, exact, ggn), 20 samples"
    assert repr(posterior) == f"Posterior: {about}, prior 3, T 0.83, T_c 0.11"
    assert repr(posterior.information) == f"Information: {about}"
    softened = posterior.with_calibration(temperature=1.0, covariance_scale=1.0, softening=0.5)
    assert repr(softened).endswith("T 1, T_c 1, c 0.5")
    assert "prior of 32 numbers" in repr(posterior.with_prior(errbar.Prior(torch.ones(32))))


def test_logits_are_one_line(posterior: errbar.Posterior) -> None:
    x = torch.zeros(3, 3).double()
    assert repr(posterior.logits(x)) == "LogitGaussian: 3 inputs, 2 classes, float64 on cpu"
    assert repr(posterior.logits(x, top=2)) == "LogitGaussian: 3 inputs, 2 classes chosen for each, float64 on cpu"
    assert repr(posterior.joint_logits(x)) == "JointLogits: 3 frames of 2 classes, on cpu"
    fused = errbar.FusedClassifier([posterior, posterior])
    assert repr(fused) == "FusedClassifier: 2 networks of 2 classes, T 1, q 1"


# --------------------------------------------------------------------------------------------------------------- pandas


def test_a_table_of_pandas_has_the_numbers_by_class(prediction: Prediction) -> None:
    pytest.importorskip("pandas")
    table = prediction.to_pandas(level=0.8)
    names = [f"{name}_{number}" for name in ("pmf", "std", "lower", "upper") for number in range(4)]
    assert list(table.columns) == ["label", "confidence", "entropy", "mutual_information", *names]
    lower, upper = prediction.interval(0.8)
    for name, values in {"pmf": prediction.pmf, "std": prediction.std, "lower": lower, "upper": upper}.items():
        assert table[f"{name}_2"].tolist() == values[:, 2].tolist()
    assert table["label"].tolist() == prediction.label.tolist()


def test_without_pandas_the_table_says_what_to_install(prediction: Prediction, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"to_pandas needs pandas.*pip install '\.\[pandas\]'"):
        prediction.to_pandas()
