"""The curves of `metrics`, and that `plots` draws them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from errbar import metrics, plots
from errbar.errors import ArgumentError, DataError, LabelError


def sample(count: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pmf = torch.softmax(2 * torch.randn(count, 4, generator=generator, dtype=torch.float64), 1)
    return pmf, torch.multinomial(pmf, 1, generator=generator)[:, 0]


def test_the_area_under_risk_and_coverage_is_aurc() -> None:
    pmf, labels = sample()
    coverage, risk = metrics.risk_coverage(pmf, labels)
    assert sum(risk) / len(risk) == pytest.approx(metrics.aurc(pmf, labels))
    assert coverage == pytest.approx([(n + 1) / 200 for n in range(200)])
    assert risk[-1] == pytest.approx(1 - metrics.accuracy(pmf, labels))
    few = metrics.risk_coverage(pmf, labels, points=11)
    assert (len(few[0]), few[0][-1], few[1][-1]) == (11, 1.0, risk[-1])


def test_the_area_under_the_roc_curve_is_auroc_with_ties_too() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 9, (300,), generator=generator).double()
    positive = torch.rand(300, generator=generator) < 0.1 + scores / 12
    false, true = metrics.roc(scores, positive)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    assert len(false) == 10  # one point a score that occurs, and the origin
    area = torch.trapezoid(torch.tensor(true, dtype=torch.float64), torch.tensor(false, dtype=torch.float64))
    assert float(area) == pytest.approx(metrics.auroc(scores, positive))
    few = metrics.roc(scores, positive, points=4)
    assert (len(few[0]), few[0][-1], few[1][-1]) == (5, 1.0, 1.0)


def test_plots_take_the_curves_as_they_are() -> None:
    pmf, labels = sample()
    drawn = plots.risk_coverage({"a": metrics.risk_coverage(pmf, labels)})
    assert drawn.lines[0].get_ydata()[-1] == pytest.approx(1 - metrics.accuracy(pmf, labels))
    wrong = pmf.argmax(1) != labels
    ax = plots.roc({"a": metrics.roc(1 - pmf.amax(1), wrong)})
    written = [text.get_text() for text in ax.get_legend().get_texts()]
    assert written == [f"a (AUROC {metrics.auroc(1 - pmf.amax(1), wrong):.3f})"]


def test_curves_without_positives_or_points_are_refused() -> None:
    with pytest.raises(LabelError, match="0 positives and 2 negatives"):
        metrics.roc([0.1, 0.2], [False, False])
    with pytest.raises(ArgumentError, match="points is 1; expected a whole number of two or more"):
        metrics.risk_coverage(*sample(), points=1)


# Few values, so that ties are many, at both infinities too.
@pytest.mark.parametrize("seed", range(20))
def test_roc_and_auroc_are_one_answer_whatever_the_scores(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([-torch.inf, -1.0, -0.0, 0.0, 1e-300, 2.5, torch.inf], dtype=torch.float64)
    scores = values[torch.randint(len(values), (40,), generator=generator)]
    positive = torch.rand(40, generator=generator) < 0.4
    false, true = metrics.roc(scores, positive)
    assert len(false) == len(set(scores.tolist())) + 1  # one point a score that occurs, and the origin
    area = torch.trapezoid(torch.tensor(true, dtype=torch.float64), torch.tensor(false, dtype=torch.float64))
    assert float(area) == pytest.approx(metrics.auroc(scores, positive), abs=1e-12)


def test_infinite_scores_are_ties_of_the_roc_curve() -> None:
    scores, positive = [torch.inf, torch.inf, 0.0, -torch.inf, -torch.inf], [True, False, True, False, True]
    assert metrics.roc(scores, positive) == ([0.0, 0.5, 0.5, 1.0], pytest.approx([0.0, 1 / 3, 2 / 3, 1.0]))


@pytest.mark.parametrize("of", [metrics.roc, metrics.auroc])
def test_scores_that_are_no_number_are_refused(of: Callable[..., object]) -> None:
    with pytest.raises(DataError, match="Scores hold NaN"):
        of([0.1, float("nan")], [True, False])
    with pytest.raises(DataError, match="Scores are a list and flags a list, one of them no vector of numbers"):
        of(["high", "low"], [True, False])


def test_scores_of_lists_are_not_rounded() -> None:
    """Two scores that float32 cannot tell apart."""
    assert metrics.auroc([1 + 1e-12, 1.0], [True, False]) == 1
    assert len(metrics.roc([1 + 1e-12, 1.0], [True, False])[0]) == 3


def test_points_may_be_numbers_of_numpy() -> None:
    assert len(metrics.risk_coverage(*sample(), points=np.int64(11))[0]) == 11
