"""What the metrics take for PMFs: lists, arrays, tensors and predictions, all in full precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import errbar
from errbar import metrics, plots

OF_PMF: list[Callable[..., Any]] = [
    metrics.accuracy,
    metrics.log_likelihood,
    metrics.nll,
    metrics.brier,
    metrics.ece,
    metrics.ece_interval,
    metrics.ece_literal,
    metrics.aurc,
    metrics.risk_coverage,
    lambda pmf, labels: metrics.reliability(pmf, labels).gap.tolist(),
]
RULES: list[Callable[..., Any]] = [
    lambda pmf, labels: errbar.abstention(pmf, labels, risk=0.3, delta=0.3),
    lambda pmf, labels: errbar.conformal(pmf, labels, level=0.5),
]
BINNED: list[Callable[..., Any]] = [metrics.ece, metrics.ece_literal, metrics.ece_interval, metrics.reliability]


def prediction() -> tuple[errbar.Prediction, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    covariance = torch.eye(3, dtype=torch.float64).expand(40, 3, 3)
    return errbar.LogitGaussian(mean, covariance).predict(100), torch.arange(40) % 3


@pytest.mark.parametrize("of", [*OF_PMF, *RULES])
def test_lists_arrays_tensors_and_predictions_have_one_answer(of: Callable[..., Any]) -> None:
    made, labels = prediction()
    expected = of(made.pmf, labels)
    assert of(made.pmf.numpy(), labels.numpy()) == expected
    assert of(made.pmf.tolist(), labels.tolist()) == expected
    assert of(tuple(map(tuple, made.pmf.tolist())), tuple(labels.tolist())) == expected
    assert of(made, labels) == expected


def test_lists_are_read_in_double_precision() -> None:
    """0.7 in float32 is below 0.7, and in another bin."""
    pmf, labels = [[0.7, 0.3]] * 5 + [[0.75, 0.25]] * 5, [0] * 5 + [1] * 5
    assert metrics.ece(pmf, labels) == metrics.ece(np.array(pmf), labels) == pytest.approx(0.225)
    assert metrics.nll([[1e-50, 1.0]], [0]) == pytest.approx(50 * math.log(10))
    assert metrics.log_likelihood([[1e-50, 1.0]], [0]) == pytest.approx(-50 * math.log(10))


def test_lists_of_rows_of_numpy_and_of_tensors_are_lists() -> None:
    rows = [[0.7, 0.3], [0.1, 0.9]]
    for kind in (np.array, lambda row: torch.tensor(row, dtype=torch.float64)):
        assert metrics.nll([kind(row) for row in rows], [0, 1]) == metrics.nll(rows, [0, 1])
    frozen = np.array(rows)
    frozen.setflags(write=False)
    assert metrics.nll(frozen, [0, 1]) == metrics.nll(rows, [0, 1])


@pytest.mark.parametrize("of", BINNED)
def test_bins_may_be_a_number_of_numpy(of: Callable[..., Any]) -> None:
    made, labels = prediction()
    expected, found = of(made.pmf, labels, 7), of(made.pmf, labels, bins=np.int64(7))
    assert str(found) == str(expected)
    with pytest.raises(errbar.ArgumentError, match=r"bins is 7\.0; expected a whole number of one or more"):
        of(made.pmf, labels, bins=7.0)


def test_a_reliability_diagram_is_drawn_of_a_prediction() -> None:
    made, labels = prediction()
    assert plots.reliability(made, labels, bins=np.int64(5)).get_xlabel()


@pytest.mark.parametrize("of", [*OF_PMF, *RULES])
@pytest.mark.parametrize("pmf", ["high", [["a", "b"]], [[0.5, 0.5], [1.0]], None, SimpleNamespace(pmf="no"), 1j])
def test_what_is_no_pmf_is_refused_in_words(of: Callable[..., Any], pmf: Any) -> None:
    with pytest.raises(errbar.DataError, match=r"PMFs are a .* expected a Prediction, or .*\(inputs, classes\)"):
        of(pmf, [0])
