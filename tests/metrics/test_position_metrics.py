"""Scores of tokens and pixels: position by position, without those that have no label."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import errbar
from errbar import metrics
from errbar.errors import LabelError


@pytest.mark.parametrize("score", [metrics.accuracy, metrics.nll, metrics.brier, metrics.ece, metrics.log_likelihood])
def test_positions_without_a_label_do_not_count(score: object) -> None:
    generator = torch.Generator().manual_seed(0)
    pmf = torch.softmax(torch.randn(3, 4, 5, 6, generator=generator), -1)
    labels = torch.randint(0, 6, (3, 4, 5), generator=generator)
    labels[0, 1], labels[2, :, 3] = -100, -100
    named = labels >= 0
    assert score(pmf, labels) == pytest.approx(score(pmf[named], labels[named]), abs=1e-12)  # type: ignore[operator]


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(LabelError, match=r"Labels have shape \(3, 5\); expected \(3, 4\)"):
        metrics.nll(torch.full((3, 4, 2), 0.5), torch.zeros(3, 5, dtype=torch.long))


def test_positions_that_the_fit_ignored_do_not_count() -> None:
    model, x = nn.Linear(3, 4).double(), torch.randn(5, 6, 3, dtype=torch.float64)
    y = torch.randint(0, 4, (5, 6))
    none = torch.rand(5, 6) < 0.3
    posterior = errbar.fit(model, [(x, y.masked_fill(none, 255))], last_layers=1, outputs="positions", ignore_index=255)
    expected = metrics.nll(posterior.predict(x).pmf, y.masked_fill(none, -100))
    for prediction in (posterior.predict(x), posterior.logits(x).predict(), posterior.predict(x)[:]):
        assert metrics.nll(prediction, y.masked_fill(none, 255)) == expected
    drawn = posterior.predict_by_parameters(x, 20)
    assert metrics.nll(drawn, y.masked_fill(none, 255)) == metrics.nll(drawn.pmf, y.masked_fill(none, -100))


def test_positions_without_any_label_are_refused() -> None:
    with pytest.raises(LabelError, match="No position has a label; expected some other than -100"):
        metrics.nll(torch.full((3, 4, 2), 0.5), torch.full((3, 4), -100))
